"""Measure speed and memory, and update the tables of docs/performance.md: python -m tools.benchmark CASE...

`make bench` measures every case of the page except the GPU's, in about an hour on 2 cores; nothing else should run on
the machine. `make test-gpu` measures those of a GPU, in parts of ten minutes.

A case has groups of figures; benchmarks/results/CASE.json is written after each, with the value of every round. With
--budget_seconds, results of this code and machine are continued: groups that failed are tried again after those that
are missing.
"""

import argparse
import importlib
import json
import math
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch

from tools.benchmark import tables
from tools.benchmark.tables import failed

# The cases of a GPU, and the seconds that a group takes at most.
GPU_LIMITS = {"bits": 580, "cuda_graph": 400, "small_to_loss": 290, "tests": 580, "gpu": 500, "curve": 560}
ROUNDS = dict.fromkeys(("bits", "cuda_graph", "tests", "gpu", "curve"), 1)  # other cases: 3
TEXTS = dict.fromkeys(("time_to_loss", "small_to_loss"), Path("corpora/shakespeare")) | {"curve": Path("corpora/linux")}


def measure(case: Callable[[], object], end: float = math.inf) -> dict:
    """Run a case; return its wall-clock time, how many cores other work kept busy, and what the case returned.

    Raise TimeoutError if it has not ended when time.monotonic() is `end`.
    """
    psutil.cpu_percent()  # starts an interval
    start, own = time.perf_counter(), tables.cpu_seconds()
    signal.setitimer(signal.ITIMER_REAL, 0 if end == math.inf else max(0.1, end - time.monotonic()))
    try:
        values = values if isinstance(values := case(), dict) else {}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    seconds = time.perf_counter() - start
    busy_cores = psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1)
    others_cores = max(0.0, busy_cores - (tables.cpu_seconds() - own) / seconds)
    return {"seconds": seconds, "others_cores": others_cores} | values


def run_interleaved(
    cases: dict[str, Callable], baselines: dict[str, list[str]], rounds: int, limit_seconds: float = math.inf
) -> dict[str, dict]:
    """Run the cases A B C A B C ..., so that other load slows all of them alike; return {case: {quantity: value}}.

    A float becomes a list with the value of each round; other values are kept once. A case that raises is recorded as
    "error" and dropped; the others continue.
    """
    figures: dict[str, dict] = {name: {} for name in cases}
    end = time.monotonic() + limit_seconds
    for name in cases:
        if against := [other for other in baselines.get(name, []) if other in cases and other != name]:
            figures[name]["against"] = against
    for number in range(rounds):
        for name in list(cases):
            try:
                values = measure(cases[name], end)
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


def groups_of(case: str, options: argparse.Namespace) -> dict[str, tuple[dict, dict]]:
    """Return the groups of a case as {name: (cases, baselines)}; with --quick, the first alone."""
    module = importlib.import_module(f"tools.benchmark.{'gpu' if case in GPU_LIMITS else 'cpu'}")
    own = argparse.Namespace(**vars(options))
    own.text = options.text or (tables.PAGE if options.quick else TEXTS.get(case))  # quickly, any text will do
    groups = [(name, (cases, baselines)) for name, cases, baselines in getattr(module, case)(own)]
    return dict(groups[:1] if options.quick else groups)


def measure_cases(options: argparse.Namespace) -> bool:
    """Measure the groups of all cases, write the results and print them; return whether all are measured.

    With --budget_seconds, keep what this code has measured on this machine without an error, and start only groups that
    are sure to end in time; the first that is missing is always measured. With --quick, write nothing.
    """
    deadline = time.monotonic() + (options.budget_seconds or math.inf)
    results, groups, left_out = {}, {}, []
    for case in options.cases:
        results[case] = tables.own_figures(case, bool(options.nanogpt)) if options.budget_seconds else {}
        kept = [group for group, figures in results[case].items() if not failed(figures)]
        groups |= {(case, group): cases for group, cases in groups_of(case, options).items() if group not in kept}
    # Groups that failed before are last.
    for number, (case, group) in enumerate(sorted(groups, key=lambda each: each[1] in results[each[0]])):
        limit_seconds = GPU_LIMITS.get(case, math.inf)
        if number and options.budget_seconds and time.monotonic() + limit_seconds > deadline:
            left_out.append(f"{case}, {group}")
            continue
        print(f"{case}, {group}:", file=sys.stderr, flush=True)
        rounds = options.rounds or (1 if options.quick else ROUNDS.get(case, 3))
        cases, baselines = groups[case, group]
        results[case][group] = run_interleaved(cases, baselines, rounds, limit_seconds)
        if not options.quick:
            tables.write_result(case, results[case])
    if options.quick:
        print(json.dumps(results, indent=2))
    else:
        tables.PAGE.write_text(tables.render_page())
        for case, figures in results.items():
            shown = tables.section(case, tables.read_result(case)) if figures else "not measured"
            print(f"## {case}\n\n{shown}\n")
        print(*(f"left out: {name}; run the same command again" for name in left_out), sep="\n")
    return not left_out and not any(failed(figures) for groups in results.values() for figures in groups.values())


def stop(number: int, frame: object) -> None:
    """Raise TimeoutError or SystemExit after a signal, so that the running program ends too."""
    if number == signal.SIGALRM:
        raise TimeoutError("its time is over")
    sys.exit(1)


def main() -> int:
    """Parse the command line, measure and print; return 1 if a group failed or was left out."""
    parser = argparse.ArgumentParser(
        "tools.benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="+", choices=tables.TABLES, metavar="CASE", help=", ".join(tables.TABLES))
    parser.add_argument("--rounds", type=int, help=f"default: 3; with --quick, and for {', '.join(ROUNDS)}, 1")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT to compare with")
    texts = ", ".join(f"{path} for {name}" for name, path in TEXTS.items())
    parser.add_argument("--text", type=Path, help=f"a text file, or a corpus of data.prepare; default: {texts}")
    parser.add_argument(
        "--budget_seconds", type=float, help="continue the results, and start no group that may end later"
    )
    parser.add_argument("--quick", action="store_true", help="measure the first groups in miniature, and only print")
    options = parser.parse_args()
    if not options.quick and not torch.cuda.is_available() and (on_gpu := GPU_LIMITS.keys() & options.cases):
        sys.exit(f"no GPU was found for {', '.join(sorted(on_gpu))}; --quick tests a case on a CPU")
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, stop)
    for case, text in TEXTS.items():
        if case in options.cases and not (options.text or text).exists() and not options.quick:
            print(f"{case}: needs {options.text or text}\n")
            options.cases.remove(case)
    with TemporaryDirectory() as folder:
        options.scratch = Path(folder)
        return 0 if measure_cases(options) else 1


if __name__ == "__main__":
    sys.exit(main())
