"""The order of the data: the samples of global batch s are a function of (seed, s), so resuming needs no sampler state.

Each epoch visits every sample once, in an order that is computed from the seed and the epoch: `permute` maps one
position to one sample index, as a cipher maps numbers, so that no list of all indices is made, kept or saved (a
`randperm` of a billion samples takes 8 GB). Another order, such as a curriculum, only overrides `GlobalBatches.at`.
"""

from bisect import bisect_right
from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np

from config.schema import TrainConfig
from model.seeds import derive_seed, mix_bits

MIX_BLOCK = 1000  # samples; a mixture has its exact proportions in each block
POSITIONS_AT_ONCE = 256
FEISTEL_ROUNDS = 8  # 4 suffice in theory (Luby and Rackoff 1988); with few bits, for a small corpus, more are needed


def permute(positions: np.ndarray, size: int, key: int) -> np.ndarray:
    """Map positions in [0, size) to indices in [0, size) by the permutation that `key` selects.

    A balanced Feistel network on the smallest even number of bits that covers `size`. A result outside [0, size) is
    permuted again until it is inside ("cycle walking", Black and Rogaway 2002), which keeps the map a permutation.

    Args:
        positions: int64 [n], each in [0, size).
        size: the number of elements permuted, up to 2**62.
        key: selects the permutation.

    Returns:
        int64 [n]; distinct positions give distinct indices.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    round_keys = [derive_seed(key, round_index) for round_index in range(FEISTEL_ROUNDS)]
    indices = _feistel(positions.astype(np.uint64), half_bits, round_keys)
    while (outside := indices >= size).any():
        indices[outside] = _feistel(indices[outside], half_bits, round_keys)
    return indices.astype(np.int64)


def _feistel(values: np.ndarray, half_bits: int, round_keys: list[int]) -> np.ndarray:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for round_key in round_keys:
        # mix_bits takes int64; the views keep the bits.
        mixed = mix_bits((right ^ np.uint64(round_key)).view(np.int64)).view(np.uint64)
        left, right = right, left ^ (mixed & mask)
    return (left << shift) | right


def permute_groups(positions: np.ndarray, size: int, seed: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Permute positions within consecutive groups of `size` (epochs or blocks), each with a key of its own.

    Returns:
        The group of each position, and its index within the group after the permutation, both int64 [n].
    """
    groups, indices = np.divmod(positions, size)
    for group in np.unique(groups):
        in_group = groups == group
        indices[in_group] = permute(indices[in_group], size, derive_seed(seed, name, int(group)))
    return groups, indices


