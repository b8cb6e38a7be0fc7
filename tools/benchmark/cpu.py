"""Benchmark cases on a CPU: the real train.py compared with nanoGPT's and with a hand-written loop.

Each function yields groups of cases to be compared: the name of the group, its cases, and for a case the names of its
baselines, by which its figures are divided.
"""

import json
import math
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distributed.cores import available_cores
from distributed.cpu import prepare_cpu
from model.config import FAMILIES, GPTConfig
from model.gpt import GPTModel
from model.hf import to_transformers
from run.metrics_log import read_rows

ROOT = Path(__file__).parents[2]
LOGGED = ("[step ", "iter ")  # prefixes of the log lines of train.py and nanoGPT
INTERVALS, WARM_UP = 8, 2  # numbers of intervals between log lines: measured, and skipped before
Case = Callable[[], Any]
Group = tuple[str, dict[str, Case], dict[str, list[str]]]
RANDOM = {"config": "configs/random_tokens.yaml", "model.dropout": 0.0, "data.num_samples": 10_000}
STORIES = {"config": "configs/stories.yaml"}
WITHOUT_WANDB = {"tracking.wandb": "disabled"}
TINY = {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32}
GPT2 = {"bias": False, "tie_embeddings": True, "mlp": "gelu_erf"}  # as in nanoGPT
BARE_LOOP = "-m", "tools.benchmark.bare_loop"
FIRST_STEP = "[step 1 /"
PROMPT_TOKENS = 32
# On a CPU nanoGPT's train.py enters a nullcontext instead of autocast; this removes it, to measure bfloat16.
RUN_WITH_AUTOCAST = """
import sys
from pathlib import Path
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
source, found = Path(sys.argv[0]).read_text(), "nullcontext() if device_type == 'cpu' else "
assert found in source
exec(compile(source.replace(found, ""), sys.argv[0], "exec"))
"""
RECIPE_FOR_A_CPU = {  # from its README
    **dict(device="cpu", compile=False, eval_iters=20, block_size=64, batch_size=12, n_layer=4, n_head=4, n_embd=128),
    **dict(max_iters=2000, lr_decay_iters=2000, dropout=0.0),
}


class NanoGPT:
    """nanoGPT's train.py on tokens, {split: ids [T]}, with a recipe: settings that replace its own."""

    def __init__(self, path: Path, tokens: Mapping[str, np.ndarray], vocab_size: int, recipe: Mapping[str, Any]):
        self.path, self.recipe, self.folder = path.resolve(), recipe, tempfile.TemporaryDirectory()
        self.cwd = Path(self.folder.name)  # train.py reads data/ and configurator.py from its working directory
        (self.cwd / "configurator.py").symlink_to(self.path / "configurator.py")
        (data := self.cwd / "data" / "text").mkdir(parents=True)
        for split, ids in tokens.items():
            ids.astype(np.uint16).tofile(data / f"{split}.bin")
        (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))

    @classmethod
    def on_characters(cls, path: Path, text: Path | None = None) -> "NanoGPT":
        """Return it with its recipe for a CPU, on the characters of a text, or on random tokens without one."""
        characters = list(text.read_text()) if text else np.random.default_rng(0).integers(0, 65, 1_000_000)
        alphabet, ids = np.unique(characters, return_inverse=True)
        training = int(0.9 * len(ids))
        return cls(path, {"train": ids[:training], "val": ids[training:]}, len(alphabet), RECIPE_FOR_A_CPU)

    def command(self, precision: str = "float32", **settings) -> list[str]:
        """Return a command that trains; run it in `cwd`."""
        settings = {**self.recipe, **settings, "dtype": precision}
        on_cpu = settings["device"] == "cpu"
        runner = ["-c", RUN_WITH_AUTOCAST] if precision == "bfloat16" and on_cpu else []
        command = [sys.executable, *runner, str(self.path / "train.py")]
        command += [str(self.path / "config" / "train_shakespeare_char.py"), "--dataset=text"]
        return [*command, *(f"--{name}={value}" for name, value in settings.items())]


def to_arguments(settings: Mapping[str, object]) -> list[str]:
    """Format settings as arguments of train.py: {"model.d_model": 64} becomes --model.d_model 64."""
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def train_command(settings: dict, processes: int = 0, script: tuple[str, ...] = ("train.py",)) -> list[str]:
    """Return a command that trains: `python` for 0 processes, else `accelerate launch` in float32."""
    command = [sys.executable]
    if processes:
        launcher = {"config_file": "accelerate_configs/cpu.yaml", "mixed_precision": "no", "num_processes": processes}
        command += [str(Path(sys.executable).parent / "accelerate"), "launch", *to_arguments(launcher)]
    return [*command, *script, *to_arguments(settings)]


