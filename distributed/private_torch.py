"""Private functions of torch that this repository uses, each with the reason. Check them when torch is upgraded.

Others are used in one module each: torch._inductor's cache_dir (training/prepare_model.py), FakeTensorMode
(checks/plan.py), the state dict stager (checkpoint/storage.py), oneDNN products and the softmax backward (model/).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Multi-tensor operations: one kernel launch for a list of tensors. torch's own optimizers are built on them, but they
# have no public name.


def foreach_add_(tensors: Sequence[Tensor], others: Sequence[Tensor], alpha: float = 1.0) -> None:
    """Add `alpha` times each of `others` to each of `tensors`, in place."""
    _foreach("add_")(list(tensors), list(others), alpha=alpha)


def foreach_sub(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """Return the difference of each pair."""
    return list(_foreach("sub")(list(tensors), list(others)))


def foreach_mul_(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply each tensor by one factor, a number or 0-dim tensor, in place."""
    _foreach("mul_")(list(tensors), factor)


def foreach_lerp_(tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> None:
    """Move each tensor towards its end by the fraction `weight`, in place."""
    _foreach("lerp_")(list(tensors), list(ends), weight)


def foreach_norm(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the L2 norm of each tensor, 0-dim."""
    return list(_foreach("norm")(list(tensors)))


def _foreach(name: str) -> Any:
    return getattr(torch, f"_foreach_{name}")