class BatchSizes:
    """Sizes of the global batches of a run, in sequences.

    The first batch has `warmup_from` sequences. At equal intervals the size increases by `warmup_from`, and from step
    `warmup_steps` on it is `global_batch_size`; if `warmup_from` is None, it always is. All sizes are multiples of the
    first: if the first divides into whole micro-batches on every process, all do.
    """

    def __init__(self, global_batch_size: int, warmup_from: int | None = None, warmup_steps: int | None = None):
        self.global_batch_size, self.first_size = global_batch_size, warmup_from or global_batch_size
        num_increases = global_batch_size // self.first_size - 1
        self.increase_steps = [
            -(-i * (warmup_steps or 0) // num_increases)  # i / num_increases of the warm-up, rounded up
            for i in range(1, num_increases + 1)
        ]

    @classmethod
    def from_config(cls, config: TrainConfig) -> "BatchSizes":
        """Return the sizes for a config whose `global_batch_size` is resolved."""
        assert config.global_batch_size is not None, "the config is resolved"
        return cls(config.global_batch_size, config.schedule.batch_warmup_from, config.schedule.batch_warmup_steps)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "BatchSizes":
        """Return the sizes for flat settings, such as those that a run stores."""
        names = ("global_batch_size", "schedule.batch_warmup_from", "schedule.batch_warmup_steps")
        return cls(*(settings[name] for name in names))

    def size(self, step: int) -> int:
        """Return the number of sequences in the global batch of `step` (from 0)."""
        return self.first_size * (1 + bisect_right(self.increase_steps, step))

    def sequences_before(self, step: int) -> int:
        """Return the number of sequences in all global batches before that of `step`."""
        # Each increase, at step t, adds first_size sequences to the steps t, ..., step - 1.
        return self.first_size * (step + sum(step - t for t in self.increase_steps if t < step))


class GlobalBatches(BatchSizes):
    """The sample indices of every global batch of a run.

    A global batch may contain the end of one epoch and the beginning of the next, so no sample is ever dropped.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int,
        seed: int,
        warmup_from: int | None = None,
        warmup_steps: int | None = None,
    ):
        super().__init__(global_batch_size, warmup_from, warmup_steps)
        self.num_samples, self.seed = num_samples, seed
        self._cached_key, self._cached_indices = None, []

    def indices(self, step: int, rank: int = 0, num_processes: int = 1) -> list[int]:
        """Return the sample indices of process `rank`'s part of the global batch of `step` (from 0).

        It is the contiguous slice [rank * B / W, (rank + 1) * B / W) of the B indices, so that the slices of any number
        of processes W, in the order of their ranks, are the same global batch.
        """
        # Several steps at once: NumPy takes as long for 16 positions as for 256, 0.2 ms, and 1 ms for a mixture.
        num_steps = max(1, POSITIONS_AT_ONCE // (self.global_batch_size // num_processes))
        first_step = step - step % num_steps
        cache_key = first_step, rank, num_processes
        if cache_key != self._cached_key:
            self._cached_indices = self._indices_of_steps(first_step, num_steps, rank, num_processes)
            self._cached_key = cache_key
        return self._cached_indices[step % num_steps]

    def _indices_of_steps(self, first_step: int, num_steps: int, rank: int, num_processes: int) -> list[list[int]]:
        steps = range(first_step, first_step + num_steps)
        sizes = [self.size(step) // num_processes for step in steps]
        firsts = [self.sequences_before(step) + rank * size for step, size in zip(steps, sizes, strict=True)]
        positions = [np.arange(first, first + size) for first, size in zip(firsts, sizes, strict=True)]
        indices = iter(self.at(np.concatenate(positions)).tolist())
        return [list(islice(indices, size)) for size in sizes]

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return the sample index at each position of the run's order of samples, both int64 [n]."""
        return permute_groups(positions, self.num_samples, self.seed, "epoch")[1]


class MixedBatches(GlobalBatches):
    """Global batches of a mixture of corpora, whose samples are numbered one corpus after another.

    Each block of MIX_BLOCK consecutive samples contains exactly quotas[c] samples of corpus c, at positions permuted by
    (seed, block). Each corpus has its own epochs, and its own order in each. The corpus of a position, and its position
    within that corpus, are therefore computed in O(1).
    """

    def __init__(
        self,
        sizes: list[int],
        quotas: list[int],
        global_batch_size: int,
        seed: int,
        warmup_from: int | None = None,
        warmup_steps: int | None = None,
    ):
        super().__init__(sum(sizes), global_batch_size, seed, warmup_from, warmup_steps)
        self.sizes, self.quotas, self.quota_ends = sizes, quotas, np.cumsum(quotas)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return the sample index at each position of the run's order of samples, both int64 [n]."""
        blocks, slots = permute_groups(positions, MIX_BLOCK, self.seed, "block")
        corpora = np.searchsorted(self.quota_ends, slots, side="right")
        indices = np.empty_like(positions)
        for c in np.unique(corpora):
            in_corpus = corpora == c
            first_slot, first_index = self.quota_ends[c] - self.quotas[c], sum(self.sizes[:c])
            within_corpus = blocks[in_corpus] * self.quotas[c] + slots[in_corpus] - first_slot
            seed = derive_seed(self.seed, "corpus", int(c))
            indices[in_corpus] = first_index + permute_groups(within_corpus, self.sizes[c], seed, "epoch")[1]
        return indices


def mix_quotas(weights: list[float]) -> list[int]:
    """Return the number of samples of each corpus in a block, proportional to its weight; the sum is MIX_BLOCK."""
    ends = np.rint(np.cumsum(weights) / np.sum(weights) * MIX_BLOCK).astype(int)
    return np.diff(ends, prepend=0).tolist()


def apportion(number: int, quotas: list[int]) -> list[int]:
    """Divide `number` samples among corpora in proportion to their quotas, at least one to each (largest remainders).

    Raises:
        ValueError: there are fewer samples than corpora.
    """
    if number < len(quotas):
        raise ValueError(f"{number} is fewer than the {len(quotas)} corpora")
    counts, remainders = np.divmod(np.array(quotas) * number, sum(quotas))
    counts[np.argsort(-remainders, kind="stable")[: number - counts.sum()]] += 1
    for empty in np.flatnonzero(counts == 0):
        counts[counts.argmax()] -= 1
        counts[empty] = 1
    return counts.tolist()
