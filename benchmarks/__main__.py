"""Measures, and renews the tables and pictures of docs/performance.md: python -m benchmarks CASE [--rounds 3]

`make bench` measures all that the page shows but the GPU's, in about an hour on 2 cores; nothing else should run on the
machine. benchmarks/results/CASE.json is written after each group of a case's figures, with the value of every round.
"""

import argparse
import importlib
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

from benchmarks import page
from benchmarks.measure import by_turns

MODULES = {  # and their functions that say what is measured
    "programs": "throughput time_to_loss overhead scaling memory sharding checkpoint_stall startup growth",
    "nanochat": "peers",
    "parts": "generation text",
    "bits": "exactness soak",
    "gpu": "gpu",
}
CASES = {name: module for module, names in MODULES.items() for name in names.split()}
STARTED = time.monotonic()


def measure(name: str, options: argparse.Namespace) -> page.Figures:
    """The figures of a case, which are written after each group unless they are of a trial."""
    module, figures, left_out = importlib.import_module(f"benchmarks.{CASES[name]}"), {}, []
    for group in getattr(module, name)(options):
        if time.monotonic() - STARTED > options.budget_seconds:
            left_out.append(group.name)
            print(f"{group.name}: left out, {options.budget_seconds:g} s are over", file=sys.stderr, flush=True)
        else:
            print(f"{group.name}:", file=sys.stderr, flush=True)
            figures[group.name] = by_turns(group, group.rounds or options.rounds)
        if not options.quick:
            page.write(name, figures, left_out)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--rounds", type=int, help="default: 3, with --quick 1")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT to compare with")
    parser.add_argument("--nanochat", type=Path, help="a checkout of nanochat, its environment in .venv, for peers")
    parser.add_argument("--text", type=Path, help="a text file, tinyshakespeare for the published figures")
    parser.add_argument("--quick", action="store_true", help="a trial of seconds, in the smallest sizes; only prints")
    parser.add_argument("--budget_seconds", type=float, default=math.inf, help="no group starts later than this")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.text = options.text or (page.PAGE if options.quick else None)  # any text will do
    if options.case in ("time_to_loss", "text") and not options.text:
        parser.error(f"{options.case} needs --text FILE")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that programs that sleep do not outlive this one
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler has nothing to say to a reader
    figures = measure(options.case, options)
    if not options.quick:
        page.renew(options.case)
    on_page = options.case in page.TABLES and not options.quick
    print(page.section(options.case) if on_page else json.dumps(figures, indent=2))
    return 1 if any("error" in case for cases in figures.values() for case in cases.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
