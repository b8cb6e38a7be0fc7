"""A linear layer that multiplies by oneDNN on CPUs where PyTorch's default is slow.

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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., K] times weight [N, K] transposed, plus bias [N], as F.linear does."""
    is_float32_on_cpu = x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if use_onednn and is_float32_on_cpu and x.numel() >= MIN_ROWS * x.shape[-1] > 0:
        return OneDNNLinear.apply(x, weight, bias)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """nn.Linear that computes `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
