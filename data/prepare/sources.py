"""Sources of a corpus's text: files, datasets and Python's own library, read as documents in a fixed order.

Files are UTF-8, or UTF-16 or UTF-32 with a byte order mark; a file that is probably in another encoding is refused.
"""

import codecs
import errno
import io
import json
import os
import re
import stat
import sys
import sysconfig
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from glob import escape, glob
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from data.prepare import chat
from runtime.config.errors import UNUSABLE_PATH, ConfigError
from runtime.files import folder_problems

CHUNK = 2**19  # characters of a document that are yielded at once
BATCH_ROWS, BATCH_BYTES = 256, 2**24  # of a Parquet file that are read at once, at most
FILE_TYPES = ".txt", ".jsonl", ".parquet"

HUB_NAME = re.compile(r"[\w-]+|[\w-][\w.-]*/[\w-][\w.-]*")  # without a user or organisation it has no dot

LIBRARY = "python-library"
LIBRARY_FOLDER = Path(sysconfig.get_path("stdlib"))
# What not every machine with a version of Python has: tests, and modules that distributions leave out or package alone.
NOT_EVERYWHERE = {"test", "tests", "distutils", "ensurepip", "idlelib", "lib2to3", "macholib", "tkinter", "turtle"}
NOT_EVERYWHERE |= {"turtledemo"}

# The first bytes of a file decide, not its name, whether it is compressed.
COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
# Programs that read what Arrow does not: a gzip file with zeros at its end, a window of zstd above 128 MiB.
DECOMPRESS = {"gzip": ("gzip -dk", "gzip -dc <"), "zstd": ("zstd -d --long=31", "zstd -dc --long=31 <")}
SUFFIXES = {"gzip": ".gz", "zstd": ".zst"}
NOT_TEXT = {b"BZh91AY": "bzip2", b"\xfd7zXZ": "xz", b"PK\3\4": "zip", b"%PDF-": "PDF", b"PAR1": "Parquet"}
NOT_TEXT |= {b"SQLite format 3": "SQLite", b"ARROW1": "Arrow", b"\x89HDF": "HDF5"}

# The longest first: the mark of UTF-16-LE is a prefix of the mark of UTF-32-LE.
BYTE_ORDER_MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
BYTE_ORDER_MARKS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}

MIN_CHARACTERS = 2**19  # after so many, replacements are checked before the end of the file, too
# Encodings in which all bytes are ASCII: what stands for a character, or a row of them, that is not.
HZ, UTF_7 = re.compile(r"~\{(?:[!-}][!-~])+~\}"), re.compile(r"\+[A-Za-z0-9+/]{3,}-?")
ISO_2022 = re.compile("\x1b\\$|\x0e")  # the second one shifts in ISO-2022-KR, whose only escape is at the begin
MAX_REPLACED, MAX_FRACTION_REPLACED = 10, 0.002  # German in ISO-8859-1 has one per 70 characters


