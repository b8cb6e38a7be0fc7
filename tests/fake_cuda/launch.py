"""Run the scripts on fake devices, as a user would start them on a machine with GPUs."""

import json
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT, TINY_STORIES, environment, metrics, train_command
from tests.support import forked

STEPS = 8
# The steps between 4 and 8 log nothing: tests/fake_cuda/recorded_train.py records them.
SETTINGS = "--name run --tracking.log_every 4 --checkpoint.every 4 --evaluation.every 8 --timeout_seconds 120".split()


@dataclass
class Trained:
    """A finished run."""

    directory: Path
    stdout: str
    stderr: str
    events: dict[tuple[str, str, str], int]
    """What the emulator reported in steps 5 to 7, in all processes: (kind, detail, FILE:LINE) to its count."""

    @property
    def losses(self) -> list[float]:
        """Training losses and, last, the validation loss."""
        rows = metrics(self.directory)
        return [row["train/loss"] for row in rows] + [rows[-1]["val/loss"]]

    @property
    def grad_norms(self) -> list[float]:
        """Gradient norms, which AdamW's losses hardly depend on."""
        return [row["train/grad_norm"] for row in metrics(self.directory)]

    @property
    def digest(self) -> str:
        """Hash of the final weights and moments."""
        return metrics(self.directory)[-1]["state/digest"]

    def of_kind(self, *kinds: str) -> set[tuple[str, str]]:
        """Return (detail, FILE) of the events of these kinds."""
        return {(detail, place.partition(":")[0]) for kind, detail, place in self.events if kind in kinds}


def fake_gpus(count: int, **more: str) -> dict[str, str]:
    """Environment of a machine with `count` fake GPUs."""
    return environment(FAKE_CUDA="1", CUDA_VISIBLE_DEVICES=",".join(map(str, range(count))), **more)


def train_on_gpus(
    launch_file: str, processes: int, *arguments, out_dir: Path, precision: str = "no", exit_code: int = 0
) -> Trained:
    """Train by `accelerate launch --config_file accelerate_configs/LAUNCH_FILE.yaml`, in forks."""
    out_dir.mkdir(parents=True, exist_ok=True)
    words = [*TINY_STORIES, *SETTINGS, *arguments, "--out_dir", out_dir]
    script, file = "tests/fake_cuda/recorded_train.py", ROOT / "accelerate_configs" / f"{launch_file}.yaml"
    command = train_command(*words, processes=processes, launch_file=file, script=script)
    command[command.index(script) : command.index(script)] = ["--mixed_precision", precision]
    done = forked.run(command[1], command[2:], 0, fake_gpus(processes, EVENTS=str(out_dir / "events")))
    assert done.returncode == exit_code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    events: dict[tuple[str, str, str], int] = {}
    for file in out_dir.glob("events.*.json"):
        for kind, detail, place, count in json.loads(file.read_text()):
            events[kind, detail, place] = events.get((kind, detail, place), 0) + count
    return Trained(out_dir / "run", done.stdout, done.stderr, events)
