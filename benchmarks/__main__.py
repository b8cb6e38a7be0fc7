"""Run benchmarks, one after the other: python -m benchmarks [CASE ...] [--nanogpt PATH] [--text FILE]

Without a case, all, in about 40 minutes on 2 cores. Each writes benchmarks/results/CASE.json, and in the end the
tables of docs/performance.md are made anew from these files. A case alone has more settings: python -m benchmarks.CASE
--help. Nothing else should run on the machine.
"""

import argparse
import subprocess
import sys
import time

from benchmarks import tables
from benchmarks.measure import ROOT

CASES = {  # which of the two paths a case takes
    **{"throughput": ["nanogpt"], "time_to_loss": ["nanogpt", "text"], "overhead": [], "scaling": []},
    **{"memory": ["nanogpt"], "startup": [], "growth": []},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--nanogpt", help="a checkout of nanoGPT to compare with")
    parser.add_argument("--text", help="a text file, tinyshakespeare for the published figures; time_to_loss needs it")
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - CASES.keys():
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    failed = []
    for case in arguments.cases or CASES:
        if case == "time_to_loss" and not arguments.text:
            print("time_to_loss is left out: it needs --text FILE")
            continue
        given = {path: getattr(arguments, path) for path in CASES[case]}
        words = [word for path, value in given.items() if value for word in (f"--{path}", value)]
        print(f"--- {case}", flush=True)
        start = time.perf_counter()
        if subprocess.run([sys.executable, "-m", f"benchmarks.{case}", *words], cwd=ROOT).returncode:
            failed.append(case)
        print(f"--- {case}: {time.perf_counter() - start:.0f} s", flush=True)
    tables.write()
    print(f"failed: {', '.join(failed)}" if failed else "All done; docs/performance.md has the tables.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
