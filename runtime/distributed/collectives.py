"""Collectives for tensors, Python objects and requests to stop."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.distributed.world import num_processes


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


def never_stop() -> bool:
    """Return False: the default of functions that accept a StopVote."""
    return False
