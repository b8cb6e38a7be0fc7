"""Makes a corpus for data.source text: python -m data.prepare --source X --tokenizer T --out DIR.

One process reads and cuts the text into parts, the others each encode a part and write it as one Arrow file of either
split. The text alone says where a part ends, so the files are the same bytes for any number of workers. They are
written into DIR.partial, which becomes DIR when all is done; after a kill the same command makes only the missing
parts. The result is DIR/train/*.arrow, DIR/validation/*.arrow, DIR/tokenizer and DIR/metadata.json.

A row of column input_ids is a document with an end-of-text token before it; of a document of more than a million
characters each further piece is a row of its own, without that token. So the flat buffer of the column is the stream
of tokens, and an end-of-text token in it is always the beginning of a document: none comes from the text.
"""

import fcntl
import io
import json
import math
import multiprocessing
import os
import re
import shutil
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from glob import glob
from hashlib import blake2b
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from jsonargparse import ArgumentParser, set_parsing_settings
from jsonargparse.typing import PositiveInt
from tokenizers import Tokenizer
from tqdm import tqdm

from config import ConfigError
from data.tokenizer import load_tokenizer, save_tokenizer

SPLITS = ("train", "validation")
COUNTS = ("documents", "tokens", "bytes", "empty_documents", "replacement_characters")
PIECE = 2**19  # characters; documents of more than two are encoded in pieces
PART = 2**24  # characters, of one file of tokens
TRAINING_TEXTS = 10**6  # documents, or pieces of a txt file, from which train:VOCAB learns: the first of the source


@dataclass
class PrepareConfig:
    """What to make of which text."""

    source: str
    """A .txt, .jsonl or .parquet file (.gz and .zst are read), a pattern of such files in quotes ('texts/**/*.txt'), a
    dataset of the Hub as NAME[:CONFIGURATION[:SPLIT]], or a folder that is laid out like one. A txt file is one
    document, a row of the others is one."""

    tokenizer: str
    """byte (256 bytes and an end of text), train:VOCAB (a byte-level BPE of VOCAB tokens, learnt from the source), the
    name of one on the Hub (gpt2), or a folder with one."""

    out: str
    """The folder of the corpus. It must not exist yet."""

    validation: str = "hash:0.005"
    """What is kept from training. hash:SHARE: so large a share of the documents, chosen by a hash of their text;
    tail:SHARE: the end of each document; or a source of its own, files or a pattern."""

    document_separator: str | None = None
    r"""Divides a txt file into documents, and belongs to none. \n means a new line."""

    text_column: str = "text"
    """The column, or the key in jsonl, that holds the text."""

    invalid_utf8: Literal["replace", "refuse"] = "replace"
    """Bytes that are no UTF-8: replace them by U+FFFD (metadata.json counts these), or refuse the file."""

    streaming: bool = False
    """Read a dataset of the Hub while it is downloaded, instead of downloading all of it first."""

    max_tokens: PositiveInt | None = None
    """Stop after the file in which so many are reached: up to about 16 million characters more. null: take all."""

    num_workers: PositiveInt = os.cpu_count() or 1
    """Processes that encode. The corpus is the same for any number."""


