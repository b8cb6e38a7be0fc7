"""status.json: the state of a run, for programs that decide whether to restart it."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from data.files import flush_to_disk, write_atomically
from data.json_objects import from_json, parse_object

MAX_REASON_CHARACTERS = 1000  # so that the file fits into one block of the disk, see write_status


@dataclass(frozen=True)
class Status:
    """Content of status.json."""

    state: str
    """running, finished, preempted or failed."""
    step: int
    """The step that the session started from, or whose save began last."""
    reason: str = ""
    """Why the run was preempted or failed."""


def read_status(path: Path) -> Status | None:
    """Return the content of the file; None if it is absent or damaged."""
    try:
        return from_json(parse_object(path.read_bytes()), Status, "status")
    except (OSError, ValueError):
        return None


def write_status(path: Path, status: Status) -> None:
    """Replace the file. An OSError is only printed: it must not hide the error that ended the run."""
    text = json.dumps(asdict(status) | {"reason": status.reason[:MAX_REASON_CHARACTERS]}) + "\n"
    try:
        try:
            write_atomically(path, text)
        except OSError:
            # A full disk has no room for a second file, but the existing file has its block.
            with open(path, "rb+", buffering=0) as file:
                file.write(text.encode())
                file.truncate()
                flush_to_disk(file.fileno())
    except OSError as error:
        if path.parent.is_dir():
            print(f"{path} cannot be written: {error.strerror}", file=sys.stderr)


def write_outcome(path: Path, state: str, reason: str = "") -> None:
    """Replace the state and the reason; the step stays."""
    before = read_status(path)
    write_status(path, Status(state, before.step if before else 0, reason))
