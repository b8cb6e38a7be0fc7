"""Data order: a uniform permutation in O(1) memory, the same on any number of processes."""

import hashlib
import tracemalloc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from data.corpus import load_corpus
from data.sampler import BatchSizes, GlobalBatches, permute
from model.seeds import derive_seed
from runtime.config.parser import parse_config
from tests.conftest import ROOT, thinned


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 1000, 65_537])
def test_permute_is_permutation(size):
    for key in range(3):
        assert sorted(permute(np.arange(size), size, key)) == list(range(size))


def test_permute_order_is_stable():
    """A change of this digest changes the data order of every run, also of one that is resumed."""
    orders = [permute(np.arange(size), size, key=1) for size in (1, 2, 3, 4, 5, 16, 17, 64, 65, 1000)]
    assert hashlib.sha256(np.concatenate(orders).tobytes()).hexdigest()[:16] == "454265d8750f9585"


def test_permute_differs_between_keys():
    orders = {tuple(permute(np.arange(1000), 1000, key)) for key in range(20)}
    assert len(orders) == 20
    fixed_points = [np.sum(permute(np.arange(1000), 1000, key) == np.arange(1000)) for key in range(400)]
    assert 0.7 < np.mean(fixed_points) < 1.3  # the mean of a random permutation is 1, its standard error here 0.05


def test_order_of_a_run_knows_its_training_set():
    """For a fork that sorts the samples by their content (tests/data/test_text.py: of a mixture)."""
    config = parse_config(["--config", str(ROOT / "tests" / "support" / "tiny_random.yaml")])
    corpus = load_corpus(config)
    assert corpus.global_batches(config).dataset is corpus.train


def test_permute_is_uniform():
    """Over many keys, every index is equally likely at the first position and after every other index."""
    size, keys = 10, 2_000
    orders = np.array([permute(np.arange(size), size, key) for key in range(keys)])
    for position in (0, size - 1):
        counts = np.bincount(orders[:, position], minlength=size)
        chi_squared = np.sum((counts - keys / size) ** 2) / (keys / size)
        assert chi_squared < 30, counts  # 9 degrees of freedom: 30 has a probability of 0.0004
    pairs = Counter(zip(orders[:, 0].tolist(), orders[:, 1].tolist(), strict=True))
    expected = keys / (size * (size - 1))
    chi_squared = sum((pairs[a, b] - expected) ** 2 / expected for a in range(size) for b in range(size) if a != b)
    assert chi_squared < 140  # 89 degrees of freedom: 140 has a probability of 0.0004


def test_permute_scatters_neighbours():
    """Adjacent windows of a corpus of a million do not meet in a batch."""
    order = permute(np.arange(100_000), 1_000_000, key=7)
    correlation = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(correlation) < 0.015  # standard error 0.003
    assert np.sum(np.abs(np.diff(order)) == 1) < 5  # 0.2 expected


def test_indices_use_constant_memory():
    batches = GlobalBatches(num_samples=10**12, sizes=BatchSizes(512), seed=1)
    tracemalloc.start()
    far = batches.indices(10**9)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(far)) == 512 and max(far) > 10**11
    assert peak_bytes < 10_000_000  # 10**12 indices would be 8 TB


@pytest.mark.parametrize("num_processes", [1, 2, 3, 6])
def test_global_batch_is_independent_of_process_count(num_processes):
    batches = GlobalBatches(num_samples=100, sizes=BatchSizes(12), seed=3)
    for step in (0, 1, 8, 10**7):  # steps 8 and 10**7 hold the end of one epoch and the start of the next
        local_batches = [batches.indices(step, rank, num_processes) for rank in range(num_processes)]
        assert sum(local_batches, []) == batches.indices(step)


def test_each_epoch_visits_samples_in_another_order():
    batches = GlobalBatches(num_samples=10, sizes=BatchSizes(4), seed=3)
    visited = sum((batches.indices(step) for step in range(5)), [])  # 20 samples: two epochs
    assert sorted(visited[:10]) == sorted(visited[10:]) == list(range(10))
    assert visited[:10] != visited[10:]


def test_batch_may_exceed_corpus():
    batch = GlobalBatches(num_samples=3, sizes=BatchSizes(7), seed=0).indices(0)
    assert sorted(batch[:3]) == sorted(batch[3:6]) == [0, 1, 2]


def test_batch_sizes_grow_evenly():
    """Sizes are multiples of the first one, at equal distances; a warm-up over no steps has its full size at once."""
    assert [BatchSizes(12, 4, 5).size(step) for step in range(8)] == [4, 4, 4, 8, 8, 12, 12, 12]
    assert [BatchSizes(6, 2, 2).size(step) for step in range(4)] == [2, 4, 6, 6]
    assert [BatchSizes(40, 8, 2).size(step) for step in range(4)] == [8, 24, 40, 40], (
        "sizes grow by two multiples at a time"
    )
    for constant in (BatchSizes(12), BatchSizes(12, 12, 7), BatchSizes(12, 4, 0)):
        assert {constant.size(step) for step in range(9)} == {12}
    lasting = Counter(map(BatchSizes(64, 8, 500).size, range(500)))
    assert sorted(lasting) == list(range(8, 64, 8)) and set(lasting.values()) == {71, 72}
    assert BatchSizes(64, 8, 500).size(499) == 56 and BatchSizes(64, 8, 500).size(500) == 64
    for sizes in (BatchSizes(64, 8, 500), BatchSizes(512, 2, 100), BatchSizes(7), BatchSizes(12, 3, 0)):
        before = [sizes.sequences_before(step) for step in range(600)]
        assert before == np.cumsum([0, *(sizes.size(step) for step in range(599))]).tolist()
    far = BatchSizes(512, 2, 10**12)
    assert far.sequences_before(2**60) - far.sequences_before(2**50) == 512 * (2**60 - 2**50)


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_growing_batches_skip_no_sample(num_processes):
    batches = GlobalBatches(10, BatchSizes(12, 4, 5), 3)
    visited = batches.sample_indices(np.arange(68)).tolist()
    begin = 0
    for step, size in enumerate([4, 4, 4, 8, 8, 12, 12, 12]):
        local_batches = [batches.indices(step, rank, num_processes) for rank in range(num_processes)]
        assert sum(local_batches, []) == visited[begin : begin + size] and len({*map(len, local_batches)}) == 1
        begin += size
    assert begin == 64 == batches.sizes.sequences_before(8)


@pytest.mark.parametrize("sizes", thinned([(600,), (3000,), (600, 4, 9), (8,)], 2), ids="of {0} samples".format)
def test_indices_do_not_depend_on_earlier_calls(sizes):
    """However many steps are computed together: all, a few, or one."""
    batches, steps = GlobalBatches(300, BatchSizes(*sizes), 0), range(12)
    bounds = [batches.sizes.sequences_before(step) for step in range(13)]
    expected = [batches.sample_indices(np.arange(*pair)).tolist() for pair in pairwise(bounds)]
    assert [batches.indices(step) for step in steps] == expected
    assert [GlobalBatches(300, BatchSizes(*sizes), 0).indices(step) for step in steps] == expected
    halves = [(batches.indices(step, 0, 2), batches.indices(step, 1, 2)) for step in reversed(steps)]
    assert [first + second for first, second in reversed(halves)] == expected


def test_derive_seed_is_stable_and_distinct():
    assert derive_seed(0, "dropout", 5, 1) == 5326986413471182180  # the same on every machine and in every version
    assert len({derive_seed(0, name, i) for name in ("a", "b") for i in range(1000)}) == 2000
    assert derive_seed(1, 23) != derive_seed(12, 3)
