"""Random tokens, as in the field's tutorials: a model can only memorise them; its loss on others is at least ln(V)."""

import math

import torch
from torch.utils.data import Dataset

from model.seeds import derive_seed


class RandomTokensDataset(Dataset):
    """`num_samples` sequences of `seq_len` tokens drawn uniformly from the vocabulary.

    Sample i is a function of (seed, split, i): nothing is stored, and every process sees the same sample i.
    """

    def __init__(self, split: str, num_samples: int, seed: int, seq_len: int, vocab_size: int):
        self.split, self.num_samples, self.seed = split, num_samples, seed
        self.seq_len, self.vocab_size = seq_len, vocab_size

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return `input_ids` and `labels`, both int64 [T] and equal: the model shifts the labels itself."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "random tokens", self.split, index))
        input_ids = torch.randint(self.vocab_size, (self.seq_len,), generator=generator)
        return {"input_ids": input_ids, "labels": input_ids}

    @property
    def entropy_nats(self) -> float:
        """The lowest expected loss over the whole dataset, in nats summed over its targets."""
        return self.num_samples * (self.seq_len - 1) * math.log(self.vocab_size)
