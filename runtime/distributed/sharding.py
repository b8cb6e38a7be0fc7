"""Helpers for tensors that FSDP2 may have sharded."""

from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return whether `tensor` is a DTensor, without importing the class, which is slow."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded. All processes call this together."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP2 keeps gathered after a forward without a backward; a later change would miss them."""
    for module in model.modules():
        if callable(free := getattr(module, "reshard", None)):  # it is an FSDPModule, whose import is slow
            free()


def shard_like(like: Tensor, tensor: Tensor) -> Tensor:
    """Shard a tensor, which every process has in full, with the placement of `like`, if `like` is sharded."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
