"""Make a corpus for data.source text: python -m data.prepare --source X --tokenizer T --out DIR.

The text is read and cut into parts, which threads encode in parallel; each part is one Arrow file per split.
Where a part ends depends on the text alone, so the files are the same bytes for any number of threads. They are written
into DIR.partial, which is renamed to DIR at the end; after a kill the same command makes only the missing parts. The
result is DIR/train/*.arrow, DIR/validation/*.arrow, DIR/tokenizer and DIR/metadata.json.

A row of column input_ids is an end-of-text token and a document. A document of more than a million characters has
several rows, and only the first begins with that token. So the flat buffer of the column is the stream of tokens, and
an end-of-text token in it always begins a document: none comes from the text.

With conversations, a row is one conversation, rendered by the tokenizer's chat template. A second column,
assistant_masks, is 1 at the tokens of answers (data/chat_template.py).
"""

import json
import math
import os
import re
import shutil
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from glob import escape
from hashlib import blake2b, sha256
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer
from tqdm import tqdm

from cli.output import ignore_failed_prints, printable
from config.errors import ConfigError
from config.parser import parse_tool
from config.paths import expand_user_path
from data import chat, chat_template
from data.files import folder_written_atomically, fsync, lock, reason_absent, write_atomically
from data.integrity import SPLITS, content_hash, file_stamp, metadata_digest, open_columns, read_metadata
from data.prepare.sources import Source, find_files, get_file_type, get_source_stamp
from data.tokenizer import (
    NAMES,
    load_tokenizer,
    parse_trained_vocab_size,
    save_tokenizer,
    token_bytes,
    wrap_tokenizer_errors,
)
from model.field_types import PositiveInt, UpTo1024

COUNTS = ("documents", "tokens", "bytes", "empty_documents", "replacement_characters")
PIECE = 2**19  # characters; a document of more than twice as many is encoded in pieces
CONTEXT = 1000  # characters on each side of a cut, encoded to test it
PART = 2**24  # minimum characters of the text of one part
PART_FILE = "parts/{:06d}.json"  # what make_part returned, kept until the corpus is complete
TRAINING_TEXTS = 10**6  # train:VOCAB is trained on this many documents, or pieces of a txt file, from the start

Text = tuple[str, bool, str | None]
"""A piece of a document, whether it is the last one, and its split; None: the hash of the document decides."""

Part = tuple[list[tuple[str, bool, str]], dict | None]
"""Pieces of documents as (text, whether it is the first one, split), and the state of a stream after them."""


@dataclass
class PrepareConfig:
    """Makes a corpus of text."""

    source: str
    """A .txt, .jsonl or .parquet file (.gz and .zst are read), a pattern of such files in quotes ('texts/**/*.txt'), a
    dataset of the Hub as NAME[:CONFIGURATION[:SPLIT]], or a folder that is laid out like one. A txt file is one
    document; in the other formats each row is one."""

    tokenizer: str
    """byte (256 bytes and an end of text), train:VOCAB (a byte-level BPE of VOCAB tokens, trained on the source), the
    name of a tokenizer on the Hub (gpt2), or a folder with a tokenizer."""

    out: str
    """The folder of the corpus. It must not exist yet."""

    validation: str = "hash:0.005"
    """Validation split. hash:FRACTION: a fraction of the documents, chosen by a hash of their text; tail:FRACTION: the
    end of each document; or a separate source, files or a pattern."""

    document_separator: str | None = None
    r"""Text between the documents of a txt file, not part of any. \n matches line breaks of every kind."""

    text_column: str = "text"
    """The column, or the key in jsonl, that holds the text."""

    invalid_utf8: Literal["replace", "refuse"] = "replace"
    """Bytes that are not UTF-8: replace them with U+FFFD (counted in metadata.json), or refuse the file."""

    streaming: bool = False
    """Read a dataset of the Hub while it is downloaded, instead of downloading all of it first."""

    max_tokens: PositiveInt | None = None
    """Stop after the part of the corpus, of about 16 million characters, that reaches this many training tokens. A
    separate validation source is read as a whole. null: read all."""

    num_workers: UpTo1024 = os.cpu_count() or 1
    """Threads that encode text. The corpus is the same for any number."""


