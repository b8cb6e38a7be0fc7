"""What is measured of whole programs: the real train.py, nanoGPT's, and a loop written by hand."""

import json
import math
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks.measure import Case, Group, Program, launch, rows, run, train, words
from benchmarks.nanogpt import RECIPE_FOR_A_CPU, NanoGPT
from examples.overlap import WAYS

RANDOM = {"config": "configs/random_tokens.yaml", "model.dropout": 0.0, "data.num_samples": 10_000}
STORIES = {"config": "configs/stories.yaml"}
QUIET = {"tracking.wandb": "disabled"}
TINY = {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32}
QWEN3 = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "qk_norm": True, "bias": False, "dropout": 0.0}
GPT2 = {"model.bias": False, "model.tie_embeddings": True}


def model(**sizes: int) -> dict[str, int]:
    return {f"model.{name}": value for name, value in ({"d_ff": 4 * sizes["d_model"]} | sizes).items()}


def bare_loop(settings: dict, processes: int = 0, **env: str) -> dict:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes else []
    printed, _ = run([sys.executable, *launcher, "-m", "benchmarks.bare_loop", *words(settings)], **env)
    return json.loads(next(line for line in printed.splitlines() if line.startswith('{"tokens')))


def against(reference: str | list[str], case: Case) -> Case:
    """A case whose figures are also shown over those of another of its group."""
    return lambda: case() | {"against": reference}


