"""Benchmark cases on one GPU, in bfloat16: train.py and nanoGPT's train.py.

--quick runs everything in miniature, without a GPU uncompiled and without CUDA graphs.
"""

import math
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from model.gpt import build_on_meta_device
from runtime.config.parser import parse_config
from tools.benchmark import programs
from tools.benchmark.programs import BF16, PEER, WITHOUT_WANDB, Case, Group, Shape, train_to_loss
from trainer.throughput import peak_bf16_flops

ON_GPU = torch.cuda.is_available()

# Speed

WAYS = {
    "compiled": "--compile true",
    "compiled, graph": "--compile true --cuda_graph true",
    "uncompiled": "--compile false",
    "uncompiled, graph": "--compile false --cuda_graph true",
    "muon": "--compile true --optimizer.name muon",
    "muon, graph": "--compile true --optimizer.name muon --cuda_graph true",
    "whole loss": "--compile true --chunked_loss false",
}
GPT2_124M, GPT_1B, CHAR_11M = Shape(12, 12, 768, 1024), Shape(24, 16, 2048, 1024), Shape(6, 6, 384, 256)


class Speed(NamedTuple):
    """A group: a shape that is trained in several ways, in batches of `batch` sequences."""

    shape: Shape
    batch: int
    ways: list[str]
    log_every: int
    vocab_size: int = 50304  # of GPT-2, padded to a multiple of 64
    dropout: float = 0.0
    settings: str = ""


LARGE_MODELS = {  # the most interesting first
    "124m_1024": Speed(GPT2_124M, 32, ["compiled", PEER, "whole loss"], 10),
    "1.3b_4096": Speed(GPT_1B._replace(context=4096), 4, ["compiled", PEER], 3),
    "124m_4096": Speed(GPT2_124M._replace(context=4096), 8, ["compiled", PEER], 10),
    "1.3b_1024": Speed(GPT_1B, 16, ["compiled", PEER], 3),
}
WITH_AND_WITHOUT = ["compiled", "compiled, graph"]
SMALL_MODELS = {
    "11m_256": Speed(CHAR_11M, 64, [way for way in WAYS if way != "whole loss"] + [PEER], 50, 256, 0.2),
    "11m_256_4_parts": Speed(CHAR_11M, 16, WITH_AND_WITHOUT, 50, 256, 0.2, "--global_batch_size 64"),
    "stories_128": Speed(Shape(2, 4, 128, 128), 32, WITH_AND_WITHOUT, 50, 266),
    **{f"124m_1024_{batch}": Speed(GPT2_124M, batch, [*WITH_AND_WITHOUT, PEER], 10) for batch in (8, 16, 32, 64)},
}


def speed(groups: dict[str, Speed], options: Namespace) -> Iterator[Group]:
    """Yield the groups; each way is compared with nanoGPT and with the compiled model."""
    for name, (shape, batch, ways, log_every, vocab_size, dropout, more) in groups.items():
        if options.quick:
            batch, log_every, vocab_size = 4, 1, 256
        settings = f"--model.vocab_size {vocab_size} --model.dropout {dropout} --tf32 true --cuda_graph false {more}"
        config = parse_config(programs.random_settings(shape, batch, log_every, settings).split())
        flops_per_token = build_on_meta_device(config.model).flops_per_token(shape.context)
        cases: dict[str, Case] = {}
        for way in ways:
            if way == PEER and options.nanogpt:
                recipe = f"--dropout={dropout} --dtype=bfloat16"
                cases[way] = programs.nanogpts_speed(options, shape, batch, log_every, vocab_size, recipe)
            elif way != PEER and (ON_GPU or "graph" not in way):
                cases[way] = programs.our_speed(options, shape, batch, log_every, f"{settings} {WAYS[way]}", BF16)
        cases = {way: partial(with_mfu, case, flops_per_token) for way, case in cases.items()}
        yield name, cases, {way: [PEER, "compiled"] for way in ways if way != PEER}


def with_mfu(case: Case, flops_per_token: float) -> dict[str, Any]:
    """Return the figures of a case, with the fraction of the GPU's peak in its data sheet where that is known."""
    figures = case()
    if ON_GPU and (peak := peak_bf16_flops(torch.device("cuda"))):
        figures["mfu"] = figures["tokens_per_second"] * flops_per_token / peak
    return figures


gpu, cuda_graph = partial(speed, LARGE_MODELS), partial(speed, SMALL_MODELS)

# Whole trainings

MODERN = """--model.position rope --model.norm rmsnorm --model.mlp relu2 --model.qk_norm true --model.zero_init true
    --optimizer.name muon --schedule.name wsd --schedule.min_lr_ratio 0"""
# For --quick.
SHORT = """--steps 11 --schedule.warmup_steps 0 --schedule.decay_steps 5 --evaluation.every 5 --tracking.log_every 1
    --micro_batch_size 4 --global_batch_size 4"""


def curve(options: Namespace) -> Iterator[Group]:
    """Curves of GPT-2 124M on --text, validation loss against seconds: a group for each program.

    All programs train on the same tokens in batches of the same size: nanoGPT, ours with its recipe, with the settings
    of MODERN, and with these for half the steps. Each takes eight minutes or less on an H100. nanoGPT evaluates random
    windows of the validation text, ours evenly spaced ones. The seconds of the curve are those of the steps alone: the
    number of steps times their median time, without the start, compilation, evaluations and checkpoints. `seconds`
    is the time from the launch to the last evaluation.
    """
    vocab_size = 50304  # of a tokenizer of 50,257 tokens; GPUs multiply matrices of a multiple of 128 faster
    recipe = """--dtype=bfloat16 --wandb_log=False --max_iters=400 --lr_decay_iters=400 --warmup_iters=40
        --batch_size=32 --gradient_accumulation_steps=15 --log_interval=10 --eval_interval=40 --eval_iters=20
        --always_save_checkpoint=False"""
    if options.quick:
        recipe += " --max_iters=10 --log_interval=1 --eval_interval=5 --batch_size=4 --gradient_accumulation_steps=1"
    if options.nanogpt:
        peer = partial(programs.nanogpt, options, recipe, "train_gpt2.py", on_text=True, vocab_size=vocab_size)
        yield PEER, {"124M": lambda: peer().train()}, {}
    settings = f"""--config configs/gpt2_124m.yaml --model.vocab_size {vocab_size} --model.bias false {WITHOUT_WANDB}
        --model.mlp gelu_exact --steps 400 --schedule.warmup_steps 40 --global_batch_size 480 --micro_batch_size 32
        --evaluation.every 40 --evaluation.num_samples 640 --evaluation.micro_batch_size 32
        --evaluation.num_logged_generations 0"""
    muon = f"{settings} {MODERN} --optimizer.lr 3.6e-3 --schedule.decay_steps 300"
    half = f"{muon} --steps 200 --schedule.warmup_steps 20 --schedule.decay_steps 150"
    for name, words in {"ours, its recipe": settings, "ours, Muon": muon, "ours, Muon, half the steps": half}.items():
        yield name, {"124M": train_to_loss(options, f"{words} {SHORT if options.quick else ''}", -math.inf, BF16)}, {}
