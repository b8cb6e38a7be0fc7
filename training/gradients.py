"""The gradient of a parameter that a batch did not use, as of an expert that nobody chose: zero. No model need know.

DDP waits for the gradients of all parameters, so every backward comes by each of them, with nothing to add to it.
"""

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distributed.sharding import full_tensor


class _Reach(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss: Tensor, *parameters: nn.Parameter) -> Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *[None] * (len(ctx.needs_input_grad) - 1)


def trainable_parameters(network: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen."""
    return [parameter for parameter in network.parameters() if parameter.requires_grad]


def backward(loss: Tensor, model: nn.Module, accelerator: Accelerator) -> None:
    """Add the gradients of `loss` to those of the prepared model's parameters, used or not."""
    if isinstance(model, DistributedDataParallel):
        loss = _Reach.apply(loss, *model.parameters())
    accelerator.backward(loss)


def first_backward(loss: Tensor, model: nn.Module, accelerator: Accelerator) -> None:
    """The backward by which DDP orders its sums for good: all parameters, the last first, whatever the batch used."""
    if isinstance(model, DistributedDataParallel):
        parameters = trainable_parameters(model)
        # What has to be compiled and allocated is so now, out of DDP's sight.
        torch.autograd.grad(loss, parameters, allow_unused=True)
        loss = loss.detach()
        for parameter in parameters:
            loss = _Reach.apply(loss, parameter)
    accelerator.backward(loss)


def loss_scale(precision: str, step: int, skipped: int) -> float:
    """What the loss of a step is multiplied with, so that in fp16 its gradients do not become zero: a power of two.

    As torch's GradScaler: halved by every update that was skipped, for infinite gradients, and doubled by every 2,000
    that were not. But it is a function of what is in the state, so a resumed run has it without a file of its own.
    """
    return 2.0 ** (16 - skipped + (step - skipped) // 2000) if precision == "fp16" else 1.0


def fill_in_gradients(parameters: list[nn.Parameter], scale: float = 1.0) -> None:
    """A gradient of zero for every parameter that no micro-batch used, and all divided by `scale` in place."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if scale != 1:
        torch._foreach_div_([parameter.grad for parameter in parameters], scale)


def clip(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients in place so that their global L2 norm is at most `max_norm`; what it was before, 0-dim.

    As accelerator.clip_grad_norm_, to the bit. But that looks at each gradient three times and multiplies by 1 where
    there is nothing to clip, which costs a small model on a CPU 1% of a step.
    """
    gradients = [parameter.grad for parameter in parameters]
    norm = full_tensor(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
    if norm.device.type != "cpu" or norm > max_norm:  # a GPU is not asked, for the host would wait for it
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
