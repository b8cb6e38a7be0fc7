"""Training on an ARM processor that qemu emulates, in a folder that tests/support/arm_root.sh makes.

`bash tests/support/arm_root.sh runs/arm_root` takes some minutes and 6 GB; ARM_ROOT=FOLDER names another folder.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, TINY_STORIES, assert_same_run, environment, metrics, train
from tests.support.forked import free_port

FOLDER = Path(os.environ.get("ARM_ROOT", ROOT / "runs" / "arm_root")).absolute()
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
TORCH = f"usr/local/lib/python3.*/dist-packages/torch-{torch.__version__.partition('+')[0]}.dist-info"
SETTINGS = [*TINY_STORIES, *"--exact true --steps 4 --checkpoint.every 4".split()]


def train_on_arm(out_dir: Path, processes: int) -> Path:
    """Train by the real train.py in emulated processes, with the variables that a launcher sets, and return the run."""
    python = next(path for path in FOLDER.glob("usr/bin/python3.*") if path.name.removeprefix("python3.").isdecimal())
    command = [QEMU, "-cpu", "neoverse-n1", "-L", FOLDER, python, "train.py", *SETTINGS]
    command += ["--out_dir", out_dir, "--name", f"on_{processes}"]
    # Without git: starting a program in a process with threads sometimes hangs in qemu.
    launched = dict(PATH="", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    launched |= dict(WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
    started = []
    for rank in range(processes):
        env = environment(**launched, RANK=str(rank), LOCAL_RANK=str(rank)) if processes > 1 else environment(PATH="")
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(subprocess.Popen(command, cwd=ROOT, env=env, **pipes))
    try:
        printed = [process.communicate(timeout=3600)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(process.returncode for process in started), printed
    assert f"{processes} x cpu" in printed[0] and "Training finished." in printed[0]
    return out_dir / f"on_{processes}"


@pytest.mark.slow
@pytest.mark.linux_only
@pytest.mark.skipif(QEMU is None, reason="qemu-user is not installed")
@pytest.mark.skipif(not [*FOLDER.glob(TORCH)], reason="tests/support/arm_root.sh has not made an aarch64 Python")
def test_arm_trains_exactly_on_two_processes(tmp_path):
    """Losses are those of this machine but for rounding."""
    one, two = train_on_arm(tmp_path, 1), train_on_arm(tmp_path, 2)
    assert_same_run(one, two, step=4)
    train(*SETTINGS, "--out_dir", tmp_path, "--name", "here")
    arm, here = metrics(one), metrics(tmp_path / "here")
    assert [row["train/loss"] for row in arm] == pytest.approx([row["train/loss"] for row in here], rel=1e-5)
    assert arm[-1]["val/loss"] == pytest.approx(here[-1]["val/loss"], rel=1e-5)
