"""Many trainings at once: each has its share of the cores or a GPU of its own, and one line on the screen.

Who trains a run is decided by the lock that a run has: what another process trains, here or on a machine that sees the
same directory, is left to it, and taken over when that has died. So the same command, started several times, shares the
work. Nothing here needs torch.
"""

import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
from tqdm import tqdm

from config import ConfigError, RunError
from data.files import lock
from launch.signals import STOP_SIGNALS
from run.metrics_file import read_rows
from run.status import read_status

IN_USE = "is in use: another training is running in it"  # says a run whose lock another process has
LOCK = ".lock"  # as run/directory.py calls it, which imports torch
FULL_DISK = "No space left on device"
LOOK_SECONDS = 0.2
MOST_AT_ONCE = 8  # on a CPU, unless told: each needs memory of its own


@dataclass(frozen=True)
class Training:
    """A run to be trained, and the command that does."""

    directory: Path
    steps: int
    command: tuple[str, ...]

    @property
    def output(self) -> Path:
        """Where what it prints is kept."""
        return self.directory.parent / "logs" / f"{self.directory.name}.log"

    def is_finished(self) -> bool:
        """Whether all its steps are done."""
        status = read_status(self.directory / "status.json")
        return status is not None and status.state == "finished" and status.step >= self.steps

    def is_in_use(self) -> bool:
        """Whether a process trains it, on whichever machine."""
        if not (file := self.directory / LOCK).exists():
            return False
        with open(file, "a") as opened:
            return not lock(opened)

    def rows(self) -> list[dict[str, float]]:
        """Of its metrics."""
        file = self.directory / "metrics.jsonl"
        return list(read_rows(file)) if file.exists() else []

    def last(self) -> dict[str, float]:
        """The newest row; only a step 0 before there is any."""
        return max(self.rows(), key=lambda row: row["step"], default={"step": 0})

    def tokens_per_second(self) -> float:
        """The median of what it logged, but for the first, which includes what is done once."""
        speeds = [row["perf/tokens_per_second"] for row in self.rows() if "perf/tokens_per_second" in row]
        return statistics.median(speeds[1:] or speeds or [math.nan])

    def message(self, begun: float) -> str:
        """Why it ended, if not as it should have, of a start at this time."""
        lines = [line for line in self.output.read_text(errors="replace").splitlines() if line.strip()]
        with suppress(OSError):
            status = read_status(self.directory / "status.json")
            if status and status.reason and (self.directory / "status.json").stat().st_mtime >= begun:
                return status.reason
        errors = [line.partition("error: ")[2] for line in lines if line.startswith("train.py: error: ")]
        return next(iter([*errors, *lines[-1:]]), "it printed nothing")


class Failed(Exception):
    """A run ended otherwise than finished or stopped; its message."""

    def __init__(self, training: Training, message: str):
        super().__init__(message)
        self.training = training


class Stopped(Exception):
    """A signal asked to stop; what was under way is saved."""


class Started(NamedTuple):
    """A run that is being trained here."""

    process: subprocess.Popen
    slot: int
    seconds: float
    """When, since the epoch."""


