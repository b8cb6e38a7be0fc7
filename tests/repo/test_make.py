"""The Makefile and the environment that it builds."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT


def make(target, directory, *arguments, **options):
    """Run make as from a shell, although `make test` may have started the tests."""
    of_make = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}
    environment = {name: value for name, value in os.environ.items() if name not in of_make}
    options = {"env": environment} | options
    return subprocess.run(["make", target, *arguments], cwd=directory, capture_output=True, text=True, **options)


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
