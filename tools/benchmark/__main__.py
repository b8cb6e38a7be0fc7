"""Measure speed and memory, and update the tables of docs/performance.md: python -m tools.benchmark CASE.

`make bench` measures every case of the page except the GPU's (time_to_loss if --text is given), in about an hour on 2
cores; nothing else should run on the machine. benchmarks/results/CASE.json is written after each group of figures, with
the value of every round.

`session`, which is `make test-gpu`, measures the cases of a GPU one after another, each in its own process, while the
longest group of the next one fits into --budget_seconds (590); the first always runs. Then it prints one page with all
results. Run the same command again to continue: a case that failed is tried again after the others. A page of another
GPU, torch, code or command is begun anew. runs/gpu has what each case printed.
"""

import argparse
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from checkpoint.provenance import provenance
from tools.benchmark import tables
from tools.benchmark.tables import ROOT

CPU_CASES = "throughput", "time_to_loss", "overhead", "memory", "exactness", "checkpoint_stall", "startup", "generation"
# The cases of a GPU, the questions on which others depend first, and the seconds that a group takes at most.
PARTS = {"bits": 190, "small_models": 290, "small_batches": 290, "small_programs": 290, "small_to_loss": 290}
PARTS |= {"tests": 580, "gpu": 170, "curve": 560}
ROUNDS = {"bits": 1, "tests": 1, "curve": 1}  # other cases: 3
CORPORA = {"small_to_loss": Path("corpora/shakespeare"), "curve": Path("corpora/linux")}
LOGS = Path("runs/gpu")
RUN_AGAIN = 75  # exit code if there is more to measure
STARTED = time.monotonic()


def measure(case: Callable[[], object]) -> dict:
    """Run a case; return its wall-clock time, how many cores other work kept busy, and what the case returned."""
    psutil.cpu_percent()  # starts an interval
    start, own = time.perf_counter(), tables.cpu_seconds()
    values = values if isinstance(values := case(), dict) else {}
    seconds = time.perf_counter() - start
    busy_cores = psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1)
    others_cores = max(0.0, busy_cores - (tables.cpu_seconds() - own) / seconds)
    return {"seconds": seconds, "others_cores": others_cores} | values


def run_interleaved(cases: dict[str, Callable], baselines: dict[str, list[str]], rounds: int) -> dict[str, dict]:
    """Run the cases A B C A B C ..., so that other load slows all of them alike; return {case: {quantity: value}}.

    A float becomes a list with the value of each round; other values are kept once. A case that raises is recorded as
    "error" and dropped with the memory that it holds; the others continue.
    """
    figures: dict[str, dict] = {name: {} for name in cases}
    for name in cases:
        if against := [other for other in baselines.get(name, []) if other in cases and other != name]:
            figures[name]["against"] = against
    for number in range(rounds):
        for name in list(cases):
            try:
                values = measure(cases[name])
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


def run_case(name: str, options: argparse.Namespace) -> tuple[tables.Figures, list[str]]:
    """Measure the groups of a case; return their figures, and the groups that there was no time for.

    The first group is always measured, with --quick no other. Otherwise the result is written after each group. With
    --resume, groups with the same cases that this code has measured on this machine without an error are kept.
    """
    figures, left_out, measured = tables.kept_figures(name) if options.resume else {}, [], False
    module = importlib.import_module(f"tools.benchmark.{'gpu' if name in PARTS else 'cpu'}")
    for group, cases, baselines in getattr(module, name)(options):
        if figures.get(group, {}).keys() == cases.keys():
            print(f"{group}: measured before", file=sys.stderr, flush=True)
        elif measured and time.monotonic() - STARTED > options.budget_seconds:
            left_out.append(group)
            print(f"{group}: left out, {options.budget_seconds:g} s are over", file=sys.stderr, flush=True)
        else:
            print(f"{group}:", file=sys.stderr, flush=True)
            figures[group], measured = run_interleaved(cases, baselines, options.rounds), True
        if options.quick:
            break
        tables.write_result(name, figures, left_out)
    return figures, left_out


