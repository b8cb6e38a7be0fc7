"""Make a corpus for data.source text: python -m data.prepare --source X --tokenizer T --out DIR.

The documents are read in blocks (data/prepare/sources.py). `datasets` encodes each block with --num_workers processes,
and caches the tokens in DIR.partial, so the same command resumes after a kill. At the end the tokens of both splits are
saved, and DIR.partial is renamed to DIR. The result, the same bytes for any number of processes, is DIR/train and
DIR/validation (`datasets.load_from_disk` opens them), DIR/tokenizer and DIR/metadata.json.

A row of column input_ids is an end-of-text token and a document. A document of more than a million characters has
several rows, and only the first begins with that token. So the flat buffer of the column is the stream of tokens, and
an end-of-text token in it always begins a document: none comes from the text.

With conversations, a row is one conversation, rendered by the tokenizer's chat template. A second column,
assistant_masks, is 1 at the tokens of answers (data/prepare/chat_template.py).
"""

import ctypes
import json
import math
import os
import platform
import re
import shutil
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial, wraps
from glob import escape
from hashlib import blake2b
from importlib.metadata import version
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Le, MinLen
from pydantic import field_validator
from tokenizers import Tokenizer

from data.integrity import (
    SPLITS,
    content_hash,
    hash_tokenizer_files,
    metadata_digest,
    open_columns,
    read_metadata,
    verify,
)
from data.prepare import chat, chat_template
from data.prepare.sources import LIBRARY, Source, find_files, get_file_type, get_source_stamp
from data.prepare.tokenizer import NAMES, parse_trained_vocab_size, save_tokenizer
from data.tokenizer import load_tokenizer, token_bytes, wrap_tokenizer_errors
from model.settings import PositiveInt, Settings
from runtime.cli.output import ignore_failed_prints, printable
from runtime.config.errors import FULL_DISK, ConfigError
from runtime.config.parser import parse_tool
from runtime.config.paths import expand_user_path
from runtime.files import (
    folder_problems,
    folder_written_atomically,
    fsync,
    lock,
    open_no_link,
    sha256,
    write_atomically,
)
from runtime.machine.cores import available_cores

PROGRAM = "data.prepare"
SKIPPED = ["empty_documents", "unanswered_conversations"]  # null rows and empty texts; conversations without a target
COUNTS = ["documents", "tokens", "bytes", *SKIPPED, "replacement_characters", "unknown_tokens"]
MAX_UNKNOWN = 10  # tokens of a corpus in any case
PIECE_CHARACTERS = 2**19  # a document of more than twice as many is encoded in pieces
CONTEXT_CHARACTERS = 1000  # on each side of a cut, encoded to test it
SHOWN_TOKENS = 120
NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?\s*%?")  # also 10%, 1e-1 and 0,1
BATCH_ROWS = 64  # that a process encodes and writes at once
BLOCK_CHARACTERS = 2**25  # minimum of the text that is encoded and cached at once
FILE_BYTES = 2**27  # of tokens in a file of the corpus, about
TRAINING_TEXTS = 10**6  # train:VOCAB is trained on this many documents, or pieces of long ones, from the start

Text = tuple[str, bool, str | None]
"""A piece of a document, whether it is the last one, and its split; None: the hash of the document decides."""


class CheckConfig(Settings):
    """Compares the files of a corpus with the hashes in its metadata.json."""

    check: str
    """The folder of the corpus."""


