"""Checks that a corpus is as data.prepare wrote it: metadata.json at once, the files by reading them.

metadata.json has the length and the SHA-256 of every file, the hash of the whole (`data.hash` of a run), and a digest
of itself. The content of a file is read once for each of its stamps: what was found is remembered in `.verified` beside
the corpus or, where that cannot be written, in the user's cache.
"""

import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from hashlib import blake2b, file_digest, sha256
from pathlib import Path

import numpy as np
import pyarrow as pa

from config.errors import ConfigError
from data.json_objects import parse_object
from distributed.cores import lower_thread_priority

SPLITS = ("train", "validation")
READERS = min(4, os.cpu_count() or 1)  # threads, for one alone hashes slower than a disk reads
REMEDY = "restore it, or remove the folder and prepare it again"


def file_stamp(file: Path | str) -> list[int]:
    """Return the length of a file and the times of its last write and last change (ctime).

    These change when a file is written, replaced or copied; no program can set ctime.
    """
    stat = os.stat(file)
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def content_hash(tokenizer_hash: str, hashes: dict[str, str]) -> str:
    """Hash the contents of a corpus: its tokenizer, and its files in order."""
    return blake2b(json.dumps([tokenizer_hash, hashes]).encode(), digest_size=16).hexdigest()


def metadata_digest(metadata: dict) -> str:
    """Hash all of metadata.json but the digest in it."""
    rest = {name: value for name, value in metadata.items() if name != "digest"}
    return blake2b(json.dumps(rest).encode(), digest_size=16).hexdigest()


