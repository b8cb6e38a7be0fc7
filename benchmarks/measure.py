"""How the benchmarks measure: by turns inside one run, by the real programs, every round kept."""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import psutil

from run.metrics_log import read_rows

ROOT, CPU = Path(__file__).parent.parent, "accelerate_configs/cpu.yaml"
LOGGED = ("[step ", "iter ")  # what lines of train.py, of the bare loop and of nanoGPT begin with
Case = Callable[[], object]
TURNS = 5  # in a row, of a program that sleeps in between


class Group(NamedTuple):
    """Cases that are compared with each other. What a case returns is beside what by_turns measures of every case."""

    name: str
    cases: dict[str, Case]
    against: str | dict[str, str | list[str]] = ""
    """What cases are set against: one for all others, or for each case that is named the one or more of its own."""
    rounds: int | None = None  # None: as many as are asked for

    def references(self, name: str) -> list[str]:
        one = self.against if isinstance(self.against, str) else self.against.get(name, "")
        return [other for other in ([one] if isinstance(one, str) else one) if other in self.cases and other != name]


def processor_seconds() -> float:
    """Those that processors worked for this process and its ended children."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def watched(case: Case) -> dict:
    """What a case returns, and how long it took unless it says so itself: by the clock, in processors' time, and how
    many cores were busy with something else meanwhile."""
    psutil.cpu_percent()  # from here on
    start, own = time.perf_counter(), processor_seconds()
    values = values if isinstance(values := case(), dict) else {}
    took = {"seconds": time.perf_counter() - start, "processor_seconds": processor_seconds() - own}
    busy_cores = psutil.cpu_percent() / 100 * psutil.cpu_count()
    own_cores = max(took["processor_seconds"], values.get("processor_seconds", 0.0)) / took["seconds"]
    return took | {"others_cores": max(0.0, busy_cores - own_cores)} | values


def by_turns(group: Group, rounds: int) -> dict[str, dict]:
    """What the cases of a group return, called by turns: A B C A B C ..., so that another load slows all, not one.

    A float is measured, and kept of every round; anything else is said once. A case that fails is recorded as its
    "error" and dropped, with the memory that it holds; the others go on.
    """
    figures = {name: {"against": others} if (others := group.references(name)) else {} for name in group.cases}
    for number in range(rounds):
        for name in list(group.cases):
            try:
                values = watched(group.cases[name])
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


def words(settings: dict) -> list[str]:
    """Settings as train.py takes them: {"model.d_model": 64} is --model.d_model 64."""
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def launch(settings: dict, processes: int = 0, script: tuple = ("train.py",), **asked: str | int) -> list[str]:
    """The command that trains: by `python` for 0 processes, else by `accelerate launch` in float32 or as asked."""
    command = [sys.executable]
    if processes:
        asked = {"config_file": CPU, "mixed_precision": "no", "num_processes": processes} | asked
        command += [str(Path(sys.executable).parent / "accelerate"), "launch", *words(asked)]
    return [*command, *script, *words(settings)]


def to_each(processes: list[psutil.Process], action: Callable[[psutil.Process], object]) -> list:
    """What an action on each process returns, but on those that have ended meanwhile."""
    done = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            done.append(action(process))
    return done


class Program:
    """A command that runs meanwhile, as in a shell that sets no number of threads, and whose lines are read."""

    def __init__(self, command: list[str], cwd: Path = ROOT, **env: str):
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.start, self.printed, self.asleep = time.perf_counter(), [], []
        self.process = psutil.Popen(command, cwd=cwd, env=inherited | {"PYTHONUNBUFFERED": "1"} | env, **pipes)

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_) -> None:
        to_each(self.asleep, psutil.Process.kill)
        if self.process.poll() is None:
            self.process.terminate()
        self.process.communicate()  # and not wait: it may still have more to say than a pipe holds

    def lines(self, exit_code: int = 0) -> Iterator[tuple[float, str]]:
        """Every line that it prints, with the seconds since the launch; another exit code is an error."""
        for line in self.process.stdout:
            self.printed.append(line)
            yield time.perf_counter() - self.start, line.rstrip()
        if self.process.wait() != exit_code:
            raise RuntimeError(f"exit code {self.process.returncode}\n{''.join(self.printed)}")

    def turn(self, beginning: str | tuple[str, ...] = LOGGED, lines: int = 1) -> dict[str, float]:
        """Let it run until it has printed so many lines that begin so; others may have their turn then. The seconds are
        those before the last line, since the line before it if there is one."""
        worked = self.processor_seconds()
        to_each(self.asleep, psutil.Process.resume)
        start = time.perf_counter() - self.start if self.asleep else 0.0
        said = (seconds for seconds, line in self.lines() if line.startswith(beginning))
        times = [start, *islice(said, lines)]
        if len(times) <= lines:
            raise RuntimeError(f"it ended before it printed {beginning!r}\n{''.join(self.printed)}")
        to_each(self.asleep, psutil.Process.suspend)
        # Those that it started meanwhile; finding them takes longer than putting known ones to sleep.
        self.asleep = [*self.process.children(recursive=True), self.process]
        to_each(self.asleep, psutil.Process.suspend)
        return {"seconds": times[-1] - times[-2], "processor_seconds": self.processor_seconds() - worked}

    def processor_seconds(self) -> float:
        """Those that processors have worked for the process and all below it."""
        alive = [self.process, *self.process.children(recursive=True)]
        return sum(to_each(alive, lambda process: sum(process.cpu_times()[:4])))


def awake(stack: ExitStack, tokens: int, command: list[str], cwd: Path = ROOT, lines: int = 1, **env: str) -> Case:
    """A case for a program that lives no longer than the stack, and sleeps but for its turns of a few seconds.

    What slows the machine for a minute so slows all that are compared. A turn goes on for so many lines of figures, of
    which the last says that so many tokens were trained on; the first few turns warm up. After TURNS the program is
    started anew: where in memory it happens to lie is worth a percent or two, as long as it lives.
    """
    life, taken = stack.enter_context(ExitStack()), count()
    program = None

    def case() -> dict[str, float]:
        nonlocal program
        if next(taken) % TURNS == 0:
            life.close()
            program = life.enter_context(Program(command, cwd, **env))
            for _ in range(4):
                program.turn()
        figures = watched(lambda: program.turn(lines=lines))
        return figures | {"tokens_per_second": tokens / figures["seconds"]}

    return case


def run(command: list[str], exit_code: int = 0, **env: str) -> list[str]:
    """What a command prints, to its end."""
    with Program(command, **env) as program:
        return [line for _, line in program.lines(exit_code)]


def train(settings: dict, processes: int = 0, folder: Path | None = None, config_file: str = CPU, **env: str) -> dict:
    """Run train.py to its end, in `folder`/run if that is to be kept; its speed, the median of what it logs without the
    first line, in which it warms up, and the peak of its memory in training."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = folder or Path(temporary)
        fixed = {"out_dir": folder, "name": "run", "evaluation.num_scored_generations": 0}
        run(launch(settings | fixed, processes, config_file=config_file), **env)
        logged = [row for row in read_rows(folder / "run" / "metrics.jsonl") if "perf/tokens_per_second" in row]
    last, speeds = logged[-1], [row["perf/tokens_per_second"] for row in logged]
    speed = statistics.median(speeds[1:] or speeds)
    measured = {"tokens_per_second": speed, "seconds_a_step": last["train/tokens"] / last["step"] / speed}
    return measured | {"peak_mib": last["perf/peak_memory_bytes"] / 2**20}
