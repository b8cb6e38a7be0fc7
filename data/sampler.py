"""The order of the training data, and the sizes and lengths of the global batches, as functions of the seed and step.

A run reads one long stream of samples: epoch after epoch, and in each epoch every sample once, in another order. (In a
mixture each corpus has epochs of its own.) A position is an index in this stream, from 0. Global batch s has the
next `BatchSizes.size(s)` positions, and `GlobalBatches.sample_indices` maps positions to indices of samples in the
dataset. Any step can be computed without the steps before it, so a resumed run needs no sampler state. A branch
computes its positions with its own batch sizes: if its parent had others, it skips or repeats samples.

To train in another order, such as a curriculum, edit `sample_indices` of `GlobalBatches` (for data.mix, of
`MixedBatches`). The last three functions of this file compute the default: a random permutation of each epoch that is
never stored.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np

from model.seeds import derive_seed, mix_bits
from runtime.config.schema import TrainConfig

MIX_BLOCK = 1000  # positions in a block of a mixture; each block has a fixed number of samples from each corpus
POSITIONS_AT_ONCE = 256  # computed together and cached
FEISTEL_ROUNDS = 8  # 4 suffice in theory (Luby and Rackoff 1988), but small corpora, with few bits, need more


class BatchSizes:
    """Sizes of the global batches of a run, in sequences.

    With a batch-size warm-up, the first batch has `warmup_from` sequences, and the size grows by `warmup_from` at
    evenly spaced steps until it is `global_batch_size` at step `warmup_steps`. (If there are fewer steps than
    increases, a step has several of them. If `warmup_steps` is 0, the first batch has `global_batch_size` already.)
    Without a warm-up (`warmup_from` is None) the size is constant. All sizes are multiples of the first: if the
    processes can split the first into whole micro-batches, they can split all.

    Attributes:
        steps: the number of steps of the run, for a fork whose batches depend on it; None: unknown.
        increase_steps: the steps, from 0, at which the size grows.
    """

    def __init__(
        self,
        global_batch_size: int,
        warmup_from: int | None = None,
        warmup_steps: int | None = None,
        steps: int | None = None,
    ):
        self.global_batch_size, self.first_size = global_batch_size, warmup_from or global_batch_size
        self.steps = steps
        num_increases = global_batch_size // self.first_size - 1

        # Increase i comes after the fraction i / num_increases of the warm-up, rounded up to a whole step.
        self.increase_steps = [
            (i * (warmup_steps or 0) + num_increases - 1) // num_increases for i in range(1, num_increases + 1)
        ]

    @classmethod
    def from_config(cls, config: TrainConfig) -> "BatchSizes":
        """Return the sizes for a config whose `global_batch_size` is resolved."""
        assert config.global_batch_size is not None, "resolve the config first"
        schedule = config.schedule
        return cls(config.global_batch_size, schedule.batch_warmup_from, schedule.batch_warmup_steps, config.steps)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "BatchSizes":
        """Return the sizes for flat settings, such as those that a run stores."""
        return cls(
            settings["global_batch_size"],
            warmup_from=settings["schedule.batch_warmup_from"],
            warmup_steps=settings["schedule.batch_warmup_steps"],
            steps=settings["steps"],
        )

    def size(self, step: int) -> int:
        """Return the number of sequences in the global batch of `step` (from 0), which may be after the last step."""
        return self.first_size * (1 + bisect_right(self.increase_steps, step))

    def sequences_before(self, step: int) -> int:
        """Return the number of sequences in the global batches of steps 0 to `step` - 1."""
        # An increase at step t adds first_size sequences to each of the steps t, ..., step - 1.
        return self.first_size * (step + sum(step - t for t in self.increase_steps if t < step))

    def length(self, step: int) -> int | None:
        """Return the tokens to which the sequences of `step` are cut, all of them if None.

        To train on shorter sequences in some steps, edit this method, and count the tokens in `tokens_before`.
        """
        return None

    def tokens_before(self, step: int, seq_len: int) -> int:
        """Return the number of tokens, with padding, in steps 0 to `step` - 1, all of them with these sizes.

        In a branch, the steps of the parent run may have had other sizes; see `TokenCount`.
        """
        return self.sequences_before(step) * seq_len

    def steps_for(self, num_sequences: Fraction) -> int:
        """Return the number of steps, from the first on, that read at least `num_sequences` sequences."""
        most = range(1, math.ceil(num_sequences / self.first_size) + 1)  # no batch is smaller than the first
        return 1 + bisect_left(most, num_sequences, key=self.sequences_before)


@dataclass(frozen=True)
class TokenCount:
    """Training tokens of a run until a step, with padding.

    A branch starts at a step of its parent, which may have used other batch sizes. So its tokens cannot be computed
    from the step alone: they are counted from a step at which they are known, such as that of a checkpoint.
    """

    sizes: BatchSizes
    seq_len: int
    known_step: int = 0
    known_tokens: int = 0
    """Training tokens in steps 0 to `known_step` - 1."""

    def __call__(self, completed_steps: int) -> int:
        """Return the training tokens in steps 0 to `completed_steps` - 1, which is at least `known_step`."""
        before, now = (self.sizes.tokens_before(step, self.seq_len) for step in (self.known_step, completed_steps))
        return self.known_tokens + now - before


class GlobalBatches:
    """The sample indices of every global batch of a run, each epoch in another random order.

    No sample is dropped or repeated to fill a batch: a global batch may have the end of one epoch and the beginning of
    the next.

    Attributes:
        dataset: the training set, for a fork whose order depends on the content of the samples.
        num_offsets: with more than 1, the windows of each epoch are moved by a random number of tokens below
            `num_offsets`. The index of window i, moved by o tokens, is i + o * num_samples.
    """

    def __init__(self, num_samples: int, sizes: BatchSizes, seed: int, dataset: Any = None, num_offsets: int = 1):
        self.num_samples, self.sizes, self.seed, self.dataset = num_samples, sizes, seed, dataset
        self.num_offsets = num_offsets
        self._cached_key, self._cached_indices = None, []

    def indices(self, step: int, rank: int = 0, num_processes: int = 1) -> list[int]:
        """Return the sample indices of the local batch of process `rank` at `step` (from 0).

        It is a contiguous slice of the global batch. The slices of all processes, joined in the order of their ranks,
        are the same global batch for any number of processes.
        """
        # Compute several steps at once, because much of the time does not depend on the number of positions: 16 take
        # 0.2 ms and 256 take 0.3 ms on one core of an Intel Xeon (for a mixture of two corpora, 0.7 and 1.7 ms).
        num_steps = max(1, POSITIONS_AT_ONCE // (self.sizes.global_batch_size // num_processes))
        first_step = step - step % num_steps
        cache_key = first_step, rank, num_processes
        if cache_key != self._cached_key:
            self._cached_indices = self._indices_of_steps(first_step, num_steps, rank, num_processes)
            self._cached_key = cache_key
        return self._cached_indices[step % num_steps]

    def _indices_of_steps(self, first_step: int, num_steps: int, rank: int, num_processes: int) -> list[list[int]]:
        """Return the sample indices of the local batches of consecutive steps."""
        positions = []  # an array for each step, int64 [sequences in the local batch]
        for step in range(first_step, first_step + num_steps):
            local_size = self.sizes.size(step) // num_processes
            first = self.sizes.sequences_before(step) + rank * local_size
            positions.append(np.arange(first, first + local_size))
        indices = iter(self.sample_indices(np.concatenate(positions)).tolist())
        return [list(islice(indices, len(positions_of_step))) for positions_of_step in positions]

    def sample_indices(self, positions: np.ndarray) -> np.ndarray:
        """Map positions in the stream of samples to sample indices, both int64 [n].

        Edit this method to train in another order, which may depend on the samples of `self.dataset`. It must depend
        on nothing that changes during a run: every process, and a resumed run, must compute the same order. It is also
        called for positions after the last step, because `indices` computes several steps at once.
        """
        epochs, indices = shuffle_groups(positions, self.num_samples, self.seed, "epoch")
        return indices + self.offsets(epochs, self.seed) * self.num_samples

    def offsets(self, epochs: np.ndarray, seed: int) -> np.ndarray:
        """Return the tokens by which windows are moved in each of these epochs, both int64 [n]."""
        numbers, places = np.unique(epochs, return_inverse=True)
        return np.array([derive_seed(seed, "offset", int(epoch)) % self.num_offsets for epoch in numbers])[places]


class MixedBatches(GlobalBatches):
    """Global batches of a mixture of corpora, whose datasets are concatenated.

    The positions are divided into blocks of MIX_BLOCK. Each block has exactly quotas[c] samples from corpus c, in a
    random order. Each corpus has epochs of its own, each in another random order and with another offset.
    """

    def __init__(
        self,
        corpus_sizes: list[int],
        quotas: list[int],
        sizes: BatchSizes,
        seed: int,
        dataset: Any = None,
        num_offsets: int = 1,
    ):
        super().__init__(sum(corpus_sizes), sizes, seed, dataset, num_offsets)
        self.corpus_sizes, self.quotas, self.quota_ends = corpus_sizes, quotas, np.cumsum(quotas)

    def sample_indices(self, positions: np.ndarray) -> np.ndarray:
        """Map positions in the stream of samples to sample indices, both int64 [n]."""
        # Give each position a slot, a random place in its block. The slots [quota_ends[c] - quotas[c], quota_ends[c])
        # hold samples of corpus c.
        blocks, slots = shuffle_groups(positions, MIX_BLOCK, self.seed, "block")  # int64 [n] each
        corpora = np.searchsorted(self.quota_ends, slots, side="right")  # int64 [n]

        # Each corpus is a stream of its own, of which block b reads positions b * quotas[c] to (b + 1) * quotas[c] - 1.
        indices = np.empty_like(positions)
        for c in np.unique(corpora):
            in_corpus = corpora == c  # bool [n]
            first_slot, first_index = self.quota_ends[c] - self.quotas[c], sum(self.corpus_sizes[:c])
            positions_in_corpus = blocks[in_corpus] * self.quotas[c] + slots[in_corpus] - first_slot
            seed = derive_seed(self.seed, "corpus", int(c))
            epochs, indices_in_corpus = shuffle_groups(positions_in_corpus, self.corpus_sizes[c], seed, "epoch")
            offsets = self.offsets(epochs, seed)
            indices[in_corpus] = first_index + indices_in_corpus + offsets * self.num_samples
        return indices


def mix_quotas(weights: list[float]) -> list[int]:
    """Return the number of samples from each corpus in a block, in proportion to the weights; the sum is MIX_BLOCK."""
    # Rounding the cumulative sums makes the sum exactly MIX_BLOCK.
    ends = np.rint(np.cumsum(weights) / np.sum(weights) * MIX_BLOCK).astype(int)
    return np.diff(ends, prepend=0).tolist()


def apportion(number: int, quotas: list[int], sizes: list[int]) -> list[int]:
    """Return how many samples of each corpus to take, for a set of `number` samples in the proportions of a mixture.

    Args:
        number: size of the set, at least the number of corpora. If a corpus has too few samples for its proportion,
            the whole set is smaller, so that the proportions stay the same.
        quotas: the proportions, as samples from each corpus in a block (`mix_quotas`).
        sizes: samples that each corpus has.

    Returns:
        The number of samples from each corpus, rounded by largest remainders, but at least 1.
    """
    # The smallest corpus, relative to its quota, limits the set.
    largest = min(size * sum(quotas) // quota for size, quota in zip(sizes, quotas, strict=True))
    number = max(min(number, largest), len(quotas))

    # Round down, and give the samples that are left to the corpora with the largest remainders.
    counts, remainders = np.divmod(np.array(quotas) * number, sum(quotas))
    counts[np.argsort(-remainders, kind="stable")[: number - counts.sum()]] += 1

    # Give each corpus at least one sample.
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

    A small block cipher (a Feistel network) encrypts each position: this map is one to one and looks random. It
    permutes [0, 4^k), where 4^k is the smallest of 4, 16, 64, ... that is at least `size`. A result outside [0, size)
    is therefore encrypted again until it is inside ("cycle walking", Black and Rogaway 2002). That keeps the map one to
    one, and takes fewer than 4 encryptions on average.

    Args:
        positions: int64 [n], each in [0, size).
        size: the number of elements permuted, up to 2**62.
        key: selects the permutation.

    Returns:
        int64 [n]; distinct positions give distinct indices.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)  # half of the bits of the largest position, rounded up
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
