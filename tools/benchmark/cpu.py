"""Benchmark cases on a CPU: train.py compared with nanoGPT's and with a hand-written loop.

A function without an underscore is a case of python -m tools.benchmark, and yields its groups.
"""

import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distributed.cores import available_cores
from distributed.cpu import prepare_cpu
from model.config import FAMILIES, GPTConfig
from model.gpt import GPTModel
from model.hf import to_transformers
from run.metrics_log import read_rows
from tools.benchmark import programs
from tools.benchmark.programs import BF16, PEER, WITHOUT_WANDB, Case, Group, Program, model_settings, nanogpt, ours

RANDOM = {"config": "configs/random_tokens.yaml", "model.dropout": 0.0, "data.num_samples": 10_000}
STORIES = {"config": "configs/stories.yaml"}
BARE_LOOP = "-m", "tools.benchmark.bare_loop"
PROMPT_TOKENS = 32
RECIPE_FOR_A_CPU = {  # from nanoGPT's README
    **dict(compile=False, dtype="float32", eval_iters=20, block_size=64, batch_size=12, n_layer=4, n_head=4),
    **dict(n_embd=128, max_iters=2000, lr_decay_iters=2000, dropout=0.0),
}


def throughput(options: Namespace) -> Iterator[Group]:
    """Training speed of two small GPT-2 shapes, against nanoGPT if --nanogpt names a checkout."""
    small = dict(n_layer=4, n_head=4, n_embd=128, block_size=64)
    medium = dict(n_layer=6, n_head=6, n_embd=384, block_size=256)
    # A processor without bfloat16 arithmetic takes twenty times as long.
    precisions = ("float32", "bfloat16") if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ("float32",)
    for shape, batch, log_every in (small, 12, 20), (medium, 16, 3):
        our_cases, peer_cases, baselines = {}, {}, {}
        with tempfile.TemporaryDirectory() as folder:
            settings = RANDOM | WITHOUT_WANDB | model_settings(shape) | programs.speed_settings(log_every, folder)
            settings |= {"model.mlp": "gelu_erf", "model.vocab_size": 65, "micro_batch_size": batch}
            recipe = RECIPE_FOR_A_CPU | shape | {"batch_size": batch, "eval_interval": 10**6, "eval_iters": 1}
            recipe |= {"max_iters": settings["steps"], "log_interval": log_every}
            for precision, compiled in product(precisions, (False, True)):
                label, own = f"{precision}{', compiled' if compiled else ''}", {"compile": compiled}
                env = BF16 if precision == "bfloat16" else {}
                our_cases[f"ours, {label}"] = ours(options, settings | own, env=env).train
                baselines[f"ours, {label}"] = list(dict.fromkeys((f"{PEER}, {label}", f"{PEER}, float32")))
                if options.nanogpt:
                    own |= {"dtype": precision}
                    peer = nanogpt(options, Path(folder, label), recipe | own, vocab_size=65)
                    peer_cases[f"{PEER}, {label}"] = peer.train
            name = f"{shape['n_layer']} x {shape['n_embd']}, context {shape['block_size']}, batch {batch}"
            yield name, our_cases | peer_cases, baselines


def time_to_loss(options: Namespace) -> Iterator[Group]:
    """Seconds from launch to a validation loss of 1.88 nats/character on --text, another seed in each round.

    Preparing the corpus is not counted. A program that never gets there is measured at its last evaluation.
    """
    target, seeds = math.inf if options.quick else 1.88, count()
    with tempfile.TemporaryDirectory() as folder:
        corpus = programs.prepare_characters(options.text, folder)
        settings = {"config": "configs/shakespeare_cpu.yaml", "data.path": corpus} | WITHOUT_WANDB
        settings |= {"out_dir": folder, "resume": "never"}
        cases: dict[str, Case] = {"ours": lambda: ours(options, settings | {"seed": next(seeds)}).train(target)}
        if options.nanogpt:
            cases[PEER] = partial(nanogpt(options, folder, RECIPE_FOR_A_CPU, corpus=corpus).train, target)
        yield "to 1.88 nats/character", cases, {"ours": [PEER]}