class PrepareConfig(Settings):
    """Makes a corpus of text. With --check DIR alone, compares the files of a corpus with their recorded hashes."""

    source: str
    """A .txt, .jsonl or .parquet file (.gz and .zst are read), a pattern of such files in quotes ('texts/**/*.txt'), a
    dataset of the Hub as NAME[:CONFIGURATION[:SPLIT]], or a folder that is laid out like one. A txt file is one
    document; in the other formats each row is one. Or python-library: the modules of the standard library of the Python
    that runs this, each a document, without tests."""

    tokenizer: str
    """byte (256 bytes and an end of text), train:VOCAB (a byte-level BPE of VOCAB tokens, trained on the source), the
    name of a tokenizer on the Hub (gpt2), or a folder with a tokenizer."""

    out: str
    """The folder of the corpus. It must not exist yet."""

    validation: str = "hash:0.005"
    """Validation split. hash:FRACTION: a fraction of the documents, chosen by a hash of their text; tail:FRACTION: the
    end of each document; or a separate source, files or a pattern."""

    document_separator: Annotated[str, MinLen(1)] | None = None
    r"""Text between the documents of a txt file, not part of any. \n matches line breaks of every kind, \t a tab."""

    text_column: str = "text"
    """The column, or the key in jsonl, that holds the text."""

    invalid_utf8: Literal["replace", "refuse"] = "replace"
    """Bytes that are not UTF-8: replace them with U+FFFD (counted in metadata.json), or refuse the file."""

    streaming: bool = False
    """Read a dataset of the Hub while it is downloaded, instead of downloading all of it first."""

    max_tokens: PositiveInt | None = None
    """Stop after the block of the corpus, of about 33 million characters, that reaches this many training tokens. A
    separate validation source is read as a whole. null: read all."""

    max_skipped: Annotated[float, Ge(0), Le(1)] = 0.01
    """Largest fraction of the documents that may be skipped, because they are empty or have no answer to train on. Up
    to five are skipped in any case."""

    max_unknown: Annotated[float, Ge(0), Le(1)] = 0.002
    """Largest fraction of the tokens that may stand for text that the tokenizer has no token for: its unknown token or,
    without one, characters that it leaves out. Up to ten may in any case."""

    num_workers: Annotated[int, Ge(1), Le(1024)] = available_cores()
    """Processes that encode text. The corpus is the same for any number."""

    @field_validator("tokenizer")
    @classmethod
    def _expand_user(cls, tokenizer: str) -> str:
        """Expand ~, which the shell leaves as it is in --tokenizer=~/folder."""
        return str(expand_user_path("tokenizer", tokenizer)) if tokenizer.startswith("~") else tokenizer


class LimitError(ConfigError):
    """More text was lost than a setting allows. The cache stays, because with another limit the corpus is the same."""


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
        left, right = text[max(cut - CONTEXT_CHARACTERS, 0) : cut], text[cut : cut + CONTEXT_CHARACTERS]
        with wrap_tokenizer_errors(f"tokenizer: it has no tokens for a text that has {left[:40]!r} in it"):
            first, second, both = tokenizer.encode_batch_fast([left, right, left + right], add_special_tokens=False)
        if first.ids + second.ids == both.ids:
            return cut
    return limit


def cut_documents(documents: Iterable[Text], tokenizer: Tokenizer, source: Source) -> Iterator[Text]:
    """Yield documents in pieces: a text of more than 2 * PIECE_CHARACTERS is cut, a conversation never."""
    buffer = ""
    for text, ends, split in documents:
        for start in range(0, len(text), PIECE_CHARACTERS):
            buffer += text[start : start + PIECE_CHARACTERS]
            while len(buffer) > 2 * PIECE_CHARACTERS and not source.conversations:
                cut = cut_point(buffer, tokenizer, PIECE_CHARACTERS)
                yield buffer[:cut], False, split
                buffer = buffer[cut:]
        if ends:
            yield buffer, True, split
            buffer = ""


def read_blocks(
    pieces: Iterable[Text], fraction: float, source: Source, shared: list[str] | None = None
) -> Iterator[dict[str, list]]:
    """Yield pieces in blocks of at least BLOCK_CHARACTERS; `fraction` of the documents are for validation.

    A block has three lists: `text` of each piece, whether it `begins` its document, and whether it is for `validation`.
    `shared` receives the training documents that are in a separate validation source, too.
    """
    block, size, begins = {"text": [], "begins": [], "validation": []}, 0, True
    held_out: set[bytes] = set()  # hashes of the documents of the validation source, which comes first
    for text, ends, split in pieces:
        if begins:
            identity = chat.get_identity(text) if source.conversations else text
            validation = in_validation(identity, fraction) if split is None else split == "validation"
            if shared is not None and identity:
                digest = blake2b(identity.strip().encode(), digest_size=8).digest()
                if validation:
                    held_out.add(digest)
                elif digest in held_out:
                    shared.append(identity)
        for values, value in zip(block.values(), (text, begins, validation), strict=True):
            values.append(value)
        size, begins = size + len(text), ends
        if size >= BLOCK_CHARACTERS:
            yield block
            block, size = {name: [] for name in block}, 0
    if block["text"]:
        yield block


