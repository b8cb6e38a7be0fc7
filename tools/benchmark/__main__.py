"""Measure speed and memory, and update the tables of docs/performance.md: python -m tools.benchmark CASE...

`make bench` measures every case of the page except the GPU's and `bits_per_byte`, in about an hour on 2 cores; nothing
else should run on the machine. A case has groups of figures; benchmarks/results/CASE.json is written after each, with
the value of every round.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch

from runtime.config.help import wrapped
from tools.benchmark import cpu, gpu, tables

ON_GPU = {"gpu", "cuda_graph", "curve"}
TEXTS = {
    "time_to_loss": Path("corpora/shakespeare"),
    "bits_per_byte": Path("corpora/text"),
    "curve": Path("corpora/linux"),
}


def measure(case: Callable[[], object]) -> dict:
    """Run a case; return its wall-clock time, how many cores other work kept busy, and what the case returned."""
    psutil.cpu_percent()  # starts an interval
    start, cpu_before = time.perf_counter(), tables.cpu_seconds()
    values = values if isinstance(values := case(), dict) else {}
    seconds = time.perf_counter() - start
    busy_cores = psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1)
    others_cores = max(0.0, busy_cores - (tables.cpu_seconds() - cpu_before) / seconds)
    return {"seconds": seconds, "others_cores": others_cores} | values


def run_interleaved(group: dict[str, Callable], baselines: dict[str, list[str]], rounds: int) -> dict[str, dict]:
    """Run the cases A B C A B C ..., so that other load slows all of them alike; return {case: {quantity: value}}.

    A float becomes a list with the value of each round; other values are kept once. A case that raises is recorded as
    "error" and dropped; the others continue.
    """
    figures: dict[str, dict] = {name: {} for name in group}
    for name in group:
        if against := [other for other in baselines.get(name, []) if other in group and other != name]:
            figures[name]["against"] = against
    for number in range(rounds):
        for name in [name for name in group if "error" not in figures[name]]:
            try:
                values = measure(group[name])
            except Exception as error:
                traceback.print_exc()
                lines = str(error).strip().splitlines() or [""]
                figures[name]["error"] = f"{type(error).__name__}: {' ... '.join(dict.fromkeys((lines[0], lines[-1])))}"
                continue
            measured = {quantity: float(f"{value:.6g}") for quantity, value in values.items() if type(value) is float}
            figures[name] |= {quantity: value for quantity, value in values.items() if quantity not in measured}
            for quantity, value in measured.items():
                figures[name].setdefault(quantity, []).append(value)
            shown = ", ".join(f"{quantity} {value:g}" for quantity, value in measured.items())
            print(f"  round {number + 1} of {rounds}: {name}: {shown}", file=sys.stderr, flush=True)
    return figures


def main() -> int:
    """Parse the command line, measure and print; return 1 if a case failed."""
    parser = argparse.ArgumentParser(
        "tools.benchmark", description=wrapped(__doc__ or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measured = {name: bool(tables.read_result(name)["figures"]) for name in tables.TABLES}
    names = ", ".join(name if has_result else f"{name} (no result yet)" for name, has_result in measured.items())
    parser.add_argument("cases", nargs="+", choices=tables.TABLES, metavar="CASE", help=names)
    parser.add_argument("--rounds", type=int, help="default: 3, on a GPU 1")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT to compare with")
    parser.add_argument("--nanochat", type=Path, help="a checkout of nanochat to compare with, for bits_per_byte")
    parser.add_argument("--text", type=Path, help="a text file, or a corpus of data.prepare; default: of the case")
    parser.add_argument("--quick", action="store_true", help="measure the first groups in miniature, and only print")
    options = parser.parse_args()
    for name, script in (("nanogpt", "train.py"), ("nanochat", "scripts/base_train.py")):
        if (checkout := getattr(options, name)) and not (checkout / script).is_file():
            parser.error(f"argument --{name}: {checkout} has no {script}; give a checkout")
    if not options.quick and not torch.cuda.is_available() and (on_gpu := ON_GPU & {*options.cases}):
        parser.error(f"no GPU was found for {', '.join(sorted(on_gpu))}; --quick tests a case on a CPU")
    results: dict[str, tables.Figures] = {}
    with TemporaryDirectory() as folder:
        options.scratch = Path(folder)
        for name in options.cases:
            case_options = argparse.Namespace(**vars(options))
            case_options.text = text = options.text or (tables.PAGE if options.quick else TEXTS.get(name))
            if name in TEXTS and text and not text.exists():
                parser.error(f"{name}: needs {text}")
            results[name] = {}
            groups = list(getattr(gpu if name in ON_GPU else cpu, name)(case_options))
            for group, cases, baselines in groups[: 1 if options.quick else None]:
                print(f"{name}, {group}:", file=sys.stderr, flush=True)
                rounds = options.rounds or (1 if options.quick or name in ON_GPU else 3)
                results[name][group] = run_interleaved(cases, baselines, rounds)
                if not options.quick:
                    tables.write_result(name, results[name])
    if options.quick:
        print(json.dumps(results, indent=2))
    else:
        tables.PAGE.write_text(tables.render_page())
        for name in results:
            print(f"## {name}\n\n{tables.section(name, tables.read_result(name))}\n")
    figures = [case for groups in results.values() for group in groups.values() for case in group.values()]
    return int(any("error" in case for case in figures))


if __name__ == "__main__":
    sys.exit(main())
