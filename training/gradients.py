"""The gradient of a parameter that a batch did not use, as of an expert that nobody chose: zero. No model need know.

DDP waits for the gradients of all parameters, so every backward comes by each of them, with nothing to add to it.
"""

from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class _Reach(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss: Tensor, *parameters: nn.Parameter) -> Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *[None] * (len(ctx.needs_input_grad) - 1)


def backward(loss: Tensor, model: nn.Module, accelerator: Accelerator) -> None:
    """Add the gradients of `loss` to those of the prepared model's parameters, used or not."""
    if isinstance(model, DistributedDataParallel):
        loss = _Reach.apply(loss, *model.parameters())
    accelerator.backward(loss)


def first_backward(loss: Tensor, model: nn.Module, accelerator: Accelerator) -> None:
    """The backward by which DDP orders its sums for good: all parameters, the last first, whatever the batch used."""
    if isinstance(model, DistributedDataParallel):
        # What has to be compiled and allocated is so now, out of DDP's sight.
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        loss = loss.detach()
        for parameter in model.parameters():
            loss = _Reach.apply(loss, parameter)
    accelerator.backward(loss)


def fill_in(parameters: Iterable[nn.Parameter]) -> None:
    """A gradient of zero for every parameter that no micro-batch used."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
