"""Loader: the micro-batches of a step do not depend on earlier loads or workers, and no wait is unbounded."""

import signal
import time
from multiprocessing import active_children

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from data.loader import BatchLoader, load_batch, split_micro_batches
from data.sampler import BatchSizes, GlobalBatches
from data.synthetic.random_tokens import RandomTokensDataset
from data.synthetic.stories import StoriesDataset

CPU = torch.device("cpu")


class Rows(Dataset):
    """Row i is [i, i, ...]; item `broken` raises, and item `hanging` takes minutes."""

    def __init__(self, broken=None, hanging=None):
        self.broken, self.hanging = broken, hanging

    def __getitem__(self, index):
        if index == self.broken:
            raise ValueError(f"row {index} is broken")
        if index == self.hanging:
            time.sleep(600)
        return {"input_ids": torch.full((4,), index), "labels": torch.full((4,), -index)}


def load(start, stop, rank=0, num_processes=1, num_workers=0, order=None, micro_batch_size=2):
    order = order or GlobalBatches(50, BatchSizes(12, 4, 9), 7)  # batch size warm-up
    loader = BatchLoader(Rows(), order, micro_batch_size, CPU, rank, num_processes, num_workers)
    return [[batch["input_ids"][:, 0].tolist() for batch in batches] for batches in loader.batches(start, stop)]


def test_batches_follow_the_order():
    order = GlobalBatches(50, BatchSizes(12, 4, 9), 7)
    for step, micro_batches in enumerate(load(0, 12)):
        assert {len(rows) for rows in micro_batches} == {2}
        assert sum(micro_batches, []) == order.indices(step)


def test_rows_are_cut_to_the_length_of_their_step(monkeypatch):
    monkeypatch.setattr(BatchSizes, "length", lambda self, step: (3, None)[step])
    loader = BatchLoader(Rows(), GlobalBatches(50, BatchSizes(4), 7), 2, CPU)
    shapes = [{rows.shape for batch in batches for rows in batch.values()} for batches in loader.batches(0, 2)]
    assert shapes == [{(2, 3)}, {(2, 4)}]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_batches_do_not_depend_on_the_first_step(num_workers):
    whole = load(0, 12)
    assert len(whole) == 12
    assert load(0, 12, num_workers=num_workers) == whole
    assert load(7, 12, num_workers=num_workers) == whole[7:]


def test_local_batches_form_the_global_batch():
    both = [load(0, 12, rank, num_processes=2) for rank in (0, 1)]
    assert [first + second for first, second in zip(*both, strict=True)] == load(0, 12)


class Longest(GlobalBatches):
    """Reads the samples in the order of their content, which is -index in Rows."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.order = np.argsort([int(self.dataset[i]["labels"][0]) for i in range(self.num_samples)])

    def sample_indices(self, positions):
        return self.order[positions % self.num_samples]


def test_order_and_length_of_a_curriculum_are_in_the_sampler(monkeypatch):
    monkeypatch.setattr(BatchSizes, "length", lambda self, step: 3 if step < 2 else None)
    order = Longest(50, BatchSizes(4), 7, Rows())
    batches = [batch for (batch,) in BatchLoader(Rows(), order, 4, CPU).batches(0, 3)]
    assert [batch["input_ids"].shape for batch in batches] == [batch["labels"].shape for batch in batches]
    assert [batch["input_ids"].shape for batch in batches] == [(4, 3), (4, 3), (4, 4)]
    assert [batch["input_ids"][:, 0].tolist() for batch in batches] == [
        [49, 48, 47, 46],
        [45, 44, 43, 42],
        [41, 40, 39, 38],
    ]


def test_batches_of_no_steps():
    assert load(5, 5) == load(5, 5, num_workers=1) == []


def test_load_batch_of_a_hugging_face_dataset():
    """Such a dataset has a method `batch` with another meaning."""
    rows = {"input_ids": [[1, 2], [3, 4], [5, 6]], "labels": [[1, 2], [-100, 4], [5, 6]]}
    batch = load_batch(datasets.Dataset.from_dict(rows).with_format("torch"), [2, 1])
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {name: of[:0:-1] for name, of in rows.items()}


@pytest.mark.parametrize("make", [StoriesDataset, RandomTokensDataset])
def test_load_batch_stacks_the_rows(make):
    dataset, indices = make("train", 50, 0, 96, *([30] if make is RandomTokensDataset else [])), [3, 49, 0]
    batch = load_batch(dataset, indices)
    assert batch.keys() == {"input_ids", "labels"}
    for name, rows in batch.items():
        assert torch.equal(rows, torch.stack([dataset[index][name] for index in indices]))


def test_split_micro_batches_keeps_rows_together():
    batch = load_batch(Rows(), range(6))
    parts = split_micro_batches(batch, 4)
    assert [part["input_ids"][:, 0].tolist() for part in parts] == [[0, 1, 2, 3], [4, 5]]
    assert all(torch.equal(part["labels"], -part["input_ids"]) for part in parts)
    assert parts[0]["input_ids"].data_ptr() == batch["input_ids"].data_ptr()


# Failing workers


def test_hanging_worker_ends_the_batches(monkeypatch):
    """The first batch hangs, because a busy machine may need longer than the timeout to start the worker."""
    order, children = GlobalBatches(50, BatchSizes(4), 0), []
    monkeypatch.setattr("data.loader.active_children", lambda: children.append(active_children()) or children[-1])
    dataset = Rows(hanging=order.indices(0)[0])
    with pytest.raises(RuntimeError, match="timed out after 1"):
        next(BatchLoader(dataset, order, 4, CPU, num_workers=1, timeout_seconds=1).batches(0, 9))
    others, [*now] = children
    [worker] = [process for process in now if process not in others]
    worker.join(300)
    assert worker.exitcode == -signal.SIGKILL


def test_longest_timeout_is_accepted():
    order, timeout_seconds = GlobalBatches(5, BatchSizes(1), 0), 10**6 / 2  # of `timeout_seconds`
    loader = BatchLoader(Rows(), order, 1, CPU, num_workers=1, timeout_seconds=timeout_seconds)
    assert len(list(loader.batches(0, 2))) == 2


def test_error_of_the_dataset_is_raised():
    loader = BatchLoader(Rows(broken=3), GlobalBatches(5, BatchSizes(1), 0), 1, CPU, num_workers=1)
    with pytest.raises(ValueError, match="row 3 is broken"):
        list(loader.batches(0, 5))
