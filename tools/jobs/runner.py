"""Train many runs at once: each on a part of the cores or on its own GPU, with one line of output per run.

The lock of a run decides which process trains it. A run that another process trains, here or on a machine with
the same directory mounted, is left to that process, and started here if that process dies. So the same command, started
several times, divides the work. This module does not import torch.
"""

import errno
import math
import os
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
from types import FrameType
from typing import NamedTuple

from tqdm import tqdm

from checkpoint.identity import code_hash
from config.errors import RunError
from distributed.cores import available_cores
from distributed.signals import signals_to_catch
from run.lock import IN_USE
from run.reader import RunReader
from run.status import Status

# Parts of error messages if the disk is full, the quota used up, or a file at its size limit. The last one is from the
# check before each save (checkpoint/saver.py).
DISK_FULL = (*map(os.strerror, (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)), "MB are needed, but ")
# Parts of error messages of a process whose connection to another one broke, because that was killed.
LOST_PROCESS = ("closed by peer", "reset by peer", "remote process exited")
MIN_FREE_BYTES = 2**20  # with less, a run may be unable to write why it failed
POLL_SECONDS = 0.2
DEFAULT_MAX_RUNNING = 8  # on CPUs, where all runs are in the same memory


@dataclass(frozen=True)
class Training:
    """A run to train, and the command that trains it."""

    directory: Path
    steps: int
    command: tuple[str, ...]
    restart: bool = False
    """Start it even if it is finished, as with --resume never."""
    keep_checkpoints: bool = True
    """Keep its checkpoints when it has finished."""

    @property
    def reader(self) -> RunReader:
        """Reader of the run directory."""
        return RunReader(self.directory)

    @property
    def output(self) -> Path:
        """Log file of what the run prints."""
        return self.directory.parent / "logs" / f"{self.directory.name}.log"

    def is_finished(self) -> bool:
        """Return whether all steps are completed."""
        status = self.reader.status()
        return status is not None and status.state == "finished" and status.step >= self.steps

    def last_row(self) -> dict[str, float]:
        """Return the newest row of metrics.jsonl; {"step": 0} if there is none."""
        return self.reader.newest_metrics()

    def tokens_per_second(self) -> float:
        """Return the median of the logged speeds, without the first, which includes one-time work; NaN if unknown."""
        rows = self.reader.metrics()
        speeds = [row["perf/tokens_per_second"] for row in rows if "perf/tokens_per_second" in row]
        return statistics.median(speeds[1:] or speeds or [math.nan])

    def status_since(self, start_time: float) -> Status | None:
        """Return the status, or None if it is older than `start_time` (seconds since the epoch).

        A process that fails before the training starts leaves the status of an earlier process.
        """
        file = self.directory / "status.json"
        return self.reader.status() if file.exists() and file.stat().st_mtime >= start_time else None

    def failure_message(self, start_time: float) -> str:
        """Return the reason why the process started at `start_time` failed, from its status or its output."""
        if (status := self.status_since(start_time)) and status.reason:
            return status.reason
        if not self.output.exists():
            return "see its own messages"
        if shutil.disk_usage(self.output.parent).free < MIN_FREE_BYTES:
            return os.strerror(errno.ENOSPC)
        lines = [line for line in self.output.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line.partition("error: ")[2] for line in lines if line.startswith("train.py: error: ")]
        return next(iter([*errors, *lines[-1:]]), "it printed nothing")


class Failed(Exception):
    """A run failed; the message says why.

    Attributes:
        training: The run.
        killed: True if a signal from elsewhere ended a process of the run, as when memory runs out.
    """

    def __init__(self, training: Training, message: str, killed: bool = False):
        super().__init__(message)
        self.training, self.killed = training, killed


class Stopped(Exception):
    """A signal stopped the runs; they have saved."""

    def __init__(self):
        super().__init__("stopped by a signal; rerun the same command to resume")


class OutOfTime(Exception):
    """The deadline has passed, and some runs are not finished; those in progress have saved."""

    def __init__(self):
        super().__init__("budget_minutes: the time is spent")


class Started(NamedTuple):
    """A process that trains a run."""

    process: subprocess.Popen
    slot: int
    """Index below `max_running`; decides the GPU."""
    start_time: float
    """Seconds since the epoch."""


