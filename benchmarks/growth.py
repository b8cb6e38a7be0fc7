"""What a token of training costs as things grow; benchmarks/pictures.py draws it beside what theory says it costs.

Context, width, depth, vocabulary: a training step of one process, on as many threads as there are cores. Theory is
GPTModel.flops_per_token, at the speed of one of the points.
Corpus: the order of the data and the windows it asks for, of corpora of holes instead of tokens. Theory is a constant.
Processes: train.py under a launcher, one thread a process. Theory is that the work is shared among the cores.
"""

import io
import json
import os
import resource
import tempfile
import time
import tracemalloc
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.measure import Case, Group, Program, launch, words
from benchmarks.programs import QUIET, RANDOM, bare_loop, model
from data.order import GlobalBatches
from data.text import TextCorpus, TextDataset
from data.tokenizer import load_tokenizer, save_tokenizer
from training.compute import available_cores

BASE = RANDOM | model(n_layers=2, n_heads=4, d_model=256, d_ff=688, vocab_size=512)
BASE |= {"model.position": "rope", "model.norm": "rmsnorm", "model.mlp": "swiglu", "model.qk_norm": True}
BASE |= {"model.bias": False, "model.max_position_embeddings": 4096, "seq_len": 256}
CORPUS_BATCH, CORPUS_SEQ_LEN = 64, 1025
PART = 10**8  # tokens of a file: 10,000 files at most, because a process may map no more than 65,530 on Linux


