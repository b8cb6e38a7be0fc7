"""The result of a command, and the format of an effect."""

from dataclasses import dataclass
from typing import Any

from tools.research.ledger import Row

MAX_MESSAGE = 300  # characters, so that the result of a test has less than a kilobyte


@dataclass(frozen=True)
class Result:
    """Output of a command: one object with `--json`, else lines."""

    facts: dict[str, Any]
    lines: list[str]
    exit_code: int = 0


def describe_idea(row: Row) -> str:
    """Return the idea of a row, with its note if it is the working tree, whose name `.` says nothing."""
    return f"{row['idea']} ({row['note']})" if row["note"] and row["idea"].split()[0] == "." else row["idea"]


def format_effect(row: Row) -> str:
    """Format the difference of a row with its interval; "" if it has none."""
    if not row["difference"]:
        return ""
    return "{:+.1f}% ({:+.1f} to {:+.1f})".format(*(float(row[name]) for name in ("difference", "low", "high")))


def cut_middle(message: str) -> str:
    """Return a message without its middle if it is long; a crash has the line of code and the log at its end."""
    half = MAX_MESSAGE // 2
    return message if len(message) <= MAX_MESSAGE else f"{message[:half]} ... {message[-half:]}"
