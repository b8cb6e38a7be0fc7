"""nanochat (Karpathy 2025) as the peer of a benchmark: the real base_train.py of a checkout that the user names, in the
environment that lies in it (.venv, as `uv sync --extra cpu` makes it), else in this one.

Both train a model of one shape on the same documents, cut into the same tokens, for as many of them, each by its own
recipe and program. Then both are measured on the same rows: every validation document, as far as the context goes.
"""

import json
import math
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers.convert_slow_tokenizer import bytes_to_unicode

from benchmarks.measure import ROOT, Group, Program, launch, run, words
from config.parser import parse_config
from data.corpus import load_corpus
from data.tokenizer import load_tokenizer
from run.metrics_log import read_rows

MEGABYTES, ONE_FOR_VALIDATION = 50, 50  # of text; of so many documents
GPT2_PATTERN = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # of ByteLevel in tokenizers
)
BOS = "<|bos|>"

# In its environment: our tokenizer as its own, and whether it cuts a text into the same tokens.
MAKE_TOKENIZER = """
import json, sys
import tiktoken, torch
from nanochat.tokenizer import RustBPETokenizer
ranks, pattern, bos, folder, texts = json.load(sys.stdin)
ranks = {bytes(token): rank for rank, token in enumerate(ranks)}
encoding = tiktoken.Encoding("ours", pat_str=pattern, mergeable_ranks=ranks, special_tokens={bos: len(ranks)})
RustBPETokenizer(encoding, bos).save(folder)
torch.save(torch.tensor([*map(len, ranks), 0], dtype=torch.int32), folder + "/token_bytes.pt")
print(json.dumps(encoding.encode_ordinary_batch(texts)))
"""
MEASURE = """
import sys
import numpy as np, torch
from nanochat.checkpoint_manager import build_model
model, *_ = build_model(sys.argv[1], int(sys.argv[2]), torch.device("cpu"), "eval")
rows = np.load(sys.argv[3])
inputs, targets = torch.from_numpy(rows["inputs"]), torch.from_numpy(rows["targets"])
nats = 0.0
with torch.no_grad():
    for x, y in zip(inputs.split(16), targets.split(16)):
        nats += model(x, y, loss_reduction="none").double().sum().item()  # 0 where the target is -1
print("nats", nats)
"""


class Shape(NamedTuple):
    """Of both models and trainings."""

    layers: int
    heads: int
    width: int
    context: int
    vocab_size: int
    batch: int
    steps: int

    @property
    def tokens(self) -> int:
        """That both train on."""
        return self.steps * self.batch * self.context


TINY, SMALL = Shape(1, 2, 32, 32, 300, 4, 4), Shape(4, 4, 128, 256, 4096, 16, 150)


def python_sources(megabytes: float) -> list[str]:
    """Files of Python's library and of what is installed, in an order that their paths decide by chance."""
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    files = {file: file.relative_to(folder).as_posix() for folder in folders for file in folder.rglob("*.py")}
    texts, characters = [], 0
    for file in sorted(files, key=lambda file: blake2b(files[file].encode()).digest()):
        if characters < 1e6 * megabytes:
            texts.append(file.read_text(errors="replace"))
            characters += len(texts[-1])
    return [text for text in texts if text]