def split_documents(source: Source, validation: str, held_out: Source | None) -> Iterator[Text]:
    """Yield the documents of both splits."""
    if validation.startswith("tail:"):
        yield from _cut_tails(source, float(validation.removeprefix("tail:")))
    else:
        yield from ((*part, "validation") for part in held_out or ())  # first, because max_tokens may end the other
        yield from ((*part, "train" if held_out else None) for part in source)


def _cut_tails(source: Source, fraction: float) -> Iterator[Text]:
    lengths = deque([0])
    for text, ends in source:  # a document may exceed the memory, so a first pass finds the lengths
        lengths[-1] += len(text)
        if ends:
            lengths.append(0)
    rest = None  # characters of the current document that are still for training
    for text, ends in source:
        if rest is None:
            rest = int(lengths.popleft() * (1 - fraction))
        if rest > 0:
            yield text[:rest], rest <= len(text), "train"
        if rest < len(text) or ends:
            yield text[max(rest, 0) :], ends, "validation"
        rest = None if ends else rest - len(text)


def in_validation(text: str, fraction: float) -> bool:
    """Return whether a document is for validation, by a hash of its text or, if it is long, of its first piece.

    So equal documents are in the same split, and adding other documents does not move any.
    """
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) < fraction * 2**64


def cut_point(text: str, tokenizer: Tokenizer, limit: int) -> int:
    """Find a position in `text`, shortly before `limit`, where a cut does not change its tokens.

    Encoding the text on both sides of the cut separately gives the tokens of encoding it as a whole. Without such a
    position, as in a text without words, the cut is at `limit`.
    """
    start = limit - limit // 16
    boundaries = [start + match.start() for match in re.finditer(r"\b", text[start:limit])]
    for cut in [*boundaries[:-100:-1], limit]:
        left, right = text[max(cut - CONTEXT, 0) : cut], text[cut : cut + CONTEXT]
        with wrap_tokenizer_errors(f"tokenizer: it has no tokens for a text that has {left[:40]!r} in it"):
            first, second, both = tokenizer.encode_batch_fast([left, right, left + right], add_special_tokens=False)
        if first.ids + second.ids == both.ids:
            return cut
    return limit


def cut_documents(documents: Iterable[Text], tokenizer: Tokenizer, source: Source) -> Iterator[Text]:
    """Yield documents in pieces: a text of more than 2 * PIECE characters is cut, a conversation never."""
    buffer = ""
    for text, ends, split in documents:
        for start in range(0, len(text), PIECE):
            buffer += text[start : start + PIECE]
            while len(buffer) > 2 * PIECE and not source.conversations:
                cut = cut_point(buffer, tokenizer, PIECE)
                yield buffer[:cut], False, split
                buffer = buffer[cut:]
        if ends:
            yield buffer, True, split
            buffer = ""


def collect_parts(pieces: Iterable[Text], fraction: float, source: Source) -> Iterator[Part]:
    """Yield the pieces in parts of at least PART characters; `fraction` of the documents are for validation."""
    part, size, begins = [], 0, True
    for piece, ends, given in pieces:
        if begins:
            identity = chat.get_identity(piece) if source.conversations else piece
            split = given or SPLITS[in_validation(identity, fraction)]
        part.append((piece, begins, split))
        size, begins = size + len(piece) + 1, ends
        if size >= PART and (ends or not source.streaming):  # a stream's state can only be between two documents
            yield part, source.stream_state()
            part, size = [], 0
    if part:
        yield part, source.stream_state()