@dataclass
class Source:
    """Documents of files or a dataset in order, as pairs (piece of text, whether it ends the document).

    The text of a conversation is its messages as JSON. The fields are settings of data.prepare.

    Raises:
        ConfigError: there is no such source, or it cannot be read as text.
    """

    name: str
    text_column: str = "text"
    document_separator: str | None = None
    invalid_utf8: str = "replace"
    streaming: bool = False
    setting: str = "source"
    """Name of the setting whose value is `name`, for messages."""
    conversations: bool | None = field(default=None, init=False)
    """Whether all documents are conversations; None until the first that is not null is read."""

    line: int = field(default=1, init=False)
    """Number of the line of a jsonl file that is read, for messages."""
    found_separator: bool = field(default=False, init=False)
    found_text_column: bool = field(default=False, init=False)
    null_rows: int = field(default=0, init=False)
    """Rows without a value in `text_column` and in the columns of conversations; their documents are empty."""
    decoded: "Decoded" = field(init=False)
    """Counts of all files that are read."""

    def __post_init__(self) -> None:
        self.name = os.path.expanduser(self.name)  # a pattern is in quotes, so the shell has not expanded ~
        separator = self.document_separator or ""
        for written, meant in {"\\r": "\r", "\\n": "\n", "\\t": "\t"}.items():
            separator = separator.replace(written, meant)
        self.separator = separator.replace("\r\n", "\n").replace("\r", "\n")  # like the line ends of files
        self.errors = "strict" if self.invalid_utf8 == "refuse" else "replace"
        is_library = self.name == LIBRARY
        if is_library:
            self.files = find_library_files()
        else:  # first as a file, because glob would read the brackets in its name as a pattern
            self.files = [self.name] if Path(self.name).is_file() else find_files(self.name)
        for file in self.files:
            if get_file_type(file) not in FILE_TYPES and not is_library:
                raise self._error(f"{file!r} is not .txt, .jsonl or .parquet, nor one of them with .gz or .zst")
            if self.streaming:
                raise ConfigError(f"streaming: {file!r} is on this machine; streaming is for datasets of the Hub")
        self.dataset: Any = None
        self.dataset_files: list[str] = []
        self.slices: list[Any] = []
        if not self.files:
            self.dataset, self.dataset_files, self.slices = self._load()
        self.stamps = {file: get_source_stamp(file) for file in [*self.files, *self.dataset_files]}

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        self.decoded, self.null_rows, places = Decoded(), 0, self.files or [self.name]
        for place in places:
            number = 1
            try:
                is_text = get_file_type(place) in (".txt", ".py")
                for text, ends in self._read_txt(place) if is_text else self._read_rows(place):
                    yield text, ends
                    number += ends
                changed = [f for f in ([place] if self.files else self.stamps) if get_source_stamp(f) != self.stamps[f]]
            except Exception as error:  # each format, file system and network raises its own types
                line = f" (line {self.line})" if self.files and get_file_type(place) == ".jsonl" else ""
                problem = f"{place!r}, document {number}{line}: {type(error).__name__}: {error}"
                if self.files and isinstance(error, OSError) and not error.errno:  # Arrow's errors have no number
                    problem += name_decompression(place, error)
                raise self._error(problem) from None
            if changed:
                raise self._error(f"{changed[0]!r} changed while it was read; start again when it is complete")
            if problem := self.decoded.find_problem(complete=place == places[-1]):
                raise self._error(f"{self.name!r}, in all files: {problem} and others")
        if self.setting == "source":
            self._check_options()

    def _check_options(self) -> None:
        """Raise ConfigError if an option had no effect on what was read."""
        file_types = {get_file_type(file) for file in self.files}
        if self.separator and ".txt" in file_types and not self.found_separator:
            problem = f"document_separator: {self.document_separator!r} does not occur in {self.name!r}"
            raise ConfigError(f"{problem}; correct it, or leave it out if each file is one document")
        has_rows = self.dataset is not None or file_types - {".txt", ".py"}
        if self.text_column != "text" and has_rows and not self.found_text_column:
            problem = f"text_column: {self.text_column!r} is a column of no row of {self.name!r}"
            raise ConfigError(f"{problem}; correct it, or leave it out for conversations")

    def shared_with(self, other: "Source") -> str | None:
        """Return a file or dataset that is in both sources, under whatever name; None if there is none."""
        if self.dataset is not None and self.name == other.name:
            return self.name
        same_split = [(a, b) for a in self.slices for b in other.slices if a.splitname == b.splitname]
        if same_split and all(a.to <= b.from_ or b.to <= a.from_ for a, b in same_split):
            return None  # disjoint slices, as train[:90%] and train[90%:]
        ours = {_identity(file) for file in self.files or self.dataset_files}
        return next((file for file in other.files or other.dataset_files if _identity(file) in ours), None)

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.setting}: {problem}")

    def _load(self) -> tuple[Any, list[str], list]:
        """Open the dataset; return it, the files of its split, and which rows of which splits it has.

        Files are local paths, or URLs of the Hub that contain a revision. The rows of a stream are not known: [].
        """
        import datasets  # slow to import, and not needed for files

        path, configuration, split = [*self.name.split(":", 2), "", ""][:3]
        split = split or "train"
        remedy = "Without a network, name a folder with its files, or a pattern such as 'folder/*.parquet'"
        is_path = not HUB_NAME.fullmatch(path) or "://" in self.name
        if (is_path or get_file_type(path) in FILE_TYPES or folder_problems(path)) and not os.path.exists(path):
            raise self._error(f"there is no file {self.name!r}\n{remedy}")  # asking the Hub would take half a minute
        try:
            builder = datasets.load_dataset_builder(path, configuration or None)
            files = builder.config.data_files or {}
            has_readme = os.path.exists(f"{path}/README.md")  # which may name other configurations
            if os.path.isdir(path) and not has_readme and builder.name != "text":
                used = {_identity(str(file)) for of_split in files.values() for file in of_split}
                texts = [file for file in find_files(f"{escape(path)}/**") if get_file_type(file) in FILE_TYPES]
                if left_out := [file for file in texts if _identity(file) not in used]:
                    raise ValueError(f"{left_out[0]!r} would be in no split; use a pattern of files instead")
            files = [str(file) for name in re.split(r"\+|\[.*?\]", split) for file in files.get(name, [])]
            if self.streaming:
                return builder.as_streaming_dataset(split=split), files, []
            if builder.name == "text" and any(map(os.path.exists, files)):
                raise ValueError(f"each line of its txt files would be a document; use '{path}/*.txt' for whole files")
            builder.download_and_prepare()
            rows = {name: info.num_examples for name, info in (builder.info.splits or {}).items()}
            return builder.as_dataset(split=split), files, datasets.ReadInstruction.from_spec(split).to_absolute(rows)
        except Exception as error:  # downloads and dataset builders raise many types
            problem = f"there is no file {self.name!r}, nor can a dataset NAME:CONFIGURATION:SPLIT be loaded"
            cause = error.__cause__ or error
            if isinstance(cause, OSError) and cause.errno in (*UNUSABLE_PATH, errno.EROFS):
                remedy = "Set HF_HOME in the environment to a folder where datasets can write its cache"
            if configuration and self.name.count(":") == 1:
                remedy = f"A split without a configuration comes after two colons: {path}::{configuration}\n{remedy}"
            described = str(cause) if isinstance(cause, OSError) and cause.filename else repr(cause)
            raise self._error(f"{problem}: {described}\n{remedy}") from None

    def _check_kind(self, conversations: bool) -> None:
        if self.conversations is (not conversations):
            this, earlier = ("conversation", "texts") if conversations else ("text", "conversations")
            kinds = f"this row is a {this}, but earlier rows are {earlier}"
            raise ValueError(f"conversations and texts are in one source; {kinds}; separate them")
        self.conversations = conversations

    def detect_conversations(self) -> bool:
        """Read up to the first row that is not null; return whether it is a conversation."""
        for _ in self:
            if self.conversations is not None:
                break
        return bool(self.conversations)

    def _read_txt(self, file: str) -> Iterator[tuple[str, bool]]:
        separator, rest = self.separator, ""
        begun = True  # whether what comes after the last separator is a document, though it may be blank
        self._check_kind(conversations=False)
        with open_text(file, self.errors) as text:
            for chunk in check_decoded(iter(partial(text.read, CHUNK), ""), file, self.decoded):
                if separator:
                    *documents, rest = (rest + chunk).split(separator)
                    self.found_separator |= bool(documents)
                    yield from ((document, True) for document in documents)
                    # The rest may be the start of a separator or, if it is blank, what follows the last one.
                    settled = 0 if rest.isspace() else max(len(rest) - len(separator) + 1, 0)
                    chunk, rest = rest[:settled], rest[settled:]
                    begun = (begun and not documents) or bool(chunk)
                yield chunk, False
        if begun or rest.strip():
            yield rest, True

    def _read_rows(self, place: str) -> Iterator[tuple[str, bool]]:
        for row in self._read_records(place):
            text, is_conversation = chat.read_document(row, self.text_column)
            self.found_text_column |= self.text_column in row
            if is_conversation is not None:
                self._check_kind(is_conversation)
            elif row.get(self.text_column) is None:
                self.null_rows += 1
            length = len(text) if is_conversation else CHUNK  # a conversation stays whole
            for start in range(0, max(len(text), 1), max(length, 1)):
                piece = text[start : start + length]
                # JSON may contain half of a surrogate pair, which UTF-8 cannot encode.
                piece = piece.encode("utf-8", "surrogatepass").decode("utf-8", self.errors)
                yield piece, start + length >= len(text)

    def _read_records(self, place: str) -> Iterator[dict]:
        if self.dataset is not None:
            for row in self.dataset:
                yield {name: chat.without_added_nulls(value) for name, value in row.items()}
        elif get_file_type(place) == ".jsonl":
            self.line = 1
            with open_text(place, self.errors) as lines:
                for line in check_decoded(lines, place, self.decoded):
                    if not line.isspace():
                        yield parse_line(line.removeprefix("\ufeff"), place)  # of a file that was appended
                    self.line += 1
        else:
            check_is_parquet(place)
            with pyarrow.parquet.ParquetFile(place) as file:
                names = [name for name in file.schema_arrow.names if name in (self.text_column, *chat.COLUMNS)]
                for index in range(file.num_row_groups):
                    group = file.metadata.row_group(index)
                    fitting = BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1)
                    num_rows = min(max(fitting, 1), BATCH_ROWS)
                    for batch in file.iter_batches(num_rows, [index], columns=names or None):
                        for row in batch.to_pylist():
                            yield {name: chat.without_added_nulls(value) for name, value in row.items()}


