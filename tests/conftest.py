"""What the tests share: running the real train.py in real processes, and reading what it leaves on disk."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of all processes, which torch reads when it is imported

import pytest
import torch
from safetensors.torch import load_file

from tests import forked

ROOT = Path(__file__).parent.parent
CPU_LAUNCH = ROOT / "accelerate_configs" / "cpu.yaml"

TINY_STORIES = ["--config", str(ROOT / "tests" / "tiny_stories.yaml")]


def environment(**extra: str) -> dict[str, str]:
    """The environment of a user's shell: nothing of the test runner's own launcher, one thread a process."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "TORCHELASTIC"))
    }
    return {**inherited, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", **extra}


def train_command(
    *arguments: str | Path,
    processes: int = 0,
    launch_file: Path = CPU_LAUNCH,
    max_restarts: int = 0,
    script: str = "train.py",
) -> list[str]:
    """`python train.py` for processes=0, else `accelerate launch` with so many processes."""
    launcher = [sys.executable]
    if processes:
        bin_directory = Path(sys.executable).parent
        launcher = [sys.executable, bin_directory / "accelerate", "launch", "--config_file", launch_file]
        launcher += ["--num_processes", processes, "--max_restarts", max_restarts]
    return [str(word) for word in (*launcher, script, *arguments)]


def train(
    *arguments: str | Path,
    processes: int = 0,
    launched: bool = False,
    launch_file: Path = CPU_LAUNCH,
    max_restarts: int = 0,
    faults: str = "",
    exit_code: int = 0,
    cwd: Path = ROOT,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """Run train.py to its end and check its exit code; with `faults`, those of tests/faulty_train.py.

    In forked processes (tests/forked.py), unless `launched` or something else asks for a real launcher.
    """
    script, env = ("tests/faulty_train.py", {**env, "FAULTS": faults}) if faults else ("train.py", env)
    if launched or max_restarts or launch_file != CPU_LAUNCH or cwd != ROOT:
        command = train_command(
            *arguments, processes=processes, launch_file=launch_file, max_restarts=max_restarts, script=script
        )
        done = subprocess.run(command, cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=300)
    else:
        done = forked.run(script, [str(word) for word in arguments], processes, environment(**env))
    assert done.returncode == exit_code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def python(command: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `python SCRIPT ...` or `python -m MODULE ...` as a page shows it, in a fork, and check that it succeeds."""
    program, script, *arguments = shlex.split(command)
    assert program == "python"
    done = forked.run(script, arguments, 0, environment(**env), cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def shell(command: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a page shows it, with the environment active, and check that it succeeds."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=cwd,
        env=environment(PATH=path, **env),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def metrics(run: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl without those that depend on the clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    """All weights and moments of a checkpoint."""
    files = (run / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Every tensor of the one is, bit for bit, that of the other."""
    assert ours.keys() == theirs.keys() and len(ours) > 10
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, f"{len(different)} of {len(ours)} tensors differ, such as {different[0]}"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """An empty directory for `--out_dir`."""
    return tmp_path / "runs"
