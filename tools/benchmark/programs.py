"""Start the programs that are compared, train.py and nanoGPT's train.py, and read what they print."""

import importlib.util
import math
import os
import pickle
import re
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from config.schema import OptimizerConfig
from model.config import GPTConfig
from tools.benchmark.tables import ROOT

Case = Callable[[], Any]
# The name of a group, its cases, and for a case the names of its baselines, by which its figures are divided.
Group = tuple[str, dict[str, Case], dict[str, list[str]]]
PEER = "nanoGPT"
INTERVALS, WARM_UP = 8, 2  # numbers of intervals between log lines: measured, and skipped before
WITHOUT_WANDB = {"tracking.wandb": "disabled"}
BF16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}
TINY = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 96}  # for --quick, in nanoGPT's names
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


class Program(NamedTuple):
    """A command with its working directory, and variables that are added to the environment."""

    command: list[str]
    cwd: Path = ROOT
    env: Mapping[str, str] = {}

    def run(self) -> list[tuple[float, str]]:
        """Run to the end; return the printed lines, each with the seconds since the launch.

        OMP_NUM_THREADS of this shell is not passed on. Raise RuntimeError if the program fails.
        """
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        env, lines = inherited | {"PYTHONUNBUFFERED": "1"} | dict(self.env), []
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        start = time.perf_counter()
        process = subprocess.Popen(self.command, cwd=self.cwd, env=env, **pipes)
        try:
            for line in process.stdout or ():
                lines.append((time.perf_counter() - start, line.rstrip()))
            if process.wait():
                raise RuntimeError("\n".join([f"exit code {process.returncode}", *(line for _, line in lines)]))
            return lines
        finally:
            process.terminate()  # does nothing if it has ended
            process.communicate()

    def log(self) -> tuple[dict[int, float], list[tuple[int, float, float]], int]:
        """Train; return what is logged.

        Returns:
            {step: seconds from the launch to its log line}, the evaluations (step, seconds, validation loss), and the
            tokens of a step, 0 if they change.
        """
        logged, evaluations, tokens = {}, [], 0
        for seconds, line in self.run():
            if found := re.search(r"step (\d+)\b.*val.loss (?:= )?([\d.]+)", line):
                evaluations.append((int(found[1]), seconds, float(found[2])))
            elif found := re.match(r"(?:\[step|iter) (\d+)", line):
                logged.setdefault(int(found[1]), seconds)
            elif found := re.search(r"tokens(?: per iteration will be)?: ([\d,]+)(?: a step|$)", line):
                tokens = int(found[1].replace(",", ""))
        return logged, evaluations, tokens

    def train(self, target: float = -math.inf) -> dict[str, Any]:
        """Train; return the figures of the log.

        Speeds are medians over the intervals between log lines after the warm-up. If there were evaluations, `seconds`
        and `tokens` are those until the first with a loss of at most `target`, or until the last.
        """
        logged, evaluations, tokens = self.log()
        figures: dict[str, Any] = {"start_seconds": min(logged.values())}
        if intervals := list(pairwise(list(logged.items())[WARM_UP:])):
            step_seconds = statistics.median((end - start) / (to - since) for (since, start), (to, end) in intervals)
            figures |= {"seconds_a_step": step_seconds, "tokens_per_second": tokens / step_seconds}
        if evaluations:
            step, seconds, loss = next((each for each in evaluations if each[2] <= target), evaluations[-1])
            figures |= {"seconds": seconds, "val/loss": loss, "curve": evaluations}
            figures |= {"tokens": float(step * tokens)} if tokens else {}
        return figures


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


def ours(
    options: Namespace,
    settings: dict,
    processes: int = 0,
    script: tuple[str, ...] = ("train.py",),
    env: Mapping[str, str] = {},
) -> Program:
    """Return train.py, or another script with its arguments; with --quick, of a tiny model, uncompiled, one thread."""
    if options.quick:
        settings, env = settings | model_settings(TINY) | {"compile": False}, {**env, "OMP_NUM_THREADS": "1"}
    return Program(train_command(settings, processes, script), env=env)


