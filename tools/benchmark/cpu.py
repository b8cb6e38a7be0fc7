"""Benchmark cases on a CPU: the real train.py compared with nanoGPT's and with a hand-written loop."""

import json
import math
import re
import shutil
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count, pairwise
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
from tools.benchmark.nanogpt import RECIPE_FOR_A_CPU, NanoGPT
from tools.benchmark.runner import (
    LOGGED,
    ROOT,
    Case,
    Group,
    measure_speed,
    run_command,
    speed_settings,
    to_arguments,
    train_command,
)

RANDOM = {"config": "configs/random_tokens.yaml", "model.dropout": 0.0, "data.num_samples": 10_000}
STORIES = {"config": "configs/stories.yaml"}
WITHOUT_WANDB = {"tracking.wandb": "disabled"}
TINY = {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32}
GPT2 = {"bias": False, "tie_embeddings": True, "mlp": "gelu_erf"}  # as in nanoGPT
BARE_LOOP = "-m", "tools.benchmark.bare_loop"
FIRST_STEP = "[step 1 /"
PROMPT_TOKENS = 32


def model_settings(**sizes: int | str | bool) -> dict[str, object]:
    """Return sizes as settings of train.py; d_ff is 4 d_model unless given."""
    return {f"model.{name}": value for name, value in ({"d_ff": 4 * int(sizes["d_model"])} | sizes).items()}


def random_tokens(seq_len: int, batch: int, steps: int, log_every: int, **sizes: int | str | bool) -> dict:
    """Return settings that train a model of these sizes on random tokens."""
    run = {"seq_len": seq_len, "micro_batch_size": batch, "steps": steps, "tracking.log_every": log_every}
    return RANDOM | WITHOUT_WANDB | model_settings(**{"vocab_size": 512} | sizes) | run


def run_bare_loop(settings: dict, env: Mapping[str, str] = {}) -> dict:
    """Run tools/benchmark/bare_loop.py and return the figures that it prints."""
    return json.loads(run_command(train_command(settings, script=BARE_LOOP), env=env)[-1][1])


def throughput(options: Namespace) -> Iterator[Group]:
    """Training speed of two small GPT-2 shapes, against nanoGPT if --nanogpt names a checkout."""
    shapes = [(4, 4, 128, 64, 12, 20), (6, 6, 384, 256, 16, 3)]
    # A processor without bfloat16 arithmetic takes twenty times as long.
    precisions = ("float32", "bfloat16") if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ("float32",)
    variants = [(precision, compiled) for precision in precisions for compiled in (False, True)]
    peer = options.nanogpt and NanoGPT(options.nanogpt)
    for layers, heads, width, context, batch, every in [(1, 2, 32, 32, 4, 2)] if options.quick else shapes:
        sizes = dict(n_layers=layers, n_heads=heads, d_model=width, vocab_size=65, max_position_embeddings=context)
        settings = random_tokens(context, batch, 0, every, **sizes, **GPT2)
        peer_settings = dict(n_layer=layers, n_head=heads, n_embd=width, block_size=context, batch_size=batch)
        tokens, ours, theirs, baselines = every * batch * context, {}, {}, {}
        with tempfile.TemporaryDirectory() as folder:
            settings |= speed_settings(every, folder)
            peer_settings |= dict(max_iters=settings["steps"], log_interval=every, eval_interval=10**6, eval_iters=1)
            for precision, compiled in variants[::2] if options.quick else variants:
                label = f"{precision}{', compiled' if compiled else ''}"
                command = train_command(settings | {"compile": compiled})
                env = {"ACCELERATE_MIXED_PRECISION": {"float32": "no", "bfloat16": "bf16"}[precision]}
                ours[f"ours, {label}"] = partial(measure_speed, command, tokens, env=env)
                baselines[f"ours, {label}"] = [f"nanoGPT, {name}" for name in dict.fromkeys((precision, "float32"))]
                if peer:
                    command = peer.command(precision, compile=compiled, **peer_settings)
                    theirs[f"nanoGPT, {label}"] = partial(measure_speed, command, tokens, peer.cwd)
            yield Group(f"{layers} x {width}, context {context}, batch {batch}", ours | theirs, baselines)


