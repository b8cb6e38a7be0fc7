"""The order of the training data and the sizes of the global batches, as functions of the seed and the step.

The samples of successive epochs are numbered 0, 1, 2, ... (positions); each epoch visits every sample once, in an order
of its own. Global batch s takes the next `BatchSizes.size(s)` positions, and `GlobalBatches.at` maps positions to
sample indices. Any step can be computed without the steps before it, so a resumed run needs no sampler state.

To train in another order, such as a curriculum, edit `GlobalBatches.at` (for data.mix, `MixedBatches.at`). The last
three functions of this file compute the default: a random permutation of each epoch that is never stored.
"""

from bisect import bisect_right
from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np

from config.schema import TrainConfig
from model.seeds import derive_seed, mix_bits

MIX_BLOCK = 1000  # samples; each block of a mixture has exactly `quotas` samples of its corpora
POSITIONS_AT_ONCE = 256  # computed together and cached
FEISTEL_ROUNDS = 8  # 4 suffice in theory (Luby and Rackoff 1988), but small corpora, with few bits, need more


class BatchSizes:
    """Sizes of the global batches of a run, in sequences.

    With a batch-size warm-up, the first batch has `warmup_from` sequences, and the size grows by `warmup_from` at
    evenly spaced steps until it is `global_batch_size` at step `warmup_steps`. Without one (`warmup_from` is None) the
    size is constant. All sizes are multiples of the first: if the processes can split the first into whole
    micro-batches, they can split all.

    Attributes:
        increase_steps: the steps, from 0, at which the size grows.
    """

    def __init__(self, global_batch_size: int, warmup_from: int | None = None, warmup_steps: int | None = None):
        self.global_batch_size, self.first_size = global_batch_size, warmup_from or global_batch_size
        num_increases = global_batch_size // self.first_size - 1
        # Increase i comes after i / num_increases of the warm-up, rounded up to a whole step.
        self.increase_steps = [
            (i * (warmup_steps or 0) + num_increases - 1) // num_increases for i in range(1, num_increases + 1)
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
        """Return the number of sequences in the global batches of steps 0 to `step` - 1."""
        # An increase at step t adds first_size sequences to each of the steps t, ..., step - 1.
        return self.first_size * (step + sum(step - t for t in self.increase_steps if t < step))

    def tokens_before(self, step: int, seq_len: int) -> int:
        """Return the number of tokens, with padding, in the global batches of steps 0 to `step` - 1.

        Edit this method too if you cut the sequences of some steps in `StepDataset` of data/loader.py.
        """
        return self.sequences_before(step) * seq_len

    def tokens(self, step: int, seq_len: int, since: tuple[int, int] = (0, 0)) -> int:
        """Return the number of training tokens of a run, with padding, in steps 0 to `step` - 1.

        Args:
            step: at least `since[0]`.
            seq_len: tokens of a sequence.
            since: a step, and the tokens before it: those of a branch's parent, counted with the parent's sizes.
        """
        first, before = since
        return before + self.tokens_before(step, seq_len) - self.tokens_before(first, seq_len)


class GlobalBatches(BatchSizes):
    """The sample indices of every global batch of a run, each epoch in another random order.

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
        """Return the sample indices of the local batch of process `rank` at `step` (from 0).

        It is a contiguous slice of the global batch. The slices of all processes, joined in the order of their ranks,
        are the same global batch for any number of processes.
        """
        # `at` takes 0.2 ms (1 ms for a mixture) whether it maps 16 or 256 positions, so compute several steps at once.
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
        """Map positions in the run's order of samples to sample indices, both int64 [n].

        Edit this method to train in another order. It must depend on nothing that changes during a run: every process,
        and a resumed run, must compute the same order.
        """
        _, indices = shuffle_groups(positions, self.num_samples, self.seed, "epoch")
        return indices


class MixedBatches(GlobalBatches):
    """Global batches of a mixture of corpora, whose datasets are concatenated.

    Each block of MIX_BLOCK consecutive positions has exactly quotas[c] samples from corpus c, in a random order. Each
    corpus has epochs of its own, each in another random order.
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
        """Map positions in the run's order of samples to sample indices, both int64 [n]."""
        # In a block, the slots [quota_ends[c] - quotas[c], quota_ends[c]) belong to corpus c.
        blocks, slots = shuffle_groups(positions, MIX_BLOCK, self.seed, "block")
        corpora = np.searchsorted(self.quota_ends, slots, side="right")
        indices = np.empty_like(positions)
        for c in np.unique(corpora):
            in_corpus = corpora == c
            first_slot, first_index = self.quota_ends[c] - self.quotas[c], sum(self.sizes[:c])
            positions_in_corpus = blocks[in_corpus] * self.quotas[c] + slots[in_corpus] - first_slot
            seed = derive_seed(self.seed, "corpus", int(c))
            _, indices_in_corpus = shuffle_groups(positions_in_corpus, self.sizes[c], seed, "epoch")
            indices[in_corpus] = first_index + indices_in_corpus
        return indices


def mix_quotas(weights: list[float]) -> list[int]:
    """Return the number of samples from each corpus in a block, in proportion to the weights; the sum is MIX_BLOCK."""
    ends = np.rint(np.cumsum(weights) / np.sum(weights) * MIX_BLOCK).astype(int)
    return np.diff(ends, prepend=0).tolist()


def apportion(number: int, quotas: list[int], sizes: list[int]) -> list[int]:
    """Return the samples of each corpus in the largest set, at most `number`, that is in proportion to the quotas.

    Args:
        number: at least one for each corpus.
        quotas: of each corpus.
        sizes: samples that each corpus has. A corpus smaller than its part makes the whole set smaller.

    Returns:
        Counts in proportion to the quotas, rounded by largest remainders, but at least 1.
    """
    largest = min(size * sum(quotas) // quota for size, quota in zip(sizes, quotas, strict=True))
    number = max(min(number, largest), len(quotas))
    counts, remainders = np.divmod(np.array(quotas) * number, sum(quotas))
    counts[np.argsort(-remainders, kind="stable")[: number - counts.sum()]] += 1
    for empty in np.flatnonzero(counts == 0):
        counts[counts.argmax()] -= 1
        counts[empty] = 1
    return counts.tolist()


def shuffle_groups(positions: np.ndarray, size: int, seed: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Shuffle each group of `size` consecutive positions (an epoch or a block) by itself.

    Args:
        positions: int64 [n].
        size: the number of positions in a group.
        seed: with `name` and the number of a group, selects the order of that group.
        name: the kind of group, such as "epoch".

    Returns:
        The group of each position, and its shuffled index within the group, in [0, size); both int64 [n].
    """
    groups, indices = np.divmod(positions, size)
    for group in np.unique(groups):
        in_group = groups == group
        indices[in_group] = permute(indices[in_group], size, derive_seed(seed, name, int(group)))
    return groups, indices


def permute(positions: np.ndarray, size: int, key: int) -> np.ndarray:
    """Return `permutation[positions]` for a random permutation of [0, size), in memory that does not grow with `size`.

    A small block cipher (a Feistel network) encrypts each position: this map is one to one and looks random. Its range
    is not [0, size) but up to the next power of 4, so a result outside [0, size) is encrypted again until it is inside
    ("cycle walking", Black and Rogaway 2002), which keeps the map one to one.

    Args:
        positions: int64 [n], each in [0, size).
        size: the number of elements permuted, up to 2**62.
        key: selects the permutation.

    Returns:
        int64 [n]; distinct positions give distinct indices.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    round_keys = [derive_seed(key, round_index) for round_index in range(FEISTEL_ROUNDS)]
    indices = _encrypt(positions.astype(np.uint64), half_bits, round_keys)
    while (outside := indices >= size).any():
        indices[outside] = _encrypt(indices[outside], half_bits, round_keys)
    return indices.astype(np.int64)


def _encrypt(values: np.ndarray, half_bits: int, round_keys: list[int]) -> np.ndarray:
    """Map numbers of 2 * `half_bits` bits one to one to such numbers, both uint64 [n].

    Each round XORs one half of the bits with a hash of the other half, which can be undone whatever the hash is.
    """
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for round_key in round_keys:
        # mix_bits takes int64; the views keep the bits.
        mixed = mix_bits((right ^ np.uint64(round_key)).view(np.int64)).view(np.uint64)
        left, right = right, left ^ (mixed & mask)
    return (left << shift) | right