class JobRunner:
    """Trains runs, at most `max_running` at the same time.

    Each process is the leader of a process group, to which signals are forwarded: launchers do not forward all of them.

    Attributes:
        max_running: By default the number of GPUs, else the number of cores, at most 8.
        show_output: Let runs print to the terminal instead of a log file.
        code: Hash of the sources; if given, no run starts once they have changed.
        threads: Threads of each run on a CPU. None: the cores, divided by the number of runs at the same time.
        deadline: Value of time.monotonic() at which runs save and stop.
        outcomes: "finished", "stopped" or "failed" of each run that has ended.
        failures: The error of each run that failed.
        signal: The last stop signal received; 0 if none.
    """

    def __init__(self, max_running: int | None = None):
        self.gpus = visible_gpus()
        self.max_running = max_running or len(self.gpus) or min(available_cores(), DEFAULT_MAX_RUNNING)
        self.show_output = False
        self.code: str | None = None
        self.threads: int | None = None
        self.deadline = math.inf
        self.outcomes: dict[Training, str] = {}
        self.failures: dict[Training, Failed] = {}
        self.signal = 0
        self._running: dict[Training, Started] = {}
        self._num_sharing_cores = self.max_running
        for number in signals_to_catch():
            signal.signal(number, self._receive)

    def train(self, trainings: Iterable[Training], until_failure: bool = True) -> None:
        """Train all runs that are not finished, started in this order, and return when they have ended.

        With `until_failure`, stop the other runs as soon as one fails or is stopped.

        Raises:
            Failed: A run failed; with `until_failure` only.
            Stopped: A signal was received; or, with `until_failure`, a run was stopped from elsewhere.
            OutOfTime: The deadline has passed; the runs in progress have saved.
            RunError: A disk is full, or the code changed before all runs were started.
        """
        self.raise_if_stopped()
        missing = [training for training in dict.fromkeys(trainings) if training.restart or not training.is_finished()]
        waiting, ended = list(missing), []
        self._num_sharing_cores = min(self.max_running, len(missing))
        num_steps = sum(training.steps for training in missing)
        disable = True if self.show_output else None  # None: tqdm disables itself outside a terminal
        bar = tqdm(total=num_steps, unit="step", disable=disable, leave=False, file=sys.stderr)
        try:
            while len(ended) < len(missing):
                self.raise_if_stopped()
                self._collect_ended(waiting, until_failure)
                if time.monotonic() < self.deadline:
                    self._start_waiting(waiting)
                elif waiting or self._running:
                    raise OutOfTime
                bar.update(sum(training.last_row()["step"] for training in missing) - bar.n)
                for training in missing:
                    if training not in (*waiting, *self._running, *ended):
                        ended.append(training)
                        bar.write(f"[run {len(ended)} / {len(missing)}] {self._describe(training)}", file=sys.stderr)
                time.sleep(POLL_SECONDS if len(ended) < len(missing) else 0)
        finally:
            self._stop_all()
            bar.close()

    def raise_if_stopped(self) -> None:
        """Raise Stopped after a signal."""
        if self.signal:
            raise Stopped

    def _describe(self, training: Training) -> str:
        outcome = self.outcomes.setdefault(training, "finished")
        loss = training.last_row().get("val/loss")
        return f"{training.directory.name}: {outcome}" + (f", val/loss {loss:.4f}" if loss is not None else "")

    def _start_waiting(self, waiting: list[Training]) -> None:
        for training in list(waiting):
            if training.is_finished() and not training.restart:  # by another process
                waiting.remove(training)
            elif len(self._running) < self.max_running and not training.reader.is_locked():
                waiting.remove(training)
                self._running[training] = self._start(training)

    def _start(self, training: Training) -> Started:
        if self.code not in (None, code_hash()):
            raise RunError(
                "the code has changed since the first run was started; runs of different code are not comparable"
            )
        used = [run.slot for run in self._running.values()]
        slot = next(slot for slot in range(self.max_running) if slot not in used)
        environment = dict(os.environ)
        if self.threads or self._num_sharing_cores > 1:
            threads = self.threads or max(1, available_cores() // self._num_sharing_cores)
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        if self.max_running > 1 and self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        start_time = time.time()
        if self.show_output:
            process = subprocess.Popen(training.command, start_new_session=True, env=environment)
            return Started(process, slot, start_time)
        training.output.parent.mkdir(parents=True, exist_ok=True)
        with open(training.output, "w") as output:
            process = subprocess.Popen(
                training.command, start_new_session=True, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        return Started(process, slot, start_time)

    def _collect_ended(self, waiting: list[Training], until_failure: bool) -> None:
        """Remove processes that have ended; a run that another process locked first is queued again."""
        for training, run in list(self._running.items()):
            if (exit_code := run.process.poll()) is None:
                continue
            del self._running[training]
            if exit_code == 0:
                self._record_finished(training)
                continue
            message = training.failure_message(run.start_time)
            if exit_code < 0:
                message = f"ended by {signal.Signals(-exit_code).name}; out of memory?"
            if any(words in message for words in DISK_FULL):
                raise RunError(f"{training.directory}: {message}; free some space and run the same command again")
            if IN_USE in message or training.reader.is_locked():
                waiting.append(training)
                continue
            # A launcher exits with 1 whatever its processes return.
            status = training.status_since(run.start_time)
            state = status.state if status else ""
            stopped = exit_code == 75 or state == "preempted"
            self.outcomes[training] = "stopped" if stopped else "failed"
            if exit_code > 0 and state == "running":
                message = f"ended without recording why, as if killed; out of memory? ({message})"
            lost_process = any(words in message for words in LOST_PROCESS)
            failure = Failed(training, message, killed=exit_code < 0 or state == "running" or lost_process)
            if not stopped:
                self.failures[training] = failure
            if until_failure:
                raise Stopped if stopped else failure

    def _stop_all(self) -> None:
        for run in self._running.values():
            self._send(run, self.signal or signal.SIGTERM)
        for training, run in self._running.items():
            if run.process.wait():
                self.outcomes[training] = "stopped"
            else:
                self._record_finished(training)
        self._running.clear()

    def _record_finished(self, training: Training) -> None:
        self.outcomes[training] = "finished"
        if not training.keep_checkpoints:
            shutil.rmtree(training.directory / "checkpoints", ignore_errors=True)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # _stop_all forwards the first signal. Later ones are forwarded here: a second one ends a run without saving.
        is_first, self.signal = not self.signal, number
        for run in () if is_first else self._running.values():
            self._send(run, number)

    def _send(self, run: Started, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(run.process.pid, number)


def visible_gpus() -> list[str]:
    """Return a value of CUDA_VISIBLE_DEVICES for each GPU that this process may use."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in visible.split(",") if name.strip()]
    if shutil.which("nvidia-smi") is None:
        return []
    listing = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout
    return [str(index) for index in range(listing.count("UUID: GPU"))]
