"""The backward pass: unused parameters, the first backward, loss scaling.

A parameter that no micro-batch used, such as an expert that no token was routed to, gets a gradient of zero
(fill_missing_gradients). Otherwise the optimizer would update it under DDP, which gives it zeros, but skip it in a
single process. DDP waits for the gradients of all parameters, so in DDP every loss is made to depend on each of them
(_ConnectToLoss). DDP's own option find_unused_parameters would instead search the graph in every forward.
"""

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class _ConnectToLoss(torch.autograd.Function):
    """Makes the loss depend on parameters, so that DDP's hooks run for them; the loss and all gradients stay the same.

    The backward returns None for the parameters. Autograd runs the hooks of a parameter for None too.
    """

    @staticmethod
    def forward(ctx, loss: Tensor, *parameters: nn.Parameter) -> Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return (grad_outputs[0], *(None for _ in ctx.needs_input_grad[1:]))


def trainable_parameters(network: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not frozen."""
    return [parameter for parameter in network.parameters() if parameter.requires_grad]


def connect_parameters(loss: Tensor, model: nn.Module) -> Tensor:
    """Return the loss; in DDP make it depend on every trainable parameter, so that the hooks of all of them run."""
    if isinstance(model, DistributedDataParallel):
        return _ConnectToLoss.apply(loss, *trainable_parameters(model))
    return loss


def first_backward(loss: Tensor, model: nn.Module, accelerator: Accelerator) -> None:
    """Run the first backward of a process; the caller discards the gradients.

    DDP groups the gradients into buckets by the order in which they arrive in its first backward. The buckets decide in
    which order the processes' gradients are added, and so the rounding. Here the gradients arrive in the reverse order
    of the parameters, whichever of them the batch uses. So a resumed run sums in the same order as a run that never
    stopped.
    """
    if isinstance(model, DistributedDataParallel):
        parameters = trainable_parameters(model)

        # Run the backward of the model, which compiles and allocates. torch.autograd.grad does not call DDP's hooks.
        torch.autograd.grad(loss, parameters, allow_unused=True)

        # Chain the parameters: the backward below reaches the last one first.
        loss = loss.detach()
        for parameter in parameters:
            loss = _ConnectToLoss.apply(loss, parameter)
    accelerator.backward(loss)


def loss_scale(precision: str, step: int, skipped: int) -> float:
    """Return the factor that keeps fp16 gradients from underflowing, a power of two; 1 in other precisions.

    It begins at 65,536. It is halved for every skipped update, as if each had overflowed, and doubled after every 2,000
    updates that were not skipped. torch.amp.GradScaler has the same start, but doubles after 2,000 updates in a row
    without a skip, which it has to count. This scale is a function of counters that checkpoints contain anyway.

    Args:
        precision: the mixed precision of the run, such as "fp16".
        step: from 0.
        skipped: number of skipped updates before this step.
    """
    return 2.0 ** (16 - skipped + (step - skipped) // 2000) if precision == "fp16" else 1.0


def fill_missing_gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Set each gradient that is None, of a parameter that no micro-batch used, to zero; return the gradients of all."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    return gradients
