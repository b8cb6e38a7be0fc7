"""The order of the data: global batch s, and its size, is a function of (seed, s), and nothing else is stored anywhere.

Each epoch visits every sample once, in an order given by a keyed permutation of the sample indices: a small block
cipher, so that position -> index costs O(1) memory however large the corpus is (a `randperm` of a billion windows
would cost 8 GB and a start-up). Resuming at step s is therefore just asking for batch s.
"""

from bisect import bisect_right
from itertools import accumulate, islice

import numpy as np

from config.schema import TrainConfig
from model.seeds import derive_seed, mix_bits

MIX_BLOCK = 1000  # samples in which a mixture has its exact proportions
POSITIONS_AT_ONCE = 256
FEISTEL_ROUNDS = 8  # Luby and Rackoff (1988) need 4; the tiny halves of small corpora need more to look uniform


def permute(positions: np.ndarray, size: int, key: int) -> np.ndarray:
    """Map positions in [0, size) to indices in [0, size) by the permutation that `key` selects.

    A balanced Feistel network on the smallest even number of bits that covers `size`; values that fall outside are
    sent through again until they are inside ("cycle walking", Black and Rogaway 2002), which keeps it a permutation.

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
        mixed = mix_bits((right ^ np.uint64(round_key)).view(np.int64)).view(np.uint64)
        left, right = right, left ^ (mixed & mask)
    return (left << shift) | right


def permute_groups(positions: np.ndarray, size: int, seed: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Permute positions within groups of `size` (epochs, blocks), by (seed, name, group).

    Return the group of each position, and its place there after the permutation, both int64 [n].
    """
    groups, places = np.divmod(positions, size)
    for group in np.unique(groups):
        here = groups == group
        places[here] = permute(places[here], size, derive_seed(seed, name, int(group)))
    return groups, places


class BatchSizes:
    """Sizes of the global batches of a run, in sequences.

    It begins with `warmup_from`, grows by as many at equal distances, and is `global_batch_size` from step
    `warmup_steps` on. So every size splits into whole micro-batches on whatever number of processes the first one does,
    and none depends on that number.
    """

    def __init__(self, global_batch_size: int, warmup_from: int | None = None, warmup_steps: int | None = None):
        self.global_batch_size, self.first = global_batch_size, warmup_from or global_batch_size
        times = global_batch_size // self.first - 1
        self.grows_at = [-(-time * (warmup_steps or 0) // times) for time in range(1, times + 1)]  # rounded up
        self._sums = [0, *accumulate(self.grows_at)]

    @classmethod
    def of(cls, config: TrainConfig) -> "BatchSizes":
        """Return the sizes for a config whose `global_batch_size` is resolved."""
        assert config.global_batch_size is not None, "resolved by then"
        return cls(config.global_batch_size, config.schedule.batch_warmup_from, config.schedule.batch_warmup_steps)

    def size(self, step: int) -> int:
        """Return the sequences in the global batch of `step` (from 0)."""
        return self.first * (1 + bisect_right(self.grows_at, step))

    def before(self, step: int) -> int:
        """Return the sequences in all global batches before that of `step`."""
        times = bisect_right(self.grows_at, step)
        return self.first * ((1 + times) * step - self._sums[times])


class GlobalBatches(BatchSizes):
    """The sample indices of every global batch of a run.

    Epochs follow each other without a gap: a global batch may end one epoch and begin the next, so that no sample is
    ever left out, whatever the batch size.
    """

    def __init__(self, num_samples: int, global_batch_size: int, seed: int, *warmup: int | None):
        """`warmup` is that of BatchSizes."""
        super().__init__(global_batch_size, *warmup)
        self.num_samples, self.seed = num_samples, seed
        self._cached_key, self._cached_indices = None, []

    def indices(self, step: int, rank: int = 0, num_processes: int = 1) -> list[int]:
        """Return the sample indices of process `rank`'s part of the global batch of `step` (from 0).

        It is the contiguous slice [rank * B / W, (rank + 1) * B / W) of the B indices, so that the slices of any number
        of processes W, in the order of their ranks, are the same global batch.
        """
        # Several steps at once: numpy takes as long for 16 positions as for 256, about 1% of a step of 50 ms.
        num_steps = max(1, POSITIONS_AT_ONCE * num_processes // self.global_batch_size)
        key = step // num_steps, rank, num_processes
        if key != self._cached_key:
            self._cached_indices, self._cached_key = self._indices_of_steps(num_steps, *key), key
        return self._cached_indices[step % num_steps]

    def _indices_of_steps(self, num_steps: int, block: int, rank: int, num_processes: int) -> list[list[int]]:
        steps = range(block * num_steps, (block + 1) * num_steps)
        sizes = [self.size(step) // num_processes for step in steps]
        firsts = [self.before(step) + rank * size for step, size in zip(steps, sizes, strict=True)]
        positions = [np.arange(first, first + size) for first, size in zip(firsts, sizes, strict=True)]
        indices = iter(self.at(np.concatenate(positions)).tolist())
        return [list(islice(indices, size)) for size in sizes]

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return the sample index at each position, counted from the start of the run, both int64 [n]."""
        return permute_groups(positions, self.num_samples, self.seed, "epoch")[1]


class MixedBatches(GlobalBatches):
    """Global batches of several corpora, whose samples are numbered one corpus after another.

    Of each block of MIX_BLOCK samples corpus c gives exactly quotas[c], at places that a permutation by (seed, block)
    chooses, and in an order and epochs of its own. So which corpus a position belongs to, and how many of its samples
    came before, takes no counting.
    """

    def __init__(self, sizes: list[int], quotas: list[int], global_batch_size: int, seed: int, *warmup: int | None):
        super().__init__(sum(sizes), global_batch_size, seed, *warmup)
        self.sizes, self.quotas, self.quota_ends = sizes, quotas, np.cumsum(quotas)
        self.orders = [GlobalBatches(size, 1, derive_seed(seed, "corpus", c)) for c, size in enumerate(sizes)]

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return the sample index at each position, counted from the start of the run, both int64 [n]."""
        blocks, slots = permute_groups(positions, MIX_BLOCK, self.seed, "block")
        corpora = np.searchsorted(self.quota_ends, slots, side="right")
        indices = np.empty_like(positions)
        for c in np.unique(corpora):
            here = corpora == c
            first_slot, first_index = self.quota_ends[c] - self.quotas[c], sum(self.sizes[:c])
            earlier = blocks[here] * self.quotas[c] + slots[here] - first_slot  # samples of this corpus
            indices[here] = first_index + self.orders[c].at(earlier)
        return indices


def mix_quotas(weights: list[float]) -> list[int]:
    """Return the samples of each corpus in MIX_BLOCK, proportional to its weight and rounded to the exact sum."""
    ends = np.rint(np.cumsum(weights) / np.sum(weights) * MIX_BLOCK).astype(int)
    return np.diff(ends, prepend=0).tolist()


def apportion(number: int, quotas: list[int]) -> list[int]:
    """Divide `number` samples among corpora in proportion to their quotas, at least one to each.

    Fractions are rounded up or down so that the sum is exact (largest remainders).

    Raises:
        ValueError: there is not one for each.
    """
    if number < len(quotas):
        raise ValueError(f"{number} is not one for each of {len(quotas)} corpora")
    counts, remainders = np.divmod(np.array(quotas) * number, sum(quotas))
    counts[np.argsort(-remainders, kind="stable")[: number - counts.sum()]] += 1
    for empty in np.flatnonzero(counts == 0):
        counts[counts.argmax()] -= 1
        counts[empty] = 1
    return counts.tolist()