@lru_cache(maxsize=1)
def load_encoder(folder: Path, conversations: bool) -> tuple[Callable, Callable[[str, list[int]], int]]:
    """Return encode(piece, begins_document), and what `count_unknown` returns.

    The first returns the text of a piece and its columns of tokens, {} if the piece is to be skipped. A tokenizer that
    is sent to another process would lose `encode_special_tokens`; so each process loads it.
    """
    tokenizer, properties = load_tokenizer(folder)
    unknown = count_unknown(tokenizer, properties["end_of_text"])
    if conversations:
        template = chat_template.ChatTemplate(chat_template.open_chat_tokenizer(folder))
        return partial(chat_template.encode_row, template), unknown
    return partial(encode_text, tokenizer, properties["end_of_text"]), unknown


def count_unknown(tokenizer: Tokenizer, end_of_text: int) -> Callable[[str, list[int]], int]:
    """Return count(text, tokens): in how many places of a text a tokenizer has no token for it."""
    parts = json.loads(tokenizer.to_str())
    model = parts["model"]
    # Most tokenizers have a token for it, which a text may name, too.
    name = model["vocab"][model["unk_id"]][0] if model.get("unk_id") is not None else model.get("unk_token")
    unknown = None if name is None else tokenizer.token_to_id(name)
    if name is not None and unknown is not None and unknown != end_of_text:
        return lambda text, tokens: max(tokens.count(unknown) - text.count(name), 0)

    # A BPE without one leaves it out, unless it has a token for every byte. Other tokenizers raise an error.
    all_bytes = {bytes([byte]) for byte in range(256)}
    if model["type"] != "BPE" or all_bytes <= {*(token_bytes(tokenizer, end_of_text) or {}).values()}:
        return lambda text, tokens: 0

    # This copy writes the end of text, which no text has, in its place.
    model["unk_token"] = tokenizer.id_to_token(end_of_text)
    model["vocab"][model["unk_token"]] = end_of_text
    copy = Tokenizer.from_str(json.dumps(parts))
    copy.encode_special_tokens = True
    return lambda text, tokens: copy.encode(text, add_special_tokens=False).ids.count(end_of_text)


def encode_rows(folder: Path, conversations: bool, dtypes: dict[str, str], batch: dict[str, list]) -> dict[str, list]:
    """Encode a batch of a block; return {name: values of all pieces} for each of `dtypes` and of COUNTS."""
    tolerate_refused_modes()  # in every process that encodes
    columns: dict[str, list] = {name: [] for name in [*dtypes, *COUNTS]}
    for text, begins in zip(batch["text"], batch["begins"], strict=True):
        encode, count = load_encoder(folder, conversations)
        text, encoded = encode(text, begins)
        row: dict[str, Any] = {name: np.array(encoded.get(name, ()), dtype) for name, dtype in dtypes.items()}
        row |= dict.fromkeys(COUNTS, 0) | {"tokens": len(row["input_ids"])}
        if not encoded:
            row["unanswered_conversations" if conversations and text else "empty_documents"] = 1
        if encoded:  # bytes of the text that the tokens encode
            row |= {"documents": int(begins), "bytes": len(text.encode())}
            row["replacement_characters"] = text.count("\ufffd")
            row["unknown_tokens"] = count(text, encoded["input_ids"])
        for name, value in row.items():
            columns[name].append(value)
    return columns