def throughput(options: Namespace) -> Iterator[Group]:
    """Training speed on a CPU, against nanoGPT where --nanogpt says where it is.

    Two shapes of nanoGPT: its recipe for a CPU and its small model for a GPU. Each one's real train.py is launched, and
    the median of its steps taken. On a CPU nanoGPT computes in float32; here it is also put under autocast.
    """
    shapes = [(4, 4, 128, 64, 12, 200), (6, 6, 384, 256, 16, 12)]
    for layers, heads, width, context, batch, steps in [(1, 2, 32, 32, 4, 10)] if options.quick else shapes:
        settings = RANDOM | QUIET | GPT2 | model(n_layers=layers, n_heads=heads, d_model=width, vocab_size=65)
        settings |= {"seq_len": context, "model.max_position_embeddings": context, "micro_batch_size": batch}
        settings |= {"steps": steps, "tracking.log_every": max(2, steps // 20)}
        theirs = dict(n_layer=layers, n_head=heads, n_embd=width, block_size=context, batch_size=batch, max_iters=steps)
        ours, peer = {}, {}
        for precision, written in (("no", "float32"), ("bf16", "bfloat16")):
            references = [f"nanoGPT, {name}" for name in ("bfloat16", "float32") if name in (written, "float32")]
            for compiled in (False,) if options.quick else (False, True):
                label = f"{written}{', compiled' if compiled else ''}"
                mixed = {"ACCELERATE_MIXED_PRECISION": precision}
                case = partial(train, settings | {"compile": compiled}, **mixed)
                ours[f"ours, {label}"] = against(references, case)
                if options.nanogpt:
                    case = partial(NanoGPT(options.nanogpt).tokens_per_second, written, compile=compiled, **theirs)
                    peer[f"nanoGPT, {label}"] = case
        yield Group(f"{layers} x {width}, context {context}, batch {batch}", ours | peer)


def time_to_loss(options: Namespace) -> Iterator[Group]:
    """Seconds from launch to a validation loss of 1.88 nats a character; needs --text.

    Trains configs/shakespeare_cpu.yaml on the characters (bytes) of a text, the last tenth of it held out, each round
    with another seed, and stops the clock at the first evaluation, over all of that part, with at most that loss. With
    --nanogpt, its recipe for a CPU runs too, to its last evaluation. Preparing the text counts for neither.
    """
    target, seeds = math.inf if options.quick else 1.88, count()
    with tempfile.TemporaryDirectory() as folder:
        text, corpus = options.text, Path(folder, "corpus")
        if options.quick:
            (text := Path(folder, "text.txt")).write_text("To be, or not to be, that is the question.\n" * 200)
        prepare = {"source": text.resolve(), "out": corpus, "tokenizer": "byte", "validation": "tail:0.1"}
        run([sys.executable, "-m", "data.prepare", *words(prepare)])
        settings = {"config": "configs/shakespeare_cpu.yaml", "data.path": corpus, **QUIET}
        settings |= {"steps": 4, "schedule.warmup_steps": 0, "schedule.decay_steps": 2} if options.quick else {}

        def ours() -> dict:
            with tempfile.TemporaryDirectory() as out_dir:
                here = {"out_dir": out_dir, "name": "run", "seed": next(seeds)}
                with Program([*launch(0, "train.py"), *words(settings | here)]) as program:
                    lines = [(seconds, line.partition("val/loss = ")[2]) for seconds, line in program.lines()]
                last = rows(Path(out_dir))[-1]
            reached = [seconds for seconds, loss in lines if loss and float(loss.split()[0]) <= target]
            if not reached:
                raise RuntimeError(f"the loss is {last['val/loss']} at the end, not {target}")
            return {"seconds": reached[0], "val/loss": last["val/loss"], "tokens": last["train/tokens"]}

        def theirs() -> dict:
            seconds, line = [(seconds, line) for seconds, line in peer.train() if "val loss" in line][-1]
            tokens = math.prod(RECIPE_FOR_A_CPU[name] for name in ("max_iters", "batch_size", "block_size"))
            return {"seconds": seconds, "val/loss": float(line.split("val loss ")[1]), "tokens": tokens}

        peer = options.nanogpt and NanoGPT(options.nanogpt, text)
        cases = {"ours": against("nanoGPT", ours), **({"nanoGPT": theirs} if peer else {})}
        yield Group("to 1.88 nats a character", cases)


def overhead(options: Namespace) -> Iterator[Group]:
    """What train.py costs over a hand-written loop, with its data loading, logging, W&B (offline), clipping and checks.

    In 1 process, and in 2 with DDP; on stories, where steps are short and a grammar writes the data meanwhile, and on
    random tokens, with a model of 3 million parameters.
    """
    larger = model(n_layers=4, d_model=256, vocab_size=512) | {"seq_len": 128}
    recipes = {
        "stories, 0.46M parameters": STORIES | {"evaluation.every": 0, "steps": 400, "tracking.log_every": 20},
        "random tokens, 3.4M parameters": RANDOM | larger | {"steps": 120, "tracking.log_every": 6},
    }
    if options.quick:
        recipes = {"random tokens": RANDOM | model(**TINY, vocab_size=64) | {"steps": 6, "tracking.log_every": 2}}
    for name, settings in recipes.items():
        for processes in (0,) if options.quick else (0, 2):
            settings = settings | {"micro_batch_size": 16 // max(1, processes)}
            ours, bare = (partial(measure, settings, processes) for measure in (train, bare_loop))
            cases = {"train.py": against("bare loop", ours), "bare loop": bare}
            yield Group(f"{name}, {max(1, processes)} process(es)", cases)


def scaling(options: Namespace) -> Iterator[Group]:
    """What two processes are worth on two cores, and what DDP is worth, for three sizes of model.

    Processes: train.py with two processes of one thread against one process of two threads, on the same global batches.
    DDP: a loop by hand in two processes of one thread, against gradients that are averaged after backward, and how much
    of the communication is hidden behind computation. By hand each tensor is sent on its own; DDP with one bucket for
    all sends as late, but at once, so it tells what sending together gives from what sending early gives.
    """
    sizes = [(1, 16, 2, 10)] if options.quick else [(2, 128, 4, 100), (4, 256, 4, 25), (6, 384, 6, 10)]
    for layers, width, heads, steps in sizes:
        settings = RANDOM | QUIET | model(n_layers=layers, d_model=width, n_heads=heads, vocab_size=512)
        settings |= {"steps": steps, "tracking.log_every": steps // 5, "seq_len": 128}
        halves, one = settings | {"micro_batch_size": 4}, "train.py, 1 process x 2 threads"
        two = against(one, partial(train, halves, 2, OMP_NUM_THREADS="1"))
        cases = {
            one: partial(train, settings | {"micro_batch_size": 8}, OMP_NUM_THREADS="2"),
            "train.py, 2 processes x 1 thread": two,
        }
        for way in WAYS:
            case = partial(bare_loop, halves, 2, OMP_NUM_THREADS="1", WAY=way)
            cases[f"2 x 1, {way}"] = against(f"2 x 1, {list(WAYS)[-1]}", case)
        yield Group(f"{layers} x {width}", cases)


def memory(options: Namespace) -> Iterator[Group]:
    """Peak memory over that of the imports and time of a training step of 2,048 tokens with a vocabulary of 50,257.

    4 layers of 256, context 256, 8 rows, tied embeddings, float32, AdamW; the logits at once, the loss in chunks, that
    with activation checkpointing too, and, with --nanogpt, nanoGPT at the same shape, with its optimizer.
    """
    settings = RANDOM | GPT2 | model(n_layers=4, n_heads=4, d_model=256, vocab_size=512 if options.quick else 50_257)
    settings |= {"model.max_position_embeddings": 256, "seq_len": 256, "micro_batch_size": 1 if options.quick else 8}
    settings |= {"steps": 4, "tracking.log_every": 1, "optimizer.lr": 1e-3}

    def ours(chunked: bool, checkpointing: bool = False) -> Case:
        own = settings | {"chunked_loss": chunked, "activation_checkpointing": checkpointing}
        return against("nanoGPT", partial(bare_loop, own))

    chunks = {"loss in chunks": ours(True), "loss in chunks, activation checkpointing": ours(True, True)}
    peer = {"nanoGPT": partial(bare_loop, settings, PEER=str(options.nanogpt))} if options.nanogpt else {}
    yield Group("a step of 2,048 tokens", {"logits at once": ours(False), **chunks, **peer})


FIRST_STEP = "[step 1 /"
BARE_SCRIPT = f"""
import torch
from model.config import GPTConfig
from model.gpt import GPTModel
model = GPTModel(GPTConfig(vocab_size=512, **{TINY | QWEN3}))
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(512, (8, 96))
model(tokens, labels=tokens)[1].backward()
optimizer.step()
print("{FIRST_STEP}")
"""


def startup(options: Namespace) -> Iterator[Group]:
    """How long one waits for --help, for a refusal and for the first step, and what of it is torch's.

    From launch to the line of the first step, by `python` and by `accelerate launch` with two processes, with and
    without W&B, and compiled with an empty and with a filled cache. Beside them what torch alone and with Accelerate
    take to load, and a bare script that imports torch, builds the same small model and takes a step.
    """

    def to_its_end(*arguments: str, exit_code: int = 0) -> Case:
        return lambda: run([sys.executable, *arguments], exit_code)[1]

    def to_first_step(command: list[str], **env: str) -> Case:
        def case() -> dict:
            with tempfile.TemporaryDirectory() as folder:
                here = [] if BARE_SCRIPT in command else words({"out_dir": folder, "tracking.log_every": 1})
                with Program([*command, *here], **env) as program:
                    seconds, processor_seconds = program.wait_for(FIRST_STEP)  # and is stopped then
            return {"seconds": seconds, "processor_seconds": processor_seconds}

        return case

    small = STORIES | {"data.num_samples": 50} | model(**TINY)
    recipe, bare = small if options.quick else STORIES, "a bare script to its first step"
    # Compiling the smallest model takes half a minute; without a compiler train.py says so and goes on.
    env = {"CXX": "no-such-compiler"} if options.quick else {}
    one, two = (partial(lambda n, own: [*launch(n, "train.py"), *words(own)], n) for n in (0, 2))
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder, "cache")
        compiled = to_first_step(one(recipe | {"compile": True}), TORCHINDUCTOR_CACHE_DIR=str(cache), **env)
        cases = {
            "import torch": to_its_end("-c", "import torch"),
            "import torch, accelerate": to_its_end("-c", "import torch; import accelerate"),
            "import train": against("import torch, accelerate", to_its_end("-c", "import train")),
            "train.py --help": against("import torch", to_its_end("train.py", "--help")),
            "a refused setting": against("import torch", to_its_end("train.py", "--steps", "-1", exit_code=2)),
            bare: to_first_step([sys.executable, "-c", BARE_SCRIPT]),
            "first step, the same model, without W&B": against(bare, to_first_step(one(small | QUIET))),
            "first step": to_first_step(one(recipe)),
            "first step, without W&B": to_first_step(one(recipe | QUIET)),
            "first step, 2 processes": to_first_step(two(recipe)),
            "first step, 2 processes, without W&B": to_first_step(two(recipe | QUIET)),
            "first step, compiled, empty cache": lambda: shutil.rmtree(cache, ignore_errors=True) or compiled(),
            "first step, compiled, filled cache": compiled,
        }
        yield Group("from launch to", cases)
