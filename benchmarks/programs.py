"""What is measured of whole programs: the real train.py, nanoGPT's, and a loop written by hand."""

import json
import math
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks.measure import Case, Group, Program, awake, launch, rows, run, train, words
from benchmarks.nanogpt import ENDLESS, RECIPE_FOR_A_CPU, NanoGPT
from examples.overlap import WAYS
from model.config import GPTConfig
from training.compute import available_cores

RANDOM = {"config": "configs/random_tokens.yaml", "model.dropout": 0.0, "data.num_samples": 10_000}
STORIES = {"config": "configs/stories.yaml", "evaluation.every": 0}
QUIET = {"tracking.wandb": "disabled"}
TINY = {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32}
QWEN3 = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "qk_norm": True, "bias": False, "dropout": 0.0}
TURNS = 5  # a round of programs that take turns has so many
GPT2 = {"model.bias": False, "model.tie_embeddings": True}


def model(**sizes: int) -> dict[str, int]:
    return {f"model.{name}": value for name, value in ({"d_ff": 4 * sizes["d_model"]} | sizes).items()}


def logged(steps: int, every: int) -> dict[str, int]:
    """So many steps, of which the first `every` are to warm up."""
    return {"steps": steps, "tracking.log_every": every}


def bare_loop_command(settings: dict, processes: int) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes else []
    return [sys.executable, *launcher, "-m", "benchmarks.bare_loop", *words(settings)]


def bare_loop(settings: dict, processes: int = 0, **env: str) -> dict:
    printed = run(bare_loop_command(settings, processes), **env)
    return json.loads(next(line for line in printed if line.startswith('{"seconds')))


def training(settings: dict, folder: str, processes: int = 0, **env: str) -> Callable[[], Program]:
    """What starts a train.py that does not end, and logs every so many steps as `settings` say."""
    endless = logged(10**6, settings["tracking.log_every"]) | {"checkpoint.every": 10**6, "evaluation.every": 0}
    endless |= {"evaluation.num_story_samples": 0, "out_dir": folder, "resume": "never"}
    return partial(Program, [*launch(processes, "train.py"), *words(settings | endless)], **env)


def throughput(options: Namespace) -> Iterator[Group]:
    """Training speed on a CPU, against nanoGPT where --nanogpt says where it is.

    Two shapes of nanoGPT: its recipe for a CPU and its small model for a GPU. Each one's real train.py runs, by turns
    of a second or two, in which the others sleep. On a CPU nanoGPT computes in float32; here it is also put under
    autocast.
    """
    shapes = [(4, 4, 128, 64, 12, 20), (6, 6, 384, 256, 16, 1)]
    for layers, heads, width, context, batch, every in [(1, 2, 32, 32, 4, 2)] if options.quick else shapes:
        settings = RANDOM | QUIET | GPT2 | model(n_layers=layers, n_heads=heads, d_model=width, vocab_size=65)
        settings |= {"seq_len": context, "model.max_position_embeddings": context, "micro_batch_size": batch}
        settings |= {"tracking.log_every": every}
        theirs = ENDLESS | dict(n_layer=layers, n_head=heads, n_embd=width, block_size=context, batch_size=batch)
        theirs["log_interval"] = every
        tokens, ours, peer, against = every * batch * context, {}, {}, {}
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            for precision, written in (("no", "float32"), ("bf16", "bfloat16")):
                for compiled in (False,) if options.quick else (False, True):
                    label = f"{written}{', compiled' if compiled else ''}"
                    start = training(settings | {"compile": compiled}, folder, ACCELERATE_MIXED_PRECISION=precision)
                    ours[f"ours, {label}"] = awake(stack, start, "[step ", tokens)
                    against[f"ours, {label}"] = [f"nanoGPT, {name}" for name in dict.fromkeys((written, "float32"))]
                    if options.nanogpt:
                        nanogpt = partial(NanoGPT(options.nanogpt).start, written, compile=compiled, **theirs)
                        peer[f"nanoGPT, {label}"] = awake(stack, nanogpt, "iter ", tokens)
            name = f"{layers} x {width}, context {context}, batch {batch}"
            yield Group(name, ours | peer, against, TURNS * options.rounds)


