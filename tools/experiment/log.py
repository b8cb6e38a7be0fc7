"""LAB/log.jsonl: results of comparisons and confirmations, one a line."""

import json
from pathlib import Path
from typing import Any

from config.errors import ConfigError
from data.files import lock
from data.json_objects import parse_object


def append(lab: Path, row: dict[str, Any]) -> None:
    """Append a row, in turn with other processes; raise ConfigError if the lab cannot be written."""
    try:
        lab.mkdir(parents=True, exist_ok=True)
        with open(lab / "log.jsonl", "a+", errors="replace") as file:
            lock(file, wait=True)
            file.seek(0)
            is_cut = file.read()[-1:] not in ("", "\n")  # by the kill of another process
            file.write("\n" * is_cut + json.dumps(row) + "\n")
    except OSError as error:
        raise ConfigError(f"lab: {lab} cannot be written: {error.strerror}") from None


def read(lab: Path) -> list[dict[str, Any]]:
    """Return the newest row of each comparison and confirmation, without lines that are damaged."""
    file = lab / "log.jsonl"
    rows: dict[str, dict[str, Any]] = {}
    for line in file.read_text(errors="replace").splitlines() if file.exists() else ():
        try:
            row = parse_object(line)
            rows[row["key"]] = row
        except (ValueError, KeyError):
            continue
    return [*rows.values()]
