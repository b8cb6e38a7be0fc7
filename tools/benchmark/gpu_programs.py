"""Whole trainings of an 11M model on one GPU: the real train.py, with and without `cuda_graph`, and nanoGPT's.

The recipe is configs/shakespeare_char.yaml, which is nanoGPT's. --quick runs it in miniature, on a CPU without graphs.
"""

import math
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.text import TextCorpus
from run.metrics_log import read_rows
from tools.benchmark import tables
from tools.benchmark.cpu import (
    TINY,
    WITHOUT_WANDB,
    Group,
    NanoGPT,
    measure_speed,
    model_settings,
    prepare_characters,
    run_command,
    run_to_target,
    speed_settings,
    train_command,
)
from tools.benchmark.curve import corpus_tokens

BF16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}
RANDOM_BYTES = {
    "data.source": "random",
    "model.vocab_size": 256,
    "data.num_samples": 10_000,
    "evaluation.num_samples": 1,
}
MINIATURE = model_settings(**TINY) | {"micro_batch_size": 4, "global_batch_size": 4, "seq_len": 32}
MUON = {
    **{"model.position": "rope", "model.rope_theta": 1000.0, "model.norm": "rmsnorm", "model.mlp": "relu2"},
    **{"model.qk_norm": True, "model.zero_init": True, "optimizer.name": "muon", "optimizer.lr": 4e-3},
    **{"optimizer.betas": [0.9, 0.95], "schedule.name": "wsd", "schedule.warmup_steps": 20},
    **{"schedule.min_lr_ratio": 0.0, "steps": 1000, "schedule.decay_steps": 750, "evaluation.every": 50},
}
# Candidates for the fewest seconds to 1.47 nats/character, where nanoGPT's recipe ends.
RECIPES = {
    "Muon, 1,000 steps": MUON,
    "Muon, 600 steps, growing batch": MUON
    | {"steps": 600, "schedule.decay_steps": 450, "micro_batch_size": 16}
    | {"schedule.batch_warmup_from": 16, "schedule.batch_warmup_steps": 200},
    "Muon, 8 x 256": MUON
    | model_settings(n_layers=8, n_heads=4, d_model=256)
    | {"steps": 1200, "schedule.decay_steps": 900},
    "Muon, 1,500 steps, more regularised": MUON
    | {"model.dropout": 0.3, "optimizer.weight_decay": 0.3, "steps": 1500, "schedule.decay_steps": 1125},
    "configs/shakespeare_char.yaml": {},
}


def base_settings(options: Namespace) -> dict[str, Any]:
    """Return the settings of all runs; end the program if there is no GPU."""
    if not options.quick and not torch.cuda.is_available():
        sys.exit("no GPU was found; --quick tests this case on a CPU")
    settings = {"config": "configs/shakespeare_char.yaml", "evaluation.num_logged_generations": 0, **WITHOUT_WANDB}
    return settings | (MINIATURE if options.quick else {})


def modes(options: Namespace) -> dict[str, dict]:
    """Return the ways to launch kernels as settings; without a GPU or a compiler only what runs there."""
    found = {}
    for compiled in (False,) if options.quick else (True, False):
        for graph in (False, True) if torch.cuda.is_available() else (False,):
            name = ("compiled" if compiled else "uncompiled") + ", graph" * graph
            found[name] = {"compile": compiled, "cuda_graph": graph}
    return found


def peer_recipe(options: Namespace, **settings: Any) -> dict[str, Any]:
    """Return settings of nanoGPT's train_shakespeare_char.py."""
    recipe = {"device": "cuda" if torch.cuda.is_available() else "cpu", "compile": not options.quick} | settings
    tiny = dict(n_layer=1, n_head=2, n_embd=16, block_size=32, batch_size=4, max_iters=22, eval_interval=11)
    return recipe | (tiny | {"eval_iters": 1, "log_interval": 1} if options.quick else {})


def train_in_phases(settings: dict, phases: list[dict], steps: int, expected: dict[str, str], group: str) -> dict:
    """Train `steps` steps in each phase, the next one resumed; raise RuntimeError if the digest is not the expected."""
    with tempfile.TemporaryDirectory() as folder:
        for number, phase in enumerate(phases, start=1):
            own = {"out_dir": folder, "name": "run", "steps": steps * number}
            run_command(train_command(settings | phase | own), env=BF16)
        digest = list(read_rows(Path(folder, "run", "metrics.jsonl")))[-1]["state/digest"]
    if digest != expected.setdefault(group, digest):
        raise RuntimeError(f"digest {digest}, expected {expected[group]}")
    return {"digest": digest}