def overhead(options: Namespace) -> Iterator[Group]:
    """Training speed of train.py against a hand-written loop, in one process and in two, with one thread for each core.

    Steps on stories are short, and their data are generated meanwhile; steps on random tokens are longer.
    """
    larger = model_settings(dict(n_layer=4, n_head=4, n_embd=256, block_size=128)) | {"model.vocab_size": 512}
    recipes = {"stories, 0.46M parameters": (STORIES, 20), "random tokens, 3.3M parameters": (RANDOM | larger, 10)}
    for name, (recipe, log_every) in recipes.items():
        cases, baselines = {}, {}
        with tempfile.TemporaryDirectory() as folder:
            for processes, label in {1: "1 process", 2: "2 processes"}.items():
                threads = {"OMP_NUM_THREADS": str(max(1, available_cores() // processes))}
                settings = recipe | programs.speed_settings(log_every, folder) | {"micro_batch_size": 16 // processes}
                start = partial(ours, options, settings, processes if processes > 1 else 0)
                cases[f"train.py, {label}"] = start(env=threads).train
                cases[f"bare loop, {label}"] = start(BARE_LOOP, env=threads).train
                baselines[f"train.py, {label}"] = [f"bare loop, {label}", "train.py, 1 process"]
            yield name, cases, baselines


def memory(options: Namespace) -> Iterator[Group]:
    """Peak memory (beyond the imports') and time of a step of 2,048 tokens with a vocabulary of 50,257."""
    settings = RANDOM | model_settings(dict(n_layer=4, n_head=4, n_embd=256, block_size=256))
    settings |= {"model.mlp": "gelu_erf", "model.vocab_size": 50_257, "steps": 4, "optimizer.lr": 1e-3}
    variants = {
        "logits at once": {"chunked_loss": False},
        "loss in chunks": {"chunked_loss": True},
        "loss in chunks, activation checkpointing": {"chunked_loss": True, "activation_checkpointing": True},
    }

    def bare_loop(own: dict, env: dict[str, str]) -> dict[str, float]:
        return json.loads(ours(options, settings | own, script=BARE_LOOP, env=env).run()[-1][1])

    cases: dict[str, Case] = {name: partial(bare_loop, own, {}) for name, own in variants.items()}
    if options.nanogpt:
        cases[PEER] = partial(bare_loop, {}, {"PEER": str(options.nanogpt.resolve())})
    yield "a step of 2,048 tokens", cases, dict.fromkeys(variants, [PEER])


def exactness(options: Namespace) -> Iterator[Group]:
    """Time and memory of `--exact true`: 11 million parameters, 8 micro-batches in each process, one thread each."""
    settings = RANDOM | WITHOUT_WANDB | model_settings(dict(n_layer=6, n_head=6, n_embd=384, block_size=64))
    settings |= {"micro_batch_size": 1, "model.vocab_size": 512}

    def case(exact: bool, processes: int) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            own = programs.speed_settings(2, folder) | {"exact": exact, "global_batch_size": 8 * processes}
            figures = ours(options, settings | own, processes, env={"OMP_NUM_THREADS": "1"}).train()
            *_, last = read_rows(Path(folder, "run", "metrics.jsonl"))
        return figures | {"peak_mib": last["perf/peak_memory_bytes"] / 2**20}

    for processes in (1, 2):
        cases: dict[str, Case] = {"default": partial(case, False, processes), "exact": partial(case, True, processes)}
        yield f"cost, {processes} process(es)", cases, {"exact": ["default"]}


def checkpoint_stall(options: Namespace) -> Iterator[Group]:
    """Time that training waits for the second save of 100 million weights on the disk of TMPDIR.

    It is the delay of the step after the save, compared with the median step before any save. The first save also
    imports and allocates.
    """
    every = 20
    settings = RANDOM | WITHOUT_WANDB | model_settings(dict(n_layer=12, n_head=12, n_embd=768, block_size=64))
    settings |= {"model.tie_embeddings": False, "micro_batch_size": 1, "steps": 3 * every, "tracking.log_every": 1}

    def case(asynchronous: bool) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            own = {"checkpoint.every": every, "checkpoint.asynchronous": asynchronous, "out_dir": folder}
            logged, *_ = ours(options, settings | own).log()
        steps = [end - start for start, end in pairwise(logged.values())]  # steps[0] is that of step 2
        return {"waits_seconds": steps[2 * every - 1] - statistics.median(steps[1 : every - 1])}

    cases: dict[str, Case] = {"synchronous": partial(case, False), "asynchronous": partial(case, True)}
    yield "100 million parameters", cases, {"asynchronous": ["synchronous"]}


def startup(options: Namespace) -> Iterator[Group]:
    """Seconds from the launch to --help and to the end of the first step, beside importing torch."""
    with tempfile.TemporaryDirectory() as folder:
        settings = STORIES | programs.speed_settings(1, folder) | {"steps": 1, "schedule.warmup_steps": 0}
        cache = Path(folder, "cache")

        def first_step(processes: int = 0, compiled: bool = False, empty: bool = False) -> dict[str, float]:
            if empty:
                shutil.rmtree(cache, ignore_errors=True)
            run = ours(
                options, settings | {"compile": compiled}, processes, env={"TORCHINDUCTOR_CACHE_DIR": str(cache)}
            )
            return {"seconds": run.train()["start_seconds"]}

        cases: dict[str, Case] = {
            "import torch": Program([sys.executable, "-c", "import torch"]).run,
            "train.py --help": Program([sys.executable, "train.py", "--help"]).run,
            "first step": first_step,
            "first step, 2 processes": partial(first_step, 2),
            "first step, compiled, empty cache": partial(first_step, compiled=True, empty=True),
            "first step, compiled, filled cache": partial(first_step, compiled=True),
        }
        yield "from launch to", cases, {"train.py --help": ["import torch"]}


def generation(options: Namespace) -> Iterator[Group]:
    """Greedy generation of GPTModel against transformers on the exported model; both must return the same tokens."""

    def case(generate: Callable[[], Tensor], expected: Tensor) -> dict[str, float]:
        start = time.perf_counter()
        generated = generate()
        seconds = time.perf_counter() - start
        if not torch.equal(generated, expected):
            raise RuntimeError("the tokens are not those of transformers")
        return {"tokens_per_second": (expected.numel() - len(expected) * PROMPT_TOKENS) / seconds}

    prepare_cpu()
    shapes = [(1, 32, 2, 4)] if options.quick else [(2, 128, 4, 96), (6, 384, 6, 64)]
    for (family, settings), (layers, width, heads, length) in product(FAMILIES.items(), shapes):
        torch.manual_seed(0)
        sizes = dict(vocab_size=8192, n_layers=layers, d_model=width, n_heads=heads, d_ff=4 * width)
        model = GPTModel(GPTConfig(**sizes, max_position_embeddings=256, dropout=0.0, **settings)).eval()
        theirs: Any = to_transformers(model)
        greedy = {"do_sample": False, "max_new_tokens": length, "min_new_tokens": length, "pad_token_id": 0}
        for batch in (1, 16):
            prompts = torch.randint(8192, (batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
            greedy["attention_mask"] = torch.ones_like(prompts)
            generators: dict[str, Callable[[], Tensor]] = {
                "ours": partial(model.generate, prompts, length, temperature=0),
                "transformers": partial(theirs.generate, prompts, **greedy),
            }
            _, expected = [generate() for generate in generators.values()]  # warms both up
            cases: dict[str, Case] = {name: partial(case, call, expected) for name, call in generators.items()}
            yield f"{family}, {layers} x {width}, batch {batch}", cases, {"ours": ["transformers"]}
