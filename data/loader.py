"""Load the micro-batches of each training step from a dataset onto the device of this process."""

import errno
import signal
from collections.abc import Generator, Iterable, Iterator
from multiprocessing import active_children
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from data.sampler import GlobalBatches
from runtime.config.errors import RunError
from runtime.distributed.signals import ignore_stop_signals, set_handler

Batch = dict[str, Tensor]
"""Arguments of the model's forward, each [B, T]: `input_ids`, `labels` and, for isolated documents, `position_ids`.
A dataset may add keys that begin with SCORE_PREFIX, which `model_inputs` removes.

All sequences have T tokens. A dataset of shorter texts, such as the stories, pads them. Labels are -100 at the padding,
so it costs time but does not count in the loss."""

SCORE_PREFIX = "score_"
"""The model does not get keys with this prefix. They are for the scores of an evaluation (see data/corpus.py)."""

SAMPLES_AT_ONCE = 64  # samples that a process without workers loads together


class BatchLoader:
    """Loads the micro-batches of this process for each step.

    Without workers, training waits while the process loads a batch. On a Zen 3 with two cores that took 0.5 ms of a
    step of 49 ms for 16 stories, and with workers the whole step took 3% longer (benchmarks/LOG.md, 2026-11-22).
    Workers pay off only if samples are slow to load.

    The loader has no state: a batch depends only on its step. Each process loads its own slice of each global batch; do
    not let Accelerate shard it again.

    Args:
        dataset: Map-style training set; see `load_batch`.
        global_batches: Sample indices of each step's global batch.
        micro_batch_size: Sequences in a micro-batch.
        device: Where the batches are put; copies to a CUDA device are asynchronous, from pinned memory.
        rank: Index of this process among `num_processes`.
        num_processes: Number of processes that share a global batch.
        num_workers: Worker processes that load ahead; with 0 this process loads the batches itself.
        timeout_seconds: Longest wait for a batch from a worker.
    """

    def __init__(
        self,
        dataset: Any,
        global_batches: GlobalBatches,
        micro_batch_size: int,
        device: torch.device,
        rank: int = 0,
        num_processes: int = 1,
        num_workers: int = 0,
        timeout_seconds: float = 600.0,
    ):
        self.dataset = StepDataset(dataset, global_batches, rank, num_processes)
        self.micro_batch_size, self.device = micro_batch_size, device
        self.num_workers, self.timeout_seconds = num_workers, timeout_seconds

    def batches(self, start: int, stop: int) -> Generator[list[Batch]]:
        """Yield the micro-batches of each step from `start` to `stop` - 1.

        Raises:
            RunError: the workers cannot be started.
            RuntimeError: from torch, if a worker dies or a batch takes longer than `timeout_seconds`.
        """
        load = self._load_with_workers if self.num_workers else self._load_here
        for batch in load(range(start, stop)):
            yield self._to_micro_batches(batch)

    def load(self, step: int) -> list[Batch]:
        """Load the micro-batches of one step in this process."""
        return self._to_micro_batches(self.dataset[step])

    def _to_micro_batches(self, batch: Batch) -> list[Batch]:
        on_cuda = self.device.type == "cuda"
        on_device = {
            name: (tensor.pin_memory() if on_cuda else tensor).to(self.device, non_blocking=on_cuda)
            for name, tensor in batch.items()
        }
        return split_micro_batches(on_device, self.micro_batch_size)

    def _load_here(self, steps: range) -> Iterator[Batch]:
        # Load the batches of several steps at once, because each training step evicts the code of the dataset and the
        # data that it uses from the CPU's caches.
        samples_per_step = self.dataset.global_batches.sizes.global_batch_size // self.dataset.num_processes
        num_steps = max(1, SAMPLES_AT_ONCE // samples_per_step)
        for first in range(0, len(steps), num_steps):
            yield from [self.dataset[step] for step in steps[first : first + num_steps]]

    def _load_with_workers(self, steps: range) -> Iterator[Batch]:
        # Workers send NumPy arrays through a pipe, which copies them. Tensors would be sent without a copy, but need
        # shared memory, which is small in many containers, and sockets in TMPDIR, whose path may be too long.
        loader = DataLoader(
            self.dataset,
            batch_size=None,
            sampler=steps,
            num_workers=self.num_workers,
            collate_fn=_to_arrays,
            worker_init_fn=_start_worker,
            timeout=self.timeout_seconds,
        )

        # Start the workers. DataLoader keeps its processes private, so compare the child processes before and after.
        children_before = active_children()
        try:
            batches = iter(loader)
        except OSError as error:
            full = error.errno == errno.ENOSPC  # the semaphores of the queues are in /dev/shm
            remedy = f"{'enlarge /dev/shm, or ' if full else ''}set data.num_workers to 0"
            raise RunError(f"data.num_workers: {self.num_workers} workers cannot start: {error}; {remedy}") from None
        workers = set(active_children()).difference(children_before)

        try:
            for arrays in batches:
                yield {name: torch.from_numpy(array) for name, array in arrays.items()}
        finally:
            # At exit Python terminates daemonic child processes, such as the workers, and joins them. Workers ignore
            # SIGTERM, so a hanging one would keep the run from ending: kill them. torch's handler of SIGCHLD would
            # raise an error when they die.
            set_handler(signal.SIGCHLD, signal.SIG_DFL)
            for process in workers:
                process.kill()


class StepDataset(Dataset):
    """Map-style dataset whose item s is the local part of the global batch of step s.

    Training, tools.replay and the runs of verify.py read their batches by `__getitem__`.
    """

    def __init__(self, dataset: Any, global_batches: GlobalBatches, rank: int, num_processes: int):
        self.dataset, self.global_batches, self.rank, self.num_processes = dataset, global_batches, rank, num_processes

    def __getitem__(self, step: int) -> Batch:
        indices = self.global_batches.indices(step, self.rank, self.num_processes)
        batch, length = model_inputs(load_batch(self.dataset, indices)), self.global_batches.sizes.length(step)
        return {name: rows[:, :length] for name, rows in batch.items()}


def model_inputs(batch: Batch) -> Batch:
    """Return the part of a batch that is for the model."""
    return {name: tensor for name, tensor in batch.items() if not name.startswith(SCORE_PREFIX)}


def load_batch(dataset: Any, indices: Iterable[int]) -> Batch:
    """Load the samples with these indices, in the order of `indices`.

    A dataset may have a method `arrays(indices)` that returns {name: array of the whole batch}, which is faster than
    stacking rows. Then its `__getitem__` is not called here.
    """
    if hasattr(dataset, "arrays"):
        return {name: torch.from_numpy(rows) for name, rows in dataset.arrays(list(indices)).items()}
    return default_collate([dataset[index] for index in indices])


def split_micro_batches(batch: Batch, micro_batch_size: int) -> list[Batch]:
    """Split a local batch into micro-batches of `micro_batch_size` sequences, without copying."""
    tensors_by_micro_batch = zip(*(tensor.split(micro_batch_size) for tensor in batch.values()), strict=True)
    return [dict(zip(batch, tensors, strict=True)) for tensors in tensors_by_micro_batch]


def _to_arrays(batch: Any) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in batch.items()}


def _start_worker(worker_id: int) -> None:
    # A scheduler signals the workers too, but training needs batches until it has saved and stopped.
    ignore_stop_signals()
