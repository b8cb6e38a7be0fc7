"""Validation loss against seconds on one GPU: GPT-2 124M on a text, nanoGPT's train.py and ours.

--corpus names a corpus of data.prepare, --nanogpt a checkout. All programs train on the same tokens in batches of the
same size: ours with nanoGPT's recipe, with Muon and the other settings of configs/shakespeare_cpu.yaml, and with these
for half the steps. Each is a group, and takes eight minutes or less on an H100. nanoGPT evaluates random windows of
the validation text, ours evenly spaced ones.

The seconds of the curve are those of the steps alone: the number of steps times their median time, without the start,
compilation, evaluations and checkpoints. `seconds` is the time from the launch to the last evaluation.
benchmarks/results/curve.png is drawn if matplotlib is installed, or later by python -m tools.benchmark.curve.
"""

import re
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.text import TextCorpus, TextDataset
from tools.benchmark import tables
from tools.benchmark.cpu import (
    GPT2,
    ROOT,
    WITHOUT_WANDB,
    Group,
    NanoGPT,
    model_settings,
    prepare_characters,
    run_command,
    train_command,
)

PEER, PICTURE = "nanoGPT", tables.RESULTS / "curve.png"
FULL = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=32, gradient_accumulation_steps=15)
FULL |= dict(max_iters=400, warmup_iters=40, eval_interval=40, eval_iters=20, log_interval=10, compile=True)
MINIATURE = dict(n_layer=1, n_head=2, n_embd=32, block_size=64, batch_size=2, gradient_accumulation_steps=2)
MINIATURE |= dict(max_iters=8, warmup_iters=2, eval_interval=4, eval_iters=2, log_interval=1, compile=False)
# Other settings are those of configs/gpt2_124m.yaml, which are nanoGPT's for GPT-2.
ADAMW = dict(learning_rate=6e-4, min_lr=6e-5, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0, dropout=0.0)
MUON = {
    **{"model.position": "rope", "model.norm": "rmsnorm", "model.mlp": "relu2", "model.qk_norm": True},
    **{"model.zero_init": True, "optimizer.name": "muon", "optimizer.lr": 3.6e-3},
    **{"schedule.name": "wsd", "schedule.min_lr_ratio": 0.0},
}


def corpus_tokens(corpus: Path) -> dict[str, np.ndarray]:
    """Return the tokens of both splits of a corpus, {"train" or "val": ids [T]}."""
    opened, splits = TextCorpus(str(corpus)), {"train": "train", "val": "validation"}
    parts = {name: TextDataset(opened, split, 2, "concat").values for name, split in splits.items()}
    return {name: np.concatenate([ids for ids, *_ in columns]) for name, columns in parts.items()}


