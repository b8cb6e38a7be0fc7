"""Train many runs at once: each on a part of the cores or on its own GPU, with one line of output per run.

The lock of a run decides which process trains it. A run that another process trains, here or on a machine with
the same directory mounted, is left to that process, and started here if that process dies. So the same command, started
several times, divides the work. This module does not import torch.
"""

import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

import psutil
from tqdm import tqdm

from runtime.config.errors import RunError, error_kind
from runtime.distributed.signals import signals_to_catch
from runtime.files import open_no_link
from runtime.machine.cores import available_cores, describe_load
from trainer.checkpoint.identity import code_hash
from trainer.run.directory import LOCK_FILE, Run, Status

MIN_FREE_BYTES = 2**20  # with less, a run may be unable to write why it failed
EXIT_STOPPED = 75  # of train.py, after a signal
POLL_SECONDS = 0.2
DEFAULT_MAX_RUNNING = 8  # on CPUs, where all runs are in the same memory


@dataclass(frozen=True)
class Job:
    """A run to train, and the command that trains it."""

    run: Run
    steps: int
    command: tuple[str, ...]
    restart: bool = False
    """Start it even if it is finished, as with --resume never."""
    keep_checkpoints: bool = True
    """Keep its checkpoints when it has finished."""

    @property
    def output(self) -> Path:
        """Log file of what the run prints."""
        return self.run.path.parent / "logs" / f"{self.run.path.name}.log"

    def is_finished(self) -> bool:
        return self.run.is_finished(self.steps)

    def status_stamp(self) -> tuple[int, int] | None:
        """Return what changes whenever status.json is written, whatever the clock; None if there is no such file."""
        try:
            stat = os.stat(self.run.path / "status.json")
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns

    def status_since(self, stamp: tuple[int, int] | None) -> Status:
        """Return how the process ended that was started when `status_stamp` was `stamp`.

        A process that fails before the training starts leaves the status of an earlier process; what it printed tells
        why.
        """
        if self.status_stamp() not in (None, stamp) and (status := self.run.status()):
            return status
        if self.output.exists() and (full := find_full_disk(self.output.parent)):
            return Status("failed", 0, full, "disk_full")
        return Status("failed", 0, self.error_line(), "error")

    def error_line(self) -> str:
        """Return the error that the run printed, else its last line."""
        if not self.output.exists():
            return "see its own messages"
        lines = [line for line in self.output.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line.partition("error: ")[2] for line in lines if line.startswith("train.py: error: ")]
        return next(iter([*errors, *lines[-1:]]), "it printed nothing")


