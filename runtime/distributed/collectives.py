"""Collectives: of tensors on the device, of Python objects, and of the wish to stop."""

from collections.abc import Callable
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

    The answer comes one round later, so that no process waits for it: the all-reduce of a flag in CPU memory runs while
    the round is computed. All processes call it equally often and get the same answers.
    """

    def __init__(self, stop_requested: Callable[[], bool]):
        self.stop_requested = stop_requested
        self.flag = torch.zeros(1, dtype=torch.int32)
        self.all_reduce: dist.Work | None = None

    def __call__(self) -> bool:
        """Return whether any process was asked to stop before the previous round, or, in a single process, now."""
        if num_processes() == 1:
            return self.stop_requested()
        if self.all_reduce is not None:
            self.all_reduce.wait()
        stop = bool(self.flag.item())
        self.flag = torch.tensor([self.stop_requested()], dtype=torch.int32)
        self.all_reduce = dist.all_reduce(self.flag, dist.ReduceOp.MAX, async_op=True)
        return stop


def never_stop() -> bool:
    """Return False: the default of functions that accept a StopVote."""
    return False