class Source:
    """The documents of files or a dataset in their order, as pairs (text, whether the document ends with it).

    Raises:
        ConfigError: there is no such source, or it cannot be read as text.
    """

    def __init__(self, name: str, config: PrepareConfig):
        self.name, self.config = name, config
        self.errors = "strict" if config.invalid_utf8 == "refuse" else "replace"
        # A name with brackets in it is a file before it is a pattern.
        found = [name] if Path(name).is_file() else sorted(glob(name, recursive=True))
        self.stamps = {file: _stamp(file) for file in found if Path(file).is_file()}
        for file in self.stamps:
            if _kind(file) not in (".txt", ".jsonl", ".parquet"):
                raise ConfigError(f"source: {file!r} is not .txt, .jsonl or .parquet, nor one of them with .gz or .zst")
            if config.streaming:
                raise ConfigError(f"streaming: {file!r} is on this machine; streaming is for datasets of the Hub")
        self.dataset = None if self.stamps else self._load()

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        for place in self.stamps or [self.name]:
            number = 1
            try:
                for text, ends in self._txt(place) if _kind(place) == ".txt" else self._rows(place):
                    yield text, ends
                    number += ends
                changed = place in self.stamps and _stamp(place) != self.stamps[place]
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                raise ConfigError(f"source: {place!r}, document {number}: {type(error).__name__}: {error}") from None
            if changed:
                raise ConfigError(f"source: {place!r} changed while it was read; start again when it is complete")

    def _load(self) -> Iterable[dict]:
        import datasets  # slow, and not needed for files

        path, configuration, split, streaming = *[*self.name.split(":"), "", ""][:3], self.config.streaming
        try:
            return datasets.load_dataset(path, configuration or None, split=split or "train", streaming=streaming)
        except Exception as error:  # as many kinds as there are ways to fail at a download
            problem = f"source: there is no file {self.name!r}, nor can a dataset NAME:CONFIGURATION:SPLIT be loaded"
            remedy = (
                "Without a network, name a folder with the dataset's files, or a pattern such as 'folder/*.parquet'"
            )
            raise ConfigError(f"{problem}: {error!r}\n{remedy}") from None

    def _txt(self, file: str) -> Iterator[tuple[str, bool]]:
        separator, rest = (self.config.document_separator or "").replace("\\n", "\n"), ""
        with self._open(file) as text:
            while chunk := text.read(PIECE):
                if separator:
                    *documents, rest = (rest + chunk).split(separator)
                    yield from ((document, True) for document in documents)
                    settled = max(len(rest) - len(separator) + 1, 0)  # what follows may begin a separator
                    chunk, rest = rest[:settled], rest[settled:]
                yield chunk, False
        yield rest, True

    def _rows(self, place: str) -> Iterator[tuple[str, bool]]:
        column = self.config.text_column
        for row in self._records(place):
            if column not in row:
                raise KeyError(f"no text_column {column!r}; there are {list(row)}")
            # Half of a surrogate pair is valid in JSON, but no text; null is an empty document.
            yield (row[column] or "").encode("utf-8", "surrogatepass").decode("utf-8", self.errors), True

    def _records(self, place: str) -> Iterator[dict]:
        if self.dataset is not None:
            yield from self.dataset
        elif _kind(place) == ".jsonl":
            with self._open(place) as lines:
                yield from (json.loads(line) for line in lines if not line.isspace())
        else:
            for batch in pyarrow.parquet.ParquetFile(place).iter_batches(256, columns=[self.config.text_column]):
                yield from batch.to_pylist()

    def _open(self, file: str) -> io.TextIOWrapper:
        # All kinds of line ends become \n, and a byte-order mark, as Windows writes it, is dropped.
        return io.TextIOWrapper(pa.input_stream(file, compression="detect"), "utf-8-sig", self.errors)


def _stamp(file: str) -> list[int]:
    return [(stat := os.stat(file)).st_size, stat.st_mtime_ns]


def _kind(file: str) -> str:
    return Path(file.removesuffix(".gz").removesuffix(".zst")).suffix


def split_documents(source: Source, validation: str) -> Iterator[tuple[str, bool, str | None]]:
    """The documents as (text, whether the document ends with it, its split); None where its hash decides."""
    kind, _, share = validation.partition(":")
    if kind == "hash":
        yield from ((*part, None) for part in source)
    elif kind == "tail":
        yield from _cut_tails(source, float(share))
    else:
        yield from ((*part, "train") for part in source)
        yield from ((*part, "validation") for part in Source(validation, source.config))


def _cut_tails(source: Source, share: float) -> Iterator[tuple[str, bool, str]]:
    lengths = deque([0])
    for text, ends in source:  # a document may be larger than memory: its length takes a reading of its own
        lengths[-1] += len(text)
        lengths.extend([0] * ends)
    head = None
    for text, ends in source:
        head = int(lengths.popleft() * (1 - share)) if head is None else head
        if head > 0:
            yield text[:head], head <= len(text), "train"
        if head < len(text) or ends:
            yield text[max(head, 0) :], ends, "validation"
        head = None if ends else head - len(text)


def in_validation(text: str, share: float) -> bool:
    """Whether the document that begins with `text` (all of it, or its first piece) is for validation.

    A function of this text alone: a document that occurs twice is in one split, and no other document moves it.
    """
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) < share * 2**64


def cut_point(text: str, tokenizer: Tokenizer, limit: int, context: int = 1000) -> int:
    """Where to cut `text`, at or before `limit`, so that its tokens stay the same: between two pre-tokens.

    The tokenizer itself is asked: around the cut both sides alone must have the tokens of both together. Where there
    is no such place shortly before `limit`, as in a text without words, the cut is at `limit`.
    """
    start = limit - limit // 16
    boundaries = [start + match.start() for match in re.finditer(r"\b", text[start:limit])]
    for cut in [*boundaries[:-100:-1], limit]:
        left, right = text[max(cut - context, 0) : cut], text[cut : cut + context]
        first, second, both = tokenizer.encode_batch_fast([left, right, left + right], add_special_tokens=False)
        if first.ids + second.ids == both.ids:
            return cut
    return limit


