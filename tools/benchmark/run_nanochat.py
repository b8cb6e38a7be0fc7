"""Run base_train.py in a checkout of nanochat, with the tokenizer of a corpus: run_nanochat.py CORPUS ARGUMENT...

nanochat's own tokenizer needs packages that this repository does not have. With the corpus's tokenizer in its place,
both programs train on the same tokens.
"""

import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import torch

sys.path[0] = str(Path(__file__).parents[2])  # this repository, for the script runs in nanochat's folder

from data.text import TextCorpus  # noqa: E402
from data.tokenizer import token_bytes  # noqa: E402
from runtime.config.errors import ConfigError  # noqa: E402


class CorpusTokenizer:
    """The methods of nanochat's tokenizer that base_train.py calls."""

    def __init__(self, corpus: TextCorpus):
        self.corpus = corpus

    def get_vocab_size(self) -> int:
        return self.corpus.vocab_size

    def get_bos_token_id(self) -> int:
        return self.corpus.end_of_text

    def encode(self, texts: list[str], prepend: int, num_threads: int) -> list[list[int]]:
        encodings = self.corpus.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [[prepend, *encoding.ids] for encoding in encodings]

    def token_lengths(self, device: Any = "cpu") -> torch.Tensor:
        """Return the number of bytes of each token, int32 [V]; 0 for special tokens, which nanochat does not count."""
        contents = token_bytes(self.corpus.tokenizer, self.corpus.end_of_text)
        if contents is None:
            raise ConfigError(
                f"data: {self.corpus.path}: the bytes of its tokens are unknown; use --tokenizer train:4096"
            )
        lengths = [len(contents.get(index, b"")) for index in range(self.corpus.vocab_size)]
        return torch.tensor(lengths, dtype=torch.int32, device=device)


def main() -> None:
    _, corpus, *arguments = sys.argv
    tokenizer = CorpusTokenizer(TextCorpus(corpus))
    replacement: Any = types.ModuleType("nanochat.tokenizer")
    replacement.get_tokenizer, replacement.get_token_bytes = lambda: tokenizer, tokenizer.token_lengths
    replacement.HuggingFaceTokenizer = CorpusTokenizer  # scripts/base_eval.py imports the name
    sys.modules["nanochat.tokenizer"] = replacement
    sys.argv = ["base_train", *arguments]
    sys.path.insert(0, os.getcwd())
    runpy.run_module("scripts.base_train", run_name="__main__")


if __name__ == "__main__":
    main()
