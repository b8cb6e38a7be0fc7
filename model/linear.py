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

# A name of its own lets torch.compile treat the product as one opaque operation, as it does with MKL's.
library = torch.library.Library("mini_gpt", "DEF")
library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


@torch.library.impl(library, "linear", "CPU")
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@torch.library.register_fake("mini_gpt::linear", lib=library)
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _save(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.has_bias = inputs[2] is not None


def _backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    x, weight = ctx.saved_tensors
    product = torch.ops.mini_gpt.linear
    x_TK, gradient_TN = x.flatten(0, -2), gradient.flatten(0, -2)
    weight_gradient = product(gradient_TN.t(), x_TK.t(), None)
    return product(gradient, weight.t(), None), weight_gradient, gradient_TN.sum(0) if ctx.has_bias else None


torch.library.register_autograd("mini_gpt::linear", _backward, setup_context=_save, lib=library)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N]: [..., N], as F.linear."""
    in_float32_on_cpu = x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if use_onednn and in_float32_on_cpu and x.numel() >= MIN_ROWS * x.shape[-1] > 0:
        return torch.ops.mini_gpt.linear(x, weight, bias)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """nn.Linear by `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
