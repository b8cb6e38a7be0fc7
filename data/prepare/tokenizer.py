"""Make the tokenizer of a new corpus: bytes, a trained byte-level BPE, or a copy of an existing one."""

import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data.tokenizer import BYTE_OF_CHARACTER, END_OF_TEXT, open_tokenizer
from runtime.config.errors import ConfigError

MAX_VOCAB_SIZE = 10**6  # to train: tokenizers allocates memory for all tokens first, and aborts the process if it fails
MAX_WORD = 256  # bytes of a word that are merged while a tokenizer is trained
NAMES = f"byte, train:VOCAB (257 to {MAX_VOCAB_SIZE:,}; train:8192), a folder with a tokenizer or a name on the Hub"


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
    from transformers import PreTrainedTokenizerFast  # slow to import

    num_tokens = parse_trained_vocab_size(name)
    if name != "byte" and num_tokens is None:
        try:
            tokenizer = open_tokenizer(name)
        except Exception as error:  # a download may raise anything
            raise ConfigError(f"tokenizer: {name!r} cannot be loaded: {error}\nUse {NAMES}") from None
        if tokenizer.eos_token is None:
            raise ConfigError(f"tokenizer: {name!r} has no end-of-text (eos) token; use {NAMES}")
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
