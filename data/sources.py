"""The text that a corpus is made of: files and data sets, read as documents in a fixed order."""

import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from glob import escape, glob
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

import chat
from config import ConfigError

CHUNK = 2**19  # characters of a txt file that are read at once


@dataclass
class Source:
    """The documents of files or a data set in their order, as pairs (text, whether the document ends with it).

    A conversation is a text, too: its messages as JSON.

    Args: as data.prepare explains them.

    Raises:
        ConfigError: there is no such source, or it cannot be read as text.
    """

    name: str
    text_column: str = "text"
    document_separator: str | None = None
    invalid_utf8: str = "replace"
    streaming: bool = False
    conversations: bool | None = field(default=None, init=False)
    """Whether all documents are conversations; None before the first row is read, and of txt files."""

    def __post_init__(self) -> None:
        self.separator = (self.document_separator or "").replace("\\n", "\n")
        self.errors = "strict" if self.invalid_utf8 == "refuse" else "replace"
        # A name with brackets in it is a file before it is a pattern.
        self.files = [self.name] if Path(self.name).is_file() else find_files(self.name)
        for file in self.files:
            if _kind(file) not in (".txt", ".jsonl", ".parquet"):
                raise ConfigError(f"source: {file!r} is not .txt, .jsonl or .parquet, nor one of them with .gz or .zst")
            if self.streaming:
                raise ConfigError(f"streaming: {file!r} is on this machine; streaming is for datasets of the Hub")
        self.dataset, self.dataset_files = (None, []) if self.files else self._load()
        self.stamps = {file: source_stamp(file) for file in [*self.files, *self.dataset_files]}

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        for place in self.files or [self.name]:
            number = 1
            try:
                for text, ends in self._txt(place) if _kind(place) == ".txt" else self._rows(place):
                    yield text, ends
                    number += ends
                read = [place] if self.files else self.dataset_files
                changed = [file for file in read if source_stamp(file) != self.stamps[file]]
            except Exception as error:  # as many kinds as there are formats, file systems and networks
                raise ConfigError(f"source: {place!r}, document {number}: {type(error).__name__}: {error}") from None
            if changed:
                raise ConfigError(f"source: {changed[0]!r} changed while it was read; start again when it is complete")

    def shared_with(self, other: "Source") -> str | None:
        """A file, or a data set, that is in both; by whatever name, as through a link. None if there is none."""
        if self.dataset is not None and self.name == other.name:
            return self.name
        if "[" in self.name + other.name and self.dataset is not None and other.dataset is not None:
            return None  # parts of a split, as train[:90%] and train[90%:]
        ours = {_identity(file) for file in self.files or self.dataset_files}
        return next((file for file in other.files or other.dataset_files if _identity(file) in ours), None)

    def _load(self) -> tuple[Iterable[dict], list[str]]:
        """The data set, and the files of its split: on this machine, or as names that hold a revision of the Hub."""
        import datasets  # slow, and not needed for files

        path, configuration, split = [*self.name.split(":", 2), "", ""][:3]
        split = split or "train"
        try:
            builder = datasets.load_dataset_builder(path, configuration or None)
            files = builder.config.data_files or {}
            files = [str(file) for name in re.split(r"\+|\[.*?\]", split) for file in files.get(name, [])]
            if self.streaming:
                return builder.as_streaming_dataset(split=split), files
            builder.download_and_prepare()
            return builder.as_dataset(split=split), files
        except Exception as error:  # as many kinds as there are ways to fail at a download
            problem = f"source: there is no file {self.name!r}, nor can a dataset NAME:CONFIGURATION:SPLIT be loaded"
            remedy = "Without a network, name a folder with its files, or a pattern such as 'folder/*.parquet'"
            raise ConfigError(f"{problem}: {error!r}\n{remedy}") from None

    def _txt(self, file: str) -> Iterator[tuple[str, bool]]:
        separator, rest = self.separator, ""
        with self._open(file) as text:
            while chunk := text.read(CHUNK):
                if separator:
                    *documents, rest = (rest + chunk).split(separator)
                    yield from ((document, True) for document in documents)
                    settled = max(len(rest) - len(separator) + 1, 0)  # what follows may begin a separator
                    chunk, rest = rest[:settled], rest[settled:]
                yield chunk, False
        yield rest, True

    def _rows(self, place: str) -> Iterator[tuple[str, bool]]:
        for row in self._records(place):
            text, is_conversation = chat.document_in(row, self.text_column)
            if self.conversations is (not is_conversation):
                raise ValueError("conversations and texts are in one source; take them apart")
            self.conversations = is_conversation
            # Half of a surrogate pair is valid in JSON, but no text.
            yield text.encode("utf-8", "surrogatepass").decode("utf-8", self.errors), True

    def _records(self, place: str) -> Iterator[dict]:
        if self.dataset is not None:
            yield from self.dataset
        elif _kind(place) == ".jsonl":
            with self._open(place) as lines:
                yield from (json.loads(line) for line in lines if not line.isspace())
        else:
            with pyarrow.parquet.ParquetFile(place) as file:
                names = [name for name in file.schema_arrow.names if name in (self.text_column, *chat.COLUMNS)]
                for batch in file.iter_batches(256, columns=names or None):
                    yield from batch.to_pylist()

    def _open(self, file: str) -> io.TextIOWrapper:
        # All kinds of line ends become \n, and a byte-order mark, as Windows writes it, is dropped.
        return io.TextIOWrapper(pa.input_stream(file, compression="detect"), "utf-8-sig", self.errors)


def find_files(pattern: str) -> list[str]:
    """The files that a pattern matches in the order of their names, each once, however many links lead to it."""
    found = {}
    for file in sorted(filter(os.path.isfile, _expand(pattern)), key=lambda file: (len(file), file)):
        found.setdefault(_identity(file), file)
    return sorted(found.values())


def source_stamp(file: str) -> list[int] | None:
    """Size and time of a file on this machine; None for one of the Hub, whose name holds its revision."""
    if "://" in file:
        return None
    return [(stat := os.stat(file)).st_size, stat.st_mtime_ns]


def _expand(pattern: str) -> Iterator[str]:
    """As glob, but `**` enters every folder once: links may lead back to a folder above, and glob follows them."""
    if not (match := re.fullmatch(r"((?:.*?/)?)\*\*(?:/(.*))?", pattern, re.DOTALL)):
        yield from glob(pattern)
        return
    head, tail = match[1], match[2] or "*"
    entered = set()
    for top in glob(head) if head else ["."]:
        for folder, folders, _ in os.walk(top, followlinks=True):
            known = (identity := _identity(folder)) in entered
            entered.add(identity)
            folders[:] = [] if known else sorted(name for name in folders if not name.startswith("."))
            if not known:
                yield from _expand(os.path.join(escape(folder if head else folder[2:]), tail))


def _identity(file: str) -> tuple[int, int] | str:
    return file if "://" in file else ((stat := os.stat(file)).st_dev, stat.st_ino)


def _kind(file: str) -> str:
    return Path(file.removesuffix(".gz").removesuffix(".zst")).suffix
