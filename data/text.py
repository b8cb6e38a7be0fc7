"""Prepared corpora (data/prepare/prepare.py) as samples. Files are memory-mapped; tokens are read with their sample."""

import os.path
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import ConcatDataset, Dataset

from data.integrity import REMEDY, load_corpus_tokenizer, open_columns, read_metadata
from data.tokenizer import token_bytes
from runtime.config.errors import ConfigError

COMPARED_TOKENS = 2**27  # of a split, from its start, whose documents are compared with those of other splits


class TextCorpus:
    """A completed corpus of data.prepare: `tokenizer`, `vocab_size`, `end_of_text` token and `metadata`.

    Raises:
        ConfigError: the folder has no complete corpus, a file is damaged, or the tokenizer was changed.
    """

    def __init__(self, path: str):
        self.path = Path(os.path.expanduser(path))
        self.metadata = read_metadata(self.path)
        self.tokenizer, properties = load_corpus_tokenizer(self.path, self.metadata)
        self.vocab_size, self.end_of_text = properties["vocab_size"], properties["end_of_text"]
        self.has_conversations = "conversations" in self.metadata

    def open_split(self, split: str) -> list[list[pa.ListArray]]:
        """Open the columns of each batch of the files of a split."""
        files = [self.path / file for file in self.metadata["files"] if file.startswith(split)]
        return [columns for file in files for columns in open_columns(file)]

    def hash_documents(self, split: str) -> Iterator[bytes]:
        """Yield a hash of the tokens of each document in the first COMPARED_TOKENS of a split."""
        rest = COMPARED_TOKENS
        for column, *_ in self.open_split(split):
            tokens, offsets = np.from_dlpack(column.values), np.from_dlpack(column.offsets)
            if rest <= 0 or (np.diff(offsets) < 0).any():  # damaged, as TextDataset will say
                return
            for begin, end in pairwise(offsets[: np.searchsorted(offsets, rest) + 1].tolist()):
                yield blake2b(tokens[begin:end].tobytes(), digest_size=8).digest()
            rest -= len(tokens)


def count_shared_documents(corpora: Sequence[TextCorpus]) -> tuple[int, int]:
    """Return how many validation documents of a mixture its other corpora train on, and how many it has.

    Splits by a hash of the text, of one fraction, share none and are not read: (0, 0). The corpora have one tokenizer.
    """
    splits = {corpus.metadata.get("request", {}).get("validation", "") for corpus in corpora}
    if len(corpora) < 2 or (len(splits) == 1 and splits.pop().startswith("hash:")):
        return 0, 0
    held_out = [list(corpus.hash_documents("validation")) for corpus in corpora]
    wanted = {document for documents in held_out for document in documents}
    trained = [wanted.intersection(corpus.hash_documents("train")) for corpus in corpora]
    shared = 0
    for index, documents in enumerate(held_out):
        elsewhere = set().union(*trained[:index], *trained[index + 1 :])
        shared += sum(document in elsewhere for document in documents)
    return shared, sum(map(len, held_out))