def encode_text(tokenizer: Tokenizer, end_of_text: int, text: str, begins: bool) -> tuple[str, dict[str, list[int]]]:
    """Encode a piece of text; return it and its columns, {} if it is empty."""
    with wrap_tokenizer_errors(f"tokenizer: it has no tokens for a text that begins {text[:40]!r}"):
        [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    if end_of_text in encoding.ids:  # possible with a word-level tokenizer
        problem = f"it encodes characters as its end of text, in a text that begins {text[:40]!r}; take them out"
        raise ConfigError(f"tokenizer: {problem}, or name {tokenizer.id_to_token(end_of_text)!r} as document_separator")
    return text, {"input_ids": [end_of_text] * begins + encoding.ids} if text else {}


def prepare(config: PrepareConfig) -> dict:
    """Make the corpus, or resume after a killed process; return its metadata.

    Raises:
        LimitError: too much of the text is lost. The cache stays; the same command with another limit resumes.
        ConfigError: a setting or an input is wrong. The cache is removed.
        OSError: the corpus cannot be written. The cache stays; the same command resumes.
    """
    out = expand_user_path("out", config.out).absolute()
    source, held_out = _open_sources(config)
    stamps = source.stamps | (held_out.stamps if held_out else {})
    stamps |= {file: get_source_stamp(file) for file in find_files(f"{escape(config.tokenizer)}/*")}
    without = dict.fromkeys(("out", "num_workers", "max_skipped", "max_unknown"))  # the corpus does not depend on them
    request = config.model_dump() | without | {"files": stamps}
    if out.exists():
        with suppress(ConfigError):
            if (metadata := read_metadata(out)).get("request") == request:
                return metadata
        raise ConfigError(f"out: {out} exists, and is not what this command would make; name another folder")
    parse_trained_vocab_size(config.tokenizer)  # before anything is written
    if problems := folder_problems(config.tokenizer):
        raise ConfigError(f"tokenizer: {problems[0]}; use {NAMES}")
    _check_conversations(config, source, held_out)
    work = Path(f"{out}.partial")
    cache = work / "cache"
    request_file, content = cache / "request", json.dumps(request).encode()
    # A process that was killed before it wrote the request has left only these.
    own = cache / "lock", *cache.glob("request*"), cache
    others = [path for path in work.rglob("*") if path not in own]
    if work.is_symlink() or (others and not request_file.exists()):
        raise ConfigError(f"out: {work} is needed for this, but has other files; move it, or name another folder")
    new_folders = [folder for folder in work.parents if not folder.exists()]
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out: {out} cannot be written: {error.strerror}; name another folder") from None
    with open(cache / "lock", "a", opener=open_no_link) as lock_file:
        if not lock(lock_file):
            raise ConfigError(f"out: another process is preparing {out}")
        # The tokenizer is the first file that depends on the request.
        if (work / "tokenizer").exists() and request_file.read_bytes() != content:
            raise ConfigError(f"out: {work} was begun from another source or with other settings; remove it first")
        write_atomically(request_file, content)
        try:
            metadata = _make_corpus(config, source, held_out, work) | {"request": request}
        except LimitError:
            raise
        except ConfigError:
            shutil.rmtree(work)
            with suppress(OSError):  # another process uses one of them
                for folder in new_folders:
                    folder.rmdir()
            raise
        metadata["digest"] = metadata_digest(metadata)
        write_atomically(work / "metadata.json", json.dumps(metadata, indent=1).encode())
        os.rename(work, out)
        fsync(out.parent)
    shutil.rmtree(out / "cache")
    return metadata


def _parse_validation(config: PrepareConfig) -> tuple[Literal["hash", "tail", "source"], float]:
    """Parse `validation` into its kind and its fraction.

    Raises:
        ConfigError: it has no valid fraction, or does not fit other settings.
    """
    if config.validation.lower() in ("", "none", "no", "false", "off"):
        raise ConfigError(f"validation: {config.validation!r} is not a source; use hash:0.0 for no validation")
    if NUMBER.fullmatch(config.validation.strip()):
        fraction = "0.1"  # as an example, for 10% or 1000
        with suppress(ValueError):
            fraction = config.validation if 0 < float(config.validation) < 1 else fraction
        remedy = f"use hash:{fraction} for a fraction of them, or tail:{fraction} for the end of each"
        raise ConfigError(f"validation: {config.validation!r} does not say which documents; {remedy}")
    kind, _, text = config.validation.partition(":")
    if kind not in ("hash", "tail"):
        kind, text = "source", "0"
    try:
        fraction = float(text)
    except ValueError:
        fraction = math.nan
    if not 0 <= fraction < 1:
        problem = f"validation: {config.validation!r} must name a fraction of at least 0 and below 1"
        raise ConfigError(f"{problem}, such as {kind}:0.1")
    if kind != "hash" and config.streaming:
        raise ConfigError(f"validation: {config.validation!r} cannot be combined with streaming; use hash:0.005")
    if kind == "tail" and config.max_tokens:
        problem = f"max_tokens: {config.max_tokens} may end before the tail that validation: {config.validation} keeps"
        raise ConfigError(f"{problem}; use hash:0.005 or a separate source")
    return kind, fraction


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
    file_types = {get_file_type(file) for file in source.files + (held_out or source).files}
    if source.separator and ".txt" not in file_types:
        problem = f"document_separator: {config.document_separator!r} has no effect on {config.source!r}"
        documents = "module" if config.source == LIBRARY else "row"
        raise ConfigError(f"{problem}, in which each {documents} is a document; leave it out")
    if config.text_column != "text" and file_types and file_types <= {".txt", ".py"}:
        problem = f"text_column: {config.text_column!r} has no effect on {config.source!r}"
        raise ConfigError(f"{problem}, which has no columns; leave it out")
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
    load_encoder.cache_clear()
    folder = work / "tokenizer"
    if not folder.exists():
        texts = (chat.get_content(text) if source.conversations else text for text, _ in islice(source, TRAINING_TEXTS))
        with folder_written_atomically(folder) as temporary:
            save_tokenizer(config.tokenizer, temporary, texts)
    tokenizer, properties = load_tokenizer(folder)
    dtypes = {"input_ids": "uint16" if properties["vocab_size"] <= 2**16 else "uint32"}
    if source.conversations:
        dtypes["assistant_masks"] = "uint8"
    encode = partial(encode_rows, folder, bool(source.conversations), dtypes)
    pieces = cut_documents(split_documents(source, config.validation, held_out), tokenizer, source)
    shared: list[str] | None = [] if held_out else None
    blocks = read_blocks(pieces, _parse_validation(config)[1], source, shared)
    encoded = encode_blocks(blocks, encode, dtypes, work / "cache", config)
    frame = encoded.select_columns(["validation", *COUNTS]).to_pandas()
    sums = frame.groupby("validation").sum().reindex([False, True], fill_value=0)
    counts: dict[str, Any] = dict(zip(SPLITS, sums.to_dict("records"), strict=True))
    _check_splits(config, *(counts[split]["documents"] for split in SPLITS))
    null_rows = sum(each.null_rows for each in (source, held_out) if each)
    _check_skipped(config, counts, null_rows)
    _check_unknown(config, counts)
    if shared and len(shared) >= counts["validation"]["documents"]:
        problem = f"validation: all documents of {config.validation!r} are in {config.source!r}, too, so a loss on them"
        raise ConfigError(f"{problem} says nothing about new text; take them out of one of the two, or use hash:0.1")
    counts["train"] |= {"in_validation": len(shared)} if shared else {}
    files = {}
    for split in SPLITS:
        kept = np.flatnonzero((frame.validation == (split == "validation")) & (frame.tokens > 0))
        num_files = counts[split]["tokens"] * np.dtype(dtypes["input_ids"]).itemsize // FILE_BYTES + 1
        rows = encoded.select(kept, new_fingerprint=split).select_columns([*dtypes])
        rows.save_to_disk(work / split, num_shards=max(min(num_files, len(kept)), 1))
        files |= {f"{split}/{file.name}": file for file in sorted((work / split).glob("*.arrow"))}
        for written in (*(work / split).iterdir(), work / split):
            fsync(written)
    hashes = {name: sha256(file) for name, file in files.items()}
    validation = [file for name, file in files.items() if name.startswith("validation")]
    counts["validation"]["text"] = _hash_text(tokenizer, properties["end_of_text"], validation)
    return {
        "tokenizer": {"name": config.tokenizer, **properties, "files": hash_tokenizer_files(folder)},
        **counts,
        **({"conversations": True} if source.conversations else {}),
        **({"null_rows": null_rows} if null_rows else {}),
        "hash": content_hash(properties["hash"], hashes),
        "files": {name: {"bytes": file.stat().st_size, "sha256": hashes[name]} for name, file in files.items()},
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("tokenizers", "pyarrow", "datasets", "transformers")},
        },
    }


