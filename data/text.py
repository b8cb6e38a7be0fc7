"""Prepared corpora (data/prepare/prepare.py) as samples: memory-mapped, nothing is read before it is asked for."""

import os.path
from bisect import bisect_right
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset

from config.errors import ConfigError
from data.integrity import REMEDY, open_columns, read_metadata
from data.tokenizer import load_tokenizer, token_bytes


class TextCorpus:
    """A completed corpus of data.prepare: `tokenizer`, `vocab_size`, `end_of_text` token and `metadata`.

    Raises:
        ConfigError: there is no such corpus, a file of it is damaged, or its tokenizer is another one now.
    """

    def __init__(self, path: str):
        self.path = Path(os.path.expanduser(path))
        self.metadata = read_metadata(self.path)
        self.tokenizer, facts = load_tokenizer(self.path / "tokenizer")
        if different := [name for name in facts if facts[name] != self.metadata["tokenizer"].get(name)]:
            problem = f"its tokenizer is not the one that it was made with ({different[0]})"
            raise ConfigError(f"data: {path!r}: {problem}; {REMEDY}")
        self.vocab_size, self.end_of_text = facts["vocab_size"], facts["end_of_text"]
        self.has_conversations = "conversations" in self.metadata


class TextDataset(Dataset):
    """A split of a corpus in rows of `seq_len` tokens; a subclass defines what a row is.

    Args:
        num_samples: Use that many rows, evenly spread; None, or more than there are, means all.

    Raises:
        ConfigError: The split is too short for one row, or damaged.
    """

    conversations: str | None = None
    """Description of how conversations became rows, printed at the start of a run; None for text."""

    def __init__(self, corpus: TextCorpus, split: str, seq_len: int, num_samples: int | None = None):
        self.corpus, self.split, self.seq_len = corpus, split, seq_len
        files = [corpus.path / file for file in corpus.metadata["files"] if file.startswith(split)]
        columns = [open_columns(file) for file in files]
        # Views of the files: the tokens and, of conversations, the masks of answers.
        self.values = [[np.from_dlpack(column.values) for column in file] for file in columns]
        self.first_tokens = [0, *accumulate(len(tokens) for tokens, *_ in self.values)]
        if self.first_tokens[-1] != corpus.metadata[split]["tokens"]:
            raise ConfigError(f"data: {corpus.path} is damaged: tokens of {split} are missing; {REMEDY}")
        self.num_rows = self._find_rows([np.from_dlpack(tokens.offsets) for tokens, *_ in columns])
        self.num_samples = min(num_samples or self.num_rows, self.num_rows)
        if self.num_rows < 1:
            problem = f"data: the {split} split of {corpus.path}, of {self.first_tokens[-1]} tokens, has not one row"
            raise ConfigError(f"{problem} of seq_len {seq_len}; use more text, or for one file --validation tail:0.1")

    def _find_rows(self, offsets: list[np.ndarray]) -> int:
        """Find the rows and return their number; `offsets` of the documents in each file, int32."""
        raise NotImplementedError

    def _load_rows(self, rows: list[int]) -> dict[str, np.ndarray]:
        """Load rows by their indices among `num_rows`, each array int64 [B, T]."""
        raise NotImplementedError

    def __reduce__(self):
        # A worker that is not forked opens the files itself, instead of receiving their content.
        return type(self), (self.corpus, self.split, self.seq_len, self.num_samples)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Load a sample, tensors int64 [T]; the labels are not shifted."""
        return {name: torch.from_numpy(rows[0]) for name, rows in self.arrays([index]).items()}

    def arrays(self, indices: list[int]) -> dict[str, np.ndarray]:
        """Load the samples of a batch, each array int64 [B, T]."""
        batch = self._load_rows([index * self.num_rows // self.num_samples for index in indices])
        # The files may not be verified yet, and a token beyond the model's table would read other memory.
        if (largest := batch["input_ids"].max(initial=0)) >= self.corpus.vocab_size:
            problem = f"token {largest} in {self.split} exceeds the {self.corpus.vocab_size} of the tokenizer"
            raise ConfigError(f"data: {self.corpus.path} is damaged: {problem}; {REMEDY}")
        return batch

    def _copy(self, first: int, out: np.ndarray, column: int = 0) -> np.ndarray:
        """Fill `out` with the stream from token `first` on, across files, as far as it goes; return it."""
        file, rest = bisect_right(self.first_tokens, first) - 1, out
        while len(rest) and file < len(self.values):
            values = self.values[file][column][first - self.first_tokens[file] :][: len(rest)]
            rest[: len(values)] = values
            first, rest, file = first + len(values), rest[len(values) :], file + 1
        return out

    @cached_property
    def num_bytes(self) -> float:
        """UTF-8 bytes of the text that the targets of all samples stand for; an end-of-text token stands for none.

        Exact for byte-level tokenizers. For others it is estimated from the mean of the split.
        """
        counts, of_token = self.corpus.metadata[self.split], token_bytes(self.corpus.tokenizer, self.corpus.end_of_text)
        num_bytes = np.full(self.corpus.vocab_size, counts["bytes"] / counts["tokens"])
        if of_token is not None:
            num_bytes[[*of_token]] = [*map(len, of_token.values())]
        targets = (self.arrays([index])["labels"][:, 1:] for index in range(len(self)))
        return float(sum(num_bytes[ids[ids != -100]].sum() for ids in targets))


class ConcatenatedText(TextDataset):
    """Windows of the token stream (packing: concat).

    Window i begins at token i * (seq_len - 1), so every token but the first is a target once. Tokens at the end that
    fill no window are not used.
    """

    def _find_rows(self, offsets: list[np.ndarray]) -> int:
        return (self.first_tokens[-1] - 1) // (self.seq_len - 1)

    def _load_rows(self, rows: list[int]) -> dict[str, np.ndarray]:
        input_ids = np.empty((len(rows), self.seq_len), int)
        for row, out in zip(rows, input_ids, strict=True):
            self._copy(row * (self.seq_len - 1), out)
        return {"input_ids": input_ids, "labels": input_ids}


class IsolatedText(ConcatenatedText):
    """The same windows, with `position_ids` that restart at each document (packing: isolated)."""

    def _load_rows(self, rows: list[int]) -> dict[str, np.ndarray]:
        batch = super()._load_rows(rows)
        positions = np.arange(self.seq_len)
        begins = np.where(batch["input_ids"] == self.corpus.end_of_text, positions, 0)
        return batch | {"position_ids": positions - np.maximum.accumulate(begins, axis=1)}


class PaddedDocuments(TextDataset):
    """One document a row, cut off at seq_len or padded to it (packing: padded).

    A document of text (or a piece of one of more than a million characters) is between two end-of-text tokens. Labels
    are -100 at the padding and, of conversations, outside answers; conversations without an answer are left out. The
    padding is on the right, so causal attention needs no attention mask.
    """

    def _find_rows(self, offsets: list[np.ndarray]) -> int:
        firsts = np.array(self.first_tokens[:-1])  # int64, and so are its sums with the offsets
        of_files = [first + of_file[:-1] for first, of_file in zip(firsts, offsets, strict=True)]
        self.begins = np.concatenate([*of_files, self.first_tokens[-1:]])
        lengths = np.diff(self.begins)
        if (lengths < 0).any():
            raise ConfigError(f"data: {self.corpus.path} is damaged: the documents of {self.split}; {REMEDY}")
        self.rows, self.after = self._pack(lengths)
        if self.corpus.has_conversations:
            cut = self.rows[lengths[self.rows] > self.seq_len]
            has_answer = [self._copy(int(self.begins[i]), np.zeros(self.seq_len), column=1).any() for i in cut]
            lost = cut[~np.array(has_answer, bool)]
            self.rows = np.setdiff1d(self.rows, lost)
            counts = "{:,} in {:,} rows; {:,} cut off at seq_len, {:,} of them left out; targets are the answers alone"
            self.conversations = counts.format(*map(len, (lengths, self.rows, cut, lost)))
        return len(self.rows)

    def _pack(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first document of each row, and for each document i where the row after one from i would begin.

        A function of the lengths and of seq_len alone.
        """
        return np.arange(len(lengths)), np.arange(1, len(lengths) + 1)

    def _load_rows(self, rows: list[int]) -> dict[str, np.ndarray]:
        input_ids = np.full((len(rows), self.seq_len), self.corpus.end_of_text)
        is_target = np.zeros_like(input_ids)
        for b, row in enumerate(rows):
            begins = self._boundaries(row)
            first, end = int(self.begins[self.rows[row]]), begins[-1]
            self._copy(first, input_ids[b, :end])
            if self.corpus.has_conversations:
                self._copy(first, is_target[b, :end], column=1)
            else:
                is_target[b, :end] = 1
        return {"input_ids": input_ids, "labels": np.where(is_target, input_ids, -100)}

    def _boundaries(self, row: int) -> np.ndarray:
        """Return where the documents of a row begin in it, and last where its tokens end."""
        first = self.rows[row]
        begins = self.begins[first : self.after[first] + 1] - self.begins[first]
        # A row of text ends with the end-of-text token that the next document begins with.
        begins[-1] = min(begins[-1] + (not self.corpus.has_conversations), self.seq_len)
        return begins