def bits(options: Namespace) -> Iterator[Group]:
    """Digests of exact trainings without and with a graph: they must be equal, also after a resume in the other way."""
    steps = 4 if options.quick else 10
    settings = base_settings(options) | RANDOM_BYTES | {"exact": True, "schedule.name": "constant"}
    settings |= {"schedule.warmup_steps": 2, "schedule.min_lr_ratio": 0.0, "evaluation.every": 0}
    part = 2 if options.quick else 16
    variants = {
        "11M": {},
        "11M, several micro-batches": {"micro_batch_size": part},
        "11M, Muon": {"optimizer.name": "muon"},
    }
    expected: dict[str, str] = {}
    for variant, own in variants.items():
        for compiled in (False,) if options.quick else (True, False):
            ways = [
                {"compile": compiled, "cuda_graph": graph} for graph in (False, True)[: 1 + torch.cuda.is_available()]
            ]
            phases = {"graph" if way["cuda_graph"] else "no graph": [way, way] for way in ways}
            if len(ways) == 2 and variant == "11M":
                phases |= {"graph, then none": ways[::-1], "none, then graph": ways}
            group = f"{variant}, {'compiled' if compiled else 'uncompiled'}"
            run = partial(train_in_phases, settings | own, steps=steps, expected=expected, group=group)
            yield group, {name: partial(run, each) for name, each in phases.items()}, {}


def small_programs(options: Namespace) -> Iterator[Group]:
    """Tokens/s of the whole train.py on random bytes, and the seconds to its first log line."""
    every = 1 if options.quick else 50
    settings = base_settings(options) | RANDOM_BYTES
    tokens = every * (4 * 32 if options.quick else 64 * 256)
    with tempfile.TemporaryDirectory() as folder:
        settings |= speed_settings(every, folder) | {"schedule.warmup_steps": every}
        cases = {
            f"ours, {name}": partial(measure_speed, train_command(settings | own), tokens, env=BF16)
            for name, own in modes(options).items()
        }
        if options.nanogpt:
            random = {name: np.random.default_rng(0).integers(0, 256, 10**6) for name in ("train", "val")}
            recipe = dict(max_iters=settings["steps"], log_interval=every, eval_interval=10**6, eval_iters=1)
            peer = NanoGPT(options.nanogpt, random, 256, peer_recipe(options, **recipe))
            cases["nanoGPT"] = partial(measure_speed, peer.command("bfloat16"), tokens, peer.cwd)
        yield "11M, 64 x 256", cases, dict.fromkeys(cases, ["nanoGPT"])


def small_to_loss(options: Namespace) -> Iterator[Group]:
    """Seconds from launch to 1.47 nats/character on --corpus, another seed in each round."""
    target, settings = math.inf if options.quick else 1.47, base_settings(options)
    with tempfile.TemporaryDirectory() as folder:
        corpus = options.corpus or Path(folder, "corpus")
        if options.corpus is None:  # with --quick
            prepare_characters(tables.PAGE, corpus)

        def ours(own: dict, seeds: Iterator[int]) -> dict:
            with tempfile.TemporaryDirectory() as out_dir:
                own = own | {"data.path": corpus, "seed": next(seeds), "out_dir": out_dir}
                return run_to_target(train_command(settings | own), target, env=BF16)

        ways = {name: own for name, own in modes(options).items() if own["cuda_graph"] or not torch.cuda.is_available()}
        for recipe, own in RECIPES.items():
            if options.quick:
                own = {name: value for name, value in own.items() if name.startswith("optimizer")} | {"steps": 4}
                own |= {"schedule.warmup_steps": 0, "evaluation.every": 2}
            yield recipe, {name: partial(ours, own | way, count()) for name, way in ways.items()}, {}
        if options.nanogpt:
            vocab_size = TextCorpus(str(corpus)).vocab_size
            peer = NanoGPT(options.nanogpt, corpus_tokens(corpus), vocab_size, peer_recipe(options))
            yield "nanoGPT", {"nanoGPT": partial(run_to_target, peer.command("bfloat16"), target, peer.cwd)}, {}
