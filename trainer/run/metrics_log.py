"""Files of JSON lines with a step: metrics.jsonl, generations.jsonl and sessions.jsonl."""

import errno
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime.files import flush_to_disk, open_no_link, open_regular, write_atomically
from runtime.json_objects import parse_object

TAIL_BYTES = 2**16  # longer than almost any row


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the file, oldest first.

    A line that is not a JSON object with a step, such as the half line of a killed process, is skipped.
    """
    with open(path, "rb", opener=open_regular) as file:
        lines = file.read().splitlines()
    yield from filter(None, map(_parse_row, lines))


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


def read_newest_row(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the newest row, if there is one; only the end of the file is read, unless the row is longer."""
    with open(path, "rb", opener=open_regular) as file:
        size = file.seek(0, os.SEEK_END)
        for num_bytes in (min(size, TAIL_BYTES), size):
            file.seek(size - num_bytes)
            newest_first = map(_parse_row, reversed(file.read(num_bytes).splitlines()))
            if row := next(filter(None, newest_first), None):
                yield row
                return


class RowWriter:
    """Appends rows to a file. Rows for which the disk has no room are kept in memory and written later."""

    def __init__(self, path: Path):
        self._path = path
        self._descriptor = open_no_link(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
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
        flush_to_disk(self._descriptor)

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
