"""Layers that are faster than PyTorch's on a CPU: Linear and RMSNorm.

In float32 PyTorch multiplies matrices with MKL, which uses half of the vector width of an AMD Zen 5 core: oneDNN is
twice as fast (benchmarks/LOG.md). In bfloat16 PyTorch uses oneDNN itself.
"""

import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HAS_ONEDNN = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
CPU_INFO, ZEN_5 = Path("/proc/cpuinfo"), re.compile(r"AuthenticAMD\ncpu family\s*: 26\n")
use_onednn = HAS_ONEDNN and CPU_INFO.exists() and ZEN_5.search(CPU_INFO.read_text()) is not None
"""True if `linear` uses oneDNN; an exact run sets it, so that the bits do not depend on the processor."""

# With fewer rows, as in generation, a oneDNN product takes longer to set up than to compute.
MIN_ROWS = 64


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `linear` by oneDNN; under torch.compile as a custom operation, which costs 10 us more per call."""
    if torch.compiler.is_compiling():
        return onednn_linear_op(x, weight, bias)
    if torch.is_grad_enabled():  # in a backward that is itself differentiated
        return OneDNNLinear.apply(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


# Opaque to the compiler, like MKL's product: the compiler needs only the shape of the result.
onednn_linear_op = torch.library.custom_op("mini_gpt::linear", onednn_linear, mutates_args=())
onednn_linear_op.register_fake(lambda x, weight, bias=None: x.new_empty(*x.shape[:-1], weight.shape[0]))


def transposed_product(x_TM: Tensor, y_TN: Tensor) -> Tensor:
    """Return x transposed times y, [M, N], by oneDNN, whose first factor must be contiguous.

    PyTorch copies a transposed matrix on one thread, and the other threads then read the copy from that core's cache.
    A leading dimension of size 1 makes all threads copy. It only costs time if there is one thread, or under
    torch.compile, which always copies on all threads.
    """
    plain_copy = torch.compiler.is_compiling() or torch.get_num_threads() == 1
    x_MT = x_TM.t().contiguous() if plain_copy else x_TM.t()[None].contiguous()[0]
    return onednn_linear(x_MT, y_TN.t())


class OneDNNLinear(torch.autograd.Function):
    """`linear` by oneDNN with a backward that can be differentiated."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn_linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        x_TK, grad_y_TN = x.flatten(0, -2), grad_y.flatten(0, -2)
        narrow = x_TK.shape[1] <= grad_y_TN.shape[1]  # copy the smaller factor: copies are slow
        grad_weight = transposed_product(x_TK, grad_y_TN).t() if narrow else transposed_product(grad_y_TN, x_TK)
        grad_x = onednn_linear(grad_y_TN, weight.t()).view(x.shape)
        return grad_x, grad_weight, grad_y_TN.sum(0) if ctx.needs_input_grad[2] else None


def is_float32_on_cpu(x: Tensor) -> bool:
    """Return whether operations on x run on the CPU in float32."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., K] times weight [N, K] transposed, plus bias [N], as F.linear does."""
    if use_onednn and is_float32_on_cpu(x) and x.numel() >= MIN_ROWS * x.shape[-1] > 0:
        return OneDNNLinear.apply(x, weight, bias)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """nn.Linear that computes `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class RMSNormFunction(torch.autograd.Function):
    """F.rms_norm with an analytic gradient.

    On a CPU F.rms_norm consists of single operations, whose autograd takes more than twice as long (benchmarks/LOG.md).
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse_rms = (x * x).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse_rms)
        return (x * inverse_rms).mul_(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        normalized = x * inverse_rms
        product = grad_y * normalized
        grad_weight = product.flatten(0, -2).sum(0)
        projection = product.mul_(weight).mean(-1, keepdim=True)
        grad_x = (grad_y * weight).addcmul_(normalized, projection, value=-1).mul_(inverse_rms)
        return grad_x, grad_weight, None


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm that computes RMSNormFunction in float32 on a CPU; torch.compile fuses nn.RMSNorm's operations."""

    def forward(self, x: Tensor) -> Tensor:
        if is_float32_on_cpu(x) and not torch.compiler.is_compiling():
            return RMSNormFunction.apply(x, self.weight, self.eps)
        return super().forward(x)
