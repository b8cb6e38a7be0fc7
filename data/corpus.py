"""What a run trains on and is evaluated on. A new data source is one file in this folder and one branch here."""

from dataclasses import dataclass

from tokenizers import Tokenizer
from torch.utils.data import Dataset

from data.random_tokens import RandomTokensDataset
from data.stories import StoriesDataset, build_tokenizer


@dataclass
class Corpus:
    """A training and a validation set of the same kind, and the tokenizer that made them, if any.

    Both are map-style: sample i is `{"input_ids": int64 [T], "labels": int64 [T]}`, a function of i and the seed.
    The validation set may have `floor_nats` (the lowest loss that any model can expect on it, in nats summed over its
    targets) and `num_bytes` (of its text, for bits per byte).
    """

    train: Dataset
    validation: Dataset
    tokenizer: Tokenizer | None
    vocab_size: int


def load_corpus(
    source: str, num_samples: int, num_validation_samples: int, seed: int, seq_len: int, vocab_size: int | None
) -> Corpus:
    """The corpus named `source`, cut into sequences of `seq_len` tokens; `vocab_size` None is the tokenizer's.

    Raises:
        ValueError: the settings do not fit the corpus; says which and what would.
    """
    sizes = {"train": num_samples, "validation": num_validation_samples}
    tokenizer = None
    if source == "random":
        splits = [RandomTokensDataset(split, size, seed, seq_len, vocab_size) for split, size in sizes.items()]
    else:
        splits = [StoriesDataset(split, size, seed, seq_len) for split, size in sizes.items()]
        tokenizer = build_tokenizer()
        if vocab_size is None:
            vocab_size = tokenizer.get_vocab_size()
        elif vocab_size < tokenizer.get_vocab_size():
            raise ValueError(
                f"model.vocab_size: {vocab_size} is smaller than the tokenizer's {tokenizer.get_vocab_size()}; "
                "null takes the tokenizer's"
            )
    return Corpus(*splits, tokenizer, vocab_size)
