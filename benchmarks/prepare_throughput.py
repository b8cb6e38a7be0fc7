"""data.prepare against the bare `tokenizers` batch encode, in one run on the same cores, and what the loader gives.

python -m benchmarks.prepare_throughput TEXT [MEGABYTES] writes benchmarks/results/text.json. The text is repeated to
the size asked for. Both are done in turns, on all cores, and medians are compared: by the clock, and by the processor
time of all processes, which other work on the machine changes less.
"""

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from benchmarks import record
from data.order import GlobalBatches, StepSampler
from data.prepare import PrepareConfig, prepare
from data.text import TextCorpus, TextDataset
from data.tokenizer import load_tokenizer, save_tokenizer

DOCUMENT = 4000  # characters


def clocks() -> tuple[float, float]:
    """Seconds that have passed, and that processors have worked for this process and its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    text, megabytes = Path(sys.argv[1]).read_text(), int(sys.argv[2]) if len(sys.argv) > 2 else 60
    cores = len(os.sched_getaffinity(0))
    text = text * (megabytes * 10**6 // len(text) + 1)
    documents = [text[i : i + DOCUMENT] for i in range(0, megabytes * 10**6, DOCUMENT)]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "texts.jsonl").write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
        save_tokenizer("train:8192", folder / "tokenizer", [text[: 10**6]])
        tokenizer, _ = load_tokenizer(folder / "tokenizer")
        bare, ours = [], []
        for i in range(3):
            started = clocks()
            for first in range(0, len(documents), 1000):
                tokenizer.encode_batch(documents[first : first + 1000], add_special_tokens=False)
            bare.append([now - then for now, then in zip(clocks(), started, strict=True)])
            started = clocks()
            config = PrepareConfig(
                str(folder / "texts.jsonl"), str(folder / "tokenizer"), str(folder / f"out{i}"), num_workers=cores
            )
            metadata = prepare(config)
            ours.append([now - then for now, then in zip(clocks(), started, strict=True)])
        corpus = TextCorpus(str(folder / "out0"))
        opened = time.perf_counter()
        dataset = TextDataset(corpus, "train", 1024, "concat")
        opened = time.perf_counter() - opened
        torch.set_num_threads(1)
        loader = {}
        for seq_len in (1024, 256):
            dataset = TextDataset(corpus, "train", seq_len, "concat")
            sampler = StepSampler(GlobalBatches(len(dataset), 16384 // seq_len, seed=0), 0, 3000, 0, 1)
            started = time.perf_counter()
            tokens = sum(batch["input_ids"].numel() for batch in DataLoader(dataset, batch_sampler=sampler))
            loader[f"seq_len {seq_len}, one core"] = tokens / (time.perf_counter() - started)
    record.save(
        "text",
        {
            "cores": cores,
            "documents": len(documents),
            "tokens": metadata["train"]["tokens"] + metadata["validation"]["tokens"],
            "bare_encode_seconds_and_processor_seconds": bare,
            "prepare_seconds_and_processor_seconds": ours,
            "prepare_over_bare": statistics.median(s for s, _ in bare) / statistics.median(s for s, _ in ours),
            "prepare_over_bare_by_processor_time": statistics.median(s for _, s in bare)
            / statistics.median(s for _, s in ours),
            "loader_tokens_per_second": loader,
            "open_seconds": opened,
        },
    )


if __name__ == "__main__":
    main()
