"""Benchmark cases on one GPU: training steps, and whole trainings by train.py and nanoGPT.

A step of `gpu` and `cuda_graph` is that of a GPT-2 shape in bfloat16 on random tokens in device memory. FLOP/s are
compared with those of a bfloat16 product of large matrices and with the data sheet (MFU).

--quick runs everything in miniature, without a GPU uncompiled and without CUDA graphs.
"""

import importlib.util
import math
import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from tools.benchmark import programs
from tools.benchmark.programs import BF16, PEER, WITHOUT_WANDB, Case, Group, Shape, nanogpt, ours, train_to_loss
from tools.benchmark.tables import ROOT

ON_GPU = torch.cuda.is_available()

# Steps

GRAPH, EAGER, MUON = "--cuda_graph true", "--compile false", "--optimizer.name muon"
SETTINGS = {"ours": "", "whole_loss": "--chunked_loss false", "graph": GRAPH, "uncompiled": EAGER, "muon": MUON}
SETTINGS |= {"uncompiled, graph": f"{EAGER} {GRAPH}", "muon, graph": f"{MUON} {GRAPH}"}
GPT2_124M, GPT_1B, CHAR_11M = Shape(12, 12, 768, 1024), Shape(24, 16, 2048, 1024), Shape(6, 6, 384, 256)


class Steps(NamedTuple):
    """A group: a shape, and its variants, which are compared."""

    shape: Shape
    batch: int
    variants: list[str]
    steps: int = 60
    """Of which the second half is measured."""
    settings: str = "--model.vocab_size 50304 --model.dropout 0"
    attention: str = ""
    """Kernel of attention."""


LARGE_MODELS = {  # the most interesting first
    "124m_1024": Steps(GPT2_124M, 32, ["ours", PEER, "whole_loss"]),
    "1.3b_4096": Steps(GPT_1B._replace(context=4096), 4, ["ours", PEER]),
    "124m_1024_flash": Steps(GPT2_124M, 32, ["ours"], attention="FLASH"),
    "124m_1024_cudnn": Steps(GPT2_124M, 32, ["ours"], attention="CUDNN"),
    "124m_1024_efficient": Steps(GPT2_124M, 32, ["ours"], attention="EFFICIENT"),
    "124m_4096": Steps(GPT2_124M._replace(context=4096), 8, ["ours", PEER]),
    "1.3b_1024": Steps(GPT_1B, 16, ["ours", PEER]),
}
BYTES = "--model.vocab_size 256 --model.dropout 0.2"
ALL_BUT_WHOLE_LOSS = [*(name for name in SETTINGS if name != "whole_loss"), PEER]
SMALL_STEPS = {
    "11m_256": Steps(CHAR_11M, 64, ALL_BUT_WHOLE_LOSS, 400, BYTES),
    "11m_256_4_parts": Steps(CHAR_11M, 16, ["ours", "graph"], 400, f"{BYTES} --global_batch_size 64"),
    "stories_128": Steps(Shape(2, 4, 128, 128), 32, ["ours", "graph"], 400, "--model.vocab_size 266 --model.dropout 0"),
    **{f"124m_1024_{batch}": Steps(GPT2_124M, batch, ["ours", "graph", PEER], 100) for batch in (8, 16, 32)},
}


def measure_steps(groups: dict[str, Steps], options: Namespace) -> Iterator[Group]:
    """Yield the groups; each variant is compared with nanoGPT and with the default settings."""
    for name, group in groups.items():
        settings = f"--config configs/random_tokens.yaml {group.shape.settings()} --micro_batch_size {group.batch}"
        settings += f" {group.settings} --tf32 true --optimizer.lr 1e-4 --compile true --tracking.log_every 1000"
        settings += f" --steps {2 if options.quick else group.steps}"
        env = BF16 | ({"ATTENTION": group.attention} if group.attention else {})
        cases: dict[str, Case] = {
            "a large product": programs.steps(options, "product", "64" if options.quick else "8192")
        }
        for variant in group.variants:
            if variant == PEER and options.nanogpt:
                cases[variant] = programs.steps(options, str(options.nanogpt.resolve()), settings, env)
            elif variant != PEER and (ON_GPU or "cuda_graph" not in SETTINGS[variant]):
                cases[variant] = programs.steps(options, "train", f"{settings} {SETTINGS[variant]}", env)
        yield name, cases, {variant: [PEER, "ours"] for variant in group.variants if variant != PEER}


gpu, cuda_graph = partial(measure_steps, LARGE_MODELS), partial(measure_steps, SMALL_STEPS)

# Whole trainings

CHAR = f"--config configs/shakespeare_char.yaml --evaluation.num_logged_generations 0 {WITHOUT_WANDB}"
MODERN = """--model.position rope --model.norm rmsnorm --model.mlp relu2 --model.qk_norm true --model.zero_init true
    --optimizer.name muon --schedule.name wsd --schedule.min_lr_ratio 0"""
MODERN_11M = f"""{MODERN} --model.rope_theta 1000 --optimizer.lr 4e-3 --optimizer.betas [0.9,0.95] --steps 1000
    --schedule.warmup_steps 20 --schedule.decay_steps 750 --evaluation.every 50"""