def make_part(folder: Path, encode: Callable, types: dict[str, pa.DataType], index: int, texts: Part) -> dict:
    """Encode and write part `index`, then its counts and state as a JSON file, and return these.

    A part that a killed process completed is only read. `encode` maps a piece, and whether it is the first one of
    its document, to its text and its row: a list of integers for each column in `types`, or {} if it is empty.
    """
    if finished := _finished_part(folder, index):
        return finished
    pieces, state = texts
    part = {"state": state}
    for split in SPLITS:
        rows, counts = [], Counter()
        for text, begins, _ in (piece for piece in pieces if piece[2] == split):
            text, columns = encode(text, begins)
            counts.update(documents=begins and columns != {}, empty_documents=columns == {})
            if columns:  # bytes of the text that the tokens encode
                counts.update(bytes=len(text.encode()), replacement_characters=text.count("\ufffd"))
                rows.append({name: np.array(columns[name], kind.to_pandas_dtype()) for name, kind in types.items()})
        columns = {name: pa.array([row[name] for row in rows], pa.list_(kind)) for name, kind in types.items()}
        batch, stream = pa.record_batch(columns), pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, batch.schema) as writer:
            writer.write_batch(batch)
        name, content = f"{split}/{index:06d}.arrow", stream.getvalue()
        write_atomically(folder / name, content)
        entry = {"file": name, "sha256": sha256(content).hexdigest(), "stamp": file_stamp(folder / name)}
        part[split] = {**counts, "tokens": len(batch["input_ids"].values), **entry}
    write_atomically(folder / PART_FILE.format(index), json.dumps(part).encode())
    return part


