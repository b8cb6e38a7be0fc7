"""What `--exact true` costs, and what it buys: python -m benchmarks.exactness [--steps 200]

Bits: the stories recipe on 1, 2 and 4 processes, with and without `exact`; how far losses and weights are apart.
Cost: a model of 11 million parameters on 1 and 2 processes with 8 micro-batches each, exact against default,
alternating, in time a step and peak memory a process.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from benchmarks import record
from benchmarks.measure import ROOT, launch

MODEL = "--model.n_layers 6 --model.d_model 384 --model.n_heads 6 --model.dropout 0 --seq_len 64".split()


def train_command(out_dir: Path, name: str, processes: int, *arguments: str, max_restarts: int = 0) -> list[str]:
    """`accelerate launch` of train.py on the CPU."""
    own = ["--out_dir", str(out_dir), "--name", name, "--tracking.wandb", "disabled"]
    return [*launch(processes, "train.py", max_restarts), *own, *arguments]


def train(out_dir: Path, name: str, processes: int, *arguments: str) -> int:
    """Run train.py; returns the highest peak of resident memory of any process, in bytes."""
    command = train_command(out_dir, name, processes, *arguments)
    process = psutil.Popen(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    peak = 0
    while process.poll() is None:
        for child in process.children():
            try:
                status = Path(f"/proc/{child.pid}/status").read_text()
            except OSError:
                continue
            peak = max([peak, *(int(line.split()[1]) * 1024 for line in status.splitlines() if "VmHWM" in line)])
        time.sleep(0.2)
    if process.returncode:
        sys.exit(process.stderr.read().decode())
    return peak


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def tensors(run: Path) -> dict[str, torch.Tensor]:
    newest = max((run / "checkpoints").iterdir())
    return {name: tensor for file in newest.glob("*.safetensors") for name, tensor in load_file(file).items()}


def compare(one: Path, other: Path) -> dict[str, float]:
    """Relative differences of the logged losses and of all weights together, and how many tensors differ in any bit."""
    losses = [(a["train/loss"], b["train/loss"]) for a, b in zip(rows(one), rows(other), strict=True)]
    ours, theirs = tensors(one), tensors(other)
    weights = [name for name in ours if name.startswith("model.")]
    difference = torch.stack([(ours[name] - theirs[name]).norm() for name in weights]).norm()
    return {
        "largest_loss_difference": max(abs(a / b - 1) for a, b in losses),
        "weight_difference": (difference / torch.stack([theirs[name].norm() for name in weights]).norm()).item(),
        "tensors_that_differ": sum(not torch.equal(ours[name], theirs[name]) for name in ours),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cost_steps", type=int, default=20)
    arguments = parser.parse_args()
    figures: dict = {"steps": arguments.steps}
    with tempfile.TemporaryDirectory() as directory:
        out_dir = Path(directory)
        stories = f"--steps {arguments.steps} --micro_batch_size 4 --tracking.log_every 1 --evaluation.every 0".split()
        stories += ["--evaluation.num_story_samples", "0", "--model.dropout", "0.1"]
        for mode, exact in (("default", "false"), ("exact", "true")):
            for processes in (1, 2, 4):
                train(out_dir, f"{mode}{processes}", processes, *stories, "--exact", exact)
            figures[mode] = {
                f"1_against_{n}_processes": compare(out_dir / f"{mode}1", out_dir / f"{mode}{n}") for n in (2, 4)
            }
        for processes in (1, 2):
            seconds, peaks = {"false": [], "true": []}, {"false": [], "true": []}
            for repeat in range(arguments.repeats):
                for exact in seconds:
                    name = f"cost{processes}{exact}{repeat}"
                    cost = [*MODEL, "--micro_batch_size", "1", "--global_batch_size", str(8 * processes)]
                    cost += ["--steps", str(arguments.cost_steps), "--tracking.log_every", "5", "--exact", exact]
                    cost += ["--evaluation.every", "0", "--schedule.warmup_steps", "0"]
                    random = ["--config", "configs/random_tokens.yaml", "--model.vocab_size", "512"]
                    peaks[exact].append(train(out_dir, name, processes, *random, *cost))
                    speeds = [row["perf/tokens_per_second"] for row in rows(out_dir / name)]
                    seconds[exact].append(8 * processes * 64 / statistics.median(speeds))
            middle = {exact: statistics.median(values) for exact, values in seconds.items()}
            peak = {exact: statistics.median(values) / 2**20 for exact, values in peaks.items()}
            figures[f"cost_{processes}_processes"] = {
                "default_seconds_a_step": round(middle["false"], 3),
                "exact_seconds_a_step": round(middle["true"], 3),
                "time_ratio": round(middle["true"] / middle["false"], 3),
                "default_peak_mib": round(peak["false"]),
                "exact_peak_mib": round(peak["true"]),
            }
    record.save("exactness", figures)


if __name__ == "__main__":
    main()
