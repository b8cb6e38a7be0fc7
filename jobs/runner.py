"""Many trainings at once: each has its share of the cores or a GPU of its own, and one line on the screen.

Who trains a run is decided by the lock that a run has: what another process trains, here or on a machine that sees the
same directory, is left to it, and taken over when that has died. So the same command, started several times, shares the
work. Nothing here needs torch.
"""

import errno
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
from typing import Any, NamedTuple

import psutil
from tqdm import tqdm

from checkpoint.identity import code_hash
from config.errors import ConfigError, RunError
from data.files import lock
from distributed.signals import signals_to_catch
from run.lock import IN_USE, LOCK_FILE
from run.metrics_log import read_rows
from run.status import Status, read_status

# What a failed run reports when its disk is full, its quota used up or a file at its size limit. The last is the check
# before each save (checkpoint/saver.py).
DISK_FULL = (*map(os.strerror, (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)), "MB are needed, but ")
LOOK_SECONDS = 0.2
MOST_AT_ONCE = 8  # on a CPU, unless told: each needs memory of its own


@dataclass(frozen=True)
class Training:
    """A run to be trained, and the command that does."""

    directory: Path
    steps: int
    command: tuple[str, ...]
    again: bool = False
    """Whether to start it even if it is finished, as with --resume never."""

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
        if not (file := self.directory / LOCK_FILE).exists():
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

    def status(self, since: float) -> Status | None:
        """What it wrote since a start at that time; what ends before it begins leaves the status of the time before."""
        file = self.directory / "status.json"
        return read_status(file) if file.exists() and file.stat().st_mtime >= since else None

    def message(self, since: float) -> str:
        """Why a start at that time ended otherwise than it should have."""
        if (status := self.status(since)) and status.reason:
            return status.reason
        if not self.output.exists():
            return "its own messages say why"
        lines = [line for line in self.output.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line.partition("error: ")[2] for line in lines if line.startswith("train.py: error: ")]
        return next(iter([*errors, *lines[-1:]]), "it printed nothing")


class Failed(Exception):
    """A run ended otherwise than finished or stopped; its message.

    Attributes:
        killed: whether a signal that was not sent from here ended the process, as when memory runs out.
    """

    def __init__(self, training: Training, message: str, killed: bool = False):
        super().__init__(message)
        self.training, self.killed = training, killed


class Stopped(Exception):
    """A signal asked to stop; what was under way is saved."""


