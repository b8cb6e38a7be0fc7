"""Generation on the CPU, against transformers' `generate` on the same model, exported.

Both write greedily from prompts of 32 tokens, and must write the same tokens. A step of a small model is mostly what a
framework does around its products, so two sizes are measured, one text at a time and 16 together.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.measure import Group
from hub import FAMILIES, to_transformers
from model.config import GPTConfig
from model.gpt import GPTModel
from training.compute import prepare_cpu

PROMPT = 32


def case(write: Callable[[], Tensor], expected: Tensor) -> dict[str, float]:
    start = time.perf_counter()
    written = write()
    seconds = time.perf_counter() - start
    if not torch.equal(written, expected):
        raise RuntimeError("other tokens than transformers writes")
    return {"tokens_per_second": (expected.numel() - len(expected) * PROMPT) / seconds}


def generation(options: Namespace) -> Iterator[Group]:
    """Tokens a second of GPTModel.generate and of transformers, for both families."""
    prepare_cpu()
    sizes = [(1, 32, 2, 4)] if options.quick else [(2, 128, 4, 96), (6, 384, 6, 64)]
    for family, settings in FAMILIES.items():
        for layers, width, heads, length in sizes:
            shape = {"n_layers": layers, "d_model": width, "n_heads": heads, "d_ff": 4 * width, "vocab_size": 8192}
            torch.manual_seed(0)
            ours = GPTModel(GPTConfig(**shape, **settings, max_position_embeddings=256, dropout=0.0)).eval()
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