def width(size: int) -> dict:
    """Heads stay 64 wide."""
    return BASE | model(d_model=size, n_heads=size // 64, d_ff=8 * -(-size // 3))


AXES: dict[str, tuple[int, list[int], Callable[[int], dict]]] = {  # tokens of a step, points, settings at a point
    "context": (4096, [2**n for n in range(7, 13)], lambda n: BASE | {"seq_len": n}),
    "width": (2048, [2**n for n in range(6, 11)], width),
    "depth": (2048, [1, 2, 4, 8, 16], lambda n: BASE | {"model.n_layers": n}),
    "vocabulary": (1024, [2**n for n in (8, 10, 12, 14, 15, 16, 17)], lambda n: width(128) | {"model.vocab_size": n}),
}


def axis_case(settings: dict, tokens: int) -> dict:
    batch = {"micro_batch_size": tokens // settings["seq_len"], "steps": 6, "tracking.log_every": 1}
    figures = bare_loop(settings | batch)
    return {"microseconds_per_token": 1e6 / figures.pop("tokens_per_second"), "tokens_a_step": tokens, **figures}


class SparseFile(io.FileIO):
    """A file in which what is long is a hole: it must have been zeros."""

    def write(self, content: bytes) -> int:
        if len(content) < 2**20:
            return super().write(content)
        self.seek(len(content), os.SEEK_CUR)
        return len(content)


def sparse_corpus(folder: Path, tokens: int, part: int, tokenizer: Path) -> TextCorpus:
    """A corpus of `tokens` zeros in files of `part` tokens, all of which are one file full of holes."""
    zeros = np.zeros(part, np.uint16)  # which takes no memory until it is read
    column = pa.ListArray.from_arrays(np.array([0, part], np.int32), pa.array(zeros))
    batch = pa.record_batch({"input_ids": column})
    (folder / "train").mkdir(parents=True)
    names = [f"train/{index:06d}.arrow" for index in range(tokens // part)]
    with SparseFile(folder / names[0], "w") as sparse:
        with pa.ipc.new_stream(pa.PythonFile(sparse, mode="w"), batch.schema) as writer:
            writer.write_batch(batch)
    for name in names[1:]:
        (folder / name).hardlink_to(folder / names[0])
    (folder / "tokenizer").symlink_to(tokenizer)
    size, facts = (folder / names[0]).stat().st_size, load_tokenizer(tokenizer)[1]
    counts = {"train": {"tokens": len(names) * part, "bytes": 0}, "validation": {"tokens": 0, "bytes": 0}}
    metadata = {"tokenizer": facts, **counts, "hash": "", "files": dict.fromkeys(names, size)}
    (folder / "metadata.json").write_text(json.dumps(metadata))
    return TextCorpus(str(folder))


def traced_kib(work: Callable[[], object]) -> float:
    """The highest that Python's, numpy's and Arrow's memory rises while `work` is done."""
    arrow = pa.total_allocated_bytes()
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return (peak + pa.total_allocated_bytes() - arrow) / 1024


def page_faults() -> int:
    """How often so far the system had to find the memory behind an address that this process had not used before."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def corpus_case(folder: Path, tokens: int, part: int, batches: int) -> Case:
    """The order and the windows that it asks for; later calls ask for later batches."""
    corpus = sparse_corpus(folder / str(tokens), tokens, part, folder / "tokenizer")
    Path(folder, str(tokens), "train", "000000.arrow").read_bytes()  # so that it lies in memory: no disk is measured
    dataset = TextDataset(corpus, "train", CORPUS_SEQ_LEN, "concat")
    order, numbers = GlobalBatches(len(dataset), CORPUS_BATCH, seed=0), count()

    def case() -> dict[str, float]:
        start = time.perf_counter()
        wanted = [order.indices(next(numbers)) for _ in range(batches)]
        ordered, faults = time.perf_counter(), page_faults()
        for indices in wanted:
            dataset.batch(indices)
        windows = time.perf_counter() - ordered
        nanoseconds = 1e9 / (batches * CORPUS_BATCH * CORPUS_SEQ_LEN)
        return {
            "order_nanoseconds_per_token": (ordered - start) * nanoseconds,
            "windows_nanoseconds_per_token": windows * nanoseconds,
            "page_faults_per_window": (page_faults() - faults) / (batches * CORPUS_BATCH),
            "order_peak_kib": traced_kib(lambda: order.indices(0)),
            "open_corpus_peak_kib": traced_kib(lambda: TextDataset(corpus, "train", CORPUS_SEQ_LEN, "concat")[0]),
        }

    return case


def processes_case(processes: int, every: int, intervals: int) -> dict:
    """A run that is stopped after `intervals` log lines, each `every` steps: by the clock and in processor time."""
    settings = RANDOM | QUIET | model(n_layers=2, d_model=256, d_ff=688, vocab_size=512) | {"seq_len": 128}
    settings |= {"steps": 10**6, "global_batch_size": 16, "micro_batch_size": 2, "tracking.log_every": every}
    with tempfile.TemporaryDirectory() as folder:
        command = launch(processes, "train.py") + words(settings | {"out_dir": folder})
        with Program(command, OMP_NUM_THREADS="1") as program:
            readings = [program.wait_for(f"[step {line * every} /") for line in range(1, intervals + 2)]
    clock, processors = 1e6 * np.median(np.diff(readings, axis=0), axis=0) / (every * 16 * 128)
    measured = {"microseconds_per_token": float(clock), "cpu_microseconds_per_token": float(processors)}
    return measured | {"cores": available_cores()}


def growth(options: Namespace) -> Iterator[Group]:
    for name, (tokens, points, at) in AXES.items():
        points, tokens = (points[:2], 256) if options.quick else (points, tokens)
        yield Group(name, {str(point): partial(axis_case, at(point), tokens) for point in points})
    sizes, part, batches = [10**n for n in range(6, 13)], PART, 15
    if options.quick:
        sizes, part, batches = sizes[:2], 10**6, 1
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer("byte", Path(folder, "tokenizer"), ())
        yield Group("corpus", {str(size): corpus_case(Path(folder), size, min(size, part), batches) for size in sizes})
    counts, work = ((1, 2), (1, 1)) if options.quick else ((1, 2, 4, 8), (4, 4))
    yield Group("processes", {str(count): partial(processes_case, count, *work) for count in counts})
