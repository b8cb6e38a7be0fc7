"""Benchmark cases on a CPU: train.py compared with nanoGPT's, nanochat's and a hand-written loop.

A function without an underscore is a case of python -m tools.benchmark, and yields its groups.
"""

import math
import shutil
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, pairwise, product
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from model.config import FAMILIES, GPTConfig
from model.gpt import GPTModel
from model.hf import to_transformers
from runtime.machine.cores import available_cores
from runtime.machine.cpu import prepare_cpu
from tools.benchmark import programs
from tools.benchmark.programs import BF16, PEER, RANDOM, WITHOUT_WANDB, Case, Group, Shape, nanogpt, ours

BARE_LOOP = "-m", "tools.benchmark.bare_loop"
PROMPT_TOKENS = 32
# From nanoGPT's README.
RECIPE_FOR_A_CPU = f"""--compile=False --dtype=float32 --eval_iters=20 --batch_size=12 {Shape(4, 4, 128, 64).recipe()}
    --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"""

OUR_RECIPE = f"""--config configs/text.yaml --model.n_layers 4 --steps 150 --evaluation.every 150
    --evaluation.num_samples 512 --checkpoint.every 150 {WITHOUT_WANDB}"""
NANOCHATS_RECIPE = """--device-type=cpu --depth=4 --aspect-ratio=32 --head-dim=64 --max-seq-len=256 --window-pattern=L
    --device-batch-size=16 --total-batch-size=4096 --num-iterations=150 --eval-every=150 --eval-tokens=131072
    --core-metric-every=-1 --sample-every=-1"""


def throughput(options: Namespace) -> Iterator[Group]:
    """Training speed of two small GPT-2 shapes, against nanoGPT if --nanogpt names a checkout."""
    # A processor without bfloat16 arithmetic takes twenty times as long.
    precisions = ("float32", "bfloat16") if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ("float32",)
    for shape, batch, log_every in (Shape(4, 4, 128, 64), 12, 20), (Shape(6, 6, 384, 256), 16, 3):
        our_cases, peer_cases, baselines = {}, {}, {}
        for precision, compiled in product(precisions, (False, True)):
            label, env = f"{precision}{', compiled' if compiled else ''}", BF16 if precision == "bfloat16" else {}
            settings = f"--model.vocab_size 65 --compile {compiled}"
            recipe = f"--dtype={precision} --compile={compiled}"
            our_cases[f"ours, {label}"] = programs.our_speed(options, shape, batch, log_every, settings, env)
            baselines[f"ours, {label}"] = list(dict.fromkeys((f"{PEER}, {label}", f"{PEER}, float32")))
            if options.nanogpt:
                peer_cases[f"{PEER}, {label}"] = programs.nanogpts_speed(options, shape, batch, log_every, 65, recipe)
        name = f"{shape.layers} x {shape.width}, context {shape.context}, batch {batch}"
        yield name, our_cases | peer_cases, baselines


def time_to_loss(options: Namespace) -> Iterator[Group]:
    """Seconds from launch to a validation loss of 1.88 nats/character on --text, another seed in each round.

    Preparing the corpus is not counted.
    """
    target = math.inf if options.quick else 1.88
    settings = f"--config configs/shakespeare_cpu.yaml {WITHOUT_WANDB}"
    cases: dict[str, Case] = {"ours": programs.train_to_loss(options, settings, target)}
    if options.nanogpt:
        cases[PEER] = lambda: nanogpt(options, RECIPE_FOR_A_CPU, on_text=True).train(target)
    yield "to 1.88 nats/character", cases, {"ours": [PEER]}


def bits_per_byte(options: Namespace) -> Iterator[Group]:
    """Measure the loss after 614,400 tokens of --text, and the seconds, against nanochat with --nanochat CHECKOUT.

    4 layers of width 128, context 256, 150 steps of 16 sequences, each program with its own recipe: configs/text.yaml,
    and the defaults of nanochat's base_train.py. --text is a corpus of data.prepare with many documents. Each round has
    another seed of ours; nanochat's seed is fixed.
    """
    seeds = count()

    def case() -> dict[str, float]:
        with TemporaryDirectory() as folder:
            paths = f"--data.path={programs.text_corpus(options)}", f"--out_dir={folder}"
            return programs.last_bits_per_byte(ours(options, OUR_RECIPE, *paths, f"--seed={next(seeds)}").run())

    cases: dict[str, Case] = {"ours": case}
    if options.nanochat:
        cases["nanochat"] = lambda: programs.last_bits_per_byte(programs.nanochat(options, NANOCHATS_RECIPE).run())
    yield "614,400 tokens", cases, {"ours": ["nanochat"]}