def time_to_loss(options: Namespace) -> Iterator[Group]:
    """Seconds from launch to a validation loss of 1.88 nats a character; needs --text.

    Trains configs/shakespeare_cpu.yaml on the characters (bytes) of a text, the last tenth of it held out, each round
    with another seed, and stops the clock at the first evaluation, over all of that part, with at most that loss. With
    --nanogpt, its recipe for a CPU runs too, to its last evaluation. Preparing the text counts for neither.
    """
    target, seeds = math.inf if options.quick else 1.88, count()
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus")
        prepare = {"source": options.text.resolve(), "out": corpus, "tokenizer": "byte", "validation": "tail:0.1"}
        run([sys.executable, "-m", "data.prepare", *words(prepare)])
        settings = {"config": "configs/shakespeare_cpu.yaml", "data.path": corpus, **QUIET}
        recipe = RECIPE_FOR_A_CPU
        if options.quick:
            settings |= {"steps": 4, "schedule.warmup_steps": 0, "schedule.decay_steps": 2}
            recipe = recipe | {"max_iters": 4, "eval_iters": 1}

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
            with peer.start(**recipe) as program:
                seconds, line = [(seconds, line) for seconds, line in program.lines() if "val loss" in line][-1]
            tokens = math.prod(recipe[name] for name in ("max_iters", "batch_size", "block_size"))
            return {"seconds": seconds, "val/loss": float(line.split("val loss ")[1]), "tokens": tokens}

        peer = options.nanogpt and NanoGPT(options.nanogpt, options.text)
        cases = {"ours": ours, **({"nanoGPT": theirs} if peer else {})}
        yield Group("to 1.88 nats a character", cases, "nanoGPT")


