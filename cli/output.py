"""What is printed: streams to which writing cannot fail, and foreign text in a form that a terminal only shows."""

import os
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


def printable(text: str) -> str:
    """A line of foreign text, such as the name of a directory: what a terminal would obey is spelt out (`\\x1b`)."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def escape_controls(text: str) -> str:
    """Spell out the control characters of generated text, such as `\\x1b`, except line breaks and tabs.

    A terminal would obey them: move the cursor, change the title, or answer with input.
    """
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character) == "Cc" and character not in "\n\t"
        else character
        for character in text
    )


def printable_lines(error: Exception) -> str:
    """The message of an error, which may have several lines."""
    return "\n".join(map(printable, str(error).split("\n")))


def aligned(rows: list[list[str]]) -> list[str]:
    """Columns side by side: the first to the left, the others to the right."""
    if not rows:
        return []
    num_columns = max(map(len, rows))
    rows = [row + [""] * (num_columns - len(row)) for row in rows]
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]  # the widths
    lines = []
    for row in rows:
        cells = [row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:], others, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


class ForgivingStream:
    """A stream to which writing cannot fail: what nobody reads is dropped, what the screen's encoding lacks is spelt
    out (`\\xfc`), and `failure` says what has no room."""

    def __init__(self, stream: TextIO | None):
        self._stream = stream or open(os.devnull, "w")
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        with self._remembering():
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with self._remembering():
            self._stream.flush()

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            pass  # the reader has left, as `head` does
        except OSError as error:
            self.failure = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def ignore_failed_prints() -> None:
    """From now on no print fails: a pipe that nobody reads, or a log on a full disk, is no reason to stop training."""
    if not isinstance(sys.stdout, ForgivingStream):
        sys.stdout, sys.stderr = ForgivingStream(sys.stdout), ForgivingStream(sys.stderr)
