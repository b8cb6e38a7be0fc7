"""What is measured of whole programs: the real train.py, nanoGPT's, and a loop written by hand."""

import json
import math
import re
import shutil
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache, partial
from itertools import count, pairwise
from pathlib import Path

import torch

from benchmarks.measure import CPU, LOGGED, ROOT, TURNS, Case, Group, Program, awake, launch, run, train, words
from benchmarks.nanogpt import ENDLESS, RECIPE_FOR_A_CPU, NanoGPT
from benchmarks.parts import reading_a_corpus
from distributed.cores import available_cores
from examples.overlap import WAYS
from model.config import GPTConfig
from run.metrics_log import read_rows

RANDOM = {"config": "configs/random_tokens.yaml", "model.dropout": 0.0, "data.num_samples": 10_000}
STORIES = {"config": "configs/stories.yaml"}
QUIET = {"tracking.wandb": "disabled"}
TINY = {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32}
QWEN3 = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "qk_norm": True, "bias": False, "dropout": 0.0}
GPT2 = {"bias": False, "tie_embeddings": True, "mlp": "gelu_erf"}  # as nanoGPT has it
BARE_LOOP = "-m", "benchmarks.bare_loop"
FIRST_STEP = "[step 1 /"


def model(**sizes: int) -> dict[str, int]:
    return {f"model.{name}": value for name, value in ({"d_ff": 4 * sizes["d_model"]} | sizes).items()}


def random_tokens(seq_len: int, batch: int, steps: int, every: int, **sizes: int) -> dict:
    """So many steps of so many rows, of which the first `every` are to warm up, for a model of these sizes."""
    logged = {"seq_len": seq_len, "micro_batch_size": batch, "steps": steps, "tracking.log_every": every}
    return RANDOM | QUIET | model(**{"vocab_size": 512} | sizes) | logged


def endless(settings: dict, folder: str, name: str = "run") -> dict:
    """A training that does not end, and does nothing else but log."""
    never = {"steps": 10**6, "checkpoint.every": 10**6, "evaluation.every": 0, "evaluation.num_scored_generations": 0}
    return settings | never | {"out_dir": folder, "name": name, "resume": "never"}


def bare_loop(settings: dict, processes: int = 0, **env: str) -> dict:
    printed = run(launch(settings, processes, BARE_LOOP), **env)
    return json.loads(next(line for line in printed if line.startswith('{"seconds')))


def throughput(options: Namespace) -> Iterator[Group]:
    """Training speed on a CPU, against nanoGPT where --nanogpt says where it is: its recipe for a CPU and its small
    model for a GPU. Each one's real train.py runs, by turns of a second or two, in which the others sleep."""
    shapes = [(4, 4, 128, 64, 12, 20), (6, 6, 384, 256, 16, 3)]
    # A processor that has no arithmetic in bfloat16 takes twenty times as long.
    precisions = ("float32", "bfloat16") if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ("float32",)
    variants = [(written, compiled) for written in precisions for compiled in (False, True)]
    for layers, heads, width, context, batch, every in [(1, 2, 32, 32, 4, 2)] if options.quick else shapes:
        sizes = dict(n_layers=layers, n_heads=heads, d_model=width, vocab_size=65, max_position_embeddings=context)
        settings = random_tokens(context, batch, 0, every, **sizes, **GPT2)
        theirs = dict(n_layer=layers, n_head=heads, n_embd=width, block_size=context, batch_size=batch)
        theirs |= ENDLESS | {"log_interval": every}
        tokens, ours, peers, against = every * batch * context, {}, {}, {}
        peer = options.nanogpt and NanoGPT(options.nanogpt)
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            for written, compiled in variants[::2] if options.quick else variants:
                label = f"{written}{', compiled' if compiled else ''}"
                command = launch(endless(settings | {"compile": compiled}, folder, label))
                precision = {"ACCELERATE_MIXED_PRECISION": {"float32": "no", "bfloat16": "bf16"}[written]}
                ours[f"ours, {label}"] = awake(stack, tokens, command, **precision)
                against[f"ours, {label}"] = [f"nanoGPT, {name}" for name in dict.fromkeys((written, "float32"))]
                if peer:
                    command = peer.command(written, compile=compiled, **theirs)
                    peers[f"nanoGPT, {label}"] = awake(stack, tokens, command, peer.cwd)
            name = f"{layers} x {width}, context {context}, batch {batch}"
            yield Group(name, ours | peers, against, TURNS * options.rounds)


