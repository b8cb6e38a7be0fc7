"""Start the programs that are compared, train.py and those of nanoGPT and nanochat, and read what they print.

Settings are written as on a command line, where later ones override earlier ones.
"""

import math
import os
import pickle
import re
import signal
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch

from tools.benchmark.tables import ROOT
from trainer.run.metrics_log import read_rows

Case = Callable[[], Any]
# The name of a group, its cases, and for a case the names of its baselines, by which its figures are divided.
Group = tuple[str, dict[str, Case], dict[str, list[str]]]
PEER = "nanoGPT"
INTERVALS, WARM_UP = 8, 2  # numbers of intervals between log lines: measured, and skipped before
WITHOUT_WANDB = "--tracking.wandb disabled"
RANDOM = f"""--config configs/random_tokens.yaml --data.num_samples 10000 --model.dropout 0 --model.mlp gelu_exact
    {WITHOUT_WANDB}"""
BF16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}
# nanoGPT does not print its peak memory, and on a CPU it enters a nullcontext instead of autocast to bfloat16.
RUN_NANOGPT = """
import resource, sys
from pathlib import Path
source, clause = Path("train.py").read_text(), "nullcontext() if device_type == 'cpu' else "
assert clause in source
exec(compile(source.replace(clause, "") if "--dtype=bfloat16" in sys.argv else source, "train.py", "exec"))
resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
peak = torch.cuda.max_memory_allocated() or resident
print(f"peak memory: {peak} bytes")
"""


class Shape(NamedTuple):
    """The sizes of a GPT-2 model without biases, with tied embeddings."""

    layers: int
    heads: int
    width: int
    context: int

    def settings(self) -> str:
        """Return the settings of train.py."""
        sizes = f"--model.n_layers {self.layers} --model.n_heads {self.heads} --model.d_model {self.width}"
        context = f"--model.max_position_embeddings {self.context} --seq_len {self.context}"
        return f"{sizes} --model.d_ff {4 * self.width} {context} --model.bias false --model.tie_embeddings true"

    def recipe(self) -> str:
        """Return the settings of nanoGPT's train.py."""
        sizes = f"--n_layer={self.layers} --n_head={self.heads} --n_embd={self.width}"
        return f"{sizes} --block_size={self.context}"


TINY = Shape(1, 2, 16, 96)  # for --quick


class Program(NamedTuple):
    """A command with its working directory, and variables that are added to the environment."""

    command: list[str]
    cwd: Path = ROOT
    env: Mapping[str, str] = {}

    def run(self, *more: str) -> list[tuple[float, str]]:
        """Run to the end, with more arguments; return the printed lines, each with the seconds since the launch.

        OMP_NUM_THREADS of this shell is not passed on. Raise RuntimeError if the program fails.
        """
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        env, lines = inherited | {"PYTHONUNBUFFERED": "1"} | dict(self.env), []
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        start = time.perf_counter()
        process = subprocess.Popen([*self.command, *more], cwd=self.cwd, env=env, start_new_session=True, **pipes)
        try:
            for line in process.stdout or ():
                lines.append((time.perf_counter() - start, line.rstrip()))
            if process.wait():
                raise RuntimeError("\n".join([f"exit code {process.returncode}", *(line for _, line in lines)]))
            return lines
        finally:
            with suppress(ProcessLookupError):  # it has ended, and what it started too
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def train(self, target: float = -math.inf) -> dict[str, Any]:
        """Train in a temporary folder; return the figures of the log.

        Speeds are medians over the intervals between log lines after the warm-up. If there were evaluations, `seconds`
        and `tokens` are those until the first with a loss of at most `target`, or until the last. Peak memory is that
        of the process, or on a GPU.
        """
        with TemporaryDirectory() as folder:
            lines = self.run(f"--out_dir={folder}")
            rows = [row for file in Path(folder).glob("*/metrics.jsonl") for row in read_rows(file)]
        logged, evaluations, tokens = read_log(lines)
        peaks = [row["perf/peak_memory_bytes"] for row in rows if "perf/peak_memory_bytes" in row]
        peaks += [int(match[1]) for _, line in lines if (match := re.match(r"peak memory: (\d+) bytes", line))]
        figures: dict[str, Any] = {"start_seconds": min(logged.values())}
        figures |= {"peak_mib": max(peaks) / 2**20} if peaks else {}
        if intervals := list(pairwise(list(logged.items())[WARM_UP:])):
            step_seconds = statistics.median((end - start) / (to - since) for (since, start), (to, end) in intervals)
            figures |= {"seconds_a_step": step_seconds, "tokens_per_second": tokens / step_seconds}
        if evaluations:
            step, seconds, loss = next((row for row in evaluations if row[2] <= target), evaluations[-1])
            figures |= {"seconds": seconds, "val/loss": loss, "curve": evaluations}
            figures |= {"tokens": float(step * tokens)} if tokens else {}
        return figures