class NanoChat:
    """Its base_train.py, on our corpus."""

    def __init__(self, path: Path, shape: Shape, folder: Path):
        self.path, self.shape, self.folder = path.resolve(), shape, folder
        own = self.path / ".venv" / "bin" / "python"
        self.python = str(own) if own.exists() else sys.executable
        self.env = {"NANOCHAT_BASE_DIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}

    def take(self, documents: dict[str, list[str]], tokenizer: Path) -> None:
        """Give it the documents of both splits, and our tokenizer.

        Raises:
            RuntimeError: it cuts them into other tokens.
        """
        shards = self.folder / "base_data_climbmix"
        shards.mkdir(parents=True)
        for number, texts in enumerate((documents["train"], documents["validation"])):  # its last file is the latter
            pq.write_table(pa.table({"text": texts}), shards / f"shard_{number:05d}.parquet", row_group_size=1000)
        ours, _ = load_tokenizer(tokenizer)
        byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        # Our end of text is number 0, and its beginning of text the last one.
        learnt = sorted((index, token) for token, index in ours.get_vocab().items() if index)
        ranks = [[byte_of[character] for character in token] for _, token in learnt]
        told = json.dumps([ranks, GPT2_PATTERN, BOS, str(self.folder / "tokenizer"), documents["validation"]])
        made = subprocess.run(
            [self.python, "-c", MAKE_TOKENIZER], input=told, cwd=self.path, env=os.environ | self.env, text=True,
            stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
        theirs = json.loads(made.stdout.splitlines()[-1])
        mine = [encoding.ids for encoding in ours.encode_batch_fast(documents["validation"], add_special_tokens=False)]
        if theirs != [[index - 1 for index in ids] for ids in mine]:
            raise RuntimeError("nanochat's tokenizer cuts the text otherwise than ours, from the same vocabulary")

    def command(self) -> list[str]:
        """To be started in its checkout: no evaluation, and a checkpoint at the end."""
        shape, never = self.shape, ("eval-every", "core-metric-every", "sample-every", "save-every")
        settings = {
            **{"depth": shape.layers, "aspect-ratio": shape.width // shape.layers, "window-pattern": "L"},
            **{"head-dim": shape.width // shape.heads, "max-seq-len": shape.context, "num-iterations": shape.steps},
            **{"device-batch-size": shape.batch, "total-batch-size": shape.batch * shape.context},
            **{"model-tag": "run", "device-type": "cpu", **dict.fromkeys(never, -1)},
        }
        return [self.python, "-m", "scripts.base_train", *(f"--{name}={value}" for name, value in settings.items())]

    def nats(self, rows: np.ndarray, labels: np.ndarray) -> float:
        """The loss of its checkpoint on our rows, int [N, T], and labels, which are -100 where there is no target."""
        theirs = np.where(rows == 0, self.shape.vocab_size - 1, rows - 1)
        targets = np.where(labels[:, 1:] == -100, -1, theirs[:, 1:])
        np.savez(self.folder / "rows.npz", inputs=theirs[:, :-1], targets=targets)
        checkpoint = self.folder / "base_checkpoints" / "run"
        words = [str(checkpoint), str(self.shape.steps), str(self.folder / "rows.npz")]
        with Program([self.python, "-c", MEASURE, *words], self.path, **self.env) as program:
            said = [line for _, line in program.lines()]
        return float(said[-1].removeprefix("nats "))


def peers(options: Namespace) -> Iterator[Group]:
    """Seconds of the whole program, from launch to exit, and bits a byte of the same rows, ours and nanochat's; each
    round ours has another seed, and nanochat its one.

    The text is that of the Python files of this machine. --nanochat says where a checkout is.
    """
    shape, seeds = TINY if options.quick else SMALL, count()
    documents = python_sources(0.1 if options.quick else MEGABYTES)
    documents = {"train": documents, "validation": documents[::ONE_FOR_VALIDATION]}
    documents["train"] = [text for index, text in enumerate(documents["train"]) if index % ONE_FOR_VALIDATION]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for split, texts in documents.items():
            (folder / f"{split}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        prepare = {"source": folder / "train.jsonl", "validation": folder / "validation.jsonl"}
        prepare |= {"tokenizer": f"train:{shape.vocab_size}", "out": folder / "corpus"}
        run([sys.executable, "-m", "data.prepare", *words(prepare)])
        settings = our_settings(shape, folder)

        def ours() -> dict:
            here = {"name": "run", "resume": "never", "seed": next(seeds)}
            seconds = seconds_of(launch(settings | here))
            last = list(read_rows(folder / "run" / "metrics.jsonl"))[-1]
            return {"seconds": seconds, "val/bits_per_byte": last["val/bits_per_byte"], "tokens": shape.tokens}

        cases = {"ours": ours}
        if options.nanochat:
            peer = NanoChat(options.nanochat, shape, folder / "nanochat")
            peer.take(documents, folder / "corpus" / "tokenizer")
            validation = load_corpus(parse_config(words(settings))).validation
            batch = validation.arrays(list(range(len(validation))))

            def theirs() -> dict:
                seconds = seconds_of(peer.command(), peer.path, **peer.env)
                nats = peer.nats(batch["input_ids"], batch["labels"])
                bits = nats / math.log(2) / validation.num_bytes
                return {"seconds": seconds, "val/bits_per_byte": bits, "tokens": shape.tokens}

            cases["nanochat"] = theirs
        sizes = f"{shape.layers} x {shape.width}, context {shape.context}, vocabulary {shape.vocab_size:,}"
        yield Group(f"{sizes}, batch {shape.batch}", cases, "nanochat")


def our_settings(shape: Shape, folder: Path) -> dict:
    """Those of configs/shakespeare_cpu.yaml in another size, on rows that begin with a document."""
    model = {"n_layers": shape.layers, "n_heads": shape.heads, "d_model": shape.width, "d_ff": 4 * shape.width}
    model |= {"max_position_embeddings": shape.context, "rope_theta": 10_000.0}
    return {
        **{"config": "configs/shakespeare_cpu.yaml", "out_dir": folder, "steps": shape.steps, "seq_len": shape.context},
        **{"micro_batch_size": shape.batch, "global_batch_size": shape.batch, "schedule.warmup_steps": 0},
        **{f"model.{name}": value for name, value in model.items()},
        **{"data.path": folder / "corpus", "data.packing": "padded", "schedule.decay_steps": 3 * shape.steps // 4},
        **{"evaluation.num_logged_generations": 0, "tracking.wandb": "disabled"},
    }


def seconds_of(command: list[str], cwd: Path = ROOT, **env: str) -> float:
    """How long a command takes to its end, by the clock."""
    with Program(command, cwd, **env) as program:
        for _ in program.lines():
            pass
        return time.perf_counter() - program.start