def cut_parts(
    documents: Iterable[tuple[str, bool, str | None]], tokenizer: Tokenizer, share: float, source: Source
) -> Iterator[tuple[list[tuple[str, bool, str]], dict | None]]:
    """Lists of PART characters or more, each with the state of a stream after it (None if reading again is cheap).

    A list holds pieces of documents: (text, whether a document begins with it, its split).
    """
    streaming = source.config.streaming
    part, size, buffer, begins = [], 0, "", True
    for text, ends, given in documents:
        pieces = []
        for start in range(0, len(text), PIECE):
            buffer += text[start : start + PIECE]
            while len(buffer) > 2 * PIECE:
                cut = cut_point(buffer, tokenizer, PIECE)
                pieces.append((buffer[:cut], False))
                buffer = buffer[cut:]
        if ends:
            pieces.append((buffer, True))
            buffer = ""
        for piece, last in pieces:
            if begins:
                split = given or SPLITS[in_validation(piece, share)]
            part.append((piece, begins, split))
            size, begins = size + len(piece) + 1, last
            if size >= PART and (last or not streaming):  # a stream's state is between two documents
                yield part, source.dataset.state_dict() if streaming else None
                part, size = [], 0
    if part:
        yield part, source.dataset.state_dict() if streaming else None


def _start_worker(folder: Path) -> None:
    global _folder, _tokenizer, _facts
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    # A worker must not outlive a parent that was killed.
    threading.Thread(target=lambda: os._exit(multiprocessing.parent_process().join() or 1), daemon=True).start()
    _folder, (_tokenizer, _facts) = folder, load_tokenizer(folder / "tokenizer")


