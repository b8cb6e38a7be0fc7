"""Runs benchmark cases interleaved, so that other load on the machine slows all of them alike."""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import psutil

from run.metrics_log import read_rows

ROOT, CPU = Path(__file__).parent.parent, "accelerate_configs/cpu.yaml"
LOGGED = ("[step ", "iter ")  # prefixes of the log lines of train.py, the bare loop and nanoGPT
TURNS = 5  # of a program before it is restarted; multiplies the rounds
Case = Callable[[], object]


class Group(NamedTuple):
    """Cases to be compared with each other; a case may return quantities beside those that are always measured."""

    name: str
    cases: dict[str, Case]
    baselines: dict[str, list[str]] | str = ""
    """Cases that a case is divided by; a string is the baseline of all others."""
    rounds: int | None = None  # None: the number that the command line asks for

    def baselines_of(self, name: str) -> list[str]:
        """Return the baselines of a case that are in this group."""
        names = [self.baselines] if isinstance(self.baselines, str) else self.baselines.get(name, [])
        return [other for other in names if other in self.cases and other != name]


def processor_seconds() -> float:
    """Return the CPU time of this process and its finished children."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def measure(case: Case) -> dict:
    """Return what a case returns, its wall-clock and CPU time, and how many cores other work kept busy meanwhile."""
    psutil.cpu_percent()  # starts an interval
    start, own = time.perf_counter(), processor_seconds()
    values = values if isinstance(values := case(), dict) else {}
    times = {"seconds": time.perf_counter() - start, "processor_seconds": processor_seconds() - own}
    busy_cores = psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1)
    own_cores = max(times["processor_seconds"], values.get("processor_seconds", 0.0)) / times["seconds"]
    return times | {"others_cores": max(0.0, busy_cores - own_cores)} | values


def run_interleaved(group: Group, rounds: int) -> dict[str, dict]:
    """Run the cases A B C A B C ... and return {case: {quantity: value}}.

    A float becomes a list with the value of each round; other values are kept once. A case that raises is recorded as
    "error" and dropped with the memory that it holds; the others continue.
    """
    figures: dict[str, dict] = {name: {} for name in group.cases}
    for name in group.cases:
        if baselines := group.baselines_of(name):
            figures[name]["against"] = baselines
    for number in range(rounds):
        for name in list(group.cases):
            try:
                values = measure(group.cases[name])
            except Exception as error:
                traceback.print_exc()
                lines = str(error).strip().splitlines() or [""]
                figures[name]["error"] = f"{type(error).__name__}: {' ... '.join(dict.fromkeys((lines[0], lines[-1])))}"
                del group.cases[name]
                continue
            measured = {quantity: float(f"{value:.6g}") for quantity, value in values.items() if type(value) is float}
            figures[name] |= {quantity: value for quantity, value in values.items() if quantity not in measured}
            for quantity, value in measured.items():
                figures[name].setdefault(quantity, []).append(value)
            shown = ", ".join(f"{quantity} {value:g}" for quantity, value in measured.items())
            print(f"  round {number + 1} of {rounds}: {name}: {shown}", file=sys.stderr, flush=True)
    return figures


def to_arguments(settings: dict) -> list[str]:
    """Return settings as train.py takes them: {"model.d_model": 64} becomes --model.d_model 64."""
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def train_command(settings: dict, processes: int = 0, script: tuple[str, ...] = ("train.py",)) -> list[str]:
    """Return a command that trains: `python` for 0 processes, else `accelerate launch` in float32."""
    command = [sys.executable]
    if processes:
        launcher = {"config_file": CPU, "mixed_precision": "no", "num_processes": processes}
        command += [str(Path(sys.executable).parent / "accelerate"), "launch", *to_arguments(launcher)]
    return [*command, *script, *to_arguments(settings)]


def for_each(processes: list[psutil.Process], action: Callable[[psutil.Process], object]) -> list:
    """Return the results of an action on the processes that still exist."""
    results = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            results.append(action(process))
    return results


class Program:
    """A running command, without OMP_NUM_THREADS of this shell; its output is read line by line."""

    def __init__(self, command: list[str], cwd: Path = ROOT, env: Mapping[str, str] = {}):
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self.start = time.perf_counter()
        self.printed: list[str] = []
        self.suspended: list[psutil.Process] = []
        self.process = psutil.Popen(
            command,
            cwd=cwd,
            env=inherited | {"PYTHONUNBUFFERED": "1"} | dict(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_) -> None:
        for_each(self.suspended, psutil.Process.kill)
        if self.process.poll() is None:
            self.process.terminate()
        self.process.communicate()  # not wait(): a full pipe would block the program for ever

    def lines(self, exit_code: int = 0) -> Iterator[tuple[float, str]]:
        """Yield each printed line with the seconds since the launch.

        Raises:
            RuntimeError: The program ended with another exit code.
        """
        for line in self.process.stdout:
            self.printed.append(line)
            yield time.perf_counter() - self.start, line.rstrip()
        if self.process.wait() != exit_code:
            raise RuntimeError(f"exit code {self.process.returncode}\n{''.join(self.printed)}")

    def run_until(self, prefix: str | tuple[str, ...] = LOGGED, lines: int = 1) -> dict[str, float]:
        """Resume the program, read as many lines with this prefix, and suspend it.

        Return the CPU time of it all, and the seconds from the last line but one (or the resume) to the last.
        """
        before = self.processor_seconds()
        for_each(self.suspended, psutil.Process.resume)
        start = time.perf_counter() - self.start if self.suspended else 0.0
        times = [start, *islice((seconds for seconds, line in self.lines() if line.startswith(prefix)), lines)]
        if len(times) <= lines:
            raise RuntimeError(f"the program ended before it printed {prefix!r}\n{''.join(self.printed)}")
        for_each(self.suspended, psutil.Process.suspend)
        # Listing the children takes longer than suspending those that are known already.
        self.suspended = [*self.process.children(recursive=True), self.process]
        for_each(self.suspended, psutil.Process.suspend)
        return {"seconds": times[-1] - times[-2], "processor_seconds": self.processor_seconds() - before}

    def processor_seconds(self) -> float:
        """Return the CPU time of the program and all its descendants."""
        alive = [self.process, *self.process.children(recursive=True)]
        return sum(for_each(alive, lambda process: sum(process.cpu_times()[:4])))


def endless_case(
    stack: ExitStack, tokens: int, command: list[str], cwd: Path = ROOT, lines: int = 1, env: Mapping[str, str] = {}
) -> Case:
    """Return a case that resumes an endless training for some log lines and measures the last of them.

    The program is suspended while other cases run, and ends with the stack. The first few lines warm it up. Each TURNS
    turns it is restarted, because the placement of its memory changes its speed by a percent or two for its lifetime.

    Args:
        stack: Ends the program.
        tokens: Trained between two log lines.
        command: Starts the training.
        cwd: Working directory of the command.
        lines: Log lines of a turn.
        env: Environment variables.
    """
    life, taken = stack.enter_context(ExitStack()), count()
    program: Program | None = None

    def case() -> dict[str, float]:
        nonlocal program
        if next(taken) % TURNS == 0 or program is None:
            life.close()
            program = life.enter_context(Program(command, cwd, env))
            for _ in range(4):
                program.run_until()
        figures = measure(partial(program.run_until, lines=lines))
        return figures | {"tokens_per_second": tokens / figures["seconds"]}

    return case


def run_command(command: list[str], exit_code: int = 0, env: Mapping[str, str] = {}) -> list[str]:
    """Run a command to its end and return the lines that it printed."""
    with Program(command, env=env) as program:
        return [line for _, line in program.lines(exit_code)]


def train(settings: dict, processes: int = 0, env: Mapping[str, str] = {}) -> dict[str, float]:
    """Run train.py to its end; return its median speed after the first log line, and its peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = {"out_dir": folder, "name": "run", "evaluation.num_scored_generations": 0}
        run_command(train_command(settings | fixed, processes), env=env)
        logged = [row for row in read_rows(Path(folder, "run", "metrics.jsonl")) if "perf/tokens_per_second" in row]
    last, speeds = logged[-1], [row["perf/tokens_per_second"] for row in logged]
    speed = statistics.median(speeds[1:] or speeds)
    measured = {"tokens_per_second": speed, "seconds_a_step": last["train/tokens"] / last["step"] / speed}
    return measured | {"peak_mib": last["perf/peak_memory_bytes"] / 2**20}