def time_to_loss(options: Namespace) -> Iterator[Group]:
    """Seconds from launch to a validation loss of 1.88 nats/character on --text, another seed in each round.

    Preparing the corpus is not counted. A program that never gets there is measured at its last evaluation.
    """
    target, seeds, recipe = math.inf if options.quick else 1.88, count(), dict(RECIPE_FOR_A_CPU)

    def run_to_target(command: list[str], cwd: Path = ROOT) -> dict:
        found = [(s, re.search(r"val.loss (?:= )?([\d.]+)", line)) for s, line in run_command(command, cwd)]
        losses = [(seconds, float(match[1])) for seconds, match in found if match]
        seconds, loss = next((pair for pair in losses if pair[1] <= target), losses[-1])
        return {"seconds": seconds, "val/loss": loss}

    with tempfile.TemporaryDirectory() as folder:
        corpus, text = Path(folder, "corpus"), Path(folder, "text.txt")
        text.symlink_to(options.text.resolve())  # data.prepare detects a format by its suffix
        prepare = {"source": text, "out": corpus, "tokenizer": "byte", "validation": "tail:0.1"}
        run_command([sys.executable, "-m", "data.prepare", *to_arguments(prepare)])
        settings = {"config": "configs/shakespeare_cpu.yaml", "data.path": corpus, **WITHOUT_WANDB}
        if options.quick:
            settings |= {"steps": 4, "schedule.warmup_steps": 0, "schedule.decay_steps": 2}
            recipe |= {"max_iters": 4, "eval_iters": 1}

        def ours() -> dict:
            out_dir = Path(folder, str(seed := next(seeds)))
            figures = run_to_target(train_command(settings | {"out_dir": out_dir, "name": "run", "seed": seed}))
            return figures | {"tokens": list(read_rows(out_dir / "run" / "metrics.jsonl"))[-1]["train/tokens"]}

        cases: dict[str, Case] = {"ours": ours}
        if options.nanogpt:
            peer = NanoGPT(options.nanogpt, options.text)
            tokens = {"tokens": math.prod(recipe[name] for name in ("max_iters", "batch_size", "block_size"))}
            cases["nanoGPT"] = lambda: run_to_target(peer.command(**recipe), peer.cwd) | tokens
        yield Group("to 1.88 nats/character", cases, "nanoGPT")


