"""Checks that a corpus is as data.prepare wrote it: metadata.json at once, the files by reading them.

metadata.json has the length and the SHA-256 of every file, the hash of the whole (`data.hash` of a run), and a digest
of itself. A file is read again only when its stamp has changed: the stamps of verified files are kept in `.verified`
in the corpus folder or, where that cannot be written, in the user's cache.
"""

import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa
from tqdm import tqdm

from config.errors import ConfigError
from data.files import sha256
from data.json_objects import parse_object
from distributed.world import is_main_process

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
    if names := [name for name in files if not re.fullmatch(r"(train|validation)/[\w-]+\.arrow", name)]:
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


def open_columns(file: Path) -> list[list[pa.ListArray]]:
    """Memory-map the columns of each batch of a file: the tokens and, for conversations, the masks of answers.

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
        batches = [batch.columns for batch in reader]
        for columns in batches:
            for column in columns:
                column.validate()
                if column.null_count or column.values.null_count or len(column.values) != len(columns[0].values):
                    raise ValueError("it has nulls, or tokens without a mask")
        return batches
    except (pa.ArrowException, ValueError, OSError) as error:
        raise ConfigError(f"data: {file} is damaged: {error}; {REMEDY}") from None


def verify(corpora: dict[Path, dict]) -> None:
    """Compare the SHA-256 of every file with the recorded one, except those compared before and not changed since.

    Called by one process of each machine. The main process shows a progress bar on a terminal, elsewhere one line.

    Args:
        corpora: the metadata of each corpus folder.

    Raises:
        ConfigError: a file has another content than data.prepare wrote, or cannot be read.
    """
    unread = [(folder, file, entry) for folder in corpora for file, entry in _unverified(folder, corpora[folder])]
    if not unread:
        return
    total = sum(entry["bytes"] for *_, entry in unread)
    bar = tqdm(
        desc="Verifying the corpus",
        total=total,
        unit="B",
        unit_scale=True,
        disable=None if is_main_process() else True,  # None: tqdm disables itself outside a terminal
        leave=False,
        file=sys.stderr,
    )
    if bar.disable and is_main_process():
        print(f"verifying {len(unread)} files of the corpus, {total:,} bytes ...", file=sys.stderr, flush=True)
    with bar, ThreadPoolExecutor(NUM_THREADS) as pool:
        lines = pool.map(_verify_file, *zip(*unread, strict=True))
        for (folder, _, entry), line in zip(unread, lines, strict=True):
            _record(folder, line)
            bar.update(entry["bytes"])


def _unverified(folder: Path, metadata: dict) -> list[tuple[str, dict]]:
    """Return the names and entries of the files that have no line in a record."""
    recorded = set()
    for record in _records(folder):
        with suppress(OSError):
            recorded.update(record.read_text(errors="replace").splitlines())
    return [(file, entry) for file, entry in metadata["files"].items() if _line(folder, file, entry) not in recorded]


def _verify_file(folder: Path, file: str, entry: dict) -> str:
    """Return the line that records the file as verified."""
    try:
        line = _line(folder, file, entry)  # before it is read, so that a later change makes another line
        if sha256(folder / file) == entry["sha256"]:
            return line
        problem = "has another content than data.prepare wrote"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    raise ConfigError(f"data: {folder / file} {problem}; {REMEDY}")


def _line(folder: Path, file: str, entry: dict) -> str:
    return json.dumps([file, file_stamp(folder / file), entry["sha256"]])


def _record(folder: Path, line: str) -> None:
    for record in _records(folder):
        with suppress(OSError):  # without a record the next start reads the file again
            record.parent.mkdir(parents=True, exist_ok=True)
            with open(record, "a") as file:  # a line at a time: several machines may write it
                file.write(line + "\n")
            return


def _records(folder: Path) -> list[Path]:
    """Return where verified files may be recorded: in the corpus folder or, if it is read-only, in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    name = blake2b(str(folder.resolve()).encode(), digest_size=16).hexdigest()
    paths = [folder / ".verified", *([cache / "mini-gpt" / name] if cache.is_absolute() else [])]
    # A .verified that came with a corpus may be a link to any file of the user.
    return [path for path in paths if not os.path.lexists(path) or (path.is_file() and not path.is_symlink())]