def run_part(command: list[str], out: Path, limit_seconds: float) -> int:
    """Run a command, with its output in OUT.txt and OUT.log; return its exit code, 124 if its time was over."""
    with open(f"{out}.txt", "w") as stdout, open(f"{out}.log", "w") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=stderr, start_new_session=True)
        try:
            return process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            if process.poll() is None:  # its programs must not stay on the GPU
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, signal.SIGTERM)
                    process.wait(20)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def run_session(options: argparse.Namespace, run: Callable[[list[str], Path, float], int] = run_part) -> int:
    """Run the parts that are not done while there is time, and print the page; return the exit code."""
    LOGS.mkdir(parents=True, exist_ok=True)
    file, versions, hardware = LOGS / "state.json", provenance(), tables.machine()
    words = ["--quick"] if options.quick else ["--resume"]
    words += ["--nanogpt", str(options.nanogpt)] if options.nanogpt else []
    title = f"# {hardware.get('gpu', hardware['cpu'])}, torch {versions['torch']}, code {versions['code']}"
    state = json.loads(file.read_text()) if file.exists() else {}
    if (state.get("title"), state.get("words")) != (title, words):
        state = {"title": title, "words": words, "exit_codes": {}}
    codes = state["exit_codes"]
    states = {name: f"needs {path}" for name, path in CORPORA.items() if not options.quick and not path.exists()}
    ready = [name for name in PARTS if name not in states and codes.get(name) != 0]
    for number, name in enumerate(sorted(ready, key=lambda name: codes.get(name, RUN_AGAIN) != RUN_AGAIN)):
        left = options.budget_seconds - (time.monotonic() - STARTED)
        if number and left < PARTS[name]:
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        own = [*words, "--budget_seconds", f"{max(0.0, left - PARTS[name]):.0f}"]
        codes[name] = run([sys.executable, "-m", "tools.benchmark", name, *own], LOGS / name, max(left, PARTS[name]))
        file.write_text(json.dumps(state, indent=1))
    print(title)
    for name in PARTS:
        known = {None: "not run", 0: "done", RUN_AGAIN: "unfinished", 124: "failed: time limit"}
        print(f"\n## {name}: {states.get(name) or known.get(codes.get(name), 'failed')}\n")
        if name in codes:
            print((LOGS / f"{name}.txt").read_text().strip())
        if codes.get(name, 0) not in (0, RUN_AGAIN):
            print(f"Its log ends: {LOGS / name}.log", *(LOGS / f"{name}.log").read_text().splitlines()[-5:], sep="\n")
    if any(code not in (0, RUN_AGAIN) for code in codes.values()):
        return 1
    return 0 if all(codes.get(name) == 0 for name in PARTS if name not in states) else RUN_AGAIN


def main() -> int:
    """Parse the command line, measure and print; return 1 if a case failed, 75 if groups were left out."""
    parser = argparse.ArgumentParser(
        "tools.benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=[*CPU_CASES, *PARTS, "session"])
    parser.add_argument("--rounds", type=int, help="default: 3, with --quick and for digests and the curve 1")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT to compare with")
    parser.add_argument("--text", type=Path, help="a text file; the published figures are of tinyshakespeare")
    parser.add_argument(
        "--corpus", type=Path, help=f"a corpus of data.prepare; default: {', '.join(map(str, CORPORA.values()))}"
    )
    parser.add_argument(
        "--quick", action="store_true", help="measure the first group in the smallest sizes, and only print"
    )
    parser.add_argument("--budget_seconds", type=float, help="start no group later than this, but the first")
    parser.add_argument("--resume", action="store_true", help="measure only the groups that are missing or failed")
    options = parser.parse_args()
    name = options.case
    options.rounds = options.rounds or (1 if options.quick else ROUNDS.get(name, 3))
    if options.budget_seconds is None:
        options.budget_seconds = 590.0 if name == "session" else math.inf
    if options.quick:
        options.text = options.text or tables.PAGE  # any text will do
    else:
        options.corpus = options.corpus or CORPORA.get(name)
        if (name in PARTS or name == "session") and not torch.cuda.is_available():
            sys.exit("no GPU was found; --quick tests this case on a CPU")
    if name == "time_to_loss" and not options.text:
        parser.error("time_to_loss needs --text FILE")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the running program, too
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences torch's profiler
    if name == "session":
        return run_session(options)
    figures, left_out = run_case(name, options)
    if options.quick or name not in tables.TABLES:
        print(json.dumps(figures, indent=2))
    else:
        tables.update_page()
        print(tables.section(name))
    if any(map(tables.failed, figures.values())):
        return 1
    return RUN_AGAIN if left_out else 0


if __name__ == "__main__":
    sys.exit(main())
