"""Load the tokenizer of a text corpus: always a fast one of Hugging Face, with an end-of-text token."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from runtime.config.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
# Tokenizers with equal vocabularies but different rules almost always split one of these texts differently. Several
# texts, because a tokenizer may have no tokens for one of them; combining and compatible characters, because only some
# normalizers replace them.
PROBES = (
    " Two  words, isn't it? 12345\n\tÄpfel 中文",
    "WE'VE said:\r\n\r\n  don\u2019t   ",
    "e\u0301cole, \ufb01n\u00a0de 2\u00b2",
)
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
# Byte-level tokenizers write each byte as one of these characters (GPT-2's bytes_to_unicode).
BYTE_OF_CHARACTER = {byte: byte for byte in _PRINTABLE} | {256 + index: byte for index, byte in enumerate(_OTHERS)}


@contextmanager
def wrap_tokenizer_errors(problem: str) -> Iterator[None]:
    """Convert errors of tokenizers, including panics, which are not Exceptions, to a ConfigError."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{problem}: {error}") from None


def load_tokenizer(folder: Path) -> tuple[Tokenizer, dict]:
    """Load a saved tokenizer, and its `hash`, `vocab_size` (largest token + 1) and `end_of_text` token.

    It encodes special tokens that are spelled in a text as ordinary characters, so no text can end a document.

    Raises:
        ConfigError: the folder has no tokenizer, or the tokenizer has no end-of-text token.
    """
    try:
        content = (folder / "tokenizer.json").read_bytes()
        tokenizer = Tokenizer.from_buffer(content)
        end_of_text = json.loads((folder / "tokenizer_config.json").read_bytes())["eos_token"]
        end_of_text = tokenizer.token_to_id(end_of_text["content"] if isinstance(end_of_text, dict) else end_of_text)
        vocab_size = max(tokenizer.get_vocab().values()) + 1
    except Exception as error:  # tokenizers raises plain Exceptions
        raise ConfigError(f"tokenizer: '{folder}' cannot be read: {type(error).__name__}: {error}") from None
    if end_of_text is None:
        raise ConfigError(f"tokenizer: '{folder}' names an end-of-text (eos) token that is not in its vocabulary")
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    content_hash = blake2b(content, digest_size=16).hexdigest()
    return tokenizer, {"hash": content_hash, "vocab_size": vocab_size, "end_of_text": end_of_text}


def find_difference(one: Tokenizer, other: Tokenizer) -> str | None:
    """Return the first of PROBES that two tokenizers encode or decode differently; None if there is none."""
    return next((probe for probe in PROBES if _encode_and_decode(one, probe) != _encode_and_decode(other, probe)), None)


def _encode_and_decode(tokenizer: Tokenizer, text: str) -> tuple[list[int], str] | None:
    """Return the tokens of a text and what they decode to; None if the tokenizer has no tokens for it."""
    try:
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        return tokens, tokenizer.decode(tokens)
    except Exception:  # tokenizers raises nothing more specific
        return None


def open_tokenizer(name: str | Path) -> "PreTrainedTokenizerBase":
    """Open a tokenizer of transformers, from a folder or the Hub, without running its code.

    Raises:
        ConfigError: it is not a fast tokenizer, or transformers rebuilt it from the class that its config names, and it
            splits text otherwise than its own tokenizer.json.
        Exception: of any type, from transformers, if it cannot be opened.
    """
    from transformers import AutoTokenizer  # slow to import
    from transformers.utils.hub import cached_file

    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if not tokenizer.is_fast:
        problem = f"{type(tokenizer).__name__}, the class of the tokenizer of '{name}', is not a fast tokenizer"
        raise ConfigError(f"tokenizer: {problem}; use one that has a tokenizer.json")
    file = Path(name) / "tokenizer.json"
    if not Path(name).is_dir():  # on the Hub; the line above has downloaded the file, if there is one
        found = cached_file(name, "tokenizer.json", _raise_exceptions_for_missing_entries=False, local_files_only=True)
        file = Path(found or "")
    if file.is_file():
        ours: Tokenizer = tokenizer.backend_tokenizer  # pyright: ignore[reportAttributeAccessIssue] of fast ones
        if (probe := find_difference(ours, Tokenizer.from_file(str(file)))) is not None:
            raise ConfigError(
                f"tokenizer: {type(tokenizer).__name__}, the tokenizer_class in the tokenizer_config.json of '{name}', "
                f"encodes or decodes {probe!r} otherwise than its tokenizer.json; set it to PreTrainedTokenizerFast"
            )
    return tokenizer


def token_bytes(tokenizer: Tokenizer, end_of_text: int) -> dict[int, bytes] | None:
    """Return the bytes of each token of a byte-level tokenizer, b"" for special tokens; None for other tokenizers.

    A byte-level tokenizer writes bytes as characters (BYTE_OF_CHARACTER) in its normalizer or pre-tokenizer, and its
    decoder, if any, reverses this.
    """
    parts = json.loads(tokenizer.to_str())
    if '"ByteLevel"' not in json.dumps([parts[name] for name in ("normalizer", "pre_tokenizer", "decoder")]):
        return None
    added = tokenizer.get_added_tokens_decoder()  # written as they are, not in these characters
    special = {end_of_text, *(index for index, token in added.items() if token.special)}
    bytes_of_token = {
        i: token.translate(BYTE_OF_CHARACTER).encode("latin-1", "replace") for token, i in tokenizer.get_vocab().items()
    }
    bytes_of_token |= {index: token.content.encode() for index, token in added.items()}
    return bytes_of_token | dict.fromkeys(special, b"")
