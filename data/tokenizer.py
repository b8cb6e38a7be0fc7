"""Tokenizers of text corpora: always fast ones of Hugging Face, with an end-of-text token."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from config.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
MAX_VOCAB_SIZE = 10**6  # to train: tokenizers allocates memory for all tokens first, and aborts the process if it fails
MAX_WORD = 256  # bytes of a word that are merged while a tokenizer is trained
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
# Byte-level tokenizers write each byte as one of these characters (GPT-2's bytes_to_unicode).
BYTE_OF_CHARACTER = {byte: byte for byte in _PRINTABLE} | {256 + index: byte for index, byte in enumerate(_OTHERS)}
NAMES = f"byte, train:VOCAB (257 to {MAX_VOCAB_SIZE:,}; train:8192), a folder with a tokenizer or a name on the Hub"


@contextmanager
def wrap_tokenizer_errors(problem: str) -> Iterator[None]:
    """Convert errors of tokenizers, including panics, which are not Exceptions, to a ConfigError."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{problem}: {error}") from None


def parse_trained_vocab_size(name: str) -> int | None:
    """Return VOCAB if `name` is train:VOCAB, else None; raise ConfigError if the size is out of range."""
    if not name.startswith("train:"):
        return None
    size = name.removeprefix("train:")
    if not re.fullmatch("[0-9]{3,7}", size) or not 256 < int(size) <= MAX_VOCAB_SIZE:
        raise ConfigError(f"tokenizer: {name!r:.60} has no valid vocabulary size; use {NAMES}")
    return int(size)


def save_tokenizer(name: str, folder: Path, texts: Iterable[str]) -> None:
    """Save the tokenizer called `name`, after training it on `texts` if its name says so.

    Raises:
        ConfigError: there is no such tokenizer, it cannot be trained, or it has no end-of-text token.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # slow to import

    num_tokens = parse_trained_vocab_size(name)
    if name != "byte" and num_tokens is None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except Exception as error:  # a download may raise anything
            raise ConfigError(f"tokenizer: {name!r} cannot be loaded: {error}\nUse {NAMES}") from None
        if not tokenizer.is_fast or tokenizer.eos_token is None:
            raise ConfigError(f"tokenizer: {name!r} is not a fast tokenizer with an end-of-text (eos) token")
        tokenizer.save_pretrained(folder)
        return
    tokenizer = Tokenizer(models.BPE({chr(character): byte for character, byte in BYTE_OF_CHARACTER.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=num_tokens is not None)
    tokenizer.decoder = decoders.ByteLevel()
    if num_tokens is not None:
        settings = {"vocab_size": num_tokens, "special_tokens": [END_OF_TEXT], "show_progress": False}
        trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **settings)
        # The time for a word grows with the square of its length, and text such as DNA is one word.
        words = tokenizer.pre_tokenizer
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(MAX_WORD)])
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.pre_tokenizer = words
    tokenizer.add_special_tokens([END_OF_TEXT])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT).save_pretrained(folder)


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