def encode_text(tokenizer: Tokenizer, end_of_text: int, text: str, begins: bool) -> tuple[str, dict[str, list[int]]]:
    """Encode a piece of text for make_part."""
    with wrap_tokenizer_errors(f"tokenizer: it has no tokens for a text that begins {text[:40]!r}"):
        # Unlike `encode`, this releases the GIL.
        [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    if end_of_text in encoding.ids:  # possible with a word-level tokenizer
        problem = f"it encodes characters as its end of text, in a text that begins {text[:40]!r}; take them out"
        raise ConfigError(f"tokenizer: {problem}, or name {tokenizer.id_to_token(end_of_text)!r} as document_separator")
    return text, {"input_ids": [end_of_text] * begins + encoding.ids} if text else {}


def _finished_part(folder: Path, index: int) -> dict | None:
    """Return what make_part returned for a part whose files have not changed since, else None."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        part = json.loads((folder / PART_FILE.format(index)).read_bytes())
        if all(file_stamp(folder / part[split]["file"]) == part[split]["stamp"] for split in SPLITS):
            return part
    return None


def prepare(config: PrepareConfig) -> dict:
    """Make the corpus, or resume after a killed process; return its metadata.

    Raises:
        ConfigError: a setting or an input is wrong. Finished parts are removed, except those of a stream.
        OSError: the corpus cannot be written. Finished parts stay; the same command resumes.
    """
    out = expand_user_path("out", config.out).absolute()
    source, held_out = _open_sources(config)
    stamps = source.stamps | (held_out.stamps if held_out else {})
    stamps |= {file: get_source_stamp(file) for file in find_files(f"{escape(config.tokenizer)}/*")}
    request = asdict(config) | {"out": None, "num_workers": None, "files": stamps}  # what the corpus depends on
    if out.exists():
        with suppress(ConfigError):
            if (metadata := read_metadata(out)).get("request") == request:
                return metadata
        raise ConfigError(f"out: {out} exists, and is not what this command would make; name another folder")
    parse_trained_vocab_size(config.tokenizer)  # before anything is written
    if problem := reason_absent(config.tokenizer):
        raise ConfigError(f"tokenizer: {problem}; use {NAMES}")
    _check_conversations(config, source, held_out)
    work = Path(f"{out}.partial")
    for name in ("parts", *SPLITS):
        (work / name).mkdir(parents=True, exist_ok=True)
    with open(work / "parts" / "lock", "w") as lock_file:
        if not lock(lock_file):
            raise ConfigError(f"out: another process is preparing {out}")
        request_file, content = work / "parts" / "request", json.dumps(request).encode()
        # The tokenizer is the first file that depends on the request.
        if (work / "tokenizer").exists() and request_file.read_bytes() != content:
            raise ConfigError(f"out: {work} was begun from another source or with other settings; remove it first")
        write_atomically(request_file, content)
        try:
            metadata = _make_corpus(config, source, held_out, work) | {"request": request}
        except ConfigError:
            if not config.streaming:  # a stream may have lost its connection, and can resume
                shutil.rmtree(work)
            raise
        metadata["digest"] = metadata_digest(metadata)
        write_atomically(work / "metadata.json", json.dumps(metadata, indent=1).encode())
        os.rename(work, out)
        fsync(out.parent)
    shutil.rmtree(out / "parts")
    return metadata


def _parse_validation(config: PrepareConfig) -> tuple[Literal["hash", "tail", "source"], float]:
    """Parse `validation` into its kind and its fraction.

    Raises:
        ConfigError: it has no valid fraction, or does not fit other settings.
    """
    kind, _, fraction = config.validation.partition(":")
    if kind not in ("hash", "tail"):
        kind, fraction = "source", "0.0"
    if not re.fullmatch(r"0?\.\d+", fraction):
        raise ConfigError(f"validation: {config.validation!r} must name a fraction below 1, such as {kind}:0.1")
    if kind != "hash" and config.streaming:
        raise ConfigError(f"validation: {config.validation!r} cannot be combined with streaming; use hash:0.005")
    if kind == "tail" and config.max_tokens:
        problem = f"max_tokens: {config.max_tokens} may end before the tail that validation: {config.validation} keeps"
        raise ConfigError(f"{problem}; use hash:0.005 or a separate source")
    return kind, float(fraction)


def _open_sources(config: PrepareConfig) -> tuple[Source, Source | None]:
    """Open the source and any separate source of validation text; raise ConfigError if `validation` does not fit."""
    kind, fraction = _parse_validation(config)
    options = config.text_column, config.document_separator, config.invalid_utf8, config.streaming
    source, held_out = Source(config.source, *options), None
    if kind == "source":
        held_out = Source(config.validation, *options, setting="validation")
        if shared := held_out.shared_with(source):
            problem = f"validation: {config.validation!r} has {shared!r} in common with source: {config.source!r}"
            raise ConfigError(problem)
    is_one_document = [get_file_type(file) for file in source.files] == [".txt"] and not source.separator
    if is_one_document and kind == "hash" and fraction > 0:
        problem = f"validation: {config.validation!r} chooses among documents, and {config.source!r} is one"
        raise ConfigError(f"{problem}; use tail:0.1, or document_separator, or hash:0.0 for no validation")
    return source, held_out


def _check_conversations(config: PrepareConfig, source: Source, held_out: Source | None) -> None:
    """Raise ConfigError if conversations are mixed with text, or divided by tail:FRACTION."""
    has_conversations = source.detect_conversations()
    if has_conversations and _parse_validation(config)[0] == "tail":
        raise ConfigError(f"validation: {config.validation!r} would cut conversations; use hash:0.1")
    if held_out is not None and held_out.detect_conversations() != has_conversations:
        problem = f"only one of validation: {config.validation!r} and source: {config.source!r} has conversations"
        raise ConfigError(f"{problem}; use two sources of one kind, or hash:0.1")


def _make_corpus(config: PrepareConfig, source: Source, held_out: Source | None, work: Path) -> dict:
    if not (work / "tokenizer").exists():
        texts = (chat.get_content(text) if source.conversations else text for text, _ in islice(source, TRAINING_TEXTS))
        with folder_written_atomically(work / "tokenizer") as folder:
            save_tokenizer(config.tokenizer, folder, texts)
    tokenizer, properties = load_tokenizer(work / "tokenizer")
    types = {"input_ids": pa.uint16() if properties["vocab_size"] <= 2**16 else pa.uint32()}
    encode = partial(encode_text, tokenizer, properties["end_of_text"])
    if source.conversations:
        template = chat_template.ChatTemplate(chat_template.open_tokenizer(work / "tokenizer"))
        encode, types["assistant_masks"] = partial(chat_template.encode_row, template), pa.uint8()

    parts, max_tokens = [], config.max_tokens or math.inf
    if config.streaming:  # finished parts need not be downloaded again
        while _total(parts, "tokens", ["train"]) < max_tokens and (part := _finished_part(work, len(parts))):
            source.dataset.load_state_dict(part["state"])
            parts.append(part)
    pieces = cut_documents(split_documents(source, config.validation, held_out), tokenizer, source)
    to_make = collect_parts(pieces, _parse_validation(config)[1], source)
    with tqdm(desc="Encoding", unit="B", unit_scale=True, initial=_total(parts, "bytes")) as bar:
        for part in _make_parts(partial(make_part, work, encode, types), len(parts), to_make, config.num_workers):
            if _total(parts, "tokens", ["train"]) >= max_tokens:
                break
            parts.append(part)
            bar.update(_total([part], "bytes"))
    num_train, num_validation = (_total(parts, "documents", [split]) for split in SPLITS)
    _refuse_empty_split(config, num_train, num_validation)
    hashes = {part[split]["file"]: part[split]["sha256"] for part in parts for split in SPLITS}
    for unused in {str(file.relative_to(work)) for file in work.glob("*/*.arrow")} - hashes.keys():
        (work / unused).unlink()  # encoded before max_tokens was known to be reached
    counts: dict[str, Any] = {split: {name: _total(parts, name, [split]) for name in COUNTS} for split in SPLITS}
    validation_files = sorted(work.glob("validation/*.arrow"))
    counts["validation"]["text"] = _hash_text(tokenizer, properties["end_of_text"], validation_files)
    return {
        "tokenizer": {"name": config.tokenizer, **properties},
        **counts,
        **({"conversations": True} if source.conversations else {}),
        "hash": content_hash(properties["hash"], hashes),
        "files": {file: {"bytes": (work / file).stat().st_size, "sha256": sha} for file, sha in hashes.items()},
        "versions": {name: version(name) for name in ("tokenizers", "pyarrow", "datasets", "transformers")},
    }


def _hash_text(tokenizer: Tokenizer, end_of_text: int, files: list[Path]) -> str | None:
    """Return a hash of the text of the files, the same for all byte-level tokenizers; None for other tokenizers."""
    bytes_of_token = token_bytes(tokenizer, end_of_text)
    if bytes_of_token is None:
        return None
    bytes_of_token[end_of_text], hashed = b"\0", blake2b(digest_size=16)  # a text has no NUL
    for file in files:
        tokens = np.from_dlpack(open_columns(file)[0].values)
        for start in range(0, len(tokens), PIECE):
            hashed.update(b"".join(map(bytes_of_token.__getitem__, tokens[start : start + PIECE].tolist())))
    return hashed.hexdigest()


def _refuse_empty_split(config: PrepareConfig, num_train: int, num_validation: int) -> None:
    if num_train == 0:
        rest = ", nor a conversation with an answer of role 'assistant'"
        if num_validation:
            rest = f" is left for training: all {num_validation:,} documents are for validation"
        raise ConfigError(f"source: {config.source!r}: no text{rest}")
    if num_validation == 0 and _parse_validation(config) != ("hash", 0.0):
        problem = f"validation: {config.validation!r} keeps none of the {num_train:,} documents"
        remedy = "use hash:0.1, or tail:0.1 for the end of each, or hash:0.0 for no validation"
        raise ConfigError(f"{problem}; {remedy}")


def _make_parts(make: Callable, first: int, texts: Iterable[Part], num_workers: int) -> Iterator[dict]:
    pending: deque[Future] = deque()
    with ThreadPoolExecutor(num_workers) as pool:
        for index, part in enumerate(texts, start=first):
            pending.append(pool.submit(make, index, part))
            if len(pending) > num_workers:  # bounds the memory: one part is read ahead
                yield pending.popleft().result()
        yield from (future.result() for future in pending)


def _total(parts: list[dict], name: str, splits: Iterable[str] = SPLITS) -> int:
    return sum(part[split].get(name, 0) for part in parts for split in splits)


def cli() -> int:
    """Run from the command line; return the exit code."""
    ignore_failed_prints()
    try:
        config = parse_tool(PrepareConfig, "python -m data.prepare", positional=False)
        # In a thread: only the main thread handles Ctrl-C, and it could not while it trains a tokenizer.
        metadata = ThreadPoolExecutor(1).submit(prepare, config).result()
    except (ConfigError, OSError) as error:
        print("prepare: error:", printable(str(error), kept="\n"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nprepare: interrupted; run the same command again to resume", file=sys.stderr, flush=True)
        os._exit(130)  # does not wait for threads in the middle of a part
    trained = f"train:{metadata['tokenizer']['vocab_size']}"
    if config.tokenizer != trained and config.tokenizer.startswith("train:"):
        print(f"tokenizer: {config.tokenizer} became {trained}: the source has no more pairs of tokens to merge")
    for split in SPLITS:
        print(f"{config.out}/{split}: " + ", ".join(f"{metadata[split][n]:,} {n.replace('_', ' ')}" for n in COUNTS))
    return 0
