"""What a run trains on and is evaluated on. A new data source is one file in this folder and one branch here."""

from dataclasses import dataclass

from tokenizers import Tokenizer
from torch.utils.data import Dataset

from data.random_tokens import RandomTokensDataset
from data.stories import StoriesDataset, build_tokenizer
from training.config import TrainConfig


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


def load_corpus(config: TrainConfig) -> Corpus:
    """The corpus that `config.data` names, in sequences of `config.seq_len` tokens.

    Raises:
        ValueError: the settings do not fit the corpus; says which and what would.
    """
    sizes = {"train": config.data.num_samples, "validation": config.evaluation.num_samples}
    vocab_size = config.model.vocab_size
    if config.data.source == "random":
        splits = [
            RandomTokensDataset(split, size, config.seed, config.seq_len, vocab_size) for split, size in sizes.items()
        ]
        return Corpus(*splits, tokenizer=None, vocab_size=vocab_size)
    splits = [StoriesDataset(split, size, config.seed, config.seq_len) for split, size in sizes.items()]
    tokenizer = build_tokenizer()
    num_tokens = tokenizer.get_vocab_size()
    if vocab_size is not None and vocab_size < num_tokens:
        raise ValueError(f"model.vocab_size: {vocab_size} is less than the tokenizer's {num_tokens}; null takes that")
    return Corpus(*splits, tokenizer, vocab_size or num_tokens)
