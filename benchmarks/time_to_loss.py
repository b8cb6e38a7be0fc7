"""Seconds from launch to a validation loss: python -m benchmarks.time_to_loss --text FILE [--target 1.88] [--cold]

Trains configs/shakespeare_cpu.yaml on the characters (bytes) of a text, the last tenth of it held out, and stops the
clock at the first evaluation, over all of that part, with at most the target. Exit code 0 if there is one, else 1.
With --nanogpt PATH, nanoGPT's recipe for a CPU runs as well, by turns, to its last evaluation. Preparing the text
counts for neither. --cold: with an empty cache of compiled code.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import record
from benchmarks.measure import ROOT, run
from benchmarks.nanogpt import NanoGPT


def seconds_to_loss(corpus: Path, target: float, seed: int, cold: bool) -> dict[str, float]:
    """Train once; the seconds to the target (infinite if it was missed), the loss then, and the tokens seen."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-u", "train.py", "--config", "configs/shakespeare_cpu.yaml", "--name", "run"]
        command += ["--data.path", str(corpus), "--out_dir", directory, "--seed", str(seed)]
        command += ["--tracking.wandb", "disabled"]
        env = os.environ | ({"TORCHINDUCTOR_CACHE_DIR": f"{directory}/cache"} if cold else {})
        start, seconds = time.perf_counter(), math.inf
        with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE) as process:
            for line in process.stdout:
                _, found, loss = line.decode().partition("val/loss = ")
                if found and float(loss.split()[0]) <= target:
                    seconds = min(seconds, time.perf_counter() - start)
        if process.returncode:
            sys.exit(f"train.py ended with exit code {process.returncode}")
        rows = [json.loads(line) for line in Path(directory, "run", "metrics.jsonl").read_text().splitlines()]
    return {"seconds": round(seconds, 2), "val/loss": rows[-1]["val/loss"], "tokens": rows[-1]["train/tokens"]}


def nanogpt_seconds(peer: NanoGPT) -> dict[str, float]:
    """The whole recipe of its README, to its last estimate of the validation loss."""
    evaluations = [(seconds, line) for seconds, line in peer.train() if "val loss" in line]
    seconds, line = evaluations[-1]
    return {"seconds": round(seconds, 2), "val/loss": float(line.split("val loss ")[1]), "tokens": 2000 * 12 * 64}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--target", type=float, default=1.88, help="nats per character")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--nanogpt", help="a checkout of nanoGPT")
    parser.add_argument("--rounds", type=int, default=1, help="each with another seed")
    arguments = parser.parse_args()
    figures = {"target": arguments.target, "cold": arguments.cold, "ours": [], "nanoGPT": []}
    with tempfile.TemporaryDirectory() as directory:
        corpus = Path(directory, "corpus")
        prepare = [
            sys.executable,
            "-m",
            "data.prepare",
            "--source",
            str(arguments.text.resolve()),
            "--out",
            str(corpus),
        ]
        run([*prepare, "--tokenizer", "byte", "--validation", "tail:0.1"])
        peer = NanoGPT(arguments.nanogpt, arguments.text) if arguments.nanogpt else None
        for seed in range(arguments.rounds):
            figures["ours"].append(seconds_to_loss(corpus, arguments.target, seed, arguments.cold))
            if peer:
                figures["nanoGPT"].append(nanogpt_seconds(peer))
    ours = statistics.median(each["seconds"] for each in figures["ours"])
    if peer:
        figures["share_of_nanogpts_time"] = round(
            ours / statistics.median(each["seconds"] for each in figures["nanoGPT"]), 3
        )
        record.save("time_to_loss", figures)
    else:
        print(json.dumps(figures, indent=2))
    return 0 if ours < math.inf else 1


if __name__ == "__main__":
    sys.exit(main())
