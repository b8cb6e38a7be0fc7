"""Printing: escaped control characters, aligned tables, and streams whose failed writes do not end training."""

import os
import sys
import unicodedata
from contextlib import suppress
from typing import Any, TextIO, cast


def printable(text: str, kept: str = "") -> str:
    r"""Escape control characters, such as `\x1b`, except those in `kept`.

    A terminal would execute them: move the cursor, change the title, or send input.
    """
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character) == "Cc" and character not in kept
        else character
        for character in text
    )


def aligned(rows: list[list[str]]) -> list[str]:
    """Format rows as lines of aligned columns, the first one to the left, the others to the right."""
    if not rows:
        return []
    num_columns = max(map(len, rows))
    rows = [row + [""] * (num_columns - len(row)) for row in rows]
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]  # widths in characters
    lines = []
    for row in rows:
        cells = [row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:], others, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


class LossyStream:
    """A text stream that drops text that it cannot write.

    Training therefore continues after the reader of a pipe has exited, or when the disk of a log is full. Characters
    that the encoding of the stream lacks are escaped.
    """

    def __init__(self, stream: TextIO | None):
        # None where the file descriptor was closed. The file stays open as long as the process prints.
        self._stream: Any = stream or open(os.devnull, "w")  # noqa: SIM115
        if hasattr(self._stream, "reconfigure"):
            with suppress(OSError):  # a terminal that is also open for reading cannot be reconfigured
                self._stream.reconfigure(errors="backslashreplace")
        self.failure: OSError | None = None
        """The last error other than a broken pipe: a reader that exits early, as `head` does, wants no more."""

    def write(self, text: str) -> int:
        """Write the text, or drop it; return its length."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._record(error)
            return len(text)

    def flush(self) -> None:
        """Flush the buffer, or drop it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._record(error)

    def _record(self, error: OSError) -> None:
        if not isinstance(error, BrokenPipeError):
            self.failure = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def ignore_failed_prints() -> None:
    """Replace stdout and stderr so that no `print` raises an error from here on."""
    if not isinstance(sys.stdout, LossyStream):
        sys.stdout, sys.stderr = (cast(TextIO, LossyStream(stream)) for stream in (sys.stdout, sys.stderr))