def run_command(
    command: list[str], cwd: Path = ROOT, env: Mapping[str, str] = {}, until: str | None = None
) -> list[tuple[float, str]]:
    """Run a command to its end, or until it prints a line that begins with `until`; return the printed lines.

    Each has the seconds since the launch. OMP_NUM_THREADS of this shell is not passed on. Raise RuntimeError if the
    command fails, or ends before it prints `until`.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    env, lines = inherited | {"PYTHONUNBUFFERED": "1"} | dict(env), []
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for line in process.stdout or ():
            lines.append((time.perf_counter() - start, line.rstrip()))
            if until is not None and line.startswith(until):
                return lines
        if process.wait() or until is not None:
            printed = "\n".join(line for _, line in lines)
            raise RuntimeError(f"exit code {process.returncode}\n{printed}")
        return lines
    finally:
        process.terminate()  # does nothing if it has ended
        process.communicate()


def prepare_characters(text: Path, corpus: Path) -> None:
    """Make a corpus of the bytes of a text, the last tenth for validation."""
    (link := corpus.with_suffix(".txt")).symlink_to(text.resolve())  # data.prepare detects a format by its suffix
    settings = {"source": link, "out": corpus, "tokenizer": "byte", "validation": "tail:0.1"}
    run_command([sys.executable, "-m", "data.prepare", *to_arguments(settings)])


def speed_settings(log_every: int, folder: str) -> dict:
    """Return settings of a training for `measure_speed`, without evaluations and checkpoints on the way."""
    settings = {"checkpoint.every": 10**6, "evaluation.every": 0, "evaluation.num_scored_generations": 0}
    settings |= {"steps": log_every * (WARM_UP + INTERVALS + 1), "tracking.log_every": log_every}
    return settings | {"out_dir": folder, "resume": "never"}


def measure_speed(command: list[str], tokens: int, cwd: Path = ROOT, env: Mapping[str, str] = {}) -> dict[str, float]:
    """Return the median speed of a training that logs a line each `tokens` tokens, and the seconds to its first."""
    logged = [seconds for seconds, line in run_command(command, cwd, env) if line.startswith(LOGGED)]
    intervals = [end - start for start, end in pairwise(logged[WARM_UP:])]
    return {"tokens_per_second": tokens / statistics.median(intervals), "start_seconds": logged[0]}


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
    peer = options.nanogpt and NanoGPT.on_characters(options.nanogpt)
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
            yield f"{layers} x {width}, context {context}, batch {batch}", ours | theirs, baselines


def run_to_target(command: list[str], target: float, cwd: Path = ROOT, env: Mapping[str, str] = {}) -> dict:
    """Train; return the first validation loss of at most `target`, else the last, and its seconds from the launch."""
    found = [(s, re.search(r"val.loss (?:= )?([\d.]+)", line)) for s, line in run_command(command, cwd, env)]
    losses = [(seconds, float(match[1])) for seconds, match in found if match]
    seconds, loss = next((pair for pair in losses if pair[1] <= target), losses[-1])
    return {"seconds": seconds, "val/loss": loss}


def time_to_loss(options: Namespace) -> Iterator[Group]:
    """Seconds from launch to a validation loss of 1.88 nats/character on --text, another seed in each round.

    Preparing the corpus is not counted. A program that never gets there is measured at its last evaluation.
    """
    target, seeds, recipe = math.inf if options.quick else 1.88, count(), dict(RECIPE_FOR_A_CPU)

    with tempfile.TemporaryDirectory() as folder:
        prepare_characters(options.text, corpus := Path(folder, "corpus"))
        settings = {"config": "configs/shakespeare_cpu.yaml", "data.path": corpus, **WITHOUT_WANDB}
        if options.quick:
            settings |= {"steps": 4, "schedule.warmup_steps": 0, "schedule.decay_steps": 2}
            recipe |= {"max_iters": 4, "eval_iters": 1}

        def ours() -> dict:
            out_dir = Path(folder, str(seed := next(seeds)))
            figures = run_to_target(train_command(settings | {"out_dir": out_dir, "name": "run", "seed": seed}), target)
            return figures | {"tokens": list(read_rows(out_dir / "run" / "metrics.jsonl"))[-1]["train/tokens"]}

        cases: dict[str, Case] = {"ours": ours}
        if options.nanogpt:
            peer = NanoGPT.on_characters(options.nanogpt, options.text)
            tokens = {"tokens": math.prod(recipe[name] for name in ("max_iters", "batch_size", "block_size"))}
            cases["nanoGPT"] = lambda: run_to_target(peer.command(**recipe), target, peer.cwd) | tokens
        yield "to 1.88 nats/character", cases, {"ours": ["nanoGPT"]}


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
            yield name, cases, baselines


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
    yield "a step of 2,048 tokens", cases, dict.fromkeys(variants, ["nanoGPT"])


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
        yield f"cost, {processes} process(es)", cases, {"exact": ["default"]}


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
    yield "100 million parameters", cases, {"asynchronous": ["synchronous"]}


def startup(options: Namespace) -> Iterator[Group]:
    """Seconds from the launch to --help and to the first step, beside importing torch."""
    recipe = STORIES | ({"data.num_samples": 50} | model_settings(**TINY) if options.quick else {})
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder, "cache")
        # Compiling the smallest model takes half a minute; without a compiler train.py trains uncompiled.
        compiler = {"TORCHINDUCTOR_CACHE_DIR": str(cache)} | ({"CXX": "no-such-compiler"} if options.quick else {})
        own = {"out_dir": folder, "resume": "never", "tracking.log_every": 1}

        def first_step(processes: int = 0, compiled: bool = False, empty: bool = False) -> dict[str, float]:
            if empty:
                shutil.rmtree(cache, ignore_errors=True)
            command = train_command(recipe | own | {"compile": compiled}, processes)
            return {"seconds": run_command(command, env=compiler, until=FIRST_STEP)[-1][0]}

        cases: dict[str, Case] = {
            "import torch": partial(run_command, [sys.executable, "-c", "import torch"]),
            "train.py --help": partial(run_command, [sys.executable, "train.py", "--help"]),
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
                yield f"{family}, {layers} x {width}, batch {batch}", cases, {"ours": ["transformers"]}
