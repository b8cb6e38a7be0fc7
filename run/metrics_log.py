"""metrics.jsonl and generations.jsonl: JSON objects with a step, in the order of the steps."""

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
    """The rows of the file. What is no row, as the half line of a process that was killed, is passed over.

    Raises:
        OSError: the file cannot be read.
    """
    yield from filter(None, map(_row, path.read_bytes().splitlines()))


def forget_after(path: Path, step: int, one_each: bool = False) -> None:
    """Leave only the rows until `step`: those after it are done again, and would stand there twice; with `one_each`
    only the first of a step, where damage has made another of it."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept, newest = [], -1
    for line in lines:
        row = _row(line) if line.endswith(b"\n") else None
        if row and row["step"] <= step and not (one_each and row["step"] <= newest):
            kept.append(line)
            newest = row["step"]
    if lines != kept:
        write_atomically(path, b"".join(kept).decode())


class MetricsFile:
    """The file of a running run. Rows that a full disk has no room for are kept, and written when there is some."""

    def __init__(self, path: Path):
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._unwritten = b""
        self._lock = threading.Lock()  # rows are logged while a checkpoint is written in the background

    def append(self, *rows: dict[str, Any]) -> None:
        """Write rows, after those that are still unwritten.

        Raises:
            OSError: there is no room for them now.
        """
        with self._lock:
            self._unwritten += b"".join(json.dumps(row).encode() + b"\n" for row in rows)
            self._write()

    def sync(self) -> None:
        """Return once all rows are on the disk.

        Raises:
            OSError: they cannot be, or the file was deleted.
        """
        self._path.stat()
        with self._lock:
            self._write()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """No more rows come; what is still unwritten is lost."""
        os.close(self._descriptor)

    def _write(self) -> None:
        size = os.fstat(self._descriptor).st_size
        if os.write(self._descriptor, self._unwritten) < len(self._unwritten):
            os.ftruncate(self._descriptor, size)  # no half line stays
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._unwritten = b""


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_object(line.decode())
        for value in row.values():
            if type(value) is int:
                float(value)  # no number of ours is larger than any float is
    except (ValueError, OverflowError):
        return None
    return row if type(row.get("step")) is int else None
