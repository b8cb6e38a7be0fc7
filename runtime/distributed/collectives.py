"""Collectives for tensors, Python objects, requests to stop and work that not all processes have."""

import threading
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import Tensor

from runtime.distributed.signals import never_stop
from runtime.distributed.world import num_processes

MEET_SECONDS = 0.5  # how long processes that wait for the work of others are in one collective


def all_gather(tensor: Tensor) -> Tensor:
    """Stack the equally shaped tensors of all processes in order of rank: [processes, *shape].

    `Accelerator.gather` is not used because on GPUs it calls a deprecated function of torch, which warns in every run.
    """
    if not dist.is_initialized():
        return tensor[None]
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.stack(gathered)


def broadcast_from_main(value: Any) -> Any:
    """Return the main process's `value` on all processes."""
    box = [value]
    if num_processes() > 1:
        dist.broadcast_object_list(box)
    return box[0]


class StopVote:
    """Asks, in each round of a long computation, whether any process was asked to stop.

    The answer comes one round later: the all-reduce of a flag in CPU memory runs while the round is computed, so that
    no round waits for it. All processes call it equally often and get the same answers.
    """

    def __init__(self, stop_requested: Callable[[], bool], timeout_seconds: float = 600):
        self.stop_requested = stop_requested
        # A group of gloo, because the default group of another program may have no backend for CPU tensors.
        timeout = timedelta(seconds=timeout_seconds)
        self.group = dist.new_group(backend="gloo", timeout=timeout) if num_processes() > 1 else None
        self.flag = torch.zeros(1, dtype=torch.int32)
        self.all_reduce: dist.Work | None = None

    def __call__(self) -> bool:
        """Return whether any process had been asked to stop at the previous call; in a single process, at this one."""
        if num_processes() == 1:
            return self.stop_requested()
        if self.all_reduce is not None:
            self.all_reduce.wait()
        stop = bool(self.flag.item())
        self.flag = torch.tensor([self.stop_requested()], dtype=torch.int32)
        self.all_reduce = dist.all_reduce(self.flag, dist.ReduceOp.MAX, self.group, async_op=True)
        return stop


def wait_for_work(
    work: Callable[[Callable[[], bool]], Any] | None, stop_requested: Callable[[], bool] = never_stop
) -> list[Any]:
    """Run work that only some processes have, however long it takes; called by all processes together.

    A process whose `work` is not None calls it in a thread. Meanwhile all processes meet in a short collective again
    and again, so that none waits in one until `timeout_seconds`.

    Args:
        work: called with a function that returns whether any process was asked to stop; it then raises Interrupted.
        stop_requested: whether this process was asked to stop.

    Returns:
        The results of all processes by rank; None for a process without work.

    Raises:
        Exception: on all processes, the exception of the first process whose work failed.
    """
    if num_processes() == 1:
        return [work(stop_requested) if work else None]
    stop = threading.Event()
    thread = futures.ThreadPoolExecutor(1, "work")
    future = thread.submit(work, stop.is_set) if work else None
    try:
        while True:
            is_done = future is None or bool(futures.wait([future], MEET_SECONDS).done)
            error = future.exception() if future and is_done else None
            result = future.result() if future and is_done and not error else None
            outcomes = gather_object([(is_done, stop_requested(), error, result)])
            if any(is_asked for _, is_asked, _, _ in outcomes):
                stop.set()
            if all(is_done for is_done, _, _, _ in outcomes):
                break
    finally:
        stop.set()  # if another process is lost, the work ends, too
        thread.shutdown(wait=False)
    for _, _, error, _ in outcomes:
        if error is not None:
            raise error
    return [result for _, _, _, result in outcomes]
