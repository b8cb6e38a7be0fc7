"""How the benchmarks measure: by turns inside one run, by the real programs, every round kept."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).parent.parent
Case = Callable[[], dict]


class Group(NamedTuple):
    """Cases that are compared with each other. Each returns {quantity: value}."""

    name: str
    cases: dict[str, Case]
    rounds: int | None = None  # None: as many as are asked for


def by_turns(cases: dict[str, Case], rounds: int) -> dict[str, dict]:
    """What the cases return, called by turns: A B C A B C ..., so that another load slows all of them, not one.

    A float is measured, and kept of every round; anything else is said once. A case that fails is recorded as its
    "error" and taken out of `cases`; the others go on.
    """
    figures = {name: {} for name in cases}
    for number in range(rounds):
        for name in list(cases):
            try:
                values = cases[name]()
            except Exception as error:
                traceback.print_exc()
                lines = str(error).strip().splitlines() or [""]
                figures[name]["error"] = f"{type(error).__name__}: {' ... '.join(dict.fromkeys((lines[0], lines[-1])))}"
                del cases[name]
                continue
            measured = {quantity: float(f"{value:.6g}") for quantity, value in values.items() if type(value) is float}
            figures[name] |= {quantity: value for quantity, value in values.items() if quantity not in measured}
            for quantity, value in measured.items():
                figures[name].setdefault(quantity, []).append(value)
            shown = ", ".join(f"{quantity} {value:g}" for quantity, value in measured.items())
            print(f"  round {number + 1} of {rounds}: {name}: {shown}", file=sys.stderr, flush=True)
    return figures


def words(settings: dict) -> list[str]:
    """Settings as train.py takes them: {"model.d_model": 64} is --model.d_model 64."""
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def launch(processes: int, script: str, max_restarts: int = 0, launch_file: str = "cpu.yaml") -> list[str]:
    """The command up to the script's own arguments: `python` for 0 processes, else `accelerate launch` in float32."""
    if not processes:
        return [sys.executable, script]
    command = [sys.executable, str(Path(sys.executable).parent / "accelerate"), "launch"]
    command += ["--config_file", f"accelerate_configs/{launch_file}", "--num_processes", str(processes)]
    return [*command, "--mixed_precision", "no", "--max_restarts", str(max_restarts), script]


def environment(env: dict[str, str]) -> dict[str, str]:
    """That of a shell in which the number of threads is not set, and `env`."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | env


def run(command: list[str], exit_code: int = 0, **env: str) -> tuple[str, dict[str, float]]:
    """Run a command to its end; returns what it printed, and what it took: seconds, those of processors in all of its
    processes, and the resident memory of the largest of these.

    Raises:
        RuntimeError: it ends with another exit code; the message is what it printed.
    """
    with tempfile.TemporaryFile("w+") as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, env=environment(env), stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        measured = {"seconds": time.perf_counter() - start, "processor_seconds": usage.ru_utime + usage.ru_stime}
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        printed = output.read()
    if process.returncode != exit_code:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {process.returncode}\n{printed}")
    return printed, measured | {"peak_mib": usage.ru_maxrss / 1024}


class Program:
    """A command that runs meanwhile, and whose lines are read."""

    def __init__(self, command: list[str], cwd: Path = ROOT, **env: str):
        self.start, self.printed = time.perf_counter(), []
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        env = environment({"PYTHONUNBUFFERED": "1", **env})
        self.process = psutil.Popen(command, cwd=cwd, env=env, **pipes)

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.communicate()  # and not wait: it may still have more to say than a pipe holds

    def clocks(self) -> tuple[float, float]:
        """Seconds since the launch, and those that processors have worked for the process and all below it."""
        alive = [self.process, *self.process.children(recursive=True)]
        return time.perf_counter() - self.start, sum(sum(process.cpu_times()[:4]) for process in alive)

    def lines(self) -> Iterator[tuple[float, str]]:
        """Every line that it prints, with the seconds since the launch; an exit code other than 0 is an error."""
        for line in self.process.stdout:
            self.printed.append(line)
            yield time.perf_counter() - self.start, line.rstrip()
        if self.process.wait():
            raise RuntimeError(f"exit code {self.process.returncode}\n{''.join(self.printed)}")

    def wait_for(self, beginning: str) -> tuple[float, float]:
        """The clocks when it prints a line that begins so."""
        for _, line in self.lines():
            if line.startswith(beginning):
                return self.clocks()
        raise RuntimeError(f"it ended before it printed {beginning!r}\n{''.join(self.printed)}")


def train(
    settings: dict, processes: int = 0, folder: Path | None = None, launch_file: str = "cpu.yaml", **env: str
) -> dict[str, float]:
    """Run train.py to its end, in `folder`/run if that is to be kept; what it took, and its tokens per second: the
    median of what it logs without the first line, in which it warms up."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = folder or Path(temporary)
        fixed = {"out_dir": folder, "name": "run", "evaluation.num_story_samples": 0}
        _, measured = run([*launch(processes, "train.py", launch_file=launch_file), *words(settings | fixed)], **env)
        speeds = [row["perf/tokens_per_second"] for row in rows(folder) if "perf/tokens_per_second" in row]
    return {"tokens_per_second": statistics.median(speeds[1:] or speeds), **measured}


def rows(folder: Path) -> list[dict]:
    """What that run logged."""
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
