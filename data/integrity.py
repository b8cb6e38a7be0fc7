"""Checks that a corpus is as data.prepare wrote it: metadata.json at once, the files by reading them.

metadata.json has the length and the SHA-256 of every file, the hash of the whole (`data.hash` of a run), and a digest
of itself. A file is read again only when its stamp has changed: the stamps of verified files are kept in `.verified`
in the corpus folder or, where that cannot be written, in the user's cache.
"""

import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa

from config.errors import ConfigError
from data.files import sha256
from data.json_objects import parse_object
from distributed.cores import lower_thread_priority

SPLITS = ("train", "validation")
NUM_THREADS = min(4, os.cpu_count() or 1)  # one thread hashes slower than a disk reads
REMEDY = "restore it, or remove the folder and prepare it again"


def file_stamp(file: Path) -> list[int]:
    """Return the length of a file and the times of its last write and last change (ctime).

    These change when a file is written, replaced or copied; no program can set ctime.
    """
    stat = os.stat(file)
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def content_hash(tokenizer_hash: str, hashes: dict[str, str]) -> str:
    """Hash the contents of a corpus: its tokenizer, and the SHA-256 of its files in order."""
    return blake2b(json.dumps([tokenizer_hash, hashes]).encode(), digest_size=16).hexdigest()


def metadata_digest(metadata: dict) -> str:
    """Hash all of metadata.json except the digest in it."""
    rest = {name: value for name, value in metadata.items() if name != "digest"}
    return blake2b(json.dumps(rest).encode(), digest_size=16).hexdigest()


