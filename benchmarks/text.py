"""data.prepare against the bare `tokenizers` batch encode, on the same cores, and what the loader gives; needs --text.

The text is repeated to 100 MB and cut into documents. Besides the clock, processor time of all processes is compared,
which other work on the machine changes less.
"""

import json
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from benchmarks.measure import Group
from data.corpus import Batches
from data.order import GlobalBatches, StepSampler
from data.prepare import PrepareConfig, prepare
from data.text import TextCorpus, TextDataset
from data.tokenizer import load_tokenizer, save_tokenizer
from training.compute import available_cores

DOCUMENT = 4000  # characters


def text(options: Namespace) -> Iterator[Group]:
    characters, content = 10**6 if options.quick else 10**8, options.text.read_text()
    content *= characters // len(content) + 1
    documents = [content[i : i + DOCUMENT] for i in range(0, characters, DOCUMENT)]
    with tempfile.TemporaryDirectory() as directory:
        folder, numbers = Path(directory), count()
        source, tokenizer_folder = folder / "texts.jsonl", folder / "tokenizer"
        source.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
        save_tokenizer("train:8192", tokenizer_folder, [content[: 10**6]])
        tokenizer, _ = load_tokenizer(tokenizer_folder)

        def bare_encode() -> dict:
            for first in range(0, len(documents), 1000):
                tokenizer.encode_batch(documents[first : first + 1000], add_special_tokens=False)
            return {"documents": len(documents)}

        def prepared() -> dict:
            out = str(folder / f"out{next(numbers)}")
            config = PrepareConfig(str(source), str(tokenizer_folder), out, num_workers=available_cores())
            metadata = prepare(config)
            return {"tokens": metadata["train"]["tokens"] + metadata["validation"]["tokens"]}

        yield Group("encoding", {"bare encode": bare_encode, "data.prepare": prepared}, "bare encode")

        def loaded(seq_len: int) -> dict[str, float]:
            start = time.perf_counter()
            dataset = TextDataset(TextCorpus(str(folder / "out0")), "train", seq_len, "concat")
            opened = time.perf_counter()
            sampler = StepSampler(GlobalBatches(len(dataset), 16384 // seq_len, seed=0), 0, 3000, 0, 1)
            batches = DataLoader(Batches(dataset), batch_size=None, sampler=sampler)
            tokens = sum(batch["input_ids"].numel() for batch in batches)
            return {"open_seconds": opened - start, "tokens_per_second": tokens / (time.perf_counter() - opened)}

        torch.set_num_threads(1)
        sizes = (16,) if options.quick else (1024, 256)
        yield Group("loading, one core", {f"seq_len {seq_len}": partial(loaded, seq_len) for seq_len in sizes})