def find_files(pattern: str) -> list[str]:
    """Return the files that match a pattern, sorted by name, each once; `**` matches any folders.

    A file that several links lead to is one file, such as below a link to a parent folder. Broken links are included,
    so that opening them fails instead of silently leaving out text.
    """
    found: dict[tuple[int, int] | str, str] = {}
    for file in sorted({*glob(pattern, recursive=True)}, key=lambda file: (file.count("/"), file)):
        try:
            if stat.S_ISREG(os.stat(file).st_mode):
                found.setdefault(_identity(file), file)
        except OSError as error:
            if error.errno != errno.ELOOP:  # below a link to a parent folder, at a depth that the system refuses
                found[file] = file
    return sorted(found.values())


def find_library_files() -> list[str]:
    """Return the modules of Python's library that each machine with this version has, sorted by name.

    Python names its own modules. So what a site or a build adds is none of them, such as sitecustomize.py.
    """
    found = {}
    for file in LIBRARY_FOLDER.rglob("*.py"):
        path = file.relative_to(LIBRARY_FOLDER).with_suffix("")
        if path.parts[0] in sys.stdlib_module_names and NOT_EVERYWHERE.isdisjoint(path.parts):
            found[path.as_posix()] = str(file)
    if not found:
        raise ConfigError(f"source: {LIBRARY}: {LIBRARY_FOLDER} has no modules of Python's library as files")
    return [found[name] for name in sorted(found)]