def time_to_loss(options: Namespace) -> Iterator[Group]:
    """Seconds from launch to the first evaluation with a validation loss of 1.88 nats a character, or to the last, each
    round with another seed; needs --text, whose preparation is not counted."""
    target, seeds, recipe = math.inf if options.quick else 1.88, count(), dict(RECIPE_FOR_A_CPU)

    def to_the_loss(command: list[str], cwd: Path = ROOT) -> dict:
        with Program(command, cwd) as program:
            said = [(seconds, re.search(r"val.loss (?:= )?([\d.]+)", line)) for seconds, line in program.lines()]
        losses = [(seconds, float(found[1])) for seconds, found in said if found]
        seconds, loss = next((one for one in losses if one[1] <= target), losses[-1])
        return {"seconds": seconds, "val/loss": loss}

    with tempfile.TemporaryDirectory() as folder:
        corpus, text = Path(folder, "corpus"), Path(folder, "text.txt")
        text.symlink_to(options.text.resolve())  # which may have any name
        prepare = {"source": text, "out": corpus, "tokenizer": "byte", "validation": "tail:0.1"}
        run([sys.executable, "-m", "data.prepare", *words(prepare)])
        settings = {"config": "configs/shakespeare_cpu.yaml", "data.path": corpus, **QUIET}
        if options.quick:
            settings |= {"steps": 4, "schedule.warmup_steps": 0, "schedule.decay_steps": 2}
            recipe |= {"max_iters": 4, "eval_iters": 1}

        def ours() -> dict:
            here = {"out_dir": Path(folder, str(seed := next(seeds))), "name": "run", "seed": seed}
            figures, log = to_the_loss(launch(settings | here)), here["out_dir"] / "run" / "metrics.jsonl"
            return figures | {"tokens": list(read_rows(log))[-1]["train/tokens"]}

        cases = {"ours": ours}
        if options.nanogpt:
            peer = NanoGPT(options.nanogpt, options.text)
            tokens = {"tokens": math.prod(recipe[name] for name in ("max_iters", "batch_size", "block_size"))}
            cases["nanoGPT"] = lambda: to_the_loss(peer.command(**recipe), peer.cwd) | tokens
        yield Group("to 1.88 nats a character", cases, "nanoGPT")


