"""Runs benchmark cases interleaved, so that other load on the machine slows all of them alike."""

import os
import resource
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT, CPU = Path(__file__).parents[2], "accelerate_configs/cpu.yaml"
LOGGED = ("[step ", "iter ")  # prefixes of the log lines of train.py and nanoGPT
INTERVALS, WARM_UP = 8, 2  # numbers of intervals between log lines: measured, and skipped before
Case = Callable[[], object]


class Group(NamedTuple):
    """Cases to be compared with each other; a case may return quantities in addition to those of `measure`."""

    name: str
    cases: dict[str, Case]
    baselines: dict[str, list[str]] | str = ""
    """Baselines of each case, by which its figures are divided; a string is the baseline of all others."""

    def baselines_of(self, name: str) -> list[str]:
        """Return the baselines of a case that are in this group."""
        names = [self.baselines] if isinstance(self.baselines, str) else self.baselines.get(name, [])
        return [other for other in names if other in self.cases and other != name]


def cpu_seconds() -> float:
    """Return the CPU time of this process and its finished children."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def measure(case: Case) -> dict:
    """Run a case; return its wall-clock time, how many cores other work kept busy, and what the case returned."""
    psutil.cpu_percent()  # starts an interval
    start, own = time.perf_counter(), cpu_seconds()
    values = values if isinstance(values := case(), dict) else {}
    seconds = time.perf_counter() - start
    busy_cores = psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1)
    others_cores = max(0.0, busy_cores - (cpu_seconds() - own) / seconds)
    return {"seconds": seconds, "others_cores": others_cores} | values


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


def to_arguments(settings: Mapping[str, object]) -> list[str]:
    """Format settings as arguments of train.py: {"model.d_model": 64} becomes --model.d_model 64."""
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def train_command(settings: dict, processes: int = 0, script: tuple[str, ...] = ("train.py",)) -> list[str]:
    """Return a command that trains: `python` for 0 processes, else `accelerate launch` in float32."""
    command = [sys.executable]
    if processes:
        launcher = {"config_file": CPU, "mixed_precision": "no", "num_processes": processes}
        command += [str(Path(sys.executable).parent / "accelerate"), "launch", *to_arguments(launcher)]
    return [*command, *script, *to_arguments(settings)]


def run_command(
    command: list[str], cwd: Path = ROOT, env: Mapping[str, str] = {}, exit_code: int = 0, until: str | None = None
) -> list[tuple[float, str]]:
    """Run a command to its end, or until it prints a line that begins with `until`; return the printed lines.

    Each has the seconds since the launch. OMP_NUM_THREADS of this shell is not passed on. Raise RuntimeError if the
    command ends with another exit code, or before it prints `until`.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    env, lines = inherited | {"PYTHONUNBUFFERED": "1"} | dict(env), []
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for line in process.stdout or ():
            lines.append((time.perf_counter() - start, line.rstrip()))
            if until is not None and line.startswith(until):
                return lines
        if process.wait() != exit_code or until is not None:
            printed = "\n".join(line for _, line in lines)
            raise RuntimeError(f"exit code {process.returncode}\n{printed}")
        return lines
    finally:
        process.terminate()  # does nothing if it has ended
        process.communicate()


def speed_settings(log_every: int, folder: str) -> dict:
    """Return settings of a training for `measure_speed`, without evaluations and checkpoints on the way."""
    settings = {"checkpoint.every": 10**6, "evaluation.every": 0, "evaluation.num_scored_generations": 0}
    settings |= {"steps": log_every * (WARM_UP + INTERVALS + 1), "tracking.log_every": log_every}
    return settings | {"out_dir": folder, "resume": "never"}


def measure_speed(command: list[str], tokens: int, cwd: Path = ROOT, env: Mapping[str, str] = {}) -> dict[str, float]:
    """Return the median speed of a training that logs a line each `tokens` tokens."""
    logged = [seconds for seconds, line in run_command(command, cwd, env) if line.startswith(LOGGED)]
    intervals = [end - start for start, end in pairwise(logged[WARM_UP:])]
    return {"tokens_per_second": tokens / statistics.median(intervals)}