class OutOfTime(Exception):
    """No run is begun any more, and one that is wanted is not finished."""

    def __init__(self):
        super().__init__("the budget of minutes is spent")


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
        self.on_screen = False  # whether what a run prints is not kept in a file, but goes to the screen
        self.code: str | None = None  # its hash, if nothing is to be started once it has changed
        self.until = math.inf  # on the clock of time.monotonic: no run is begun after that
        self.sharers = self.at_once  # of the cores
        self.running: dict[Training, Started] = {}
        self.outcomes: dict[Training, str] = {}  # finished, stopped or failed
        self.failures: dict[Training, Failed] = {}
        for number in signals_to_catch():
            signal.signal(number, self._receive)

    def train(self, wanted: Iterable[Training], until_failure: bool = True) -> None:
        """Return once all are finished; begun in this order. What became of each is in `outcomes`.

        Raises:
            Failed: one has failed and, with `until_failure`, so the others were stopped, and go on when wanted again.
            Stopped: a signal asked to; or, with `until_failure`, one was stopped by others.
            OutOfTime: it is later than `until`, and what was begun before is finished.
            RunError: a disk is full, or the code was changed meanwhile.
        """
        self.check()
        missing = [training for training in dict.fromkeys(wanted) if training.again or not training.is_finished()]
        waiting, shown, self.sharers = list(missing), [], min(self.at_once, len(missing))
        steps = sum(training.steps for training in missing)
        quiet = True if self.on_screen else None  # None: off a terminal
        bar = tqdm(total=steps, unit="step", disable=quiet, leave=False, file=sys.stderr)
        try:
            while len(shown) < len(missing):
                self.check()
                self._end(waiting, until_failure)
                if time.monotonic() < self.until:
                    self._begin(waiting)
                elif waiting and not self.running:
                    raise OutOfTime
                bar.update(sum(training.last()["step"] for training in missing) - bar.n)
                for training in missing:
                    if training not in (*waiting, *self.running, *shown):
                        shown.append(training)
                        loss = training.last().get("val/loss")
                        said = self.outcomes.setdefault(training, "finished")
                        said += f", val/loss {loss:.4f}" if loss is not None else ""
                        number = f"[run {len(shown)} / {len(missing)}]"
                        bar.write(f"{number} {training.directory.name}: {said}", file=sys.stderr)
                time.sleep(LOOK_SECONDS if len(shown) < len(missing) else 0)
        finally:
            self._stop_all()
            bar.close()

    def check(self) -> None:
        """Raise Stopped after a signal."""
        if self.signal:
            raise Stopped

    def _begin(self, waiting: list[Training]) -> None:
        for training in list(waiting):
            if training.is_finished() and not training.again:  # elsewhere
                waiting.remove(training)
            elif len(self.running) < self.at_once and not training.is_in_use():
                waiting.remove(training)
                self.running[training] = self._start(training)

    def _start(self, training: Training) -> Started:
        if self.code not in (None, code_hash()):
            raise RunError("the code that trains was changed meanwhile: what is not started would be of another code")
        slot = next(slot for slot in range(self.at_once) if slot not in [run.slot for run in self.running.values()])
        own = dict(os.environ)
        if self.sharers > 1:
            own = {"OMP_NUM_THREADS": str(max(1, cores() // self.sharers)), **own}
        if self.at_once > 1 and self.gpus:
            own["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        seconds = time.time()
        if self.on_screen:
            return Started(subprocess.Popen(training.command, start_new_session=True, env=own), slot, seconds)
        training.output.parent.mkdir(parents=True, exist_ok=True)
        with open(training.output, "w") as output:
            streams = {"stdout": output, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(training.command, start_new_session=True, env=own, **streams)
        return Started(process, slot, seconds)

    def _end(self, waiting: list[Training], until_failure: bool) -> None:
        """Take those away that have ended, and what another process took first back among those that wait."""
        for training, run in list(self.running.items()):
            if run.process.poll() is None:
                continue
            del self.running[training]
            if run.process.returncode == 0:
                self.outcomes[training] = "finished"
                continue
            status, message = training.status(run.seconds), training.message(run.seconds)
            if run.process.returncode < 0:
                message = f"ended by {signal.Signals(-run.process.returncode).name}, as where memory is out"
            if any(words in message for words in DISK_FULL):
                raise RunError(f"{training.directory}: {message}; with room there, the same command goes on")
            if IN_USE in message or training.is_in_use():
                waiting.append(training)
                continue
            # A launcher makes 1 of every code.
            stopped = run.process.returncode == 75 or (status is not None and status.state == "preempted")
            self.outcomes[training] = "stopped" if stopped else "failed"
            failure = Failed(training, message, killed=run.process.returncode < 0)
            if not stopped:
                self.failures[training] = failure
            if until_failure:
                raise Stopped if stopped else failure

    def _stop_all(self) -> None:
        for run in self.running.values():
            self._send(run, self.signal or signal.SIGTERM)
        for training, run in self.running.items():
            self.outcomes[training] = "stopped" if run.process.wait() else "finished"
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
    if (settings := accelerate_settings(launch)) is not None:
        return settings.get("mixed_precision") or "no"
    names = [Path(word).name for word in launch]
    passes_on = names[0].startswith(("python", "torchrun")) and "accelerate" not in " ".join(names)
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no") if passes_on else None


def launched_processes(launch: list[str]) -> int:
    """Of each run that is started like this, as far as `accelerate launch` is told; else 1."""
    return int((accelerate_settings(launch) or {}).get("num_processes") or 1)


def accelerate_settings(launch: list[str]) -> dict[str, Any] | None:
    """Of `accelerate launch` with its file; None where something else starts a run."""
    if [Path(word).name for word in launch[:2]] != ["accelerate", "launch"]:
        return None
    from distributed.launch_checks import parse_launch_command  # imports torch

    return parse_launch_command([*launch[2:], "train.py"], os.getcwd())[1]
