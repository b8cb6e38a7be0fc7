"""The encoding of files of text: that of their mark (BOM), else UTF-8; what is neither is refused instead of learnt."""

import codecs
import io
from collections.abc import Iterable, Iterator

import pyarrow as pa

# The longest first: the mark of UTF-16 begins that of UTF-32.
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
MARKS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}

ENOUGH = 2**19  # characters after which too many replacements are reported, before the end of the file
MOST_REPLACED, MOST_REPLACED_SHARE = 10, 0.002  # German in ISO-8859-1 has one in 70 characters
SAMPLE_BYTES = 2**16


def open_text(file: str, errors: str) -> io.TextIOWrapper:
    """Open a file, .gz and .zst included, as text without a byte order mark; line ends become line feeds."""
    stream = io.BufferedReader(pa.input_stream(file, compression="detect"))
    begin = stream.peek(4)
    encoding = next((name for mark, name in MARKS.items() if begin.startswith(mark)), "utf-8-sig")
    return io.TextIOWrapper(stream, encoding, errors)


def checked(texts: Iterable[str], file: str) -> Iterator[str]:
    """Yield the pieces of a file's text after checking them.

    Raises:
        ValueError: there is a NUL in them, or too many characters were replaced, as where the file is of another
            encoding; says which, and what to do.
    """
    characters = replaced = 0
    for text in texts:
        if "\0" in text:
            raise ValueError(f"there is a NUL in it, as in no text; {_remedy(file, tells_nul=True)}")
        characters, replaced = characters + len(text), replaced + text.count("\ufffd")
        if characters >= ENOUGH:
            _refuse_too_many(replaced, characters, file)
        yield text
    _refuse_too_many(replaced, characters, file)


def _refuse_too_many(replaced: int, characters: int, file: str) -> None:
    if replaced > max(MOST_REPLACED, characters * MOST_REPLACED_SHARE):
        found = f"{replaced:,} of its first {characters:,} characters are no UTF-8 or U+FFFD already"
        raise ValueError(f"{found}; {_remedy(file)}")


def _remedy(file: str, tells_nul: bool = False) -> str:
    with pa.input_stream(file, compression="detect") as stream:
        likely = likely_encoding(stream.read(SAMPLE_BYTES))
    if likely:
        return f"it is likely {likely}: make it UTF-8, as by iconv -f {likely} -t UTF-8 {file!r}"
    if tells_nul:
        return "take them out, as by tr -d '\\000', if it is one"
    return "make it UTF-8, as by iconv -f GB18030, SHIFT_JIS, WINDOWS-1251 or whatever its language is written in"


def likely_encoding(begin: bytes) -> str:
    """Guess the encoding, other than UTF-8, of bytes from the beginning of a file; "" if unknown.

    Half of the bytes of UTF-16 are NUL where the text is Latin, and those of spaces and line ends in any. Where few
    bytes are no ASCII, these are likely the letters that Western languages add to it.
    """
    nuls = [begin[place::4].count(0) for place in range(4)]
    few = len(begin) / 400  # of each fourth byte, one in a hundred
    if min(nuls[2:]) > len(begin) / 5:
        return "UTF-32LE"
    if min(nuls[:2]) > len(begin) / 5:
        return "UTF-32BE"
    if sum(nuls) > few:
        of_low, of_high = nuls[0] + nuls[2], nuls[1] + nuls[3]
        return "UTF-16LE" if of_high > 4 * of_low else "UTF-16BE" if of_low > 4 * of_high else ""
    beyond_ascii = sum(byte >= 0x80 for byte in begin)
    return "WINDOWS-1252" if 0 < beyond_ascii < len(begin) * 0.15 else ""