def encode_blocks(
    blocks: Iterable[dict[str, list]], encode: Callable, dtypes: dict[str, str], cache: Path, config: PrepareConfig
) -> Any:
    """Return a Dataset of the encoded blocks, as far as `max_tokens`; those in the cache are not encoded again."""
    import datasets  # slow to import

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()  # each update would be a line of the log
    features = {"validation": datasets.Value("bool"), **{name: datasets.Value("int64") for name in COUNTS}}
    features |= {name: datasets.List(datasets.Value(dtype)) for name, dtype in dtypes.items()}
    encoded, num_tokens = [], 0
    for index, block in enumerate(blocks):
        num_processes = min(config.num_workers, -(-len(block["text"]) // BATCH_ROWS))
        encoded.append(
            datasets.Dataset.from_dict(block).map(
                encode,
                batched=True,
                batch_size=BATCH_ROWS,
                writer_batch_size=BATCH_ROWS,
                remove_columns=["text", "begins"],
                features=datasets.Features(features),
                num_proc=num_processes if num_processes > 1 else None,  # None: in this process
                cache_file_name=str(cache / f"{index:06d}.arrow"),
                new_fingerprint=f"{index:06d}",
                desc="Encoding",
            )
        )
        num_tokens += np.dot(encoded[-1]["tokens"], np.logical_not(block["validation"]))
        if num_tokens >= (config.max_tokens or math.inf):
            break
    if not encoded:
        raise ConfigError(f"source: {config.source!r}: no text")
    return datasets.concatenate_datasets(encoded)


def _hash_text(tokenizer: Tokenizer, end_of_text: int, files: list[Path]) -> str | None:
    """Return a hash of the text of the files, the same for all byte-level tokenizers; None for other tokenizers."""
    bytes_of_token = token_bytes(tokenizer, end_of_text)
    if bytes_of_token is None:
        return None
    bytes_of_token[end_of_text], hashed = b"\xff", blake2b(digest_size=16)  # no byte of UTF-8
    for file in files:
        for column, *_ in open_columns(file):
            tokens = np.from_dlpack(column.values)
            for start in range(0, len(tokens), PIECE_CHARACTERS):
                hashed.update(
                    b"".join(map(bytes_of_token.__getitem__, tokens[start : start + PIECE_CHARACTERS].tolist()))
                )
    return hashed.hexdigest()


def _check_splits(config: PrepareConfig, num_train: int, num_validation: int) -> None:
    if num_train == 0:
        rest = ", nor a conversation with an answer of role 'assistant'"
        if num_validation:
            rest = f" is left for training: all {num_validation:,} documents are for validation"
        raise ConfigError(f"source: {config.source!r}: no text{rest}")
    if num_validation == 0 and _parse_validation(config) != ("hash", 0.0):
        problem = f"validation: {config.validation!r} keeps none of the {num_train:,} documents"
        remedy = "use hash:0.1, or tail:0.1 for the end of each, or hash:0.0 for no validation"
        raise ConfigError(f"{problem}; {remedy}")


def _check_skipped(config: PrepareConfig, counts: dict[str, Any], null_rows: int) -> None:
    """Raise ConfigError if more than `max_skipped` of the documents were skipped; `null_rows` are some of these."""
    skipped = {name: sum(counts[split][name] for split in SPLITS) for name in SKIPPED}
    number, documents = sum(skipped.values()), sum(counts[split]["documents"] for split in SPLITS)
    if number > max(5, config.max_skipped * (number + documents)):
        found = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in skipped.items() if count)
        found += f"; {_name_null_rows(config, null_rows)}" if null_rows else ""
        problem = f"max_skipped: {config.max_skipped}, but of {number + documents:,} documents {number:,} were skipped"
        remedy = "look at the source, or raise max_skipped to go on without them"
        raise LimitError(f"{problem} ({found}); {remedy} ({_name_cache(config)})")


def _name_null_rows(config: PrepareConfig, number: int) -> str:
    rows = f"{number:,} of the empty documents are rows without a value in {config.text_column!r}"
    return f"{rows}; is their text in another column?"


def _check_unknown(config: PrepareConfig, counts: dict[str, Any]) -> None:
    """Raise ConfigError if more than `max_unknown` of the tokens stand for text that the tokenizer has no token for."""
    number, tokens = (sum(counts[split][name] for split in SPLITS) for name in ("unknown_tokens", "tokens"))
    if number > max(MAX_UNKNOWN, config.max_unknown * tokens):
        problem = f"max_unknown: {config.max_unknown}, but in {number:,} places, for {tokens:,} tokens in all, the "
        problem += f"tokenizer {config.tokenizer!r} has no token for the text"
        remedy = f"name one that has, or raise max_unknown to lose that text ({_name_cache(config)})"
        raise LimitError(f"{problem}; {remedy}")


def _name_cache(config: PrepareConfig) -> str:
    return f"{config.out}.partial keeps what is encoded, until you remove it"


def show_document(corpus: Path) -> str:
    """Return the begin of the first training document as the model gets it, with [[ and ]] around what it learns."""
    import datasets  # slow to import

    rows: Any = datasets.load_from_disk(str(corpus / "train"))
    row = rows[0]
    tokenizer, _ = load_tokenizer(corpus / "tokenizer")
    tokens = row["input_ids"]
    is_target = row.get("assistant_masks", [0, *[1] * (len(tokens) - 1)])
    # The first tokens and, of a long prompt, those around the first target, too.
    first_target = is_target.index(1) if 1 in is_target else 0
    begins = [0] if first_target < SHOWN_TOKENS else [0, first_target - SHOWN_TOKENS // 4]
    shown, end = "", 0
    for begin in begins:
        shown += " ... " if begin > end else ""
        begin, end = max(begin, end), begin + SHOWN_TOKENS
        for target, group in groupby(zip(tokens[begin:end], is_target[begin:end], strict=True), lambda pair: pair[1]):
            text = tokenizer.decode([token for token, _ in group], skip_special_tokens=False)
            shown += f"[[{text}]]" if target else text
    return printable(shown, kept="\n\t") + (" ..." if len(tokens) > end else "")


def find_full_disk(error: BaseException | None) -> OSError | None:
    """Return the error of a full disk or quota that caused another error, None if there is none.

    Tokenizers, written in Rust, raises an Exception that only mentions its number; datasets raises a ValueError when it
    closes the file that it could not write.
    """
    while error is not None:
        number = re.search(r"\(os error (\d+)\)", str(error))
        code = error.errno if isinstance(error, OSError) else int(number[1]) if number else None
        if code in FULL_DISK:
            return error if isinstance(error, OSError) else OSError(code, os.strerror(code))
        error = error.__cause__ or error.__context__
    return None


def tolerate_refused_modes() -> None:
    """Let os.chmod do nothing where it is refused, as on CIFS and gcsfuse: datasets calls it for each file."""
    chmod = os.chmod
    if hasattr(chmod, "__wrapped__"):
        return

    @wraps(chmod)
    def chmod_if_possible(*arguments: Any, **settings: Any) -> None:
        with suppress(PermissionError):
            chmod(*arguments, **settings)

    os.chmod = chmod_if_possible


def end_with_parent() -> None:
    """Make Linux end this process, a child that encodes, when the process that started it ends."""
    with suppress(OSError, AttributeError):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def cli() -> int:
    """Run from the command line; return the exit code."""
    ignore_failed_prints()
    os.register_at_fork(after_in_child=end_with_parent)
    try:
        if any(word.startswith("--check") for word in sys.argv):
            corpus = parse_tool(CheckConfig, PROGRAM).check
            print(f"{corpus}: {verify(expand_user_path('check', corpus))} files have their recorded hashes")
            return 0
        config = parse_tool(PrepareConfig, PROGRAM)
        # In a thread: only the main thread handles Ctrl-C, and it could not while it trains a tokenizer. Its processes
        # inherit the blocked signal.
        block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGINT})
        metadata = ThreadPoolExecutor(1, initializer=block).submit(prepare, config).result()
    except Exception as error:
        full = find_full_disk(error)
        known = error if isinstance(error, ConfigError | OSError) else full
        if known is None:
            raise
        print(f"{PROGRAM}: error:", printable(str(known), kept="\n"), file=sys.stderr)
        if full:
            disk = f"The disk of {config.out} is full, or your quota on it is used up"
            print(f"{disk}; make room and run the same command again", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would interrupt the message
        print(f"\n{PROGRAM}: interrupted; run the same command again to resume", file=sys.stderr, flush=True)
        os._exit(130)  # does not wait for the thread
    trained = f"train:{metadata['tokenizer']['vocab_size']}"
    if config.tokenizer != trained and config.tokenizer.startswith("train:"):
        print(f"tokenizer: {config.tokenizer} became {trained}: the source has no more pairs of tokens to merge")
    template = Path(config.out).expanduser() / "tokenizer" / "chat_template.jinja"
    if metadata.get("conversations") and "strftime_now" in template.read_text():
        print(f"tokenizer: the chat template of {config.tokenizer} names the current date, so the tokens depend on it")
    print("The first training document, as the model gets it; it learns to write the tokens in [[ ]]:")
    print("  | " + show_document(Path(config.out).expanduser()).replace("\n", "\n  | "))
    names = {name: name.replace("_", " ") for name in COUNTS}
    names["documents"] = "conversations" if metadata.get("conversations") else "documents"
    for split in SPLITS:
        numbers = [f"{metadata[split][name]:,} {shown}" for name, shown in names.items()]
        print(f"{config.out}/{split}: " + ", ".join(numbers))
    if null_rows := metadata.get("null_rows"):
        print(_name_null_rows(config, null_rows))
    if shared := metadata["train"].get("in_validation"):
        print(f"{shared:,} training documents are also in validation: {config.validation}")
    return 0
