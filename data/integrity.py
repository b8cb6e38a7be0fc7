"""metadata.json and the Arrow files of a corpus, and the checks that they are as data.prepare wrote them.

metadata.json has the size and the SHA-256 of every file, the hash of the whole (`data.hash` of a run), and a digest of
itself. A start compares sizes, the contents of the tokenizer's files, and `stamp_files`. If the stamp is another than
at the last start of the run, or the processes of a new run have several copies, all files are read and their hashes
compared, as by `python -m data.prepare --check DIR`.
"""

import errno
import json
import re
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa
from tokenizers import Tokenizer

from data.tokenizer import load_tokenizer
from runtime.config.errors import ConfigError
from runtime.distributed.signals import never_stop
from runtime.files import hash_files, sha256
from runtime.json_objects import parse_object

SPLITS = ("train", "validation")
REMEDY = "restore it, or remove the folder and prepare it again"


def unreadable(file: Path, error: OSError) -> ConfigError:
    """Return the message for a file that could not be read.

    Only a file that is absent, or was read and is wrong, is damaged. One that exists may be intact: its permissions,
    the memory or the network were at fault.
    """
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return ConfigError(f"data: {file} is damaged: {error.strerror}; {REMEDY}")
    return ConfigError(f"data: {file} cannot be read: {error.strerror or error}; the corpus may be intact")


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
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise ConfigError(f"data: '{folder}' is not a corpus that data.prepare has completed: {error}") from None
    except OSError as error:
        raise unreadable(folder / "metadata.json", error) from None

    # Its content: file names, counts, and the digest over all of it.
    try:
        files, counts = metadata["files"], [metadata[split][name] for split in SPLITS for name in ("tokens", "bytes")]
        if names := [name for name in files if not re.fullmatch(r"(train|validation)/[\w-]+\.arrow", name)]:
            raise ValueError(f"{names[0]!r} is not the name of a corpus file")
        if names := [name for name in metadata["tokenizer"].get("files", {}) if not re.fullmatch(r"\w[\w.-]*", name)]:
            raise ValueError(f"{names[0]!r} is not the name of a tokenizer file")
        counts += [entry["bytes"] for entry in files.values()]
        if wrong := [count for count in counts if type(count) is not int or count < 0]:
            raise ValueError(f"{wrong[0]!r} is not a count")
        whole = content_hash(metadata["tokenizer"]["hash"], {name: entry["sha256"] for name, entry in files.items()})
        if (metadata["hash"], metadata.get("digest")) != (whole, metadata_digest(metadata)):
            raise ValueError("it does not match its own digest")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        problem = f"{folder / 'metadata.json'} is damaged: {type(error).__name__}: {error}"
        raise ConfigError(f"data: {problem}; {REMEDY}") from None

    # The lengths of the files. Reading their content would take minutes; `verify` does.
    for file, entry in files.items():
        try:
            size = (folder / file).stat().st_size
        except OSError as error:
            raise unreadable(folder / file, error) from None
        if size != entry["bytes"]:
            raise ConfigError(f"data: '{folder}' is damaged: {file}: its size has changed; {REMEDY}")
    return metadata


def hash_tokenizer_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a tokenizer, {name: hash}."""
    return {file.name: sha256(file) for file in sorted(folder.iterdir()) if file.is_file()}


def load_corpus_tokenizer(folder: Path, metadata: dict) -> tuple[Tokenizer, dict]:
    """Load the tokenizer of a corpus as load_tokenizer does.

    Raises:
        ConfigError: a file of it, such as a chat template, is not as data.prepare wrote it. An earlier version recorded
            the hash of tokenizer.json alone.
    """
    tokenizer, properties = load_tokenizer(folder / "tokenizer")
    recorded = metadata["tokenizer"]
    if different := [key for key, value in properties.items() if value != recorded.get(key)]:
        problem = f"its tokenizer is not the one that it was made with ({different[0]})"
        raise ConfigError(f"data: '{folder}': {problem}; {REMEDY}")
    for name, expected in recorded.get("files", {}).items():
        try:
            content = sha256(folder / "tokenizer" / name)
        except OSError as error:
            raise unreadable(folder / "tokenizer" / name, error) from None
        if content != expected:
            raise changed(folder, f"tokenizer/{name}")
    return tokenizer, properties


def changed(folder: Path, file: str) -> ConfigError:
    """Return the message for a file whose content is not the recorded one."""
    problem = f"{file}: it has another content than data.prepare wrote"
    return ConfigError(f"data: '{folder}' is damaged: {problem}; {REMEDY}")


def hash_validation_text(folders: list[Path]) -> str | None:
    """Hash the bytes of the validation text of corpora, independently of the tokenizer.

    Return None if a corpus does not record it, as with a tokenizer that is not byte-level.
    """
    hashes = [read_metadata(folder)["validation"].get("text") for folder in folders]
    return None if None in hashes else "+".join(hashes)


def stamp_files(folders: list[Path]) -> str:
    """Hash the sizes and times of the files of corpora: equal as long as no file is written or replaced.

    Two copies have different stamps, and processes that read the same files have the same one.
    """
    files = [folder / file for folder in folders for file in read_metadata(folder)["files"]]
    # A program can set the modification time, but not the time of the last change.
    stamps = [(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in map(Path.stat, files)]
    return blake2b(json.dumps(stamps).encode(), digest_size=16).hexdigest()


def open_columns(file: Path) -> list[list[pa.ListArray]]:
    """Memory-map the columns of each batch of a file: the tokens and, for conversations, the masks of answers.

    Only their lengths are read, and checked, so that no use of their `values` and `offsets` reads beyond the file.

    Raises:
        ConfigError: data.prepare did not write this file, or it cannot be read, for example because the limit of the
            process on its memory (`ulimit -v`) is too low to map it.
    """
    try:
        content = pa.memory_map(str(file))
    except OSError as error:
        raise unreadable(file, error) from None
    try:
        reader = pa.ipc.open_stream(content)
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
    except MemoryError as error:  # also Arrow's own
        raise unreadable(file, OSError(errno.ENOMEM, f"out of memory: {error}")) from None
    except (pa.ArrowException, ValueError, OSError) as error:
        raise ConfigError(f"data: {file} is damaged: {error}; {REMEDY}") from None


def verify(folder: Path, should_stop: Callable[[], bool] = never_stop) -> int:
    """Compare the SHA-256 of every file of a corpus with the one in metadata.json; return the number of files.

    Raises:
        ConfigError: a file has another content than data.prepare wrote, or cannot be read.
        Interrupted: `should_stop()` is true.
    """
    metadata = read_metadata(folder)
    load_corpus_tokenizer(folder, metadata)
    files = metadata["files"]
    contents = hash_files([folder / file for file in files], should_stop)
    for file, entry in files.items():
        try:
            content = next(contents)
        except OSError as error:
            raise unreadable(Path(error.filename or folder / file), error) from None
        if content != entry["sha256"]:
            raise changed(folder, file)
    return len(files) + len(metadata["tokenizer"].get("files", {}))