class Trainings:
    """Trains runs, at most `at_once` together. All that it starts gets the signals that come here, in process groups of
    their own: a launcher does not hand on each of them."""

    def __init__(self, at_once: int | None = None):
        self.gpus = gpus()
        self.at_once = at_once or len(self.gpus) or min(cores(), MOST_AT_ONCE)
        self.signal = 0
        self.running: dict[Training, Started] = {}
        for number in (*STOP_SIGNALS, signal.SIGHUP):
            signal.signal(number, self._receive)

    def train(self, wanted: Iterable[Training]) -> None:
        """Return once all are finished; begun in this order.

        Raises:
            Failed: one has failed; the others were stopped, and go on when they are wanted again.
            Stopped: a signal asked to.
            RunError: a disk is full.
        """
        missing = [training for training in dict.fromkeys(wanted) if not training.is_finished()]
        waiting, done = list(missing), []
        steps = sum(training.steps for training in missing)
        bar = tqdm(total=steps, unit="step", disable=None, leave=False, file=sys.stderr)
        try:
            while len(done) < len(missing):
                self.check()
                self._end(waiting)
                self._begin(waiting)
                bar.update(sum(training.last()["step"] for training in missing) - bar.n)
                for training in missing:
                    if training not in (*waiting, *self.running, *done):
                        done.append(training)
                        loss = training.last().get("val/loss")
                        said = f", val/loss {loss:.4f}" if loss is not None else ""
                        bar.write(
                            f"[run {len(done)} / {len(missing)}] {training.directory.name}{said}", file=sys.stderr
                        )
                time.sleep(LOOK_SECONDS if len(done) < len(missing) else 0)
        finally:
            self._stop_all()
            bar.close()

    def check(self) -> None:
        """Raise Stopped after a signal."""
        if self.signal:
            raise Stopped

    def _begin(self, waiting: list[Training]) -> None:
        for training in list(waiting):
            if training.is_finished():  # elsewhere
                waiting.remove(training)
            elif len(self.running) < self.at_once and not training.is_in_use():
                waiting.remove(training)
                self.running[training] = self._start(training)

    def _start(self, training: Training) -> Started:
        slot = next(slot for slot in range(self.at_once) if slot not in [run.slot for run in self.running.values()])
        own = {"OMP_NUM_THREADS": str(max(1, cores() // self.at_once))} | dict(os.environ)
        if self.gpus:
            own["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        training.output.parent.mkdir(parents=True, exist_ok=True)
        seconds = time.time()
        with open(training.output, "w") as output:
            process = subprocess.Popen(
                training.command, start_new_session=True, env=own, stdout=output, stderr=subprocess.STDOUT
            )
        return Started(process, slot, seconds)

    def _end(self, waiting: list[Training]) -> None:
        """Take those away that have ended, and what another process took first back among those that wait."""
        for training, run in list(self.running.items()):
            if run.process.poll() is None:
                continue
            del self.running[training]
            if training.is_finished():
                continue
            message = training.message(run.seconds)
            status = read_status(training.directory / "status.json")
            if FULL_DISK in message:
                raise RunError(f"{training.directory}: {message}; with room there, the same command goes on")
            if IN_USE in message:
                waiting.append(training)
            elif run.process.returncode == 75 or (status and status.state == "preempted"):
                raise Stopped
            else:
                raise Failed(training, message)

    def _stop_all(self) -> None:
        for run in self.running.values():
            self._send(run, self.signal or signal.SIGTERM)
        for run in self.running.values():
            run.process.wait()
        self.running.clear()

    def _receive(self, number: int, frame) -> None:
        # _stop_all hands the first one on, and each that follows goes on at once: a run that gets two ends unsaved.
        again, self.signal = self.signal, number
        for run in self.running.values() if again else ():
            self._send(run, number)

    def _send(self, run: Started, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(run.process.pid, number)


def cores() -> int:
    """Those that this process may use."""
    return len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count() or 1


def gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may be for each GPU here."""
    if (told := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in told.split(",") if name.strip()]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    return [str(index) for index in range(listed.stdout.count("UUID: GPU"))]


def launch_command(launch: str | None) -> list[str]:
    """The words to put before train.py.

    Raises:
        ConfigError: there is no such program.
    """
    words = shlex.split(launch) if launch else [sys.executable]
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(f"launch: {launch!r} begins with no program that is found; activate the environment?")
    return words


def launched_precision(launch: list[str]) -> str | None:
    """The mixed precision that runs started like this have; None where that is not for us to know, as with a script."""
    names = [Path(word).name for word in launch]
    if names[:2] == ["accelerate", "launch"]:
        from launch.request import parse_launch_command  # imports torch

        return parse_launch_command([*launch[2:], "train.py"], os.getcwd())[1].get("mixed_precision") or "no"
    passes_on = names[0].startswith(("python", "torchrun")) and "accelerate" not in " ".join(names)
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no") if passes_on else None