def read_metadata(folder: Path) -> dict:
    """Read metadata.json of the corpus in `folder`, and check that its files exist with their lengths.

    `files` has the `bytes` and the `sha256` of each, which is None in a corpus prepared before that was kept.

    Raises:
        ConfigError: there is no such file, or it is not as data.prepare wrote it, or a file of the corpus is not.
    """
    try:
        metadata = parse_object((folder / "metadata.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"data: '{folder}' is no corpus that data.prepare has completed: {error}") from None
    try:
        _check(metadata)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        problem = f"{folder / 'metadata.json'} is damaged: {type(error).__name__}: {error}"
        raise ConfigError(f"data: {problem}; {REMEDY}") from None
    for file, facts in metadata["files"].items():
        try:
            if (folder / file).stat().st_size != facts["bytes"]:
                raise OSError(None, "another size than when it was made")
        except OSError as error:
            raise ConfigError(f"data: '{folder}' is damaged: {file}: {error.strerror}; {REMEDY}") from None
    return metadata


def validation_text(folders: list[Path]) -> str | None:
    """Hash the bytes of the validation text of corpora, independently of the tokenizer.

    None if a corpus does not record it, as with a tokenizer that is not byte-level.

    Raises:
        ConfigError: as read_metadata.
    """
    hashes = [read_metadata(folder)["validation"].get("text") for folder in folders]
    return None if None in hashes else "+".join(hashes)


def _check(metadata: dict) -> None:
    """Raise an exception of any kind if the metadata are not as data.prepare wrote them."""
    tokenizer_hash, corpus_hash, files = metadata["tokenizer"]["hash"], metadata["hash"], metadata["files"]
    if names := [name for name in files if not re.fullmatch(r"(train|validation)/\d+\.arrow", name)]:
        raise ValueError(f"{names[0]!r} is no file of a corpus")
    if lengths_only := all(type(facts) is int for facts in files.values()):
        metadata["files"] = {name: {"bytes": length, "sha256": None} for name, length in files.items()}
    counts = [metadata[split][name] for split in SPLITS for name in ("tokens", "bytes")]
    counts += [facts["bytes"] for facts in metadata["files"].values()]
    if wrong := [count for count in counts if type(count) is not int or count < 0]:
        raise ValueError(f"{wrong[0]!r} is no count")
    if lengths_only:
        matches = isinstance(corpus_hash, str)
    else:
        hashes = {name: facts["sha256"] for name, facts in metadata["files"].items()}
        has_hash_of_files = corpus_hash == content_hash(tokenizer_hash, hashes)
        matches = has_hash_of_files and metadata.get("digest") == metadata_digest(metadata)
    if not matches:
        raise ValueError("it does not match its own digest")


def open_columns(file: Path) -> list[pa.ListArray]:
    """Memory-map the columns of a file: the tokens and, for conversations, the masks of answers.

    Nothing but their lengths is read.

    They are checked against the file's, so that no use of its `values` and `offsets` reads beyond it.

    Raises:
        ConfigError: it is not such a file.
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
    """Reads the files of corpora in the background, and compares them with what metadata.json says of them.

    Args:
        corpora: of data.text.TextCorpus.
    """

    problem: str | None = None
    """The first file that is not what it was, and what is wrong with it; there as soon as it is found."""

    def __init__(self, corpora: list):
        self.corpora = corpora
        lengths = [facts["bytes"] for corpus in corpora for facts in corpus.metadata["files"].values()]
        self.num_files, self.num_bytes, self.num_bytes_read = len(lengths), sum(lengths), 0
        self._known: dict[Path, tuple[list[int], str]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, unless it is under way; after an earlier one, only what has another stamp since is read again."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, daemon=True, name="verification")
            self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the verification ends, at most `seconds`; return whether it has ended."""
        assert self._thread is not None, "started"
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def describe(self, done: bool) -> str:
        """Describe what is verified, for the start of a run; `done`: on all machines."""
        files = f"{self.num_files} files, {self.num_bytes:,} bytes"
        if not done:
            return f"{files}, being verified in the background; no checkpoint is saved before"
        rest = self.num_bytes - self.num_bytes_read
        return f"{files}, verified: {self.num_bytes_read:,} read now, {rest:,} unchanged since they were read"

    def _run(self) -> None:
        try:
            for corpus in self.corpora:
                self._recall(corpus)
            with ThreadPoolExecutor(
                READERS, thread_name_prefix="verification", initializer=lower_thread_priority
            ) as pool:
                for corpus in self.corpora:
                    if not self._matches(corpus, pool):
                        self._known.clear()  # what was remembered may be wrong, and not the files
                        if not self._matches(corpus, pool):
                            unknown = "in which file, its metadata.json is too old to say"
                            self._fail(f"'{corpus.path}' has other tokens than data.prepare wrote ({unknown})")
        except Exception as error:  # what cannot be read is not verified
            self._fail(f"a corpus cannot be verified: {type(error).__name__}: {error}")

    def _matches(self, corpus, pool: ThreadPoolExecutor) -> bool:
        """Check whether all files together have the hash of the corpus; files with their own hashes come first."""
        facts = corpus.metadata
        hashes = dict(zip(facts["files"], pool.map(partial(self._hash, corpus), facts["files"]), strict=True))
        return self.problem is not None or content_hash(facts["tokenizer"]["hash"], hashes) == facts["hash"]

    def _hash(self, corpus, name: str) -> str:
        file, expected = corpus.path / name, corpus.metadata["files"][name]["sha256"]
        stamp = file_stamp(file)
        known, found = self._known.get(file, (None, ""))
        if self.problem or (known == stamp and expected in (None, found)):
            return found
        with open(file, "rb") as content:
            found = file_digest(content, sha256 if expected else partial(blake2b, digest_size=16)).hexdigest()
        if expected not in (None, found):
            self._fail(f"{file} has another content than data.prepare wrote")
        elif self._has_tokens_of(corpus, file):
            self._remember(corpus, name, stamp, found)
        return found

    def _has_tokens_of(self, corpus, file: Path) -> bool:
        """Check that all tokens are in range; hashes do not tell, because a hostile author can compute them."""
        try:
            columns = open_columns(file)
            for column in columns:
                column.validate(full=True)
            largest = np.max(np.from_dlpack(columns[0].values), initial=0)
        except (pa.ArrowException, ValueError) as error:
            self._fail(f"{file} is damaged: {error}")
            return False
        if largest >= corpus.vocab_size:
            self._fail(f"{file} is damaged: token {largest} is none of the {corpus.vocab_size} of the tokenizer")
        return largest < corpus.vocab_size

    def _fail(self, problem: str) -> None:
        self.problem = self.problem or f"data: {problem}; {REMEDY}"

    def _recall(self, corpus) -> None:
        for memory in _memories(corpus.path):
            with suppress(OSError):
                for line in memory.read_bytes().splitlines():
                    with suppress(ValueError, TypeError):  # half a line, of a process that was killed
                        name, stamp, found = json.loads(line)
                        self._known[corpus.path / name] = (stamp, str(found))

    def _remember(self, corpus, name: str, stamp: list[int], found: str) -> None:
        with self._lock:
            self.num_bytes_read += stamp[0]
            self._known[corpus.path / name] = (stamp, found)
            for memory in _memories(corpus.path):
                with suppress(OSError):  # then the next start reads the file again
                    memory.parent.mkdir(parents=True, exist_ok=True)
                    with open(memory, "a") as file:  # a line at a time: several machines may write it
                        file.write(json.dumps([name, stamp, found]) + "\n")
                    return


def _memories(folder: Path) -> list[Path]:
    """Return the paths of the cached result: beside the corpus or, if that is read-only, in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    name = blake2b(str(folder.resolve()).encode(), digest_size=16).hexdigest()
    places = [folder / ".verified", *([cache / "mini-gpt" / name] if cache.is_absolute() else [])]
    # What came with a corpus may be a link to something else.
    return [place for place in places if not os.path.lexists(place) or (place.is_file() and not place.is_symlink())]