def find_full_disk(folder: Path) -> str:
    """Return the error of a disk or quota without room for a small file; "" if there is room.

    Some file systems, such as BlobFuse, report 0 free bytes, so a file is written.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(MIN_FREE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return str(error.strerror) if error_kind(error) == "disk_full" else ""
    return ""


@dataclass(frozen=True)
class Failure:
    message: str
    killed: bool = False
    """Whether a signal from elsewhere ended a process of the run, as when memory runs out."""


class Started(NamedTuple):
    """A process that trains a run."""

    process: subprocess.Popen
    slot: int
    """Index below `max_running`; decides the GPU."""
    start_time: float
    """Of a clock that is never set back."""
    status_stamp: tuple[int, int] | None
    """Of the status that an earlier process left."""


class JobRunner:
    """Trains runs, at most `max_running` at the same time.

    Each process is the leader of a process group, to which signals are forwarded: launchers do not forward all of them.

    Attributes:
        max_running: By default the number of GPUs, else the number of cores, at most 8.
        show_output: Let runs print to the terminal instead of a log file.
        code: Hash of the sources; if given, no run starts once they have changed.
        threads: Threads of each run on a CPU. None: the cores, divided by the number of runs at the same time.
        deadline: Value of time.monotonic() at which runs save and stop.
        end_time: Value of time.monotonic() at which the wait for runs of other processes ends.
        overdue: Returns why a run fails that has trained for so many seconds and is killed, or that has waited so long
            for the process that holds its lock; "" if it may continue.
        waiting: Runs that wait for room or for the process that holds their lock, with the time when the wait began.
        stop_seconds: Time that runs have to save after a signal, before they are killed.
        outcomes: "finished", "stopped" or "failed" of each run that has ended, "locked" of one whose wait has ended.
        seconds: CPU seconds of the processes of each run that has ended; on GPUs the time from start to end.
        starts: How often each run was started.
        failures: Why each failed run failed.
        signal: The last stop signal received; 0 if none.
    """

    def __init__(self, max_running: int | None = None):
        self.gpus = visible_gpus()
        self.max_running = max_running or len(self.gpus) or min(available_cores(), DEFAULT_MAX_RUNNING)
        self.show_output = False
        self.code: str | None = None
        self.threads: int | None = None
        self.deadline = self.end_time = math.inf
        self.overdue: Callable[[Job, float], str] = lambda job, seconds: ""
        self.stop_seconds = math.inf
        self.outcomes: dict[Job, str] = {}
        self.failures: dict[Job, Failure] = {}
        self.seconds: dict[Job, float] = {}
        self.starts: dict[Job, int] = {}
        self.signal = 0
        self.waiting: dict[Job, float] = {}
        self._running: dict[Job, Started] = {}
        self._overdue: dict[Job, str] = {}
        self._num_sharing_cores = self.max_running
        for number in signals_to_catch():
            signal.signal(number, self._receive)
        if self.max_running > 1 and not self.gpus and sys.stderr.isatty() and (load := describe_load()):
            print(f"{load}, so {self.max_running} runs at once are slow; --jobs 1 trains one", file=sys.stderr)

    def train(self, jobs: Iterable[Job], until_failure: bool = True) -> bool:
        """Train all runs that are not finished, started in this order; return False if the deadline came before.

        With `until_failure`, stop the other runs as soon as one fails or is stopped.

        Raises:
            RunError: With `until_failure`, a run failed; or a disk is full, or the code changed before all runs were
                started.
            SystemExit: With code 75: a signal was received; or, with `until_failure`, a run was stopped from elsewhere.
                The runs have saved.
        """
        missing = [job for job in dict.fromkeys(jobs) if job.restart or not job.is_finished()]
        self._num_sharing_cores = min(self.max_running, len(missing))
        disable = True if self.show_output else None  # None: tqdm disables itself outside a terminal
        with tqdm(total=sum(job.steps for job in missing), unit="step", disable=disable, leave=False) as bar:

            def progress() -> None:
                bar.update(sum(job.run.newest_metrics()["step"] for job in missing) - bar.n)

            ended = 0
            for ended, job in enumerate(self.stream(missing, until_failure, progress), start=1):
                outcome = self.outcomes.setdefault(job, "finished")  # absent if another process trained it
                loss = job.run.newest_metrics().get("val/loss")
                result = f"{job.run.path.name}: {outcome}" + (f", val/loss {loss:.4f}" if loss is not None else "")
                bar.write(f"[run {ended} / {len(missing)}] {result}", file=sys.stderr)
        return ended == len(missing)

    def stream(
        self, jobs: Iterable[Job | None], until_failure: bool = False, progress: Callable[[], None] = lambda: None
    ) -> Iterator[Job]:
        """Train runs, each taken from `jobs` when there is room for it, and yield each when it has ended.

        `jobs` may yield None if the next run depends on those in training; it is asked again a little later. At the
        deadline the runs in progress save and stop. `progress` is called several times a second. Raise the errors of
        `train`.
        """
        source, self.waiting = iter(jobs), {}
        end = object()
        is_exhausted = False
        try:
            while True:
                self.raise_if_stopped()
                yield from self._collect_ended(until_failure)
                if time.monotonic() >= self.deadline and (self.waiting or self._running or not is_exhausted):
                    print("minutes: the time is spent; run the same command again to resume", file=sys.stderr)
                    return
                yield from self._start_waiting(until_failure)
                while not is_exhausted and len(self._running) < self.max_running:
                    job = next(source, end)
                    is_exhausted = job is end
                    if not isinstance(job, Job):
                        break
                    self.waiting[job] = time.monotonic()
                    yield from self._start_waiting(until_failure)
                progress()
                if is_exhausted and not self.waiting and not self._running:
                    return
                time.sleep(POLL_SECONDS)
        finally:
            self._stop_all()

    def limit_minutes(self, minutes: float | None) -> None:
        """Let the wait for runs of other processes end so many minutes from now; None: never."""
        self.end_time = math.inf if minutes is None else time.monotonic() + 60 * minutes

    def raise_if_stopped(self) -> None:
        if self.signal:
            raise_stopped()

    def _start_waiting(self, until_failure: bool) -> Iterator[Job]:
        """Start runs for which there is room; yield those that another process has finished or has locked too long."""
        for job, since in list(self.waiting.items()):
            if job.is_finished() and not job.restart:
                del self.waiting[job]
                self.outcomes.pop(job, None)  # of an earlier start
                yield job
            elif job.run.is_locked():
                yield from self._end_wait(job, time.monotonic() - since, until_failure)
            elif len(self._running) < self.max_running:
                del self.waiting[job]
                self._running[job] = self._start(job)

    def _end_wait(self, job: Job, seconds: float, until_failure: bool) -> Iterator[Job]:
        """Yield a run that another process has locked, unless the wait for that process goes on."""
        message = f"another process holds {job.run.path / LOCK_FILE}"
        if reason := self.overdue(job, seconds):
            message = f"{reason}; {message}"
            self.outcomes[job], self.failures[job] = "failed", Failure(message)
        elif time.monotonic() >= self.end_time:
            self.outcomes[job] = "locked"
            print(f"{message}, and the time is spent", file=sys.stderr)
        else:
            return
        del self.waiting[job]
        if until_failure:
            raise RunError(f"{job.run.path}: {message}")
        yield job

    def _start(self, job: Job) -> Started:
        if self.code is not None and self.code != code_hash():
            raise RunError(
                "the code has changed since the first run was started; runs of different code are not comparable"
            )
        used = [run.slot for run in self._running.values()]
        slot = next(slot for slot in range(self.max_running) if slot not in used)
        environment = dict(os.environ)
        environment.pop("SLURM_STEP_NUM_TASKS", None)  # tasks of srun divide the runs, and train each run alone
        if self.threads or self._num_sharing_cores > 1:
            threads = self.threads or max(1, available_cores() // self._num_sharing_cores)
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        if self.max_running > 1 and self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        started = slot, time.monotonic(), job.status_stamp()
        self.starts[job] = self.starts.get(job, 0) + 1
        if self.show_output:
            process = subprocess.Popen(job.command, start_new_session=True, env=environment)
            return Started(process, *started)
        job.output.parent.mkdir(parents=True, exist_ok=True)
        with open(job.output, "w", opener=open_no_link) as output:
            process = subprocess.Popen(
                job.command, start_new_session=True, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        return Started(process, *started)

    def _collect_ended(self, until_failure: bool) -> Iterator[Job]:
        """Yield the runs whose processes have ended; a run that another process locked first is queued again."""
        for job, started in list(self._running.items()):
            if (exit_code := self._exit_code(job, started)) is None:
                seconds = time.monotonic() - started.start_time
                if job not in self._overdue and (reason := self.overdue(job, seconds)):
                    self._overdue[job] = reason
                    kill_with_children(started.process.pid)
                continue
            del self._running[job]
            reason = self._overdue.pop(job, "")
            if exit_code == 0 and job.is_finished():  # a launch script with a pipe ends with 0 after a failure, too
                self._record_finished(job)
                yield job
                continue
            if job.run.is_locked() and not reason:  # a killed run has failed, whatever it has left behind
                self.waiting[job] = time.monotonic()
                continue
            status = job.status_since(started.status_stamp)
            if status.kind == "disk_full":
                raise RunError(f"{job.run.path}: {status.reason}; free some space and run the same command again")
            # A launcher exits with 1 whatever its processes return.
            stopped = not reason and (exit_code == EXIT_STOPPED or status.state == "preempted")
            self.outcomes[job] = "stopped" if stopped else "failed"
            if not stopped:
                self.failures[job] = Failure(reason) if reason else describe_failure(job, exit_code, status)
            if until_failure:
                if stopped:
                    raise_stopped()
                raise RunError(f"{job.run.path}: {self.failures[job].message}")
            yield job

    def _exit_code(self, job: Job, started: Started) -> int | None:
        """Return the exit code of the process of a run, negative after a signal; None while it runs."""
        process = started.process
        if process.returncode is None:
            # Popen.poll would not tell the CPU time. That of child processes, as of a launcher, is included.
            try:
                process_id, status, usage = os.wait4(process.pid, os.WNOHANG)
            except ChildProcessError:  # something else has waited for it, so its CPU time is unknown
                return process.poll()
            if process_id == 0:
                return None
            process.returncode = os.waitstatus_to_exitcode(status)
            elapsed = time.monotonic() - started.start_time
            seconds = elapsed if self.gpus else usage.ru_utime + usage.ru_stime
            self.seconds[job] = self.seconds.get(job, 0.0) + seconds
        return process.returncode

    def _stop_all(self) -> None:
        for run in self._running.values():
            self._send(run, self.signal or signal.SIGTERM)
        last_moment = time.monotonic() + self.stop_seconds
        for job, run in self._running.items():
            while (exit_code := self._exit_code(job, run)) is None:
                if time.monotonic() >= last_moment:
                    print(f"{job.run.path}: killed, because it did not stop", file=sys.stderr)
                    kill_with_children(run.process.pid)
                time.sleep(POLL_SECONDS)
            if exit_code == 0 and job.is_finished():
                self._record_finished(job)
            else:
                self.outcomes[job] = "stopped"
        self._running.clear()

    def _record_finished(self, job: Job) -> None:
        self.outcomes[job] = "finished"
        self.failures.pop(job, None)  # of an earlier start
        if not job.keep_checkpoints:
            shutil.rmtree(job.run.path / "checkpoints", ignore_errors=True)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # _stop_all forwards the first signal. Later ones are forwarded here: a second one ends a run without saving.
        is_first, self.signal = not self.signal, number
        for run in () if is_first else self._running.values():
            self._send(run, number)

    def _send(self, run: Started, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(run.process.pid, number)


def kill_with_children(process_id: int) -> None:
    """Kill a process and all that it has started; those of torch's launcher are in sessions of their own."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(process_id)
        for one in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                one.kill()


def raise_stopped() -> NoReturn:
    print("stopped by a signal; run the same command again to resume", file=sys.stderr)
    raise SystemExit(EXIT_STOPPED)


def describe_failure(job: Job, exit_code: int, status: Status) -> Failure:
    """Return why a run failed whose process ended with this exit code (negative: by a signal) and status."""
    if exit_code == 0 and status.kind == "error":
        return Failure(f"ended with exit code 0 before its last step ({status.reason})")
    if exit_code < 0:
        return Failure(f"ended by {signal.Signals(-exit_code).name}; out of memory?", killed=True)
    if status.state == "running":
        return Failure(f"ended without recording why, as if killed; out of memory? ({job.error_line()})", killed=True)
    return Failure(status.reason, killed=status.kind == "lost_process")


def visible_gpus() -> list[str]:
    """Return a value of CUDA_VISIBLE_DEVICES for each GPU that this process may use."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in visible.split(",") if name.strip()]
    if shutil.which("nvidia-smi") is None:
        return []
    listing = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout
    return [str(index) for index in range(listing.count("UUID: GPU"))]