def overhead(options: Namespace) -> Iterator[Group]:
    """What train.py costs over a hand-written loop, with its data loading, logging, W&B (offline), clipping and checks.

    In 1 process, and in 2 with DDP; on stories, where steps are short and a grammar writes the data meanwhile, and on
    random tokens, with a model of 3 million parameters. Both begin with the same weights and have as many threads:
    together one for each core. They take turns of 10 steps, in which the other sleeps. Lines are logged as often as by
    default: each has a digest of the state.
    """
    larger = model(n_layers=4, d_model=256, vocab_size=512) | {"seq_len": 128}
    recipes = {"stories, 0.46M parameters": STORIES, "random tokens, 3.4M parameters": RANDOM | larger}
    every = 2 if options.quick else 10
    if options.quick:
        recipes = {"random tokens": RANDOM | model(**TINY, vocab_size=64)}
    for name, recipe in recipes.items():
        for launched, processes in ((0, 1),) if options.quick else ((0, 1), (2, 2)):
            settings = recipe | {"micro_batch_size": 16 // processes, "tracking.log_every": every}
            tokens = every * 16 * (96 if "stories" in name else 128)
            env = {"OMP_NUM_THREADS": str(max(1, available_cores() // processes))}
            by_hand = partial(Program, bare_loop_command(settings | logged(10**6, every), launched), **env)
            with ExitStack() as stack:
                ours = training(settings, stack.enter_context(tempfile.TemporaryDirectory()), launched, **env)
                cases = {
                    "train.py": awake(stack, ours, "[step ", tokens),
                    "bare loop": awake(stack, by_hand, "[step ", tokens),
                }
                yield Group(f"{name}, {processes} process(es)", cases, "bare loop", TURNS * options.rounds)


def scaling(options: Namespace) -> Iterator[Group]:
    """What two processes are worth on two cores, and what DDP is worth, for three sizes of model.

    Processes: train.py with two processes of one thread against one process of two threads, on the same global batches.
    DDP: a loop by hand in two processes of one thread, against gradients that are averaged after backward, and how much
    of the communication is hidden behind computation. By hand each tensor is sent on its own; DDP with one bucket for
    all sends as late, but at once, so it tells what sending together gives from what sending early gives.
    """
    sizes = [(1, 16, 2, 10)] if options.quick else [(2, 128, 4, 60), (4, 256, 4, 15), (6, 384, 6, 10)]
    for layers, width, heads, steps in sizes:
        settings = RANDOM | QUIET | model(n_layers=layers, d_model=width, n_heads=heads, vocab_size=512)
        settings |= {"seq_len": 128} | logged(steps, steps // 5)
        halves, one, two = settings | {"micro_batch_size": 4}, "1 process x 2 threads", "2 processes x 1 thread"
        cases = {
            f"train.py, {one}": partial(train, settings | {"micro_batch_size": 8}, OMP_NUM_THREADS="2"),
            f"train.py, {two}": partial(train, halves, 2, OMP_NUM_THREADS="1"),
        }
        cases |= {f"2 x 1, {way}": partial(bare_loop, halves, 2, OMP_NUM_THREADS="1", WAY=way) for way in WAYS}
        ways = [f"2 x 1, {way}" for way in WAYS]
        against = {f"train.py, {two}": f"train.py, {one}", **dict.fromkeys(ways, ways[-1])}
        yield Group(f"{layers} x {width}", cases, against)


def memory(options: Namespace) -> Iterator[Group]:
    """Peak memory over that of the imports and time of a training step of 2,048 tokens with a vocabulary of 50,257.

    4 layers of 256, context 256, 8 rows, tied embeddings, float32, AdamW; the logits at once, the loss in chunks, that
    with activation checkpointing too, and, with --nanogpt, nanoGPT at the same shape, with its optimizer.
    """
    settings = RANDOM | GPT2 | model(n_layers=4, n_heads=4, d_model=256, vocab_size=512 if options.quick else 50_257)
    settings |= {"model.max_position_embeddings": 256, "seq_len": 256, "micro_batch_size": 1 if options.quick else 8}
    settings |= {"optimizer.lr": 1e-3} | logged(4, 1)
    whole, chunked = settings | {"chunked_loss": False}, settings | {"chunked_loss": True}
    cases = {
        "logits at once": partial(bare_loop, whole),
        "loss in chunks": partial(bare_loop, chunked),
        "loss in chunks, activation checkpointing": partial(bare_loop, chunked | {"activation_checkpointing": True}),
    }
    if options.nanogpt:
        cases["nanoGPT"] = partial(bare_loop, settings, PEER=str(options.nanogpt.resolve()))
    yield Group("a step of 2,048 tokens", cases, "nanoGPT")


def sharding(options: Namespace) -> Iterator[Group]:
    """Memory of a process against the number of processes, and FSDP2's step against DDP's, for 26 million weights.

    On CPUs joined by gloo: the memory of a process, over that of one that trains next to nothing. Predicted: the
    weights, gradients and two moments of float32 alone, 16 bytes a weight, shared by all processes or not.
    """
    nothing = TINY | {"vocab_size": 64}
    sizes = nothing if options.quick else {"n_layers": 8, "n_heads": 8, "d_model": 512, "d_ff": 2048, "vocab_size": 512}
    settings = RANDOM | QUIET | {"seq_len": 64, "micro_batch_size": 1, "checkpoint.asynchronous": False}
    num_weights = GPTConfig(**sizes, max_position_embeddings=128).num_weights
    of_nothing: dict[str, float] = {}

    def case(kind: str, processes: int) -> dict:
        launch_file = {"DDP": "cpu.yaml", "FSDP2": "fsdp2.yaml"}[kind]

        def trained(of: dict, steps: int) -> dict[str, float]:
            how = settings | model(**of) | logged(steps, steps // 3)
            return train(how, processes, launch_file=launch_file, OMP_NUM_THREADS="1")

        if kind not in of_nothing:
            of_nothing[kind] = trained(nothing, 3)["peak_mib"]
        took, shards = trained(sizes, 3 if options.quick else 9), processes if kind == "FSDP2" else 1
        return {
            "peak_mib": took["peak_mib"] - of_nothing[kind],
            "predicted_mib": str(round(16 * num_weights / shards / 2**20)),
            "seconds_a_step": processes * settings["seq_len"] / took["tokens_per_second"],
        }

    counts = (2,) if options.quick else (1, 2, 4)
    cases = {f"{kind}, {number}": partial(case, kind, number) for number in counts for kind in ("DDP", "FSDP2")}
    yield Group("processes", cases, {f"FSDP2, {number}": f"DDP, {number}" for number in counts})


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

    def to_its_end(*arguments: str, exit_code: int = 0) -> None:
        run([sys.executable, *arguments], exit_code)

    def to_first_step(command: list[str], **env: str) -> dict:
        with Program(command, **env) as program:
            seconds, processor_seconds = program.wait_for(FIRST_STEP)  # and is stopped then
        return {"seconds": seconds, "processor_seconds": processor_seconds}

    stories = {"config": "configs/stories.yaml"}
    small = stories | {"data.num_samples": 50} | model(**TINY)
    recipe = small if options.quick else stories
    with tempfile.TemporaryDirectory() as folder:

        def first_step(settings: dict, processes: int = 0, **env: str) -> Case:
            here = {"out_dir": folder, "resume": "never", "tracking.log_every": 1}
            return partial(to_first_step, [*launch(processes, "train.py"), *words(settings | here)], **env)

        cache = Path(folder, "cache")
        # Compiling the smallest model takes half a minute; without a compiler train.py says so and goes on.
        env = {"TORCHINDUCTOR_CACHE_DIR": str(cache)} | ({"CXX": "no-such-compiler"} if options.quick else {})
        compiled = first_step(recipe | {"compile": True}, **env)
        cases = {
            "import torch": partial(to_its_end, "-c", "import torch"),
            "import torch, accelerate": partial(to_its_end, "-c", "import torch; import accelerate"),
            "import train": partial(to_its_end, "-c", "import train"),
            "train.py --help": partial(to_its_end, "train.py", "--help"),
            "a refused setting": partial(to_its_end, "train.py", "--steps", "-1", exit_code=2),
            "a bare script to its first step": partial(to_first_step, [sys.executable, "-c", BARE_SCRIPT]),
            "first step, the same model, without W&B": first_step(small | QUIET),
            "first step": first_step(recipe),
            "first step, without W&B": first_step(recipe | QUIET),
            "first step, 2 processes": first_step(recipe, 2),
            "first step, 2 processes, without W&B": first_step(recipe | QUIET, 2),
            "first step, compiled, empty cache": lambda: shutil.rmtree(cache, ignore_errors=True) or compiled(),
            "first step, compiled, filled cache": compiled,
        }
        against = {
            "import train": "import torch, accelerate",
            **dict.fromkeys(["train.py --help", "a refused setting"], "import torch"),
            "first step, the same model, without W&B": "a bare script to its first step",
        }
        yield Group("from launch to", cases, against)