def read_metadata(folder: Path) -> dict:
    """Read metadata.json of the corpus in `folder`, and check that its files exist with their lengths.

    Raises:
        ConfigError: the corpus is not complete, or metadata.json or a file is not as data.prepare wrote it.
    """
    try:
        metadata = parse_object((folder / "metadata.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"data: '{folder}' is not a corpus that data.prepare has completed: {error}") from None
    try:
        _check(metadata)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        problem = f"{folder / 'metadata.json'} is damaged: {type(error).__name__}: {error}"
        raise ConfigError(f"data: {problem}; {REMEDY}") from None
    for file, entry in metadata["files"].items():
        try:
            if (folder / file).stat().st_size != entry["bytes"]:
                raise OSError(None, "its size has changed")
        except OSError as error:
            raise ConfigError(f"data: '{folder}' is damaged: {file}: {error.strerror}; {REMEDY}") from None
    return metadata


def _check(metadata: dict) -> None:
    """Raise an exception of any kind if the metadata are not as data.prepare wrote them."""
    files, counts = metadata["files"], [metadata[split][name] for split in SPLITS for name in ("tokens", "bytes")]
    if names := [name for name in files if not re.fullmatch(r"(train|validation)/\d+\.arrow", name)]:
        raise ValueError(f"{names[0]!r} is not the name of a corpus file")
    counts += [entry["bytes"] for entry in files.values()]
    if wrong := [count for count in counts if type(count) is not int or count < 0]:
        raise ValueError(f"{wrong[0]!r} is not a count")
    whole = content_hash(metadata["tokenizer"]["hash"], {name: entry["sha256"] for name, entry in files.items()})
    if (metadata["hash"], metadata.get("digest")) != (whole, metadata_digest(metadata)):
        raise ValueError("it does not match its own digest")


def hash_validation_text(folders: list[Path]) -> str | None:
    """Hash the bytes of the validation text of corpora, independently of the tokenizer.

    Return None if a corpus does not record it, as with a tokenizer that is not byte-level.
    """
    hashes = [read_metadata(folder)["validation"].get("text") for folder in folders]
    return None if None in hashes else "+".join(hashes)


def open_columns(file: Path) -> list[pa.ListArray]:
    """Memory-map the columns of a file: the tokens and, for conversations, the masks of answers.

    Only their lengths are read, and checked, so that no use of their `values` and `offsets` reads beyond the file.

    Raises:
        ConfigError: data.prepare did not write this file.
    """
    try:
        reader = pa.ipc.open_stream(pa.memory_map(str(file)))
        tokens = [{"input_ids": pa.list_(kind)} for kind in (pa.uint16(), pa.uint32())]
        masks = {}, {"assistant_masks": pa.list_(pa.uint8())}
        if reader.schema not in [pa.schema(ids | mask) for ids in tokens for mask in masks]:
            raise ValueError("it has other columns than data.prepare writes")
        columns = reader.read_next_batch().columns
        for column in columns:
            column.validate()
            if column.null_count or column.values.null_count or len(column.values) != len(columns[0].values):
                raise ValueError("it has nulls, or tokens without a mask")
        return columns
    except (pa.ArrowException, ValueError, OSError, StopIteration) as error:
        raise ConfigError(f"data: {file} is damaged: {error or 'it is empty'}; {REMEDY}") from None


class Verification:
    """Reads the files of corpora (data.text.TextCorpus) in the background, and compares them with metadata.json."""

    problem: str | None = None
    """The first damaged file and what is wrong with it, set as soon as it is found."""

    def __init__(self, corpora: list):
        self.corpora = corpora
        self.files = [(corpus, name) for corpus in corpora for name in corpus.metadata["files"]]
        self.num_bytes = sum(corpus.metadata["files"][name]["bytes"] for corpus, name in self.files)
        self.num_bytes_read = 0
        self._verified: dict[Path, tuple[list[int], str]] = {}  # stamps and hashes
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start, unless it is running; after an earlier run, only files with another stamp are read again."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, daemon=True, name="verification")
            self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the verification ends, at most `seconds`; return whether it has ended."""
        assert self._thread is not None, "started"
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def describe(self, done: bool) -> str:
        """Describe what is verified, for the start of a run; `done`: the verification has ended on all machines."""
        files = f"{len(self.files)} files, {self.num_bytes:,} bytes"
        if not done:
            return f"{files}, being verified in the background; no checkpoint is saved before"
        skipped = self.num_bytes - self.num_bytes_read
        read = f"{self.num_bytes_read:,} bytes read"
        return f"{files}, verified: {read}, {skipped:,} skipped as unchanged since the last check"

    def _run(self) -> None:
        try:
            for corpus in self.corpora:
                self._recall(corpus)
            with ThreadPoolExecutor(NUM_THREADS, "verification", initializer=lower_thread_priority) as pool:
                list(pool.map(self._verify, *zip(*self.files, strict=True)))
        except Exception as error:  # what cannot be read is not verified
            self._fail(f"a corpus cannot be verified: {type(error).__name__}: {error}")

    def _verify(self, corpus, name: str) -> None:
        file, expected = corpus.path / name, corpus.metadata["files"][name]["sha256"]
        stamp = file_stamp(file)
        if self.problem or self._verified.get(file) == (stamp, expected):
            return
        if sha256(file) != expected:
            self._fail(f"{file} has another content than data.prepare wrote")
            return
        try:  # the tokens, too: a hostile author can compute hashes
            columns = open_columns(file)
            for column in columns:
                column.validate(full=True)
            largest = np.max(np.from_dlpack(columns[0].values), initial=0)
            if largest >= corpus.vocab_size:
                raise ValueError(f"it has token {largest}, but the tokenizer has {corpus.vocab_size} tokens")
        except (pa.ArrowException, ValueError) as error:
            self._fail(f"{file} is damaged: {error}")
        else:
            self._remember(corpus, name, stamp, expected)

    def _fail(self, problem: str) -> None:
        self.problem = self.problem or f"data: {problem}; {REMEDY}"

    def _recall(self, corpus) -> None:
        for record in _records(corpus.path):
            with suppress(OSError):
                for line in record.read_bytes().splitlines():
                    with suppress(ValueError, TypeError):  # half a line, of a process that was killed
                        name, stamp, found = json.loads(line)
                        self._verified[corpus.path / name] = (stamp, found)

    def _remember(self, corpus, name: str, stamp: list[int], found: str) -> None:
        with self._lock:
            self.num_bytes_read += stamp[0]
            self._verified[corpus.path / name] = (stamp, found)
            for record in _records(corpus.path):
                with suppress(OSError):  # then the next start reads the file again
                    record.parent.mkdir(parents=True, exist_ok=True)
                    with open(record, "a") as file:  # a line at a time: several machines may write it
                        file.write(json.dumps([name, stamp, found]) + "\n")
                    return


def _records(folder: Path) -> list[Path]:
    """Return where verified files may be recorded: in the corpus folder or, if it is read-only, in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    name = blake2b(str(folder.resolve()).encode(), digest_size=16).hexdigest()
    paths = [folder / ".verified", *([cache / "mini-gpt" / name] if cache.is_absolute() else [])]
    # A .verified that came with a corpus may be a link to any file of the user.
    return [path for path in paths if not os.path.lexists(path) or (path.is_file() and not path.is_symlink())]