def read_log(lines: list[tuple[float, str]]) -> tuple[dict[int, float], list[tuple[int, float, float]], int]:
    """Read what a training prints.

    Returns:
        {step: seconds from the launch to its log line}, the evaluations (step, seconds, validation loss), and the
        tokens of a step, 0 if they change.
    """
    logged, evaluations, tokens = {}, [], 0
    for seconds, line in lines:
        if match := re.search(r"step (\d+)\b.*val.loss (?:= )?([\d.]+)", line):
            evaluations.append((int(match[1]), seconds, float(match[2])))
        elif match := re.match(r"(?:\[step|iter) (\d+)", line):
            logged.setdefault(int(match[1]), seconds)
        elif match := re.search(r"tokens(?: per iteration will be)?: ([\d,]+)(?: a step|$)", line):
            tokens = int(match[1].replace(",", ""))
    return logged, evaluations, tokens


def ours(
    options: Namespace,
    settings: str,
    *more: str,
    processes: int = 0,
    script: tuple[str, ...] = ("train.py",),
    env: Mapping[str, str] = {},
) -> Program:
    """Return train.py, or another script with its arguments; with --quick, of a tiny model, uncompiled, one thread.

    `settings` are separated by spaces, which `more` may contain. 0 processes are `python`, others `accelerate launch`
    in float32.
    """
    launcher = [sys.executable]
    if processes:
        accelerate = str(Path(sys.executable).parent / "accelerate")
        launch = "launch --config_file accelerate_configs/cpu.yaml --mixed_precision no --num_processes"
        launcher += [accelerate, *launch.split(), str(processes)]
    if options.quick:
        settings, env = f"{settings} {TINY.settings()} --compile false", {**env, "OMP_NUM_THREADS": "1"}
    return Program([*launcher, *script, *settings.split(), *more], env=env)


def nanogpt(
    options: Namespace,
    recipe: str,
    config: str = "train_shakespeare_char.py",
    on_text: bool = False,
    vocab_size: int = 0,
) -> Program:
    """Write data, and return nanoGPT's train.py with a recipe, which overrides a file of its folder `config`.

    It trains on --text, its tokens numbered without gaps if `vocab_size` is 0, or on random tokens. With --quick the
    model is tiny and uncompiled.
    """
    if on_text:
        tokens = corpus_tokens(text_corpus(options))
    else:
        tokens = {split: np.random.default_rng(0).integers(0, vocab_size, 10**6) for split in ("train", "val")}
    if not vocab_size:
        alphabet = np.unique(np.concatenate(list(tokens.values())))
        tokens, vocab_size = {split: np.searchsorted(alphabet, ids) for split, ids in tokens.items()}, len(alphabet)
    data = options.scratch.resolve()
    for split, ids in tokens.items():
        ids.astype(np.uint16).tofile(data / f"{split}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.quick:
        recipe += f" {TINY.recipe()} --compile=False"
    words = [f"config/{config}", f"--dataset={data}", f"--device={device}", *recipe.split()]
    env = {"OMP_NUM_THREADS": "1"} if options.quick else {}
    return Program([sys.executable, "-c", RUN_NANOGPT, *words], options.nanogpt.resolve(), env)


def nanochat(options: Namespace, arguments: str) -> Program:
    """Write the documents of the corpus --text as nanochat reads them, and return its base_train.py with arguments."""
    corpus, base = text_corpus(options), options.scratch.resolve() / "nanochat"
    write_documents(corpus, base / "base_data_climbmix")
    env = {"NANOCHAT_BASE_DIR": str(base)}
    if options.quick:
        arguments += " --depth=1 --max-seq-len=96 --total-batch-size=1536 --num-iterations=2 --eval-tokens=1536"
        env["OMP_NUM_THREADS"] = "1"
    words = [str(Path(__file__).parent / "run_nanochat.py"), str(corpus.resolve()), *arguments.split()]
    return Program([sys.executable, *words], options.nanochat.resolve(), env)


def write_documents(corpus: Path, folder: Path) -> None:
    """Write the documents of both splits of a corpus as Parquet files; nanochat validates on the last one."""
    import pyarrow.parquet  # a machine with a GPU may lack it

    from data.text import TextCorpus

    opened = TextCorpus(str(corpus))
    folder.mkdir(parents=True, exist_ok=True)
    for number, (_, ids) in enumerate(sorted(corpus_tokens(corpus).items())):
        documents = np.split(ids, np.flatnonzero(ids == opened.end_of_text))
        texts = opened.tokenizer.decode_batch([document.tolist() for document in documents if len(document) > 1])
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / f"shard_{number:05d}.parquet")