def overhead(options: Namespace) -> Iterator[Group]:
    """What train.py costs over a hand-written loop, with its data loading, logging, W&B (offline), clipping and checks.

    In 1 process, and in 2 with DDP; on stories, where steps are short and a grammar writes the data meanwhile, and on
    random tokens. Both have the same settings, and as many threads: together one for each core. A line, which has a
    digest of the state, comes as often as the recipe says.
    """
    larger = model(n_layers=4, d_model=256, vocab_size=512) | {"seq_len": 128}
    recipes = {  # tokens of a row, steps between lines, turns in a round
        "stories, 0.46M parameters": (STORIES, 96, 20, 4 * TURNS),
        "random tokens, 3.4M parameters": (RANDOM | larger, 128, 10, TURNS),
    }
    if options.quick:
        recipes = {"random tokens": (RANDOM | model(**TINY, vocab_size=64), 32, 2, 2)}
    one = "train.py, 1 process"
    for name, (recipe, seq_len, every, turns) in recipes.items():
        cases, against, tokens = {}, {}, every * 16 * seq_len
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            for launched, processes in ((0, "1 process"),) if options.quick else ((0, "1 process"), (2, "2 processes")):
                share = max(1, launched)
                env = {"OMP_NUM_THREADS": str(max(1, available_cores() // share))}
                settings = recipe | {"micro_batch_size": 16 // share, "tracking.log_every": every}
                settings = endless(settings, folder, processes), launched
                for label, script in {"train.py": ("train.py",), "bare loop": BARE_LOOP}.items():
                    command = launch(*settings, script)
                    # Two lines: a program that wakes does at once what its clocks have missed, as W&B's do.
                    cases[f"{label}, {processes}"] = awake(stack, tokens, command, lines=2, **env)
                against[f"train.py, {processes}"] = [f"bare loop, {processes}", one]
            yield Group(name, cases, against, turns * options.rounds)


def scaling(options: Namespace) -> Iterator[Group]:
    """What two processes are worth on two cores: train.py with two processes of one thread, against one of two threads
    on the same global batches; and what DDP is worth: the loop by hand, with each way of examples/overlap.py."""
    one, two = "train.py, 1 process x 2 threads", "train.py, 2 processes x 1 thread"
    ways = {f"2 x 1, {way}": way for way in WAYS}
    against = {two: one, **dict.fromkeys(ways, list(ways)[-1])}
    sizes = [(1, 16, 2, 10)] if options.quick else [(2, 128, 4, 60), (4, 256, 4, 15), (6, 384, 6, 10)]
    for layers, width, heads, steps in sizes:
        settings = random_tokens(128, 4, steps, steps // 5, n_layers=layers, d_model=width, n_heads=heads)
        cases = {one: partial(train, settings | {"micro_batch_size": 8}, OMP_NUM_THREADS="2")}
        cases[two] = partial(train, settings, 2, OMP_NUM_THREADS="1")
        cases |= {name: partial(bare_loop, settings, 2, OMP_NUM_THREADS="1", WAY=way) for name, way in ways.items()}
        yield Group(f"{layers} x {width}", cases, against)


def memory(options: Namespace) -> Iterator[Group]:
    """Peak memory over that of the imports and time of a training step of 2,048 tokens with a vocabulary of 50,257, in
    float32 with AdamW; with --nanogpt, nanoGPT too at the same shape, with its optimizer."""
    vocab_size, batch = (512, 1) if options.quick else (50_257, 8)
    sizes = dict(n_layers=4, n_heads=4, d_model=256, vocab_size=vocab_size, max_position_embeddings=256)
    settings = random_tokens(256, batch, 4, 1, **sizes, **GPT2) | {"optimizer.lr": 1e-3}
    ways = {
        "logits at once": {"chunked_loss": False},
        "loss in chunks": {"chunked_loss": True},
        "loss in chunks, activation checkpointing": {"chunked_loss": True, "activation_checkpointing": True},
    }
    cases = {name: partial(bare_loop, settings | way) for name, way in ways.items()}
    if options.nanogpt:
        cases["nanoGPT"] = partial(bare_loop, settings, PEER=str(options.nanogpt.resolve()))
    yield Group("a step of 2,048 tokens", cases, "nanoGPT")


def sharding(options: Namespace) -> Iterator[Group]:
    """Memory of a process, over that of one that trains next to nothing, against the number of processes, and FSDP2's
    step against DDP's, for 26 million weights on CPUs joined by gloo. Predicted: the weights, gradients and two moments
    of float32 alone, 16 bytes a weight, shared by all processes or not."""
    launch_files, counts = {"DDP": CPU, "FSDP2": "accelerate_configs/fsdp2.yaml"}, (2,) if options.quick else (1, 2, 4)
    nothing = TINY | {"vocab_size": 64}
    sizes = nothing if options.quick else {"n_layers": 8, "n_heads": 8, "d_model": 512, "d_ff": 2048, "vocab_size": 512}
    weights_mib = 16 * GPTConfig(**sizes, max_position_embeddings=128).num_weights / 2**20

    def trainable_parameters(of: dict, steps: int, kind: str, processes: int) -> dict[str, float]:
        settings = random_tokens(64, 1, steps, steps // 3, **of) | {"checkpoint.asynchronous": False}
        return train(settings, processes, config_file=launch_files[kind], OMP_NUM_THREADS="1")

    of_nothing = cache(lambda kind: trainable_parameters(nothing, 3, kind, counts[0])["peak_mib"])

    def case(kind: str, processes: int) -> dict:
        took = trainable_parameters(sizes, 3 if options.quick else 9, kind, processes)
        predicted = str(round(weights_mib / (processes if kind == "FSDP2" else 1)))
        return took | {"peak_mib": took["peak_mib"] - of_nothing(kind), "predicted_mib": predicted}

    cases = {f"{kind}, {number}": partial(case, kind, number) for number in counts for kind in launch_files}
    yield Group("processes", cases, {f"FSDP2, {number}": f"DDP, {number}" for number in counts})


def checkpoint_stall(options: Namespace) -> Iterator[Group]:
    """What the second save of 100 million weights, on TMPDIR's disk, costs a training: how long the step after waits,
    and what all until the next take longer than the first ones. The first save also imports and allocates."""
    sizes = TINY if options.quick else dict(n_layers=12, n_heads=12, d_model=768, vocab_size=10_000)
    settings = random_tokens(64, 1, 3 * (every := 20), 1, **sizes) | {"checkpoint.every": every}

    def case(asynchronous: bool) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            command = launch(settings | {"out_dir": folder, "name": "run", "checkpoint.asynchronous": asynchronous})
            with Program(command) as program:
                said = [seconds for seconds, line in program.lines() if line.startswith(LOGGED)]
        took = [end - start for start, end in pairwise(said)]
        undisturbed = statistics.median(took[1 : every - 1])
        lost = [seconds - undisturbed for seconds in took[2 * every - 1 : -1]]
        return {"step_seconds": undisturbed, "waits_seconds": lost[0], "lost_seconds": sum(lost)}

    cases = {"synchronous": partial(case, False), "asynchronous": partial(case, True)}
    yield Group("100 million parameters", cases, "synchronous")


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
    """How long one waits for --help, for a refusal and for the first step, and what of it is torch's: to load it, and a
    bare script that imports torch, builds the same small model and takes a step."""

    def to_first_step(command: list[str], **env: str) -> dict:
        with Program(command, **env) as program:
            return program.turn(FIRST_STEP)

    small = STORIES | {"data.num_samples": 50} | model(**TINY)
    recipe = small if options.quick else STORIES
    with tempfile.TemporaryDirectory() as folder:

        def first_step(settings: dict, processes: int = 0, **env: str) -> Case:
            here = {"out_dir": folder, "resume": "never", "tracking.log_every": 1}
            return partial(to_first_step, launch(settings | here, processes), **env)

        cache = Path(folder, "cache")
        # Compiling the smallest model takes half a minute; without a compiler train.py says so and goes on.
        env = {"TORCHINDUCTOR_CACHE_DIR": str(cache)} | ({"CXX": "no-such-compiler"} if options.quick else {})
        compiled = first_step(recipe | {"compile": True}, **env)
        imports = "import torch", "import torch, accelerate", "import train"
        cases = {
            **{what: partial(run, [sys.executable, "-c", what]) for what in imports},
            "train.py --help": partial(run, [sys.executable, "train.py", "--help"]),
            "a refused setting": partial(run, [sys.executable, "train.py", "--steps", "-1"], exit_code=2),
            "a bare script to its first step": partial(to_first_step, [sys.executable, "-c", BARE_SCRIPT]),
            "first step, the same model, without W&B": first_step(small | QUIET),
            "first step": first_step(recipe),
            "first step, without W&B": first_step(recipe | QUIET),
            "first step, 2 processes": first_step(recipe, 2),
            "first step, 2 processes, without W&B": first_step(recipe | QUIET, 2),
            "first step, compiled, empty cache": lambda: shutil.rmtree(cache, ignore_errors=True) or compiled(),
            "first step, compiled, filled cache": compiled,
        }
        against = dict.fromkeys(["train.py --help", "a refused setting"], "import torch")
        against |= {"import train": "import torch, accelerate"}
        against |= {"first step, the same model, without W&B": "a bare script to its first step"}
        yield Group("from launch to", cases, against)


def growth(options: Namespace) -> Iterator[Group]:
    """What a token of training costs as things grow; benchmarks/page.py draws it beside what theory says it costs. The
    corpus is of zeros, and only read; processes have one thread each, all else one for each core."""
    few, every = (slice(2), 1) if options.quick else (slice(None), 4)

    def shape(tokens: int, width: int = 256, context: int = 256, **sizes: int) -> dict:
        sizes = {"n_layers": 2, "n_heads": width // 64, "d_model": width, "d_ff": 8 * -(-width // 3)} | QWEN3 | sizes
        batch = max(1, tokens // context // (8 if options.quick else 1))
        return random_tokens(context, batch, 6, 1, max_position_embeddings=4096, **sizes)

    axes = {  # points, settings at a point, the first of which are the tokens of a step
        "context": ([2**n for n in range(7, 13)], lambda n: shape(4096, context=n)),
        "width": ([2**n for n in range(6, 11)], lambda n: shape(2048, n)),
        "depth": ([1, 2, 4, 8, 16], lambda n: shape(2048, n_layers=n)),
        "vocabulary": ([2**n for n in (8, 10, 12, 14, 15, 16, 17)], lambda n: shape(1024, 128, vocab_size=n)),
    }
    for name, (points, at) in axes.items():
        yield Group(name, {str(point): partial(bare_loop, at(point)) for point in points[few]})
    yield from reading_a_corpus(options)
    settings = random_tokens(128, 2, 0, every, n_layers=2, d_model=256, d_ff=688) | {"global_batch_size": 16}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cases = {}
        for processes in (1, 2, 4, 8)[few]:
            command = launch(endless(settings, folder, str(processes)), processes)
            cases[str(processes)] = awake(stack, every * 16 * 128, command, OMP_NUM_THREADS="1")
        yield Group("processes", cases, rounds=TURNS * options.rounds)
