"""The linear layer, with oneDNN's matrix product where the CPU's usual one is slow.

In float32 PyTorch multiplies matrices on the CPU with MKL, which uses half of the width of an AMD Zen 5 core: 105
GFLOP/s against oneDNN's 240 (docs/performance.md). In bfloat16 PyTorch takes oneDNN itself.
"""

import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ONEDNN_IS_THERE = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
CPU_INFO, ZEN_5 = Path("/proc/cpuinfo"), re.compile(r"AuthenticAMD\ncpu family\s*: 26\n")
use_onednn = ONEDNN_IS_THERE and CPU_INFO.exists() and ZEN_5.search(CPU_INFO.read_text()) is not None
"""Whether `linear` does not leave the choice to PyTorch; an exact run sets it, to have the same bits everywhere."""

# With fewer rows, as in generation, a product of oneDNN takes longer to set up than to compute.
MIN_ROWS = 64


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `linear`, by oneDNN. Only torch.compile calls the named operation below, which costs 10 us a call more."""
    if torch.compiler.is_compiling():
        return named_product(x, weight, bias)
    if torch.is_grad_enabled():  # in a backward that is itself to be differentiated
        return OneDNNLinear.apply(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


# One opaque operation, as MKL's is, of which the compiler need know no more than the shape of the result.
named_product = torch.library.custom_op("mini_gpt::linear", product, mutates_args=())
named_product.register_fake(lambda x, weight, bias=None: x.new_empty(*x.shape[:-1], weight.shape[0]))


def over_rows(x_TM: Tensor, y_TN: Tensor) -> Tensor:
    """x transposed times y, [M, N], by oneDNN, whose first factor must be contiguous.

    PyTorch copies a transposed matrix by one thread, and the others then wait for its cache; with a third dimension of
    size 1 all threads copy, which is slower where there is one. torch.compile copies by all threads as it is.
    """
    by_one = torch.compiler.is_compiling() or torch.get_num_threads() == 1
    x_MT = x_TM.t().contiguous() if by_one else x_TM.t()[None].contiguous()[0]
    return product(x_MT, y_TN.t())


class OneDNNLinear(torch.autograd.Function):
    """`linear` by oneDNN, forward and backward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        x_TK, gradient_TN = x.flatten(0, -2), gradient.flatten(0, -2)
        narrow = x_TK.shape[1] <= gradient_TN.shape[1]  # copying takes as long as many products: the smaller factor
        weight_gradient = over_rows(x_TK, gradient_TN).t() if narrow else over_rows(gradient_TN, x_TK)
        x_gradient = product(gradient_TN, weight.t()).view(x.shape)
        return x_gradient, weight_gradient, gradient_TN.sum(0) if ctx.needs_input_grad[2] else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N]: [..., N], as F.linear."""
    in_float32_on_cpu = x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if use_onednn and in_float32_on_cpu and x.numel() >= MIN_ROWS * x.shape[-1] > 0:
        return OneDNNLinear.apply(x, weight, bias)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """nn.Linear by `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