# Candidates for the fewest seconds to 1.47 nats/character, where nanoGPT's recipe ends.
RECIPES = {
    "Muon, 1,000 steps": MODERN_11M,
    "Muon, 600 steps": f"{MODERN_11M} --steps 600 --schedule.decay_steps 450",
    "Muon, 8 x 256": f"{MODERN_11M} {Shape(8, 4, 256, 256).settings()} --steps 1200 --schedule.decay_steps 900",
    "Muon, 1,500 steps, more regularised": f"""{MODERN_11M} --model.dropout 0.3 --optimizer.weight_decay 0.3
        --steps 1500 --schedule.decay_steps 1125""",
    "configs/shakespeare_char.yaml": "--steps 5000",
}
# For --quick.
SHORT = """--steps 11 --schedule.warmup_steps 0 --schedule.decay_steps 5 --evaluation.every 5 --tracking.log_every 1
    --micro_batch_size 4 --global_batch_size 4"""
WAYS = {  # to launch kernels
    ("compiled" if compiled else "uncompiled") + ", graph" * graph: f"--compile {compiled} --cuda_graph {graph}"
    for compiled in (True, False)
    for graph in ((False, True) if ON_GPU else (False,))
}


def small_programs(options: Namespace) -> Iterator[Group]:
    """Tokens/s of the whole train.py on random bytes, and the seconds to its first log line."""
    log_every = 1 if options.quick else 50
    settings = f"{CHAR} --data.source random --data.num_samples 10000 --evaluation.num_samples 1 --model.vocab_size 256"
    settings += f" {programs.speed_settings(log_every)} --schedule.warmup_steps {log_every}"
    cases: dict[str, Case] = {
        f"ours, {name}": ours(options, f"{settings} {way}", env=BF16).train for name, way in WAYS.items()
    }
    if options.nanogpt:
        recipe = f"{programs.speed_recipe(log_every)} --dtype=bfloat16"
        cases[PEER] = lambda: nanogpt(options, recipe, vocab_size=256).train()
    yield "11M, 64 x 256", cases, dict.fromkeys(cases, [PEER])


def small_to_loss(options: Namespace) -> Iterator[Group]:
    """Seconds from launch to 1.47 nats/character on --text, another seed in each round of ours."""
    target, short = (math.inf, SHORT) if options.quick else (1.47, "")
    for recipe, own in RECIPES.items():
        cases = {
            name: train_to_loss(options, f"{CHAR} {own} {way} {short}", target, BF16)
            for name, way in WAYS.items()
            if ("graph" in name) == ON_GPU
        }
        yield recipe, cases, {}
    if options.nanogpt:
        yield PEER, {PEER: lambda: nanogpt(options, "--dtype=bfloat16", on_text=True).train(target)}, {}


def curve(options: Namespace) -> Iterator[Group]:
    """Curves of GPT-2 124M on --text, validation loss against seconds: a group for each program.

    All programs train on the same tokens in batches of the same size: nanoGPT, ours with its recipe, with Muon and the
    other settings of configs/shakespeare_cpu.yaml, and with these for half the steps. Each takes eight minutes or less
    on an H100. nanoGPT evaluates random windows of the validation text, ours evenly spaced ones. The seconds of the
    curve are those of the steps alone: the number of steps times their median time, without the start, compilation,
    evaluations and checkpoints. `seconds` is the time from the launch to the last evaluation.
    """
    vocab_size = 50304  # of a tokenizer of 50,257 tokens; GPUs multiply matrices of a multiple of 128 faster
    recipe = """--dtype=bfloat16 --wandb_log=False --max_iters=400 --lr_decay_iters=400 --warmup_iters=40
        --batch_size=32 --gradient_accumulation_steps=15 --log_interval=10 --eval_interval=40 --eval_iters=20
        --always_save_checkpoint=False"""
    if options.quick:
        recipe += " --max_iters=10 --log_interval=1 --eval_interval=5 --batch_size=4 --gradient_accumulation_steps=1"
    if options.nanogpt:
        peer = partial(nanogpt, options, recipe, "train_gpt2.py", on_text=True, vocab_size=vocab_size)
        yield PEER, {"124M": lambda: peer().train()}, {}
    settings = f"""--config configs/gpt2_124m.yaml --model.vocab_size {vocab_size} --model.bias false {WITHOUT_WANDB}
        --model.mlp gelu_erf --steps 400 --schedule.warmup_steps 40 --global_batch_size 480 --micro_batch_size 32
        --evaluation.every 40 --evaluation.num_samples 640 --evaluation.micro_batch_size 32
        --evaluation.num_logged_generations 0"""
    muon = f"{settings} {MODERN} --optimizer.lr 3.6e-3 --schedule.decay_steps 300"
    half = f"{muon} --steps 200 --schedule.warmup_steps 20 --schedule.decay_steps 150"
    for name, own in {"ours, its recipe": settings, "ours, Muon": muon, "ours, Muon, half the steps": half}.items():
        yield name, {"124M": train_to_loss(options, f"{own} {SHORT if options.quick else ''}", -math.inf, BF16)}, {}


def run_tests(selected: str, options: Namespace) -> Iterator[Group]:
    """Run selected tests that need a GPU; the figure is their summary."""
    marked = sorted(str(file) for file in (ROOT / "tests").rglob("test_*.py") if "mark.cuda" in file.read_text())
    workers = ["--numprocesses", "8"] if importlib.util.find_spec("xdist") else []  # these share the GPU
    files = ["--co", "-q", *marked] if options.quick else [*workers, *marked]
    program = programs.Program([sys.executable, "-m", "pytest", "-m", "cuda", "-k", selected, "-rfE", *files])
    yield "marked cuda", {"pytest": lambda: {"summary": program.run()[-1][1].strip("= ")}}, {}


bits, tests = partial(run_tests, "cuda_graph"), partial(run_tests, "not cuda_graph")
