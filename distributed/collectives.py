"""Collectives on tensors of the device."""

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather(tensor: Tensor) -> Tensor:
    """Stack the tensors of all processes, which have one shape, in order of rank: [processes, *shape].

    Not `Accelerator.gather`: on GPUs it calls a function of torch that is deprecated, and warns in every run.
    """
    if not dist.is_initialized():
        return tensor[None]
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.stack(gathered)
