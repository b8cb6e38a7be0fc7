"""Collectives on tensors of the device."""

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather(tensor: Tensor) -> Tensor:
    """Stack the equally shaped tensors of all processes in order of rank: [processes, *shape].

    `Accelerator.gather` is not used because on GPUs it calls a deprecated function of torch, which warns in every run.
    """
    if not dist.is_initialized():
        return tensor[None]
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.stack(gathered)
