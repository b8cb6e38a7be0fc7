"""What is measured of parts, in this process."""

import json
import tempfile
import time
import tracemalloc
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.measure import Group
from data.corpus import Batches
from data.prepare.prepare import PrepareConfig, prepare
from data.sampler import GlobalBatches, StepSampler
from data.text import TextCorpus, TextDataset
from data.tokenizer import load_tokenizer, save_tokenizer
from distributed.cpu import prepare_cpu
from model.config import GPTConfig
from model.gpt import GPTModel
from model.hf import FAMILIES, to_transformers

PROMPT, DOCUMENT = 32, 4000  # tokens, characters
CORPUS_BATCH, CORPUS_SEQ_LEN = 64, 1025
PART = 10**8  # tokens of a file: 10,000 files at most, because a process may map no more than 65,530 on Linux


def generation(options: Namespace) -> Iterator[Group]:
    """Tokens a second of GPTModel.generate, and of transformers on the same model, exported: greedily, and they must be
    the same tokens. A step of a small model is mostly what a framework does around its products, so there are two."""

    def case(write: Callable[[], Tensor], expected: Tensor) -> dict[str, float]:
        start = time.perf_counter()
        written = write()
        seconds = time.perf_counter() - start
        if not torch.equal(written, expected):
            raise RuntimeError("other tokens than transformers writes")
        return {"tokens_per_second": (expected.numel() - len(expected) * PROMPT) / seconds}

    prepare_cpu()
    for family, settings in FAMILIES.items():
        for layers, width, heads, length in [(1, 32, 2, 4)] if options.quick else [(2, 128, 4, 96), (6, 384, 6, 64)]:
            torch.manual_seed(0)
            shape = dict(vocab_size=8192, n_layers=layers, d_model=width, n_heads=heads, d_ff=4 * width)
            ours = GPTModel(GPTConfig(**shape, max_position_embeddings=256, dropout=0.0, **settings)).eval()
            theirs = to_transformers(ours)
            greedy = {"do_sample": False, "max_new_tokens": length, "min_new_tokens": length, "pad_token_id": 0}
            for batch in (1, 16):
                prompts = torch.randint(8192, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
                greedy["attention_mask"] = torch.ones_like(prompts)
                writers = {
                    "ours": partial(ours.generate, prompts, length, temperature=0),
                    "transformers": partial(theirs.generate, prompts, **greedy),
                }
                _, expected = [write() for write in writers.values()]  # to warm both
                cases = {name: partial(case, write, expected) for name, write in writers.items()}
                yield Group(f"{family}, {layers} x {width}, batch {batch}", cases, "transformers")


def text(options: Namespace) -> Iterator[Group]:
    """data.prepare against the bare `tokenizers` batch encode, on the same cores, of a text that is repeated to 100 MB
    and cut into documents; and what the loader gives."""
    characters, content = 10**6 if options.quick else 10**8, options.text.read_text()
    content *= characters // len(content) + 1
    documents = [content[i : i + DOCUMENT] for i in range(0, characters, DOCUMENT)]
    with tempfile.TemporaryDirectory() as directory:
        folder, numbers = Path(directory), count()
        source, tokenizer_folder = folder / "texts.jsonl", folder / "tokenizer"
        source.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
        save_tokenizer("train:8192", tokenizer_folder, [content[: 10**6]])
        tokenizer, _ = load_tokenizer(tokenizer_folder)

        def bare_encode() -> None:
            for first in range(0, len(documents), 1000):
                tokenizer.encode_batch(documents[first : first + 1000], add_special_tokens=False)

        def prepared() -> None:
            out = str(folder / f"out{next(numbers)}")
            prepare(PrepareConfig(str(source), str(tokenizer_folder), out, validation="hash:0.0"))

        yield Group("encoding", {"bare encode": bare_encode, "data.prepare": prepared}, "bare encode")

        def loaded(seq_len: int) -> dict[str, float]:
            start = time.perf_counter()
            dataset = TextDataset(TextCorpus(str(folder / "out0")), "train", seq_len, "concat")
            opened = time.perf_counter()
            sampler = StepSampler(GlobalBatches(len(dataset), 16384 // seq_len, seed=0), 0, 3000, 0, 1)
            tokens = sum(batch["input_ids"].numel() for batch in DataLoader(Batches(dataset), None, sampler=sampler))
            return {"open_seconds": opened - start, "tokens_per_second": tokens / (time.perf_counter() - opened)}

        torch.set_num_threads(1)
        sizes = (16,) if options.quick else (1024, 256)
        yield Group("loading, one core", {f"seq_len {seq_len}": partial(loaded, seq_len) for seq_len in sizes})


def corpus_of_zeros(folder: Path, tokens: int, part: int, tokenizer: Path) -> TextCorpus:
    """A corpus in files of `part` tokens, which are one file, written beside it once for all of this `part`."""
    if not (file := folder.with_name(f"{part}.arrow")).exists():
        offsets, zeros = np.array([0, part], np.int32), np.zeros(part, np.uint16)
        batch = pa.record_batch({"input_ids": pa.ListArray.from_arrays(offsets, pa.array(zeros))})
        with pa.ipc.new_stream(str(file), batch.schema) as writer:
            writer.write_batch(batch)
    (folder / "train").mkdir(parents=True)
    files = {f"train/{index:06d}.arrow": file.stat().st_size for index in range(tokens // part)}
    for name in files:
        (folder / name).hardlink_to(file)
    (folder / "tokenizer").symlink_to(tokenizer)
    counts = {"train": {"tokens": len(files) * part, "bytes": 0}, "validation": {"tokens": 0, "bytes": 0}}
    metadata = {"tokenizer": load_tokenizer(tokenizer)[1], **counts, "hash": "", "files": files}
    (folder / "metadata.json").write_text(json.dumps(metadata))
    return TextCorpus(str(folder))


def reading_a_corpus(options: Namespace) -> Iterator[Group]:
    """The order of the data, and the windows that it asks for, of corpora of 10^6 to 10^12 tokens."""
    sizes, part, batches = ([10**6, 10**7], 10**6, 1) if options.quick else ([10**n for n in range(6, 13)], PART, 15)
    windows = batches * CORPUS_BATCH

    def case(dataset: TextDataset, order: GlobalBatches, numbers: Iterator[int]) -> dict[str, float]:
        start = time.perf_counter()
        wanted = [order.indices(next(numbers)) for _ in range(batches)]
        ordered, faults = time.perf_counter(), getrusage(RUSAGE_SELF).ru_minflt
        for indices in wanted:
            dataset.arrays(indices)
        looked_up, faults = time.perf_counter(), getrusage(RUSAGE_SELF).ru_minflt - faults
        tracemalloc.start()
        order.indices(0)
        order_peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return {
            "order_nanoseconds_per_token": (ordered - start) * 1e9 / (windows * CORPUS_SEQ_LEN),
            "windows_nanoseconds_per_token": (looked_up - ordered) * 1e9 / (windows * CORPUS_SEQ_LEN),
            "page_faults_per_window": faults / windows,
            "order_peak_kib": order_peak_bytes / 1024,
        }

    with tempfile.TemporaryDirectory() as directory:
        folder, cases = Path(directory), {}
        save_tokenizer("byte", folder / "tokenizer", ())
        for size in sizes:
            corpus = corpus_of_zeros(folder / str(size), size, min(size, part), folder / "tokenizer")
            (folder / f"{min(size, part)}.arrow").read_bytes()  # so that it lies in memory: no disk is measured
            dataset = TextDataset(corpus, "train", CORPUS_SEQ_LEN, "concat")
            cases[str(size)] = partial(case, dataset, GlobalBatches(len(dataset), CORPUS_BATCH, seed=0), count())
        yield Group("corpus", cases)