def overhead(options: Namespace) -> Iterator[Group]:
    """Training speed of train.py against a hand-written loop, in one process and in two, with one thread for each core.

    Steps on stories are short, and their data are generated meanwhile; steps on random tokens are longer.
    """
    larger = f"{RANDOM} {Shape(4, 4, 256, 128).settings()} --model.vocab_size 512"
    recipes = {
        "stories, 0.46M parameters": ("--config configs/stories.yaml", 20),
        "random tokens, 3.3M parameters": (larger, 10),
    }
    for name, (recipe, log_every) in recipes.items():
        cases, baselines = {}, {}
        for processes, label in {1: "1 process", 2: "2 processes"}.items():
            threads = {"OMP_NUM_THREADS": str(max(1, available_cores() // processes))}
            settings = f"{recipe} {programs.speed_settings(log_every)} --micro_batch_size {16 // processes}"
            start = partial(ours, options, settings, processes=processes if processes > 1 else 0, env=threads)
            cases[f"train.py, {label}"] = start().train
            cases[f"bare loop, {label}"] = start(script=BARE_LOOP).train
            baselines[f"train.py, {label}"] = [f"bare loop, {label}", "train.py, 1 process"]
        yield name, cases, baselines


def memory(options: Namespace) -> Iterator[Group]:
    """Peak memory of the process, and time of a step of 2,048 tokens with a vocabulary of 50,257."""
    shape, vocab_size = Shape(4, 4, 256, 256), 50257
    variants = {
        "logits at once": "--chunked_loss false",
        "loss in chunks": "--chunked_loss true",
        "loss in chunks, activation checkpointing": "--chunked_loss true --activation_checkpointing true",
    }
    cases = {
        name: programs.our_speed(options, shape, 8, 1, f"--model.vocab_size {vocab_size} {variant}")
        for name, variant in variants.items()
    }
    if options.nanogpt:
        cases[PEER] = programs.nanogpts_speed(options, shape, 8, 1, vocab_size, "--dtype=float32 --compile=False")
    yield "a step of 2,048 tokens", cases, dict.fromkeys(variants, [PEER])


def exactness(options: Namespace) -> Iterator[Group]:
    """Time and memory of `--exact true`: 11 million parameters, 8 micro-batches in each process, one thread each."""
    settings = f"{RANDOM} {Shape(6, 6, 384, 64).settings()} {programs.speed_settings(2)}"
    settings += " --micro_batch_size 1 --model.vocab_size 512"
    for processes in (1, 2):
        cases: dict[str, Case] = {}
        for name, exact in {"default": False, "exact": True}.items():
            words = f"{settings} --exact {exact} --global_batch_size {8 * processes}"
            cases[name] = ours(options, words, processes=processes, env={"OMP_NUM_THREADS": "1"}).train
        yield f"cost, {processes} process(es)", cases, {"exact": ["default"]}


def checkpoint_stall(options: Namespace) -> Iterator[Group]:
    """Time that training waits for the second save of 100 million weights on the disk of TMPDIR.

    It is the delay of the step after the save, compared with the median step before any save. The first save also
    imports and allocates.
    """
    every = 20
    settings = f"{RANDOM} {Shape(12, 12, 768, 64).settings()} --model.tie_embeddings false"
    settings += f" --micro_batch_size 1 --steps {3 * every} --tracking.log_every 1 --checkpoint.every {every}"

    def case(asynchronous: bool) -> dict[str, float]:
        program = ours(options, f"{settings} --checkpoint.asynchronous {asynchronous}")
        with TemporaryDirectory() as folder:
            logged, *_ = programs.read_log(program.run(f"--out_dir={folder}"))
        steps = [end - start for start, end in pairwise(logged.values())]  # steps[0] is that of step 2
        return {"waits_seconds": steps[2 * every - 1] - statistics.median(steps[1 : every - 1])}

    cases: dict[str, Case] = {"synchronous": partial(case, False), "asynchronous": partial(case, True)}
    yield "100 million parameters", cases, {"asynchronous": ["synchronous"]}


def startup(options: Namespace) -> Iterator[Group]:
    """Seconds from the launch to --help and to the end of the first step, beside importing torch."""
    settings = f"--config configs/stories.yaml {programs.speed_settings(1)} --steps 1 --schedule.warmup_steps 0"

    def first_step(processes: int = 0, compiled: bool = False, empty: bool = False) -> dict[str, float]:
        cache = options.scratch / "cache"
        if empty:
            shutil.rmtree(cache, ignore_errors=True)
        env = {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
        run = ours(options, f"{settings} --compile {compiled}", processes=processes, env=env)
        return {"seconds": run.train()["start_seconds"]}

    cases: dict[str, Case] = {
        "import torch": programs.Program([sys.executable, "-c", "import torch"]).run,
        "train.py --help": programs.Program([sys.executable, "train.py", "--help"]).run,
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