class TextDataset(Dataset):
    """A split of a corpus in rows of `seq_len` tokens, as `packing` determines.

    Text:
        concat: windows of the token stream. Window i begins at token i * (seq_len - 1), so every token except the first
            is a target once; up to seq_len - 2 at the end, `num_unused`, fill no window and are not used. Window i +
            o * num_rows is window i moved by o tokens, up to seq_len - 2. If it ends after the text, it continues with
            the beginning of the text. So the windows of one offset leave out as many tokens as those of any other.
        isolated: the same windows, with `position_ids` that restart at each document.
        padded: one document a row, between two end-of-text tokens, truncated to seq_len or padded to it. A document of
            more than a million characters was prepared in pieces, and each piece is a row.

    Conversations:
        isolated (and concat): as many whole conversations a row as fit, in their order, or one that is truncated;
            `position_ids` restart at each.
        padded: one conversation a row, truncated or padded.

    Labels are -100 at the padding and, in conversations, outside answers; a truncated conversation without an answer is
    left out. The padding is on the right, so causal attention needs no attention mask.

    If there are more than `num_samples` rows, that many are used, evenly spaced.

    Raises:
        ConfigError: The split is too short for one row, or damaged.
    """

    packing_note: str = ""
    """How conversations became rows, printed at the start of a run; empty for text."""
    num_unused: int = 0
    """Tokens at the end that fill no window, up to seq_len - 2."""

    def __init__(self, corpus: TextCorpus, split: str, seq_len: int, packing: str, num_samples: int | None = None):
        self.corpus, self.split, self.seq_len, self.packing = corpus, split, seq_len, packing
        batches = corpus.open_split(split)
        # Views of the files: the tokens and, for conversations, the masks of answers.
        self.values = [[np.from_dlpack(column.values) for column in columns] for columns in batches]
        self.first_tokens = [0, *accumulate(len(tokens) for tokens, *_ in self.values)]
        num_tokens = self.first_tokens[-1]
        if num_tokens != corpus.metadata[split]["tokens"]:
            raise ConfigError(f"data: {corpus.path} is damaged: tokens of {split} are missing; {REMEDY}")
        self.has_windows = packing != "padded" and not corpus.has_conversations
        if self.has_windows:
            self.num_rows, self.num_unused = divmod(max(num_tokens - 1, 0), seq_len - 1)
        else:
            self._find_rows([np.from_dlpack(tokens.offsets) for tokens, *_ in batches])
            self.num_rows = len(self.rows)
        self.num_samples = min(num_samples or self.num_rows, self.num_rows)
        if self.num_rows < 1:
            raise ConfigError(f"data: the {split} split of {corpus.path} has {self._explain_no_rows(num_tokens)}")

    def __reduce__(self):
        # A worker that is not forked opens the files itself, instead of receiving their content.
        return type(self), (self.corpus, self.split, self.seq_len, self.packing, self.num_samples)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Load a sample, tensors int64 [T]; the labels are not shifted."""
        return {name: torch.from_numpy(rows[0]) for name, rows in self.arrays([index]).items()}

    def arrays(self, indices: list[int]) -> dict[str, np.ndarray]:
        """Load the samples of a batch, each array int64 [B, T]."""
        rows = [index * self.num_rows // self.num_samples for index in indices]
        input_ids = np.full((len(rows), self.seq_len), self.corpus.end_of_text)
        if self.has_windows:
            for row, window in zip(rows, input_ids, strict=True):
                offset, i = divmod(row, self.num_rows)
                first = i * (self.seq_len - 1) + offset
                self._copy(first, window)
                self._copy(0, window[self.first_tokens[-1] - first :])  # nothing, unless the window ends after the text
            labels, begins_document = input_ids, input_ids == self.corpus.end_of_text
        else:
            is_target, begins_document = np.zeros_like(input_ids), np.zeros_like(input_ids, bool)
            for b, row in enumerate(rows):
                # Where the documents of the row begin, counted from its first token, and where the last one ends.
                document = self.rows[row]
                first = int(self.begins[document])
                boundaries = self.begins[document : self.after[document] + 1] - first
                # A row of text ends with the end-of-text token that the next document begins with.
                boundaries[-1] = min(boundaries[-1] + (not self.corpus.has_conversations), self.seq_len)
                end = boundaries[-1]
                self._copy(first, input_ids[b, :end])
                if self.corpus.has_conversations:
                    self._copy(first, is_target[b, :end], column=1)
                else:
                    is_target[b, :end] = 1
                begins_document[b, boundaries[:-1]] = True
            labels = np.where(is_target, input_ids, -100)
        # A corpus that data.prepare did not write may have such a token, and hashes that match.
        if (largest := input_ids.max(initial=0)) >= self.corpus.vocab_size:
            problem = f"token {largest} in {self.split}, but the tokenizer has {self.corpus.vocab_size} tokens"
            raise ConfigError(f"data: {self.corpus.path} is damaged: {problem}; {REMEDY}")
        batch = {"input_ids": input_ids, "labels": labels}
        if self.packing != "padded" and (self.packing == "isolated" or self.corpus.has_conversations):
            positions = np.arange(self.seq_len)
            batch["position_ids"] = positions - np.maximum.accumulate(np.where(begins_document, positions, 0), axis=1)
        return batch

    def _find_rows(self, offsets: list[np.ndarray]) -> None:
        """Find the rows from the offsets of the documents in each batch of a file, int32.

        Sets `begins` (the first token of each document, and the number of tokens), `rows` (the first document of each
        row), and `after` (for each document i, the first document after a row that begins with it).
        """
        firsts = np.array(self.first_tokens[:-1])  # int64, and so are its sums with the offsets
        begins = [first + of_batch[:-1] for first, of_batch in zip(firsts, offsets, strict=True)]
        self.begins = np.concatenate([*begins, self.first_tokens[-1:]])
        lengths = np.diff(self.begins)
        if (lengths < 0).any():
            raise ConfigError(f"data: {self.corpus.path} is damaged: the documents of {self.split}; {REMEDY}")
        self.rows = np.arange(len(lengths))
        self.after = self.rows + 1
        if self.packing != "padded":
            fitting = np.searchsorted(self.begins, self.begins[:-1] + self.seq_len, side="right") - 1
            self.after, rows = np.maximum(self.after, fitting), [0]
            while rows[-1] < len(lengths):
                rows.append(int(self.after[rows[-1]]))
            self.rows = np.array(rows[:-1], int)
        if self.corpus.has_conversations:
            cut = self.rows[lengths[self.rows] > self.seq_len]
            has_answer = [self._copy(int(self.begins[i]), np.zeros(self.seq_len), column=1).any() for i in cut]
            lost = cut[~np.array(has_answer, bool)]
            self.rows = np.setdiff1d(self.rows, lost)
            counts = "{:,} in {:,} rows; {:,} cut off at seq_len, {:,} of them left out; targets are the answers alone"
            self.packing_note = counts.format(*map(len, (lengths, self.rows, cut, lost)))

    def _explain_no_rows(self, num_tokens: int) -> str:
        if not num_tokens:
            remedy = "prepare it with --validation hash:0.1 or, for one file of text, tail:0.1"
            return f"no documents; {remedy if self.split == 'validation' else 'use more text'}"
        if not self.corpus.has_conversations:
            remedy = "use a smaller seq_len, more text, or for one file --validation tail:0.1"
            return f"{num_tokens} tokens, too few for a row of seq_len {self.seq_len}; {remedy}"
        targets = np.concatenate(
            [np.flatnonzero(columns[1]) + first for columns, first in zip(self.values, self.first_tokens, strict=False)]
        )
        begins = self.begins[np.searchsorted(self.begins, targets, side="right") - 1]
        needed = f"; raise seq_len to at least {(targets - begins).min() + 1}" if len(targets) else ""
        return f"{len(self.begins) - 1:,} conversations, none with an answer within seq_len {self.seq_len}{needed}"

    def _copy(self, first: int, out: np.ndarray, column: int = 0) -> np.ndarray:
        """Fill `out` with the stream from token `first` on, across batches, until the stream ends; return it."""
        batch, rest = bisect_right(self.first_tokens, first) - 1, out
        while len(rest) and batch < len(self.values):
            values = self.values[batch][column][first - self.first_tokens[batch] :][: len(rest)]
            rest[: len(values)] = values
            first, rest, batch = first + len(values), rest[len(values) :], batch + 1
        return out

    @cached_property
    def num_bytes(self) -> float:
        """UTF-8 bytes of the targets of all samples; end-of-text tokens have none.

        Exact for byte-level tokenizers that keep the text as it is. Where a normalizer or a prefix changes it, the
        bytes of the tokens are scaled to those of the text. For other tokenizers each token has the mean of the split.
        """
        counts = self.corpus.metadata[self.split]
        bytes_of_token = token_bytes(self.corpus.tokenizer, self.corpus.end_of_text)
        num_bytes = np.full(self.corpus.vocab_size, counts["bytes"] / counts["tokens"])
        if bytes_of_token is not None:
            num_bytes[[*bytes_of_token]] = [*map(len, bytes_of_token.values())]
            if not self.corpus.has_conversations:  # their bytes do not include the template
                of_tokens = sum(num_bytes[np.asarray(tokens, np.int64)].sum() for tokens, *_ in self.values)
                num_bytes *= counts["bytes"] / of_tokens
        targets = (self.arrays([index])["labels"][:, 1:] for index in range(len(self)))
        return float(sum(num_bytes[ids[ids != -100]].sum() for ids in targets))


class MixedDataset(ConcatDataset[dict[str, torch.Tensor]]):
    """The samples of several corpora, one after another."""

    datasets: list[TextDataset]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Load a sample; index + o * len(self) is the same window, moved by o tokens."""
        offset, index = divmod(index, len(self))
        corpus = bisect_right(self.cumulative_sizes, index)
        dataset = self.datasets[corpus]
        first = self.cumulative_sizes[corpus] - len(dataset)
        return dataset[index - first + offset * len(dataset)]

    @property
    def num_bytes(self) -> float:
        """UTF-8 bytes of the targets of all samples."""
        return sum(dataset.num_bytes for dataset in self.datasets)

    @property
    def num_unused(self) -> int:
        """Tokens at the ends of the corpora that fill no window."""
        return sum(dataset.num_unused for dataset in self.datasets)

    @property
    def packing_note(self) -> str:
        """How the conversations of each corpus became rows."""
        return "; ".join(dataset.packing_note for dataset in self.datasets if dataset.packing_note)
