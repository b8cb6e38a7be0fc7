"""Helpers for tensors that FSDP2 may have sharded."""

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether `tensor` is a DTensor, of which this process holds a part. (The class is slow to import.)"""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded (a DTensor); called by all processes together."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def shard_like(like: Tensor, tensor: Tensor) -> Tensor:
    """Shard a tensor that all processes hold whole as `like` is sharded, if it is."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
