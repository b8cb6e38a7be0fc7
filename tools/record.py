"""Train a record of docs/track.md again and compare its bits: python -m tools.record stories.

`python -m tools.record NAME --measure 5` trains seeds 1 to 5 and writes docs/track.yaml and the table of docs/track.md.
"""

import argparse
import os
import subprocess
import sys
from datetime import date
from statistics import mean, median
from typing import Any

import torch
import yaml

from runtime.config.help import wrapped
from tools.benchmark.tables import ROOT, cpu_seconds, machine, replace_table
from trainer.run.directory import Run

PAGE, RECORDS, RUNS = ROOT / "docs" / "track.md", ROOT / "docs" / "track.yaml", ROOT / "runs" / "track"
HEADER = ["record", "excess loss, nats/token", "tokens", "parameters", "CPU seconds", "digest of seed 1", "date"]
# Evaluations do not change the weights, and only the last is recorded, so there are no others.
SETTINGS = {"exact": "true", "evaluation.every": 10**6, "evaluation.num_scored_generations": 0, "resume": "never"}
SETTINGS |= {"tracking.wandb": "disabled"}
# A GPU, or another precision or number of threads that the shell has set, would change the bits.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}
TORCH = torch.__version__.partition("+")[0]


def train(name: str, config: str, seed: int) -> tuple[Run, float]:
    """Train one seed of a record on one thread of a CPU; return its run and the CPU seconds of the command."""
    run = Run(RUNS / f"{name}-seed-{seed}")
    settings = {"config": config} | SETTINGS | {"seed": seed, "out_dir": run.path.parent, "name": run.path.name}
    command = [sys.executable, "train.py", *(f"--{name}={value}" for name, value in settings.items())]
    before = cpu_seconds()
    try:
        code = subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT).returncode
    except KeyboardInterrupt:
        code = 130
    if code:
        sys.exit(code)
    if "val/excess_loss" not in run.metrics()[-1]:
        problem = f"config: {config} has data of unknown entropy, so no excess loss; records are of the stories"
        print(f"tools.record: error: {problem}", file=sys.stderr)
        sys.exit(2)
    return run, cpu_seconds() - before


def measure(name: str, config: str, num_seeds: int) -> dict[str, Any]:
    runs, seconds = zip(*(train(name, config, seed) for seed in range(1, num_seeds + 1)), strict=True)
    rows = [run.metrics()[-1] for run in runs]
    return {
        "config": config,
        "excess_loss": [float(f"{row['val/excess_loss']:.6g}") for row in rows],
        "tokens": rows[0]["train/tokens"],
        "parameters": runs[0].sessions()[0].parameters,
        "cpu_seconds": [round(value, 1) for value in seconds],
        "digest": rows[0]["state/digest"],
        "torch": TORCH,
        "processor": machine()["cpu"],
        "date": str(date.today()),
    }


def table(records: dict[str, dict[str, Any]]) -> str:
    """Return the records, the lowest mean excess loss first, each with a 95% interval of Student's t."""
    from scipy.stats import sem, t

    lines = [HEADER, ["---"] * len(HEADER)]
    for name, record in sorted(records.items(), key=lambda item: mean(item[1]["excess_loss"])):
        losses = record["excess_loss"]
        half = t.ppf(0.975, len(losses) - 1) * sem(losses)
        score = f"{mean(losses):.5f} ± {half:.5f} ({len(losses)} seeds)"
        figures = [f"{record['tokens']:,}", f"{record['parameters']:,}", f"{median(record['cpu_seconds']):.0f}"]
        lines.append([f"{name}: `{record['config']}`", score, *figures, f"`{record['digest']}`", record["date"]])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(records: dict[str, dict[str, Any]]) -> None:
    """Write docs/track.yaml, and the table of docs/track.md between its two marks."""
    head = RECORDS.read_text().splitlines()[0]
    RECORDS.write_text(f"{head}\n{yaml.safe_dump(records, sort_keys=False, default_flow_style=None, width=120)}")
    PAGE.write_text(replace_table(PAGE.read_text(), "records", table(records)))


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if the digest of seed 1 is that of the record, otherwise 1; with --measure, always 0."""
    records = yaml.safe_load(RECORDS.read_text()) or {}
    parser = argparse.ArgumentParser(
        "tools.record", description=wrapped(__doc__ or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help=f"one of {', '.join(records)}")
    parser.add_argument("--measure", type=int, metavar="SEEDS", help="train this many seeds and write the record")
    parser.add_argument("--config", help="with --measure; default: configs/NAME.yaml")
    options = parser.parse_args(arguments)
    name = options.name
    if options.measure is not None:
        if options.measure < 2:
            parser.error(f"measure: {options.measure} must be at least 2, for an interval")
        records[name] = measure(name, options.config or f"configs/{name}.yaml", options.measure)
        write(records)
        return 0
    if name not in records:
        parser.error(f"name: {name!r} is not a record; use one of {', '.join(records)}")
    record = records[name]
    run, seconds = train(name, record["config"], 1)
    row, processor = run.metrics()[-1], machine()["cpu"]
    same, theirs = row["state/digest"] == record["digest"], record["excess_loss"][0]
    print(f"record       {name}, {record['date']}, torch {record['torch']}, {record['processor']}")
    print(f"this run     {run.path}: torch {TORCH}, {processor}, {seconds:.0f} CPU seconds")
    print(f"excess loss  {row['val/excess_loss']:.6g} nats/token; seed 1 of the record: {theirs:.6g}")
    print(f"digest       {row['state/digest']}: {'the same bits' if same else 'the record has ' + record['digest']}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
