"""status.json: how a run stands, for whoever decides whether to start it again."""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from data.files import write_atomically
from data.json_objects import parse_object, typed

# A run's directory has a file that the process which trains in it keeps locked, and what the next one is told.
LOCK, IN_USE = ".lock", "is in use: another training is running in it"
LONGEST_REASON = 1000  # characters: the file stays within one block of the disk


@dataclass(frozen=True)
class Status:
    """`state` is running, finished, preempted or failed; `step` the last one done or saved."""

    state: str
    step: int
    reason: str = ""


def read_status(path: Path) -> Status | None:
    """What the file says; None if there is none, or it is damaged."""
    try:
        return typed(parse_object(path.read_bytes()), Status, "status")
    except (OSError, ValueError):
        return None


def write_status(path: Path, status: Status) -> None:
    """Replace the file, as well as the disk allows: that it cannot be written must not hide how the run ended."""
    text = json.dumps(asdict(status) | {"reason": status.reason[:LONGEST_REASON]}) + "\n"
    try:
        try:
            write_atomically(path, text)
        except OSError:
            # A full disk has no room for a second file, but the first one has a block of its own.
            with open(path, "rb+", buffering=0) as file:
                file.write(text.encode())
                file.truncate()
                os.fsync(file.fileno())
    except OSError as error:
        if path.parent.is_dir():
            print(f"{path} cannot be written: {error.strerror}", file=sys.stderr)
