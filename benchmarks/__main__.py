"""Measures, and renews the tables and pictures of docs/performance.md: python -m benchmarks [CASE ...] [--rounds 3]

Without a case, all that the page shows but the GPU's, in about an hour on 2 cores; nothing else should run on the
machine. benchmarks/results/CASE.json is written after each group of a case's figures, with the value of every round.
"""

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import pictures, record, tables
from benchmarks.measure import ROOT, by_turns

MODULES = {  # and their functions that say what is measured, and in their docstrings why
    "programs": ["throughput", "time_to_loss", "overhead", "scaling", "memory", "sharding", "startup"],
    **{name: [name] for name in ("generation", "growth", "gpu", "checkpoint_stall", "text")},
    "bits": ["exactness", "soak"],
}
CASES = {name: module for module, names in MODULES.items() for name in names}
ON_THE_PAGE = [*MODULES["programs"], "generation", "growth"]  # measured if nothing is named; the GPU's only on request
NEED_A_TEXT = {"time_to_loss", "text"}
STARTED = time.monotonic()


def measure(name: str, options: argparse.Namespace) -> record.Figures:
    """The figures of a case, which are written after each group unless they are of a trial."""
    module, figures, left_out = importlib.import_module(f"benchmarks.{CASES[name]}"), {}, []
    budget_seconds = options.budget_seconds or getattr(module, "BUDGET_SECONDS", math.inf)
    for group in getattr(module, name)(options):
        if time.monotonic() - STARTED > budget_seconds:
            left_out.append(group.name)
            print(f"{group.name}: left out, {budget_seconds:g} s are over", file=sys.stderr, flush=True)
        else:
            print(f"{group.name}:", file=sys.stderr, flush=True)
            figures[group.name] = by_turns(group, group.rounds or options.rounds)
        if not options.quick:
            record.write(record.RESULTS / f"{name}.json", figures, left_out)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, help="default: 3, with --quick 1")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT to compare with")
    parser.add_argument("--text", type=Path, help="a text file, tinyshakespeare for the published figures")
    parser.add_argument("--quick", action="store_true", help="a trial of seconds, in the smallest sizes; only prints")
    parser.add_argument("--budget_seconds", type=float, help="no group starts later than this; gpu: 420")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.text = options.text or (tables.PAGE if options.quick else None)  # any text will do
    if unknown := set(options.cases) - CASES.keys():
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    names = options.cases or ON_THE_PAGE
    needing = [name for name in names if name in NEED_A_TEXT and not options.text]
    if needing and options.cases:
        parser.error(f"{', '.join(needing)} needs --text FILE")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler has nothing to say to a reader
    if len(names) > 1:  # each in a process of its own
        given = [word for word in sys.argv[1:] if word not in options.cases]
        command = [sys.executable, "-m", "benchmarks"]
        names = [name for name in names if name not in needing]
        failed = [name for name in names if subprocess.run([*command, name, *given], cwd=ROOT).returncode]
        print("".join(f"{name} was left out: it needs --text FILE\n" for name in needing), end="")
        print(f"failed: {', '.join(failed)}" if failed else "All done; docs/performance.md has the tables.")
        return 1 if failed else 0
    figures = measure(names[0], options)
    if options.quick:
        print(json.dumps(figures, indent=2))
    else:
        tables.PAGE.write_text(tables.page())
        pictures.draw(names[0])
        print(tables.section(names[0]))
    return 1 if any("error" in case for cases in figures.values() for case in cases.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