def _make_part(index: int, pieces: list[tuple[str, bool, str]], state: dict | None) -> dict:
    """Encode and write a part, and last a JSON file with what is returned: its counts, and the state given."""
    dtype = "uint16" if _facts["vocab_size"] <= 2**16 else "uint32"
    rows, counts, part = {split: [] for split in SPLITS}, {split: Counter() for split in SPLITS}, {"state": state}
    for text, begins, split in pieces:
        if text:
            [encoding] = _tokenizer.encode_batch_fast([text], add_special_tokens=False)
            rows[split].append(np.array([_facts["end_of_text"]] * begins + encoding.ids, dtype))
        counts[split].update(documents=begins and text != "", empty_documents=text == "", bytes=len(text.encode()))
        counts[split].update(replacement_characters=text.count("\ufffd"))
    for split in SPLITS:
        values = np.concatenate([np.empty(0, dtype), *rows[split]])
        offsets = np.cumsum([0, *map(len, rows[split])], dtype=np.int32)
        column = pa.ListArray.from_arrays(offsets, pa.array(values))
        batch, stream = pa.record_batch({"input_ids": column}), pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, batch.schema) as writer:
            writer.write_batch(batch)
        _write(_folder / split / f"{index:06d}.arrow", stream.getvalue())
        facts = {"file": f"{split}/{index:06d}.arrow", "hash": blake2b(stream.getvalue(), digest_size=16).hexdigest()}
        part[split] = {**counts[split], "tokens": len(values), **facts}
    _write(_folder / "parts" / f"{index:06d}.json", json.dumps(part).encode())
    return part


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, also if the machine fails."""
    path.parent.mkdir(exist_ok=True)
    with open(path.with_suffix(".tmp"), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path.with_suffix(".tmp"), path)


def _read(path: Path) -> dict | None:
    return json.loads(path.read_bytes()) if path.exists() else None


def prepare(config: PrepareConfig) -> dict:
    """Make the corpus, or go on with what a killed process left of it; returns its metadata.

    Raises:
        ConfigError: a setting or an input is wrong.
        OSError: the corpus cannot be written. What is done so far stays, and the same command goes on.
    """
    kind, _, share = config.validation.partition(":")
    if kind in ("hash", "tail") and not re.fullmatch(r"0?\.\d+", share):
        raise ConfigError(f"validation: {config.validation!r} must name a share below 1, such as {kind}:0.1")
    if kind != "hash" and config.streaming:
        raise ConfigError(f"validation: {config.validation!r} does not go with streaming; use hash:0.005")
    out = Path(config.out).expanduser().absolute()
    work, source = out.with_name(f"{out.name}.partial"), Source(config.source, config)
    stamps = source.stamps | ({} if kind in ("hash", "tail") else Source(config.validation, config).stamps)
    request = asdict(config) | {"out": None, "num_workers": None, "files": stamps}  # what the corpus depends on
    if out.exists():
        if (metadata := _read(out / "metadata.json") or {}).get("request") == request:
            return metadata
        raise ConfigError(f"out: {out} exists, and is not what this command would make; name another folder")
    (work / "parts").mkdir(parents=True, exist_ok=True)
    with open(work / "parts" / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"out: another process is preparing {out}") from None
        if (_read(work / "parts" / "request") or request) != request:
            raise ConfigError(f"out: {work} was begun from another source or with other settings; remove it first")
        _write(work / "parts" / "request", json.dumps(request).encode())
        metadata = _make_corpus(config, source, work) | {"request": request}
        _write(work / "metadata.json", json.dumps(metadata, indent=1).encode())
        os.rename(work, out)
    shutil.rmtree(out / "parts")
    return metadata


def _make_corpus(config: PrepareConfig, source: Source, work: Path) -> dict:
    kind, _, share = config.validation.partition(":")
    if not (work / "tokenizer").exists():
        save_tokenizer(config.tokenizer, work / "tokenizer.tmp", (text for text, _ in islice(source, TRAINING_TEXTS)))
        os.replace(work / "tokenizer.tmp", work / "tokenizer")
    tokenizer, facts = load_tokenizer(work / "tokenizer")

    parts, most = [], config.max_tokens or math.inf
    if config.streaming:  # what is done need not be downloaded again
        while _total(parts, "tokens") < most and (part := _read(work / "parts" / f"{len(parts):06d}.json")):
            source.dataset.load_state_dict(part["state"])
            parts.append(part)
    documents = split_documents(source, config.validation)
    texts = cut_parts(documents, tokenizer, float(share) if kind == "hash" else 0.0, source)
    with tqdm(desc="Encoding", unit="B", unit_scale=True, initial=_total(parts, "bytes")) as bar:
        for part in _make_parts(texts, len(parts), work, config.num_workers):
            if _total(parts, "tokens") >= most:
                break
            parts.append(part)
            bar.update(_total([part], "bytes"))
    files = {part[split]["file"]: part[split]["hash"] for part in parts for split in SPLITS}
    for ahead in {str(file.relative_to(work)) for file in work.glob("*/*.arrow")} - files.keys():
        (work / ahead).unlink()
    return {
        "tokenizer": {"name": config.tokenizer, **facts},
        **{split: {name: _total(parts, name, [split]) for name in COUNTS} for split in SPLITS},
        "hash": blake2b(json.dumps([facts["hash"], files]).encode(), digest_size=16).hexdigest(),
        "files": {file: (work / file).stat().st_size for file in files},
        "versions": {name: version(name) for name in ("tokenizers", "pyarrow", "datasets", "transformers")},
    }


def _make_parts(texts: Iterable[tuple[list, dict | None]], first: int, work: Path, num_workers: int) -> Iterator[dict]:
    """The parts in their order; one that a killed process has completed is only read."""
    pending = deque()
    with ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"), _start_worker, (work,)) as pool:
        for index, (pieces, state) in enumerate(texts, start=first):
            done = _read(work / "parts" / f"{index:06d}.json")
            pending.append((lambda done=done: done) if done else pool.submit(_make_part, index, pieces, state).result)
            if len(pending) > num_workers:  # the text of one part waits for each worker
                yield pending.popleft()()
        yield from (result() for result in pending)


def _total(parts: list[dict], name: str, splits: Iterable[str] = SPLITS) -> int:
    return sum(part[split].get(name, 0) for part in parts for split in splits)


def cli() -> int:
    """Run from the command line; returns the exit code."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(prog="python -m data.prepare", description="Makes a corpus of text.")
    parser.add_class_arguments(PrepareConfig, as_group=False)
    arguments = ["--streaming=true" if word == "--streaming" else word for word in sys.argv[1:]]
    config = PrepareConfig(**vars(parser.parse_args(arguments)))
    try:
        metadata = prepare(config)
    except (ConfigError, OSError) as error:
        print(f"prepare: error: {error}", file=sys.stderr)
        return 2
    for split in SPLITS:
        print(f"{config.out}/{split}: " + ", ".join(f"{metadata[split][n]:,} {n.replace('_', ' ')}" for n in COUNTS))
    return 0


if __name__ == "__main__":
    sys.exit(cli())
