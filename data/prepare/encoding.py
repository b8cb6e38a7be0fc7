"""The encoding of text files: UTF-8, or UTF-16 or UTF-32 with a byte order mark."""

import codecs
import io
from collections.abc import Iterable, Iterator

import pyarrow as pa

# The longest first: the mark of UTF-16-LE is a prefix of the mark of UTF-32-LE.
BYTE_ORDER_MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
BYTE_ORDER_MARKS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}

MIN_CHARACTERS = 2**19  # after so many, replacements are checked before the end of the file, too
MAX_REPLACED, MAX_FRACTION_REPLACED = 10, 0.002  # German in ISO-8859-1 has one per 70 characters


def open_text(file: str, errors: str) -> io.TextIOWrapper:
    """Open a file, .gz and .zst included, as text without a byte order mark; line ends become line feeds."""
    stream = io.BufferedReader(pa.input_stream(file, compression="detect"))
    start = stream.peek(4)
    encoding = next((name for mark, name in BYTE_ORDER_MARKS.items() if start.startswith(mark)), "utf-8-sig")
    return io.TextIOWrapper(stream, encoding, errors)


def check_decoded(texts: Iterable[str], file: str) -> Iterator[str]:
    """Yield the pieces of a file's text after checking that the file has the encoding that it was decoded with.

    Raises:
        ValueError: the text has a NUL, or too many characters were replaced.
    """
    remedy = f"make it UTF-8, as by iconv -f ENCODING -t UTF-8 {file!r}"
    characters = replaced = 0

    def check_replaced() -> None:
        if replaced > max(MAX_REPLACED, characters * MAX_FRACTION_REPLACED):
            found = f"{replaced:,} of its first {characters:,} characters are not UTF-8, or are U+FFFD already"
            raise ValueError(f"{found}; {remedy}")

    for text in texts:
        if "\0" in text:  # every other byte of Latin text in UTF-16 without a byte order mark
            raise ValueError(f"there is a NUL in it, so it is not UTF-8 text; {remedy}")
        characters, replaced = characters + len(text), replaced + text.count("\ufffd")
        if characters >= MIN_CHARACTERS:
            check_replaced()
        yield text
    check_replaced()
