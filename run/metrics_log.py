"""Files of JSON lines with a step: metrics.jsonl, generations.jsonl and sessions.jsonl."""

import errno
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.files import write_atomically
from data.json_objects import parse_object


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the file, oldest first.

    A line that is not a JSON object with a step, such as the half line of a killed process, is skipped.
    """
    yield from filter(None, map(_parse_row, path.read_bytes().splitlines()))


def truncate_after_step(path: Path, step: int, one_per_step: bool = False) -> None:
    """Remove the rows after `step`, which will be logged again, and lines that are not rows; the file may be absent.

    With `one_per_step`, also remove rows whose step is not greater than that of the previous row.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept, newest = [], -1
    for line in lines:
        row = _parse_row(line) if line.endswith(b"\n") else None
        if row and row["step"] <= step and not (one_per_step and row["step"] <= newest):
            kept.append(line)
            newest = row["step"]
    if lines != kept:
        write_atomically(path, b"".join(kept).decode())


class RowReader:
    """Reads a growing file of rows repeatedly, and parses each line once."""

    def __init__(self, path: Path):
        self.path = path
        self._rows: list[dict[str, Any]] = []
        self._inode, self._num_bytes, self._last_line = 0, 0, b""

    def read(self) -> list[dict[str, Any]]:
        """Return all rows, oldest first; [] if the file is absent.

        A last line without a line break is parsed again at each call, because it may still be growing.
        """
        try:
            file = open(self.path, "rb")  # noqa: SIM115 - closed below
        except FileNotFoundError:
            return []
        with file:
            # A file that was replaced, as by truncate_after_step, has another inode; one that was edited in place
            # differs in the last line that was parsed.
            is_same = os.fstat(file.fileno()).st_ino == self._inode
            file.seek(self._num_bytes - len(self._last_line))
            if not is_same or file.read(len(self._last_line)) != self._last_line:
                self._inode, self._num_bytes, self._last_line = os.fstat(file.fileno()).st_ino, 0, b""
                self._rows = []
                file.seek(0)
            *lines, unfinished = file.read().split(b"\n")
        for line in lines:
            self._last_line = line + b"\n"
            self._num_bytes += len(self._last_line)
            if row := _parse_row(line):
                self._rows.append(row)
        rest = _parse_row(unfinished)
        return [*self._rows, rest] if rest else list(self._rows)


class RowWriter:
    """Appends rows to a file. Rows for which the disk has no room are kept in memory and written later."""

    def __init__(self, path: Path):
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._unwritten = b""
        self._lock = threading.Lock()  # rows are logged while a checkpoint is written in the background

    def append(self, *rows: dict[str, Any]) -> None:
        """Write rows, after those that are still unwritten; raise OSError if the disk has no room."""
        with self._lock:
            self._unwritten += b"".join(json.dumps(row).encode() + b"\n" for row in rows)
            self._write()

    def sync(self) -> None:
        """Return once all rows are on the disk; raise OSError if they cannot be written or the file was deleted."""
        self._path.stat()
        with self._lock:
            self._write()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; rows that are still unwritten are lost."""
        os.close(self._descriptor)

    def _write(self) -> None:
        size = os.fstat(self._descriptor).st_size
        if os.write(self._descriptor, self._unwritten) < len(self._unwritten):
            os.ftruncate(self._descriptor, size)  # leave no half line
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._unwritten = b""


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_object(line.decode())
    except ValueError:
        return None
    return row if type(row.get("step")) is int else None
