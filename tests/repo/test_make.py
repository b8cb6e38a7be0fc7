"""The Makefile and the environment that it builds."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import OWN_SESSION, ROOT, TINY_STORIES, environment, interrupt_after


def start_make(target, directory, *arguments, **options):
    """Start make as from a shell, although `make test` may have started the tests."""
    return subprocess.Popen(["make", target, *arguments], cwd=directory, **({"env": environment()} | options))


def make(target, directory, *arguments, check=False, **options):
    """Run make to its end."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with start_make(target, directory, *arguments, **pipes, **options) as process:
        output, errors = process.communicate()
    assert not check or process.returncode == 0, output + errors
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def copy_files(directory, *names):
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, directory / name)


def test_help_lists_every_target():
    listed = make("help", ROOT, check=True).stdout
    rules = (ROOT / "Makefile").read_text() + (ROOT / "tools" / "targets.mk").read_text()
    for target in re.findall(r"^([a-z-]+):", rules, re.MULTILINE):
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


@pytest.mark.parametrize(("version", "works"), [("3, 10", False), ("3, 11", True), ("3, 14", True), ("3, 15", False)])
def test_env_names_supported_versions_of_python(version, works, tmp_path, monkeypatch):
    copy_files(tmp_path, "Makefile", ".ci/installed.py", "requirements.txt")
    other = f'{sys.executable} -c "import sys; sys.version_info = ({version}); $2"'
    (script := tmp_path / "python").write_text(f'#!/bin/sh\n[ "$1" = -c ] || exit 7\nexec {other}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(script))
    done = make("env", tmp_path)
    assert done.returncode and ("Python 3.11 to 3.14 is needed" in done.stdout) != works, done.stdout + done.stderr


LAUNCHER = """#!/bin/sh
echo "PASS  the first check"
echo "loading torch ..." >&2
while ! test -e read; do sleep 0.1; done
cat >&2 <<END
Traceback (most recent call last):
  File "/home/me/train.py", line 1, in <module>
ValueError: an error of the script
W1126 02:10:17.393000 1953 torch/distributed/elastic/multiprocessing/api.py:1028] Sending SIGTERM
process 1: last words
LAST
  File "/home/me/.venv/bin/accelerate", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.api.SignalException: Process 17932 got signal: 2
END
exit 1
"""
FAILED = (
    "E1126 02:10:17.402000 1953 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: CODE) rank: 0"
)
TRACEBACK = "Traceback (most recent call last):"


@pytest.mark.parametrize("target", ["train", "verify"])
@pytest.mark.parametrize("last", [TRACEBACK, FAILED.replace("CODE", "1"), FAILED.replace("CODE", "-9")])
def test_launchers_log_and_traceback_are_hidden(target, last, tmp_path):
    """Each line of the script appears at once; a process that a signal killed has no message, but an exit code."""
    copy_files(tmp_path, "Makefile")
    for name, script in (("python", "#!/bin/sh\n"), ("accelerate", LAUNCHER.replace("LAST", last))):
        (tmp_path / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / ".venv" / "bin" / name).write_text(script)
        (tmp_path / ".venv" / "bin" / name).chmod(0o755)
    with start_make(target, tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr.readline() == "loading torch ...\n"
        (tmp_path / "read").touch()
        output, errors = process.communicate(timeout=60)
    shown, printed = output.splitlines()
    assert process.returncode == 2 and f" {target}.py" in shown and printed == "PASS  the first check"
    *printed, of_make = errors.splitlines()
    own = [TRACEBACK, '  File "/home/me/train.py", line 1, in <module>', "ValueError: an error of the script"]
    assert printed == [*own, "process 1: last words", *([last] if "-9" in last else [])]
    assert of_make.startswith("make: ***")


@pytest.mark.slow
def test_ctrl_c_stops_make_train_with_its_message(runs):
    """A terminal sends SIGINT to make, the shell, the launcher and its processes."""
    words = f"{' '.join(map(str, TINY_STORIES))} --steps 1000000 --out_dir {runs} --name run"
    output = interrupt_after("[step 3 ", start_make("train", ROOT, f"ARGS={words}", **OWN_SESSION), timeout=100)
    assert "Saving a checkpoint and stopping" in output and "stopped after step" in output
    assert "Traceback" not in output and "torch/distributed" not in output and "SignalException" not in output
    assert json.loads((runs / "run" / "status.json").read_text())["state"] == "preempted"