def our_settings(shape: Mapping[str, int], steps: int) -> dict[str, object]:
    """Return the recipe of nanoGPT, in its names, as settings of train.py; `steps` scales the schedule, too."""
    settings: dict[str, object] = {"config": "configs/gpt2_124m.yaml", **WITHOUT_WANDB}
    settings["global_batch_size"] = shape["batch_size"] * shape["gradient_accumulation_steps"]
    sizes = dict(n_layers=shape["n_layer"], n_heads=shape["n_head"], d_model=shape["n_embd"])
    settings |= model_settings(**sizes, max_position_embeddings=shape["block_size"], **GPT2)
    settings |= {"micro_batch_size": shape["batch_size"], "seq_len": shape["block_size"], "compile": shape["compile"]}
    settings |= {"steps": steps, "schedule.warmup_steps": shape["warmup_iters"] * steps // shape["max_iters"]}
    settings |= {"evaluation.every": shape["eval_interval"], "evaluation.micro_batch_size": shape["batch_size"]}
    settings |= {"evaluation.num_samples": shape["batch_size"] * shape["eval_iters"]}
    return settings | {"tracking.log_every": shape["log_interval"], "evaluation.num_logged_generations": 0}


def train_and_watch(command: list[str], step_tokens: int, cwd: Path = ROOT, env: Mapping[str, str] = {}) -> dict:
    """Train; return the speed, the seconds, and the curve as rows [step, seconds from the launch, validation loss]."""
    logged, curve = [], []
    for seconds, line in run_command(command, cwd, env):
        if found := re.search(r"step (\d+)\b.*val.loss (?:= )?([\d.]+)", line):
            curve.append([int(found[1]), round(seconds, 2), float(found[2])])
        elif found := re.match(r"(?:\[step|iter) (\d+)", line):
            logged.append((int(found[1]), seconds))
    step_seconds = statistics.median((end - start) / (last - first) for (first, start), (last, end) in pairwise(logged))
    figures = {"seconds_a_step": step_seconds, "tokens_per_second": step_tokens / step_seconds, "curve": curve}
    return figures | {"seconds": curve[-1][1], "val/loss": curve[-1][2]}


def curve(options: Namespace) -> Iterator[Group]:
    """Yield a group for each program; then draw what has been measured so far."""
    on_gpu = torch.cuda.is_available()
    if not options.quick and not on_gpu:
        sys.exit("curve: no GPU was found; --quick tests this case on a CPU")
    shape, precision = (MINIATURE, "float32") if options.quick else (FULL, "bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        corpus = options.corpus
        if corpus is None:  # with --quick
            corpus = Path(folder, "corpus")
            prepare_characters(tables.PAGE, corpus)
        vocab_size = TextCorpus(str(corpus)).vocab_size
        vocab_size = -(-vocab_size // 128) * 128  # GPUs multiply such matrices faster
        step_tokens = shape["batch_size"] * shape["block_size"] * shape["gradient_accumulation_steps"]
        programs: dict[str, Any] = {}
        if options.nanogpt:
            recipe = shape | ADAMW | {"lr_decay_iters": shape["max_iters"], "device": "cuda" if on_gpu else "cpu"}
            peer = NanoGPT(options.nanogpt, corpus_tokens(corpus), vocab_size, recipe)
            programs[PEER] = partial(train_and_watch, peer.command(precision), step_tokens, peer.cwd)
        recipes = {"ours, its recipe": ({}, 1), "ours, Muon": (MUON, 1), "ours, Muon, half the steps": (MUON, 2)}
        for name, (own, divisor) in recipes.items():
            steps = shape["max_iters"] // divisor
            settings = our_settings(shape, steps) | own | {"data.path": corpus, "model.vocab_size": vocab_size}
            settings |= {"schedule.decay_steps": steps * 3 // 4} if own else {}
            command = train_command(settings | {"out_dir": folder, "name": name.replace(", ", "-").replace(" ", "_")})
            env = {"ACCELERATE_MIXED_PRECISION": {"float32": "no", "bfloat16": "bf16"}[precision]}
            programs[name] = partial(train_and_watch, command, step_tokens, env=env)
        for name, program in programs.items():
            yield name, {f"{shape['n_layer']} x {shape['n_embd']}": program}, {}
    if not options.quick:
        print(report(tables.read_result("curve")["figures"]))


def training_seconds(figures: dict) -> list[tuple[float, float]]:
    """Return the curve of a program as (seconds of its steps, validation loss)."""
    return [(step * statistics.median(figures["seconds_a_step"]), loss) for step, _, loss in figures["curve"]]


def seconds_to(loss: float, points: list[tuple[float, float]]) -> float | None:
    """Return when a curve first reaches a loss, linear between evaluations; None if it does not."""
    for (start, above), (end, below) in pairwise(points):
        if below <= loss:
            return start + (end - start) * max(0.0, above - loss) / (above - below)
    return None


def report(figures: tables.Figures) -> str:
    """Draw the curves, if matplotlib is installed; return when each program reaches nanoGPT's last loss."""
    curves = {
        name: training_seconds(case) for name, cases in figures.items() for case in cases.values() if "curve" in case
    }
    lines = []
    if PEER in curves:
        last_seconds, last_loss = curves[PEER][-1]
        for name, points in curves.items():
            seconds = seconds_to(last_loss, points)
            when = f"after {seconds:.0f} s ({seconds / last_seconds:.2f}x)" if seconds is not None else "not reached"
            lines.append(f"- {name}: {PEER}'s last loss, {last_loss:.3f}: {when}")
    try:
        import matplotlib
    except ImportError:
        return "\n".join([*lines, "matplotlib is missing; draw elsewhere: python -m tools.benchmark.curve"])
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, points in curves.items():
        axes.plot(*zip(*points[1:], strict=True), marker=".", label=name)  # without the loss of the initial weights
    axes.set(xlabel="seconds of training steps", ylabel="validation loss, nats/token", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(PICTURE, dpi=120)
    pyplot.close(figure)
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(tables.read_result("curve")["figures"]))