def get_source_stamp(file: str) -> list[int] | None:
    """Return size and modification time of a local file; None for a file of the Hub, whose URL has a revision."""
    return None if "://" in file else [(facts := os.stat(file)).st_size, facts.st_mtime_ns]


def get_file_type(file: str) -> str:
    """Return the suffix of a file's name, ignoring .gz and .zst."""
    return Path(file.removesuffix(".gz").removesuffix(".zst")).suffix


def _identity(file: str) -> tuple[int, int] | str:
    """Return a key that is equal for all links to a file."""
    return file if "://" in file else ((facts := os.stat(file)).st_dev, facts.st_ino)


def parse_line(line: str, file: str) -> Any:
    """Parse a line of a jsonl file; raise ValueError if it belongs to one JSON array of all rows."""
    try:
        row = json.loads(line)
    except ValueError as error:
        if line.strip() != "[" and not line.startswith(("[{", "[ {")):
            raise
        row, problem = [], error
    else:
        problem = "its rows are in one array"
    if isinstance(row, list) and not chat.is_messages(row) and (not row or isinstance(row[0], dict)):
        convert = f"jq -c '.[]' {file!r}"
        raise ValueError(f"{problem}; a jsonl file has an object in each line, as from {convert}")
    return row


def find_compression(file: str) -> str | None:
    """Return the compression of a local file by its first bytes, a key of DECOMPRESS; None if it has none.

    Raises:
        ValueError: the file has a format that is not text.
    """
    start = read_start(file)
    check_is_text(start)
    return find_format(start, COMPRESSIONS)


def read_start(file: str) -> bytes:
    """Return the first 16 bytes of a file, which tell its format."""
    with open(file, "rb") as stream:
        return stream.read(16)


def find_format(start: bytes, formats: dict[bytes, str]) -> str | None:
    """Return which of `formats` has a file that starts with these bytes; None if none has."""
    return next((kind for mark, kind in formats.items() if start.startswith(mark)), None)


def check_is_text(start: bytes, formats: dict[bytes, str] = NOT_TEXT) -> None:
    """Raise ValueError if a file that starts with these bytes, perhaps after decompression, has one of `formats`."""
    if kind := find_format(start, formats):
        raise ValueError(f"it is not text but {kind}; extract its text, or give it the name of its format")


def check_is_parquet(file: str) -> None:
    """Raise ValueError if the first bytes of a file are not those of Parquet."""
    start = read_start(file)
    if start.startswith(b"PAR1"):
        return
    kind = find_format(start, COMPRESSIONS)
    remedy = f"decompress it first: {DECOMPRESS[kind][0]} {file!r}" if kind else "give it the name of its format"
    raise ValueError(f"it is not Parquet{f' but {kind}' if kind else ''}; {remedy}")


