"""LAB/ledger.tsv: a row for every event of a chain, append-only.

The last row of an idea is its state, and everything else about the chain follows from the rows. An incomplete last row,
left by a killed process or a full disk, is ignored, and replaced by the next one.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from cli.output import printable
from config.errors import ConfigError, RunError
from data.files import lock

# docs/research.md describes the columns.
COLUMNS = (
    *("id", "time", "kind", "parent", "commit", "candidate", "idea", "note", "diff", "settings", "status", "decision"),
    *("loss", "difference", "low", "high", "seeds_baseline", "seeds_candidate", "p", "level", "wealth"),
    *("seconds", "cpu_seconds", "parameters", "flops", "speed", "verify", "message", "log"),
)
TEXT_COLUMNS = {*COLUMNS[: COLUMNS.index("loss")], *COLUMNS[COLUMNS.index("verify") :]}

Row = dict[str, str]


class Ledger:
    """A ledger that is locked by this process."""

    def __init__(self, file: TextIO):
        self.file = file
        file.seek(0)
        lines = file.read().split("\n")
        self.complete_bytes = sum(len(line.encode(errors="surrogateescape")) + 1 for line in lines[:-1])
        """Size of the complete lines."""
        if lines[-1]:
            message = f"{file.name}: ignoring an incomplete last row; rerun the command that wrote it"
            print(message, file=sys.__stderr__)  # sys.stderr may be the log of the runs
        self.rows = [self._parse(number, line) for number, line in enumerate(lines[1:-1], start=2)]
        if lines[:-1] and tuple(lines[0].split("\t")) != COLUMNS:
            raise ConfigError(f"{file.name}: line 1 must name the columns; restore the file, or choose another --lab")

    def _parse(self, number: int, line: str) -> Row:
        cells = line.split("\t")
        if len(cells) != len(COLUMNS):
            raise ConfigError(
                f"{self.file.name}: line {number} has {len(cells)} cells instead of {len(COLUMNS)}; restore the line"
            )
        return dict(zip(COLUMNS, cells, strict=True))

    def append(self, **cells: object) -> Row:
        """Append a row and return it; if it cannot be written, raise RunError and leave the ledger as it was."""
        row = make_row(**cells)
        lines = ["\t".join(row.values())] if self.complete_bytes else ["\t".join(COLUMNS), "\t".join(row.values())]
        content = "".join(f"{line}\n" for line in lines).encode()
        descriptor = self.file.fileno()
        os.ftruncate(descriptor, self.complete_bytes)
        try:
            written = os.write(descriptor, content)
            if written < len(content):
                os.write(descriptor, content[written:])
            os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, self.complete_bytes)
            raise RunError(f"{self.file.name}: {error.strerror}; fix this, then rerun the same command") from None
        self.complete_bytes += len(content)
        self.rows.append(row)
        return row


def make_row(**cells: object) -> Row:
    """Return a row with the time; cells that are not given, and None, are empty."""
    assert cells.keys() <= set(COLUMNS), cells
    cells["time"] = cells.get("time") or time.strftime("%Y-%m-%d %H:%M:%S")
    return {name: format_cell(cells.get(name)) for name in COLUMNS}


def typed_row(row: Row) -> dict[str, str | float | None]:
    """Return a row for JSON: numbers as floats, empty cells as None."""
    return {name: None if not cell else cell if name in TEXT_COLUMNS else float(cell) for name, cell in row.items()}


def format_cell(value: object) -> str:
    """Format the value of a cell: numbers with six significant digits, text without tabs and line breaks."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else printable(" ".join(str(value).split()))


def create_lab(lab: Path) -> None:
    """Create the directory of a chain, if it does not exist; raise ConfigError if it cannot be created."""
    try:
        lab.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"lab: {lab} cannot be created: {error.strerror}; choose another --lab") from None


@contextmanager
def locked_ledger(lab: Path) -> Iterator[Ledger]:
    """Lock the ledger, so that what is decided from its rows still holds when a row is appended.

    Raises:
        ConfigError: it is damaged, or the lab cannot be written.
    """
    try:
        file = open(lab / "ledger.tsv", "a+", encoding="utf-8", errors="surrogateescape", newline="\n")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"lab: {lab} cannot be written: {error.strerror}; choose another --lab") from None
    with file:
        lock(file, wait=True)
        yield Ledger(file)
