"""How the benchmarks measure: by turns inside one run, by the real programs, in medians."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent


def alternate(cases: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median of each case, which are called by turns: A B C A B C ...

    Another load on the machine then slows all of them, not one.
    """
    values = {name: [] for name in cases}
    for number in range(rounds):
        for name, case in cases.items():
            values[name].append(case())
            print(f"  round {number + 1} of {rounds}: {name} {values[name][-1]:.6g}", file=sys.stderr, flush=True)
    return {name: statistics.median(series) for name, series in values.items()}


def launch(processes: int, script: str, max_restarts: int = 0) -> list[str]:
    """The command up to the script's own arguments: `python` for 0 processes, else `accelerate launch` on the CPU."""
    if not processes:
        return [sys.executable, script]
    command = [sys.executable, str(Path(sys.executable).parent / "accelerate"), "launch"]
    command += ["--config_file", "accelerate_configs/cpu.yaml", "--num_processes", str(processes)]
    return [*command, "--max_restarts", str(max_restarts), script]


def environment(env: dict[str, str]) -> dict[str, str]:
    """That of a shell in which the number of threads is not set, and `env`."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | env


def run(command: list[str], **env: str) -> str:
    """Run a command in the repository; returns its output, or ends the benchmark with its errors."""
    done = subprocess.run(command, cwd=ROOT, env=environment(env), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


@contextmanager
def started(command: list[str], **env: str) -> Iterator[psutil.Popen]:
    """A command that runs in the repository meanwhile; what has not ended by itself is asked to."""
    settings = environment({"PYTHONUNBUFFERED": "1", **env})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = psutil.Popen(command, cwd=ROOT, env=settings, **pipes)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()  # and not wait: it may still have more to say than a pipe holds


def wait_for_line(process: psutil.Popen, beginning: str) -> None:
    """Until a process prints a line that begins so; ends the benchmark with what it printed instead, if it ends."""
    printed = []
    for line in process.stdout:
        printed.append(line)
        if line.startswith(beginning):
            return
    sys.exit("".join(printed))


def arguments(description: str) -> argparse.Namespace:
    """Of a benchmark whose only choice is how long it takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds, in the smallest sizes; only prints")
    return parser.parse_args()


@contextmanager
def pictures(folder: Path, quick: bool) -> Iterator[Path]:
    """Where pictures go: `folder`, or with --quick one that is gone afterwards."""
    with tempfile.TemporaryDirectory() as directory:
        chosen = Path(directory) if quick else folder
        chosen.mkdir(parents=True, exist_ok=True)
        yield chosen


def training_tokens_per_second(*arguments: str, processes: int = 0, **env: str) -> float:
    """The median of what train.py logs, without its first line, in which it warms up."""
    with tempfile.TemporaryDirectory() as directory:
        fixed = ["--out_dir", directory, "--name", "run", "--evaluation.num_story_samples", "0"]
        run([*launch(processes, "train.py"), *arguments, *fixed], **env)
        rows = [json.loads(line) for line in Path(directory, "run", "metrics.jsonl").read_text().splitlines()]
    speeds = [row["perf/tokens_per_second"] for row in rows if "perf/tokens_per_second" in row]
    return statistics.median(speeds[1:])