def model_settings(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a GPT-2 shape in nanoGPT's names to settings of train.py."""
    names = {"n_layer": "n_layers", "n_head": "n_heads", "n_embd": "d_model", "block_size": "max_position_embeddings"}
    sizes = {f"model.{name}": shape[theirs] for theirs, name in names.items()} | {"model.d_ff": 4 * shape["n_embd"]}
    return sizes | {"seq_len": shape["block_size"], "model.bias": False, "model.tie_embeddings": True}


def speed_settings(log_every: int, folder: str) -> dict[str, Any]:
    """Return settings of a training of which the speed is measured."""
    settings = {"checkpoint.every": 10**6, "evaluation.every": 0, "evaluation.num_scored_generations": 0}
    settings |= {"steps": log_every * (WARM_UP + INTERVALS + 1), "tracking.log_every": log_every}
    return settings | {"out_dir": folder, "name": "run", "resume": "never"}


def nanogpt(
    options: Namespace, folder: str | Path, recipe: dict, *, corpus: Path | None = None, vocab_size: int = 0
) -> Program:
    """Return nanoGPT's train.py with a recipe: settings, and "config", its file that they replace settings of.

    It trains on the tokens of a corpus of data.prepare, numbered without gaps if `vocab_size` is 0, or on random ones.
    `folder` gets the data, and must exist until the program has run. With --quick the model is tiny and uncompiled.
    """
    path, cwd = options.nanogpt.resolve(), Path(folder, "nanogpt")
    (data := cwd / "data" / "text").mkdir(parents=True)  # train.py reads these from its working directory
    (cwd / "configurator.py").symlink_to(path / "configurator.py")
    tokens = {split: np.random.default_rng(0).integers(0, vocab_size or 1, 10**6) for split in ("train", "val")}
    if corpus:
        tokens = corpus_tokens(corpus)
    if not vocab_size:
        alphabet = np.unique(np.concatenate(list(tokens.values())))
        tokens, vocab_size = {split: np.searchsorted(alphabet, ids) for split, ids in tokens.items()}, len(alphabet)
    for split, ids in tokens.items():
        ids.astype(np.uint16).tofile(data / f"{split}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))
    settings = {"dataset": "text", "device": "cuda" if torch.cuda.is_available() else "cpu", **recipe}
    settings |= TINY | {"compile": False} if options.quick else {}
    config = path / "config" / settings.pop("config", "train_shakespeare_char.py")
    on_cpu_in_bf16 = (settings["device"], settings["dtype"]) == ("cpu", "bfloat16")
    runner = ["-c", RUN_WITH_AUTOCAST] if on_cpu_in_bf16 else []
    words, threads = (f"--{name}={value}" for name, value in settings.items()), {"OMP_NUM_THREADS": "1"}
    return Program(
        [sys.executable, *runner, str(path / "train.py"), str(config), *words], cwd, threads if options.quick else {}
    )


def nanogpt_model(
    path: Path, config: GPTConfig, optimizer: OptimizerConfig, device: str = "cpu"
) -> tuple[nn.Module, Optimizer]:
    """Return nanoGPT's model in the shape of `config`, without biases, and its optimizer."""
    # Imported under another name, because our package is called `model` too.
    spec = importlib.util.spec_from_file_location("nanogpt_model", path / "model.py")
    assert spec, path
    assert spec.loader, path
    theirs = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    sizes = dict(n_layer=config.n_layers, n_head=config.n_heads, n_embd=config.d_model, vocab_size=config.vocab_size)
    peer = theirs.GPTConfig(block_size=config.max_position_embeddings, dropout=config.dropout, bias=False, **sizes)
    # On the device: initialising a billion weights takes a CPU many seconds. nanoGPT prints while it does.
    with torch.device(device), redirect_stdout(sys.stderr):
        network = theirs.GPT(peer)
        return network, network.configure_optimizers(optimizer.weight_decay, optimizer.lr, optimizer.betas, device)


def prepare_characters(text: Path, folder: str | Path) -> Path:
    """Make a corpus of the bytes of a text, the last tenth for validation; return its path in `folder`."""
    corpus = Path(folder, "corpus")
    (link := corpus.with_suffix(".txt")).symlink_to(text.resolve())  # data.prepare detects a format by its suffix
    settings = {"source": link, "out": corpus, "tokenizer": "byte", "validation": "tail:0.1"}
    Program([sys.executable, "-m", "data.prepare", *to_arguments(settings)]).run()
    return corpus


def corpus_tokens(corpus: Path) -> dict[str, np.ndarray]:
    """Return the tokens of both splits of a corpus, {"train" or "val": ids [T]}."""
    from data.text import TextCorpus, TextDataset  # needs pyarrow, which a machine with a GPU may lack

    opened, splits = TextCorpus(str(corpus)), {"train": "train", "val": "validation"}
    parts = {name: TextDataset(opened, split, 2, "concat").values for name, split in splits.items()}
    return {name: np.concatenate([ids for ids, *_ in columns]) for name, columns in parts.items()}