def last_bits_per_byte(lines: list[tuple[float, str]]) -> dict[str, float]:
    """Return the last validation loss that a training printed, in bits per byte, and its seconds since the launch."""
    pattern = r"(?:val/bits_per_byte = |Validation bpb: )([\d.]+)"
    *_, (seconds, loss) = [(seconds, match[1]) for seconds, line in lines if (match := re.search(pattern, line))]
    return {"seconds": seconds, "val/bits_per_byte": float(loss)}


def speed_settings(log_every: int) -> str:
    steps = log_every * (WARM_UP + INTERVALS + 1)
    never = "--checkpoint.every 1000000 --evaluation.every 0 --evaluation.num_scored_generations 0"
    return f"{never} --steps {steps} --tracking.log_every {log_every}"


def random_settings(shape: Shape, batch: int, log_every: int, settings: str) -> str:
    """Return the settings of train.py for the speed on random tokens; `settings` has at least model.vocab_size."""
    return f"{RANDOM} {shape.settings()} --micro_batch_size {batch} {speed_settings(log_every)} {settings}"


def our_speed(
    options: Namespace, shape: Shape, batch: int, log_every: int, settings: str, env: Mapping[str, str] = {}
) -> Case:
    return ours(options, random_settings(shape, batch, log_every, settings), env=env).train


def nanogpts_speed(
    options: Namespace, shape: Shape, batch: int, log_every: int, vocab_size: int, recipe: str = ""
) -> Case:
    """Return a case that trains nanoGPT's train.py on batches of the same size, by default without dropout."""
    steps = log_every * (WARM_UP + INTERVALS + 1)
    recipe = f"""{shape.recipe()} --batch_size={batch} --dropout=0.0 --max_iters={steps} --log_interval={log_every}
        --eval_interval=1000000 --eval_iters=1 {recipe}"""
    return lambda: nanogpt(options, recipe, vocab_size=vocab_size).train()


def train_to_loss(options: Namespace, settings: str, target: float, env: Mapping[str, str] = {}) -> Case:
    """Return a case that trains train.py on --text to a validation loss, with another seed at each call.

    A program that never gets there is measured at its last evaluation.
    """
    seeds = count()

    def case() -> dict[str, Any]:
        corpus, seed = f"--data.path={text_corpus(options)}", f"--seed={next(seeds)}"
        return ours(options, settings, corpus, seed, env=env).train(target)

    return case


def text_corpus(options: Namespace) -> Path:
    """Return --text if it is a corpus of data.prepare, else one of its bytes, the last tenth for validation."""
    if options.text.is_dir():
        return options.text
    corpus = options.scratch / "corpus"
    if not corpus.exists():
        (link := corpus.with_suffix(".txt")).symlink_to(options.text.resolve())  # the suffix says the format
        settings = ["--tokenizer=byte", "--validation=tail:0.1", f"--source={link}", f"--out={corpus}"]
        Program([sys.executable, "-m", "data.prepare", *settings]).run()
    return corpus


def corpus_tokens(corpus: Path) -> dict[str, np.ndarray]:
    """Return the tokens of both splits of a corpus, {"train" or "val": ids [T]}."""
    from data.text import TextCorpus, TextDataset  # needs pyarrow, which a machine with a GPU may lack

    opened, splits = TextCorpus(str(corpus)), {"train": "train", "val": "validation"}
    parts = {name: TextDataset(opened, split, 2, "concat").values for name, split in splits.items()}
    return {name: np.concatenate([ids for ids, *_ in columns]) for name, columns in parts.items()}
