"""Prepared corpora (data/prepare.py) as samples: memory-mapped, nothing is read before it is asked for."""

import json
import os.path
from bisect import bisect_right
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset

from config import ConfigError
from data.integrity import REMEDY, open_tokens, read_metadata
from data.tokenizer import load_tokenizer


class TextCorpus:
    """A corpus that data.prepare has completed: its `tokenizer`, `vocab_size`, `end_of_text` token and `metadata`.

    Raises:
        ConfigError: there is no such corpus, a file of it is damaged, or its tokenizer is another one now.
    """

    def __init__(self, path: str):
        self.path = Path(os.path.expanduser(path))
        self.metadata = read_metadata(self.path)
        self.tokenizer, facts = load_tokenizer(self.path / "tokenizer")
        if different := [name for name in facts if facts[name] != self.metadata["tokenizer"].get(name)]:
            raise ConfigError(
                f"data: {path!r}: another tokenizer lies in it than it was made with ({different[0]}); {REMEDY}"
            )
        self.vocab_size, self.end_of_text = facts["vocab_size"], facts["end_of_text"]


class TextDataset(Dataset):
    """A split of a corpus in rows of `seq_len` tokens.

    `documents` says what a row is:
    concat: window i of the stream of tokens, which begins at token i * (seq_len - 1), so that every token but the first
        is a target once. What is left at the end and fills no window is not used.
    isolated: the same, with `position_ids` that begin again at every document.
    padded: row i of the Arrow files, a document (or a piece of one of more than a million characters) between two
        end-of-text tokens, cut off at seq_len or padded to it: there `attention_mask` is 0 and the label -100.

    Args:
        num_samples: use so many rows, evenly spread; None or more than there are: all.

    Raises:
        ConfigError: there is not one row.
    """

    def __init__(self, corpus: TextCorpus, split: str, seq_len: int, documents: str, num_samples: int | None = None):
        self.corpus, self.split, self.seq_len, self.documents = corpus, split, seq_len, documents
        files = [corpus.path / file for file in corpus.metadata["files"] if file.startswith(split)]
        columns = [open_tokens(file) for file in files]
        self.tokens = [column.values.to_numpy() for column in columns]  # views of the files, as are the offsets
        self.offsets = [column.offsets.to_numpy() for column in columns]
        self.first_tokens = [0, *accumulate(map(len, self.tokens))]
        self.first_rows = [0, *accumulate(map(len, columns))]
        if self.first_tokens[-1] != corpus.metadata[split]["tokens"]:
            raise ConfigError(f"data: {corpus.path} is damaged: not all tokens of {split} are there; {REMEDY}")
        self.num_rows = self.first_rows[-1] if documents == "padded" else (self.first_tokens[-1] - 1) // (seq_len - 1)
        self.num_samples = min(num_samples or self.num_rows, self.num_rows)
        if self.num_rows < 1:
            problem = f"data: the {split} split of {corpus.path} has {self.first_tokens[-1]} tokens, less than a window"
            raise ConfigError(f"{problem} of seq_len {seq_len}; use more text, or for one file --validation tail:0.1")

    def __reduce__(self):
        # Loader processes that are not forked open the files themselves, instead of being sent what is in them.
        return TextDataset, (self.corpus, self.split, self.seq_len, self.documents, self.num_samples)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """`input_ids` and `labels`, and what `documents` adds, each int64 [T]; the labels are not shifted."""
        return {name: torch.from_numpy(rows[0]) for name, rows in self.batch([index]).items()}

    def batch(self, indices: list[int]) -> dict[str, np.ndarray]:
        """The samples of a batch, each array int64 [B, T]."""
        input_ids = np.full((len(indices), self.seq_len), self.corpus.end_of_text)
        in_document = np.zeros_like(input_ids)
        for out, mask, index in zip(input_ids, in_document, indices, strict=True):
            first, length = self._place(index * self.num_rows // self.num_samples)
            self._copy(first, out[:length])
            mask[:length] = 1
        # Its files are verified in the background, while they are read here; a lookup outside a table must not happen.
        if (largest := input_ids.max(initial=0)) >= self.corpus.vocab_size:
            problem = f"token {largest} in {self.split} is none of the {self.corpus.vocab_size} of the tokenizer"
            raise ConfigError(f"data: {self.corpus.path} is damaged: {problem}; {REMEDY}")
        if self.documents == "padded":
            labels = np.where(in_document, input_ids, -100)
            return {"input_ids": input_ids, "labels": labels, "attention_mask": in_document}
        batch = {"input_ids": input_ids, "labels": input_ids}
        if self.documents == "isolated":
            positions = np.arange(self.seq_len)
            begins = np.where(input_ids == self.corpus.end_of_text, positions, 0)
            batch["position_ids"] = positions - np.maximum.accumulate(begins, axis=1)
        return batch

    def _place(self, row: int) -> tuple[int, int]:
        """The first token of a row, and how many it has."""
        if self.documents != "padded":
            return row * (self.seq_len - 1), self.seq_len
        file = bisect_right(self.first_rows, row) - 1
        begin, end = self.offsets[file][row - self.first_rows[file] :][:2].tolist()
        if not 0 <= begin <= end <= len(self.tokens[file]):
            raise ConfigError(f"data: {self.corpus.path} is damaged: row {row} of {self.split}; {REMEDY}")
        # With the end-of-text that the next one begins with.
        return self.first_tokens[file] + begin, min(end - begin + 1, self.seq_len)

    def _copy(self, first: int, out: np.ndarray) -> None:
        """Fill `out` with the stream from token `first` on: of one file, or of several, as far as it goes."""
        file = bisect_right(self.first_tokens, first) - 1
        while len(out) and file < len(self.tokens):
            tokens = self.tokens[file][first - self.first_tokens[file] :][: len(out)]
            out[: len(tokens)] = tokens
            first, out, file = first + len(tokens), out[len(tokens) :], file + 1

    @cached_property
    def num_bytes(self) -> float:
        """The UTF-8 bytes of the text that the targets of all samples stand for; an end-of-text token stands for none.

        Exact for byte-level tokenizers, whose tokens are written with one character a byte. Of others only the mean of
        the split is known.
        """
        tokenizer, counts = self.corpus.tokenizer, self.corpus.metadata[self.split]
        token_bytes = np.full(self.corpus.vocab_size, counts["bytes"] / counts["tokens"])
        if (json.loads(tokenizer.to_str())["decoder"] or {}).get("type") == "ByteLevel":
            added = tokenizer.get_added_tokens_decoder()  # written as they are, not with a character a byte
            for token, index in tokenizer.get_vocab().items():
                token_bytes[index] = len(token.encode() if index in added else token)
            token_bytes[self.corpus.end_of_text] = 0
        targets = (self.batch([index])["labels"][:, 1:] for index in range(len(self)))
        return float(sum(token_bytes[ids[ids != -100]].sum() for ids in targets))


class MixedDataset(ConcatDataset):
    """The samples of several corpora, one after another."""

    @property
    def num_bytes(self) -> float:
        """Of the targets of all samples."""
        return sum(dataset.num_bytes for dataset in self.datasets)