class PackedConversations(PaddedDocuments):
    """As many whole conversations a row as fit, in their order, or one that is cut off (packing: isolated).

    `position_ids` restart at each conversation.
    """

    def _pack(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        fitting = np.searchsorted(self.begins, self.begins[:-1] + self.seq_len, side="right") - 1
        after, rows = np.maximum(np.arange(1, len(self.begins)), fitting), [0]
        while rows[-1] < len(lengths):
            rows.append(int(after[rows[-1]]))
        return np.array(rows[:-1], int), after

    def _load_rows(self, rows: list[int]) -> dict[str, np.ndarray]:
        batch = super()._load_rows(rows)
        begins = np.zeros_like(batch["input_ids"])
        for b, row in enumerate(rows):
            inner = self._boundaries(row)[:-1]
            begins[b, inner] = inner
        return batch | {"position_ids": np.arange(self.seq_len) - np.maximum.accumulate(begins, axis=1)}


def open_dataset(
    corpus: TextCorpus, split: str, seq_len: int, packing: str, num_samples: int | None = None
) -> TextDataset:
    """Open a split of a corpus with the rows that `data.packing` names.

    Raises:
        ConfigError: The split is too short for one row, or damaged.
    """
    kinds = {"concat": ConcatenatedText, "isolated": IsolatedText, "padded": PaddedDocuments}
    kind = PackedConversations if corpus.has_conversations and packing != "padded" else kinds[packing]
    return kind(corpus, split, seq_len, num_samples)


class MixedDataset(ConcatDataset):
    """The samples of several corpora, one after another."""

    def __init__(self, datasets: list[TextDataset]):
        super().__init__(datasets)
        self.text_datasets = datasets

    @property
    def num_bytes(self) -> float:
        """UTF-8 bytes that the targets of all samples stand for."""
        return sum(dataset.num_bytes for dataset in self.text_datasets)
