"""Measure speed and memory, and update the tables of docs/performance.md: python -m tools.benchmark CASE.

`make bench` measures every case of the page except the GPU's (time_to_loss if --text is given), in about an hour on 2
cores; nothing else should run on the machine. benchmarks/results/CASE.json is written after each group of figures, with
the value of every round.
"""

import argparse
import importlib
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil

from tools.benchmark import tables

CPU_CASES = "throughput", "time_to_loss", "overhead", "memory", "exactness", "checkpoint_stall", "startup", "generation"
# The module of each case, in which a function of the same name yields groups.
CASES: dict[str, str] = dict.fromkeys(CPU_CASES, "tools.benchmark.cpu")
CASES |= dict.fromkeys(("gpu", "small_models", "small_batches"), "tools.benchmark.gpu")
CASES |= dict.fromkeys(("bits", "small_programs", "small_to_loss"), "tools.benchmark.gpu_programs")
CASES |= {"curve": "tools.benchmark.curve"}
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

    The result is written after each group unless --quick. With --resume, groups that this code has measured on this
    machine without an error are kept.
    """
    figures, left_out = tables.kept_figures(name) if options.resume else {}, []
    for group, cases, baselines in getattr(importlib.import_module(CASES[name]), name)(options):
        if group in figures:
            print(f"{group}: measured before", file=sys.stderr, flush=True)
        elif time.monotonic() - STARTED > options.budget_seconds:
            left_out.append(group)
            print(f"{group}: left out, {options.budget_seconds:g} s are over", file=sys.stderr, flush=True)
        else:
            print(f"{group}:", file=sys.stderr, flush=True)
            figures[group] = run_interleaved(cases, baselines, options.rounds)
        if not options.quick:
            tables.write_result(name, figures, left_out)
    return figures, left_out


def main() -> int:
    """Parse the command line, measure and print; return 1 if a case failed, 75 if groups were left out."""
    parser = argparse.ArgumentParser(
        "tools.benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--rounds", type=int, help="default: 3, with --quick 1")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT to compare with")
    parser.add_argument("--text", type=Path, help="a text file; the published figures are of tinyshakespeare")
    parser.add_argument("--corpus", type=Path, help="a corpus of data.prepare, for curve and small_to_loss")
    parser.add_argument("--quick", action="store_true", help="run in seconds in the smallest sizes, and only print")
    parser.add_argument("--budget_seconds", type=float, default=math.inf, help="start no group later than this")
    parser.add_argument("--resume", action="store_true", help="measure only the groups that are missing or failed")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.text = options.text or (tables.PAGE if options.quick else None)  # any text will do
    if options.case == "time_to_loss" and not options.text:
        parser.error("time_to_loss needs --text FILE")
    if options.case in ("curve", "small_to_loss") and not (options.corpus or options.quick):
        parser.error(f"{options.case} needs --corpus DIR")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the running program, too
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences torch's profiler
    figures, left_out = run_case(options.case, options)
    if options.quick or options.case not in tables.TABLES:
        print(json.dumps(figures, indent=2))
    else:
        tables.PAGE.write_text(tables.render_page())
        print(tables.section(options.case))
    if any(map(tables.failed, figures.values())):
        return 1
    return 75 if left_out else 0


if __name__ == "__main__":
    sys.exit(main())
