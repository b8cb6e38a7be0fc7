"""The Makefile, the environment that it builds, and `make trial`."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.support.fork_trial import TrialError, check_defaults, compare_defaults, compare_rows, find_base
from tools.experiment import change


def make(target, directory, **options):
    """Run make as from a shell, although `make test` may have started the tests."""
    of_make = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}
    environment = {name: value for name, value in os.environ.items() if name not in of_make}
    options = {"env": environment} | options
    return subprocess.run(["make", target], cwd=directory, capture_output=True, text=True, **options)


def copy_files(directory, *names):
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, directory / name)


def test_help_lists_every_target():
    listed = make("help", ROOT, check=True).stdout
    for target in re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE):
        assert f"make {target} " in listed


def test_clean_keeps_runs(tmp_path):
    copy_files(tmp_path, "Makefile")
    for path in ("runs/stories/__pycache__/kept", ".venv/bin/python", "data/__pycache__/x.pyc"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    make("clean", tmp_path, check=True)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["Makefile", "runs/stories/__pycache__/kept"]


def test_env_accepts_linked_environment(tmp_path):
    """Linked to an environment that is complete, but older than requirements.txt."""
    copy_files(tmp_path, "Makefile", ".ci/installed.py", "requirements.txt")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    os.utime(tmp_path / "requirements.txt", (2**32, 2**32))
    done = make("env", tmp_path)
    assert done.returncode == 0 and "Installing" not in done.stdout, done.stdout + done.stderr


def test_env_names_what_linked_environment_lacks(tmp_path):
    copy_files(tmp_path, "Makefile", ".ci/installed.py")
    (tmp_path / "requirements.txt").write_text(f"{(ROOT / 'requirements.txt').read_text()}no-such-package==1.0\n")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    done = make("env", tmp_path)
    assert done.returncode and "which lacks no-such-package==1.0" in done.stdout, done.stdout + done.stderr


LAUNCHER = """#!/bin/sh
echo "PASS  the first check"
echo "loading torch ..." >&2
echo "verify.py: error: 1 of 14 checks failed" >&2
echo "W1126 02:10:17.393000 1953 torch/distributed/elastic/multiprocessing/api.py:1028] Sending SIGTERM" >&2
echo "process 1: last words" >&2
echo "E1126 02:10:17.402000 1953 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)" >&2
echo "Traceback (most recent call last):" >&2
exit 1
"""


def test_verify_hides_launchers_traceback(tmp_path):
    copy_files(tmp_path, "Makefile")
    for name, script in (("python", "#!/bin/sh\n"), ("accelerate", LAUNCHER)):
        (tmp_path / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / ".venv" / "bin" / name).write_text(script)
        (tmp_path / ".venv" / "bin" / name).chmod(0o755)
    done = make("verify", tmp_path)
    assert done.returncode == 2 and done.stdout == "PASS  the first check\n"
    *printed, of_make = done.stderr.splitlines()
    expected = ["loading torch ...", "verify.py: error: 1 of 14 checks failed", "process 1: last words"]
    assert printed == expected and of_make.startswith("make: ***")


@pytest.mark.slow
def test_trial_ends_with_one_message():
    command = [sys.executable, "-m", "tests.support.fork_trial", "--model.mlp", "no_such_mlp"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    [message] = done.stderr.strip().splitlines()
    assert done.returncode == 1 and message.startswith("fork_trial: train.py: error: model.mlp: no_such_mlp")


@pytest.mark.parametrize(
    "resumed, message",
    [
        ([{"step": 1, "train/loss": 3.0}], "step 1: train/loss is 3.0 after a kill and a resume, 2.0 without"),
        ([{"step": 1, "train/loss": 2.0, "extra": 1}], "step 1: extra is 1 after a kill and a resume, None without"),
        ([], "0 rows after a kill and a resume, 1 without"),
    ],
)
def test_trial_names_first_difference(resumed, message):
    with pytest.raises(TrialError, match=message):
        compare_rows([{"step": 1, "train/loss": 2.0}], resumed)


def test_trial_refuses_moved_defaults():
    base = {"stories": {"state/digest": "1", "train/loss": 5.0}, "dropped": {"state/digest": "2"}}
    compare_defaults(base, {"stories": {"state/digest": "1", "train/loss": 5.0}, "added": {"state/digest": "3"}})
    moved = {"stories": {"state/digest": "4", "train/loss": 5.0}}
    with pytest.raises(TrialError, match="^defaults moved: .*stories: state/digest is 4, 1 before"):
        compare_defaults(base, moved)


@pytest.fixture
def fork_repository(tmp_path, monkeypatch):
    """A git repository whose checked-out branch is one commit ahead of main."""
    monkeypatch.setattr(change, "ROOT", tmp_path)
    change.git("init", "--quiet", "--initial-branch", "main")
    for branch in ("main", "fork"):
        (tmp_path / "code.py").write_text(f"# {branch}")
        change.git("add", ".")
        change.git("commit", "--quiet", "--message", branch, **change.AUTHOR)
        change.git("checkout", "--quiet", "-B", "fork")
    return tmp_path


def test_trial_compares_defaults_with_merge_base(fork_repository):
    upstream = change.git("rev-parse", "main")
    assert find_base(None) == upstream
    assert find_base("HEAD") == change.git("rev-parse", "fork") != upstream


def test_trial_reports_uncompared_defaults(fork_repository, capsys):
    check_defaults("HEAD")
    check_defaults("no_such_branch")
    unchanged, unknown = capsys.readouterr().out.splitlines()
    assert unchanged.startswith("defaults: not compared: ") and "--base COMMIT" in unchanged
    assert unknown.startswith("defaults: not compared: git merge-base fails: ")
