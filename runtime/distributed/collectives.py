"""Collectives: of tensors on the device, and of Python objects."""

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
