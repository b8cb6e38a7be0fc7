"""Kills processes of a run at random moments, and compares the weights it ends with to those of one left alone.

    python -m benchmarks.soak [--kills 50] [--minutes 15] [--processes 2] [--seed 0]

Every kill is a SIGKILL to a random process of a job under `accelerate launch --max_restarts`, at a random time after
the kill before: while it starts, trains or saves. When a run ends before the kills do, the next one begins.
Exit code 0: every run ended with the same bits.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from benchmarks import record
from benchmarks.exactness import tensors, train_command
from benchmarks.measure import ROOT

STEPS = 400


def launch(out_dir: Path, name: str, processes: int, max_restarts: int) -> psutil.Popen:
    short = f"--config tests/tiny_stories.yaml --steps {STEPS} --global_batch_size 12 --evaluation.every 0".split()
    short += ["--checkpoint.every", "3", "--checkpoint.keep", "2"]
    command = train_command(out_dir, name, processes, *short, max_restarts=max_restarts)
    return psutil.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=open(out_dir / f"{name}.log", "w"),
    )


def phase(run: Path, started: float) -> str:
    """What the killed process was doing, as far as the run directory tells."""
    if list((run / "checkpoints").glob(".writing-*")):
        return "saving"
    metrics_file = run / "metrics.jsonl"
    return "training" if metrics_file.exists() and metrics_file.stat().st_mtime > started else "starting"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    out_dir = Path(tempfile.mkdtemp())
    begin = time.perf_counter()
    if launch(out_dir, "left_alone", arguments.processes, 0).wait():
        sys.exit((out_dir / "left_alone.log").read_text())
    expected = tensors(out_dir / "left_alone")
    seconds_alone = time.perf_counter() - begin

    tally, runs = Counter(), 0
    while tally["kills"] < arguments.kills and time.perf_counter() - begin < 60 * arguments.minutes:
        runs += 1
        name = f"run{runs}"
        job, last_kill = launch(out_dir, name, arguments.processes, arguments.kills), time.time()
        while job.poll() is None:
            if tally["kills"] < arguments.kills and time.perf_counter() - begin < 60 * arguments.minutes:
                time.sleep(chance.uniform(0, min(10.0, 1.2 * seconds_alone)))
                victims = [child for child in job.children() if "train.py" in " ".join(child.cmdline())]
                if job.poll() is None and victims:
                    tally[phase(out_dir / name, last_kill)] += 1
                    tally["kills"] += 1
                    last_kill = time.time()
                    os.kill(chance.choice(victims).pid, signal.SIGKILL)
            time.sleep(0.05)
        ended = tensors(out_dir / name) if job.returncode == 0 else {}
        same = ended.keys() == expected.keys() and all(ended[key].equal(expected[key]) for key in expected)
        tally["runs_with_the_same_bits" if same else "runs_that_differ_or_failed"] += 1
        if not same:
            print((out_dir / f"{name}.log").read_text()[-5000:], file=sys.stderr)
    shutil.rmtree(out_dir)
    keys = ["kills", "starting", "training", "saving", "runs_with_the_same_bits", "runs_that_differ_or_failed"]
    figures = {key: tally[key] for key in keys}
    record.save("soak", {**figures, "minutes": round((time.perf_counter() - begin) / 60, 1)})
    return 0 if tally["runs_that_differ_or_failed"] == 0 and tally["kills"] >= arguments.kills else 1


if __name__ == "__main__":
    sys.exit(main())
