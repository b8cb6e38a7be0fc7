"""Without tools/, benchmarks/ and examples/ the rest trains, and its tests pass."""

import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT, TINY_STORIES, environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the copy is a clone"),
]
WITHOUT = "tools benchmarks examples tests/tools tests/repo tests/test_examples.py".split()
WITHOUT += ["tests/support/reference_examples.py"]


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """A clone without the optional folders and their tests, with the uncommitted changes of this tree."""
    clone = tmp_path_factory.mktemp("core") / "clone"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], check=True)
    listed = subprocess.run(["git", "ls-files", "-cmo", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in set(listed.stdout.splitlines()):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, clone / name)
        else:
            (clone / name).unlink(missing_ok=True)
    if (ROOT / ".venv").exists():
        (clone / ".venv").symlink_to(ROOT / ".venv")
    for name in WITHOUT:
        shutil.rmtree(clone / name) if (clone / name).is_dir() else (clone / name).unlink()
    return clone


def run_tests(core, *arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *arguments]
    return subprocess.run(command, cwd=core, env=environment(), capture_output=True, text=True)


def test_core_trains_alone(core, tmp_path):
    command = [sys.executable, "train.py", *TINY_STORIES, "--steps", "2", "--out_dir", str(tmp_path)]
    done = subprocess.run(command, cwd=core, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("Training finished.\n"), done.stdout + done.stderr


def test_core_tests_are_collected_alone(core):
    done = run_tests(core, "--collect-only")
    assert done.returncode == 0 and "error" not in done.stdout.lower().splitlines()[-1], done.stdout[-5000:]
    assert int(re.search(r"(\d+)/\d+ tests collected|(\d+) tests collected", done.stdout)[1]) > 1000


@pytest.mark.parametrize("folder", ["model", "training", "config", "checkpoint", "run", "pretrained"])
def test_core_tests_pass_alone(folder, core):
    done = run_tests(core, "--tb=short", f"tests/{folder}")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