def name_decompression(file: str, error: Exception) -> str:
    """Return the remedy for a compressed text file that Arrow cannot read; "" for other files.

    Another program reads a file that has something after its end, or for which Arrow allows too little memory.
    """
    kind = None if get_file_type(file) == ".parquet" else find_compression(file)
    if kind is None:
        return ""
    if re.search("Truncated|invalid|incorrect data|corrupt|checksum", str(error)):  # words of zlib and zstd
        return "; it is incomplete or damaged: download or copy it again"
    in_place, to_output = DECOMPRESS[kind]
    return f"; decompress it first: {in_place if file.endswith(SUFFIXES[kind]) else to_output} {file!r}"


def open_text(file: str, errors: str) -> io.TextIOWrapper:
    """Open a file, also one of gzip or zstd, as text without a byte order mark; line ends become line feeds."""
    stream = io.BufferedReader(pa.input_stream(file, compression=find_compression(file)))
    start = stream.peek(16)
    check_is_text(start, NOT_TEXT | COMPRESSIONS)  # within the compressed file
    encoding = next((name for mark, name in BYTE_ORDER_MARKS.items() if start.startswith(mark)), "utf-8-sig")
    return io.TextIOWrapper(stream, encoding, errors)


def count_escapes(text: str) -> int:
    """Count the sequences that stand for other characters in the ASCII encodings ISO-2022, HZ and UTF-7."""
    count = len(ISO_2022.findall(text)) + (len(HZ.findall(text)) if "~{" in text else 0)
    for match in UTF_7.findall(text):
        with suppress(UnicodeDecodeError):
            decoded = match.encode().decode("utf-7").removesuffix("-")
            # Writers of UTF-7 leave letters of ASCII as they are, and omit the minus sign before a space.
            letters = [character for character in decoded if character.isalpha()]
            is_word = match.endswith("-") or (len(letters) > 1 and len({*map(name_script, letters)}) == 1)
            count += decoded.isprintable() and is_word and bool(letters) and not any(map(str.isascii, letters))
    return count


def name_script(letter: str) -> str:
    """Return the script of a letter, such as CYRILLIC; all scripts of Japanese are one with Chinese."""
    script = unicodedata.name(letter, "").partition(" ")[0]
    return "CJK" if script in ("HIRAGANA", "KATAKANA") else script


@dataclass
class Decoded:
    """Counts of the decoded text of one file, or of all files of a source, which show that its encoding is another."""

    characters: int = 0
    replaced: int = 0
    escapes: int = 0
    file: str = ""
    """The first file with one of them."""

    def add(self, characters: int, replaced: int, escapes: int, file: str) -> None:
        """Add the counts of a piece of a file."""
        self.characters, self.replaced = self.characters + characters, self.replaced + replaced
        self.escapes += escapes
        if replaced or escapes:
            self.file = self.file or file

    def find_problem(self, complete: bool) -> str | None:
        """Return why this is another encoding, None if it is not, or too little of it is read unless it is complete."""
        limit = max(MAX_REPLACED, self.characters * MAX_FRACTION_REPLACED)
        if max(self.replaced, self.escapes) <= limit or not (complete or self.characters >= MIN_CHARACTERS):
            return None
        found = f"{self.replaced:,} of its first {self.characters:,} characters are not UTF-8, or are U+FFFD already"
        if self.escapes > limit:
            found = f"{self.escapes:,} escapes of ISO-2022, HZ or UTF-7 in its first {self.characters:,} characters"
            found = f"there are {found}"
        return f"{found}; {name_conversion(self.file)}"


def name_conversion(file: str) -> str:
    """Return the remedy for a file in another encoding."""
    return f"make it UTF-8, as by iconv -f ENCODING -t UTF-8 {file!r}"


def check_decoded(texts: Iterable[str], file: str, of_source: Decoded) -> Iterator[str]:
    """Yield the pieces of a file's text after checking that the file has the encoding that it was decoded with.

    `of_source` receives the counts, too: many small files may each have fewer than a file is allowed.

    Raises:
        ValueError: the text has a NUL, or too many characters were replaced or are escapes of another encoding.
    """
    of_file = Decoded()
    for text in texts:
        if "\0" in text:  # every other byte of Latin text in UTF-16 without a byte order mark
            raise ValueError(f"there is a NUL in it, so it is not UTF-8 text; if it is text, {name_conversion(file)}")
        replaced, escapes = text.count("\ufffd"), count_escapes(text)
        for counts in (of_file, of_source):
            counts.add(len(text), replaced, escapes, file)
        if problem := of_file.find_problem(complete=False):
            raise ValueError(problem)
        yield text
    if problem := of_file.find_problem(complete=True):
        raise ValueError(problem)
