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
    """A corpus that data.prepare has completed: its `tokenizer`, `vocab_size`, `end_of_text` token and `metadata`, and
    whether it has conversations.

    Raises:
        ConfigError: there is no such corpus, a file of it is damaged, or its tokenizer is another one now.
    """

    def __init__(self, path: str):
        self.path = Path(os.path.expanduser(path))
        self.metadata = read_metadata(self.path)
        self.tokenizer, facts = load_tokenizer(self.path / "tokenizer")
        if different := [name for name in facts if facts[name] != self.metadata["tokenizer"].get(name)]:
            problem = f"another tokenizer lies in it than it was made with ({different[0]})"
            raise ConfigError(f"data: {path!r}: {problem}; {REMEDY}")
        self.vocab_size, self.end_of_text = facts["vocab_size"], facts["end_of_text"]
        self.has_conversations = "conversations" in self.metadata


class TextDataset(Dataset):
    """A split of a corpus in rows of `seq_len` tokens.

    `documents` says what a row is:
    concat: window i of the stream of tokens, which begins at token i * (seq_len - 1), so that every token but the first
        is a target once. What is left at the end and fills no window is not used.
    isolated: the same, with `position_ids` that begin again at every document.
    padded: row i of the Arrow files, a document (or a piece of one of more than a million characters) between two
        end-of-text tokens, cut off at seq_len or padded to it: there `attention_mask` is 0 and the label -100.

    Of conversations a row is as many whole ones as fit, in their order, or one that is cut off; padded: always one. The
    label is -100 outside answers, and a row without an answer is left out.

    Args:
        num_samples: use so many rows, evenly spread; None or more than there are: all.

    Raises:
        ConfigError: there is not one row.
    """

    conversations: str | None = None
    """Of conversations: what became of them."""
    rows: np.ndarray | None = None
    """The first document of each, where rows are made of whole documents."""

    def __init__(self, corpus: TextCorpus, split: str, seq_len: int, documents: str, num_samples: int | None = None):
        self.corpus, self.split, self.seq_len, self.documents = corpus, split, seq_len, documents
        files = [corpus.path / file for file in corpus.metadata["files"] if file.startswith(split)]
        columns = [open_columns(file) for file in files]
        # Views of the files: the tokens, and of conversations the masks of answers.
        self.values = [[np.from_dlpack(column.values) for column in file] for file in columns]
        self.first_tokens = [0, *accumulate(len(tokens) for tokens, *_ in self.values)]
        if self.first_tokens[-1] != corpus.metadata[split]["tokens"]:
            raise ConfigError(f"data: {corpus.path} is damaged: not all tokens of {split} are there; {REMEDY}")
        self.num_rows = (self.first_tokens[-1] - 1) // (seq_len - 1)
        if corpus.has_conversations or documents == "padded":
            self._find_rows([np.from_dlpack(tokens.offsets) for tokens, *_ in columns])
        self.num_samples = min(num_samples or self.num_rows, self.num_rows)
        if self.num_rows < 1:
            problem = f"data: the {split} split of {corpus.path}, of {self.first_tokens[-1]} tokens, has not one row"
            raise ConfigError(f"{problem} of seq_len {seq_len}; use more text, or for one file --validation tail:0.1")

    def _find_rows(self, offsets: list[np.ndarray]) -> None:
        """Where the documents of each row begin and end: a function of their lengths and of seq_len alone."""
        firsts = np.array(self.first_tokens[:-1])  # int64, and so are its sums with offsets, which are int32
        of_files = [first + of_file[:-1] for first, of_file in zip(firsts, offsets, strict=True)]
        self.begins = np.concatenate([*of_files, self.first_tokens[-1:]])
        lengths = np.diff(self.begins)
        if (lengths < 0).any():
            raise ConfigError(f"data: {self.corpus.path} is damaged: the documents of {self.split}; {REMEDY}")
        # Where a row begins with document i, the next row begins with document after[i].
        self.after, rows = np.arange(1, len(self.begins)), np.arange(len(lengths))
        if self.documents != "padded":
            fitting = np.searchsorted(self.begins, self.begins[:-1] + self.seq_len, side="right") - 1
            self.after = np.maximum(self.after, fitting)
            chosen = [0]
            while chosen[-1] < len(lengths):
                chosen.append(int(self.after[chosen[-1]]))
            rows = np.array(chosen[:-1], int)
        self.rows = rows
        if self.corpus.has_conversations:
            cut = rows[lengths[rows] > self.seq_len]
            lost = [row for row in cut if not self._copy(int(self.begins[row]), np.zeros(self.seq_len), column=1).any()]
            self.rows = np.setdiff1d(rows, lost)
            said = "{:,} in {:,} rows; {:,} cut off at seq_len, {:,} of them left out; targets are the answers alone"
            self.conversations = said.format(*map(len, (lengths, self.rows, cut, lost)))
        self.num_rows = len(self.rows)

    def __reduce__(self):
        # Loader processes that are not forked open the files themselves, instead of being sent what is in them.
        return TextDataset, (self.corpus, self.split, self.seq_len, self.documents, self.num_samples)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """`input_ids` and `labels`, and what `documents` adds, each int64 [T]; the labels are not shifted."""
        return {name: torch.from_numpy(rows[0]) for name, rows in self.arrays([index]).items()}

    def arrays(self, indices: list[int]) -> dict[str, np.ndarray]:
        """The samples of a batch, each array int64 [B, T]."""
        input_ids = np.full((len(indices), self.seq_len), self.corpus.end_of_text)
        # Of zeros the system gives memory only where they are written to, so what is not needed costs nothing.
        in_row, in_answer, begins = np.zeros((3, *input_ids.shape), int)
        for b, index in enumerate(indices):
            first, (*inner, end) = self._place(index * self.num_rows // self.num_samples)
            self._copy(first, input_ids[b, :end])
            if self.rows is not None:
                in_row[b, :end] = 1
            if self.conversations:
                self._copy(first, in_answer[b, :end], column=1)
                begins[b, inner] = inner
        # The files may not be verified yet, and a token beyond the model's table would read other memory.
        if (largest := input_ids.max(initial=0)) >= self.corpus.vocab_size:
            problem = f"token {largest} in {self.split} is none of the {self.corpus.vocab_size} of the tokenizer"
            raise ConfigError(f"data: {self.corpus.path} is damaged: {problem}; {REMEDY}")
        targets = in_answer if self.conversations else in_row
        labels = input_ids if self.rows is None else np.where(targets, input_ids, -100)
        batch = {"input_ids": input_ids, "labels": labels}
        if self.documents == "padded":
            batch["attention_mask"] = in_row
        elif self.documents == "isolated":
            positions = np.arange(self.seq_len)
            if not self.conversations:
                begins = np.where(input_ids == self.corpus.end_of_text, positions, 0)
            batch["position_ids"] = positions - np.maximum.accumulate(begins, axis=1)
        return batch

    def _place(self, row: int) -> tuple[int, list[int]]:
        """The first token of a row, and where in it its documents begin, and the last one ends."""
        if self.rows is None:
            return row * (self.seq_len - 1), [0, self.seq_len]
        first = self.rows[row]
        begins = self.begins[first : self.after[first] + 1] - self.begins[first]
        # A row of text ends with the end-of-text token that the next document begins with.
        begins[-1] = min(begins[-1] + (not self.corpus.has_conversations), self.seq_len)
        return int(self.begins[first]), begins.tolist()

    def _copy(self, first: int, out: np.ndarray, column: int = 0) -> np.ndarray:
        """Fill `out` with the stream from token `first` on, of one file or of several as far as it goes; returns it."""
        file, rest = bisect_right(self.first_tokens, first) - 1, out
        while len(rest) and file < len(self.values):
            values = self.values[file][column][first - self.first_tokens[file] :][: len(rest)]
            rest[: len(values)] = values
            first, rest, file = first + len(values), rest[len(values) :], file + 1
        return out

    @cached_property
    def num_bytes(self) -> float:
        """The UTF-8 bytes of the text that the targets of all samples stand for; an end-of-text token stands for none.

        Exact for byte-level tokenizers. Of others only the mean of the split is known.
        """
        counts, of_token = self.corpus.metadata[self.split], token_bytes(self.corpus.tokenizer, self.corpus.end_of_text)
        num_bytes = np.full(self.corpus.vocab_size, counts["bytes"] / counts["tokens"])
        if of_token is not None:
            num_bytes[[*of_token]] = [*map(len, of_token.values())]
        targets = (self.arrays([index])["labels"][:, 1:] for index in range(len(self)))
        return float(sum(num_bytes[ids[ids != -100]].sum() for ids in targets))


class MixedDataset(ConcatDataset):
    """The samples of several corpora, one after another."""

    @property
    def num_bytes(self) -> float:
        """Of the targets of all samples."""
        return sum(dataset.num_bytes for dataset in self.datasets)