def overhead(options: Namespace) -> Iterator[Group]:
    """Training speed of train.py against a hand-written loop, in one process and in two, with one thread for each core.

    Steps on stories are short, and their data are generated meanwhile; steps on random tokens are longer.
    """
    larger = model_settings(n_layers=4, d_model=256, vocab_size=512) | {"seq_len": 128}
    recipes = {  # settings, tokens of a row, steps between log lines
        "stories, 0.46M parameters": (STORIES, 96, 20),
        "random tokens, 3.4M parameters": (RANDOM | larger, 128, 10),
    }
    if options.quick:
        recipes = {"random tokens": (RANDOM | model_settings(**TINY, vocab_size=64), 32, 2)}
    for name, (recipe, seq_len, every) in recipes.items():
        cases, baselines = {}, {}
        with tempfile.TemporaryDirectory() as folder:
            for label, launched in {"1 process": 0, "2 processes": 2}.items():
                processes = max(1, launched)
                env = {"OMP_NUM_THREADS": str(max(1, available_cores() // processes))}
                settings = recipe | speed_settings(every, folder) | {"micro_batch_size": 16 // processes}
                for program, script in {"train.py": ("train.py",), "bare loop": BARE_LOOP}.items():
                    command = train_command(settings, launched, script)
                    cases[f"{program}, {label}"] = partial(measure_speed, command, every * 16 * seq_len, env=env)
                baselines[f"train.py, {label}"] = [f"bare loop, {label}", "train.py, 1 process"]
            yield Group(name, cases, baselines)


def memory(options: Namespace) -> Iterator[Group]:
    """Peak memory (beyond the imports') and time of a step of 2,048 tokens with a vocabulary of 50,257."""
    vocab_size, batch = (512, 1) if options.quick else (50_257, 8)
    sizes = dict(n_layers=4, n_heads=4, d_model=256, vocab_size=vocab_size, max_position_embeddings=256)
    settings = random_tokens(256, batch, 4, 1, **sizes, **GPT2) | {"optimizer.lr": 1e-3}
    variants = {
        "logits at once": {"chunked_loss": False},
        "loss in chunks": {"chunked_loss": True},
        "loss in chunks, activation checkpointing": {"chunked_loss": True, "activation_checkpointing": True},
    }
    cases: dict[str, Case] = {name: partial(run_bare_loop, settings | own) for name, own in variants.items()}
    if options.nanogpt:
        cases["nanoGPT"] = partial(run_bare_loop, settings, env={"PEER": str(options.nanogpt.resolve())})
    yield Group("a step of 2,048 tokens", cases, "nanoGPT")


def exactness(options: Namespace) -> Iterator[Group]:
    """Time and memory of `--exact true`: 11 million parameters, 8 micro-batches in each process, one thread each."""
    sizes = TINY if options.quick else {"n_layers": 6, "n_heads": 6, "d_model": 384}

    def case(settings: dict, processes: int) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            command = train_command(settings | {"out_dir": folder, "name": "run"}, processes)
            run_command(command, env={"OMP_NUM_THREADS": "1"})
            logged = [row for row in read_rows(Path(folder, "run", "metrics.jsonl")) if "train/tokens" in row]
        step_tokens = logged[-1]["train/tokens"] / logged[-1]["step"]
        speed = statistics.median(row["perf/tokens_per_second"] for row in logged[1:])
        return {"seconds_a_step": step_tokens / speed, "peak_mib": logged[-1]["perf/peak_memory_bytes"] / 2**20}

    for processes in (1, 2):
        settings = random_tokens(64, 1, 20, 5, **sizes) | {"global_batch_size": 8 * processes}
        modes = {"default": False, "exact": True}
        cases: dict[str, Case] = {
            name: partial(case, settings | {"exact": exact}, processes) for name, exact in modes.items()
        }
        yield Group(f"cost, {processes} process(es)", cases, "default")


def checkpoint_stall(options: Namespace) -> Iterator[Group]:
    """Time that training waits for the second save of 100 million weights on the disk of TMPDIR.

    The first save also imports and allocates. `waits_seconds` is the delay of the step after the save, compared with
    the median step before any save; `lost_seconds` is the sum of the delays of all steps until the next save.
    """
    sizes = TINY if options.quick else dict(n_layers=12, n_heads=12, d_model=768, vocab_size=10_000)
    every = 20
    settings = random_tokens(64, 1, 3 * every, 1, **sizes) | {"checkpoint.every": every}

    def case(asynchronous: bool) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            command = train_command(settings | {"out_dir": folder, "checkpoint.asynchronous": asynchronous})
            logged = [seconds for seconds, line in run_command(command) if line.startswith(LOGGED)]
        steps = [end - start for start, end in pairwise(logged)]
        undisturbed = statistics.median(steps[1 : every - 1])
        lost = [seconds - undisturbed for seconds in steps[2 * every - 1 : -1]]
        return {"step_seconds": undisturbed, "waits_seconds": lost[0], "lost_seconds": sum(lost)}

    cases: dict[str, Case] = {"synchronous": partial(case, False), "asynchronous": partial(case, True)}
    yield Group("100 million parameters", cases, "synchronous")


BARE_SCRIPT = f"""
import torch
from model.config import GPTConfig
from model.gpt import GPTModel
model = GPTModel(GPTConfig(vocab_size=512, dropout=0.0, **{TINY | FAMILIES["qwen3"]}))
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(512, (8, 96))
model(tokens, labels=tokens)[1].backward()
optimizer.step()
print("{FIRST_STEP}")
"""


def startup(options: Namespace) -> Iterator[Group]:
    """Seconds to --help, to a refused setting and to the first step, against importing torch and a bare script."""

    def seconds_to_first_step(command: list[str], env: Mapping[str, str] = {}) -> dict[str, float]:
        return {"seconds": run_command(command, env=env, until=FIRST_STEP)[-1][0]}

    small = STORIES | {"data.num_samples": 50} | model_settings(**TINY)
    recipe = small if options.quick else STORIES
    with tempfile.TemporaryDirectory() as folder:

        def first_step(settings: dict, processes: int = 0, env: Mapping[str, str] = {}) -> Case:
            own = {"out_dir": folder, "resume": "never", "tracking.log_every": 1}
            return partial(seconds_to_first_step, train_command(settings | own, processes), env)

        cache = Path(folder, "cache")
        # Compiling the smallest model takes half a minute; without a compiler train.py trains uncompiled.
        env = {"TORCHINDUCTOR_CACHE_DIR": str(cache)} | ({"CXX": "no-such-compiler"} if options.quick else {})
        compiled = first_step(recipe | {"compile": True}, env=env)

        def compile_without_cache() -> object:
            shutil.rmtree(cache, ignore_errors=True)
            return compiled()

        imports = "import torch", "import torch, accelerate", "import train"
        cases: dict[str, Case] = {
            **{code: partial(run_command, [sys.executable, "-c", code]) for code in imports},
            "train.py --help": partial(run_command, [sys.executable, "train.py", "--help"]),
            "a refused setting": partial(run_command, [sys.executable, "train.py", "--steps", "-1"], exit_code=2),
            "a bare script to its first step": partial(seconds_to_first_step, [sys.executable, "-c", BARE_SCRIPT]),
            "first step, the same model, without W&B": first_step(small | WITHOUT_WANDB),
            "first step": first_step(recipe),
            "first step, without W&B": first_step(recipe | WITHOUT_WANDB),
            "first step, 2 processes": first_step(recipe, 2),
            "first step, 2 processes, without W&B": first_step(recipe | WITHOUT_WANDB, 2),
            "first step, compiled, empty cache": compile_without_cache,
            "first step, compiled, filled cache": compiled,
        }
        baselines = dict.fromkeys(["train.py --help", "a refused setting"], ["import torch"])
        baselines |= {"import train": ["import torch, accelerate"]}
        baselines |= {"first step, the same model, without W&B": ["a bare script to its first step"]}
        yield Group("from launch to", cases, baselines)


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
    for family, settings in FAMILIES.items():
        for layers, width, heads, length in shapes:
            torch.manual_seed(0)
            sizes = dict(vocab_size=8192, n_layers=layers, d_model=width, n_heads=heads, d_ff=4 * width)
            ours = GPTModel(GPTConfig(**sizes, max_position_embeddings=256, dropout=0.0, **settings)).eval()
            theirs: Any = to_transformers(ours)
            greedy = {"do_sample": False, "max_new_tokens": length, "min_new_tokens": length, "pad_token_id": 0}
            for batch in (1, 16):
                prompts = torch.randint(8192, (batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
                greedy["attention_mask"] = torch.ones_like(prompts)
                generators: dict[str, Callable[[], Tensor]] = {
                    "ours": partial(ours.generate, prompts, length, temperature=0),
                    "transformers": partial(theirs.generate, prompts, **greedy),
                }
                _, expected = [generate() for generate in generators.values()]  # warms both up
                cases: dict[str, Case] = {name: partial(case, call, expected) for name, call in generators.items()}
                yield Group(f"{family}, {layers} x {width}, batch {batch}", cases, "transformers")
