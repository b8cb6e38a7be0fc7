"""Short exact runs end with the digests of golden.yaml on any x86-64 processor; an edit in place changes them."""

import platform
import shutil
import subprocess
import sys

import pytest
import torch
import yaml

from tests.conftest import ROOT, environment, python


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other architectures have other bits")
def test_exact_runs_have_golden_digests(tmp_path):
    """Trained in a fork: nothing may be computed before the instructions are selected."""
    golden = yaml.safe_load((ROOT / "tests" / "repo" / "golden.yaml").read_text())
    if golden["torch"] != torch.__version__.partition("+")[0]:
        pytest.skip(f"the digests are those of torch {golden['torch']}")
    assert yaml.safe_load(python(f"python -m tests.support.golden {tmp_path}").stdout) == golden["runs"]


@pytest.mark.slow
@pytest.mark.parametrize("processor", ["Haswell", "EPYC-Milan"])
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="qemu-user is not installed")
def test_exact_runs_have_golden_digests_in_qemu(processor, tmp_path):
    qemu = shutil.which("qemu-x86_64") or ""
    command = [qemu, "-cpu", processor, sys.executable, "-m", "tests.support.golden", tmp_path]
    env = environment(PATH="")  # without git: starting a program in a process with threads sometimes hangs in qemu
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=7200)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout) == yaml.safe_load((ROOT / "tests" / "repo" / "golden.yaml").read_text())["runs"]
