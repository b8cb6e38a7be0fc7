"""Layers and attention that are faster than PyTorch's on some CPUs, put into a network after it is built.

On a Zen 5, a whole step without one of them took longer (benchmarks/LOG.md, 2026-11-26): without oneDNN by 37% to 48%
in float32, without RMSNorm by 3% to 10%, and without eager attention by 50% to 67% in bfloat16. In float32 we are not
sure that eager attention gains anything: the measurements range from a loss of 4% to a gain of 8%. When torch is
upgraded, measure again, by leaving one of them out of `use_cpu_kernels`, and remove what no longer gains.
"""

import math
import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.gpt import Attention, GPTModel

HAS_ONEDNN = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
CPU_INFO, ZEN_5 = Path("/proc/cpuinfo"), re.compile(r"AuthenticAMD\ncpu family\s*: 26\n")
LONGEST_EAGER = {torch.bfloat16: 256, torch.float32: 128}  # tokens; PyTorch's fused attention is faster for more
# With fewer rows, as in generation, a oneDNN product takes longer to set up than to compute.
MIN_ROWS = 64


def use_cpu_kernels(network: GPTModel) -> None:
    """Replace what is slow on this CPU; weights and their names stay the same."""
    onednn = mkl_is_slow()
    for module in network.modules():
        if type(module) is nn.Linear and onednn:
            module.__class__ = Linear
        elif type(module) is nn.RMSNorm:
            module.__class__ = RMSNorm
        elif isinstance(module, Attention) and module.sdpa is F.scaled_dot_product_attention:
            module.sdpa = scaled_dot_product_attention
    if onednn:
        network.next_token_loss.linear = linear


def mkl_is_slow() -> bool:
    """Return whether oneDNN multiplies float32 matrices faster than MKL, with which PyTorch multiplies them.

    MKL uses half of the vector width of an AMD Zen 5 core. Remove Zen 5 here once F.linear is as fast on it as `linear`
    below. In the mode of an exact run MKL is slow on every processor; the choice must then be the same on all of them.
    """
    if os.environ.get("MKL_CBWR") == "COMPATIBLE":
        return HAS_ONEDNN
    return HAS_ONEDNN and CPU_INFO.exists() and ZEN_5.search(CPU_INFO.read_text()) is not None


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


def is_float32(x: Tensor) -> bool:
    """Return whether operations on x, on the CPU, run in float32."""
    return x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., K] times weight [N, K] transposed, plus bias [N], as F.linear does."""
    if is_float32(x) and x.numel() >= MIN_ROWS * x.shape[-1] > 0:
        return OneDNNLinear.apply(x, weight, bias)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """nn.Linear that computes `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class RMSNormFunction(torch.autograd.Function):
    """F.rms_norm with an analytic gradient.

    On a CPU F.rms_norm consists of single operations, whose autograd takes more than twice as long.
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
    """nn.RMSNorm that computes RMSNormFunction in float32; torch.compile fuses nn.RMSNorm's operations."""

    def forward(self, x: Tensor) -> Tensor:
        if is_float32(x) and not torch.compiler.is_compiling():
            return RMSNormFunction.apply(x, self.weight, self.eps)
        return super().forward(x)


def scaled_dot_product_attention(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, attn_mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Compute F.scaled_dot_product_attention, by `EagerAttention` where `uses_eager_attention`."""
    if uses_eager_attention(q_BHTD, k_BKSD, attn_mask, **options):
        return EagerAttention.apply(q_BHTD, k_BKSD, v_BKSD, attn_mask)
    return F.scaled_dot_product_attention(q_BHTD, k_BKSD, v_BKSD, attn_mask, **options)


def uses_eager_attention(q_BHTD: Tensor, k_BKSD: Tensor, attn_mask: Tensor | None = None, **options: Any) -> bool:
    """Return whether `EagerAttention` supports the arguments of F.scaled_dot_product_attention and is faster.

    That is so for short sequences. In bfloat16 the backward of PyTorch's fused kernel takes up to seven times as long.
    Exact runs in float32 use the fused kernel, which gives the same bits on every processor.
    """
    is_exact = q_BHTD.dtype == torch.float32 and torch.are_deterministic_algorithms_enabled()
    is_short = 1 < q_BHTD.shape[-2] <= LONGEST_EAGER.get(q_BHTD.dtype, 0) and not is_exact
    is_plain = not options.get("dropout_p") and options.get("scale") is None and q_BHTD.shape[1] == k_BKSD.shape[1]
    has_one_mask = (
        options.get("is_causal") if attn_mask is None else attn_mask.dtype == torch.bool and attn_mask.dim() == 2
    )
    return bool(is_short and is_plain and has_one_mask)


class EagerAttention(torch.autograd.Function):
    """Attention with all scores in memory, causal or with a bool mask [T, S], and an analytic gradient.

    Autograd of the same operations would make twice as many passes over the scores. N is B times H.
    """

    @staticmethod
    def forward(ctx, q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, mask_TS: Tensor | None = None) -> Tensor:
        q_NTD, k_NSD, v_NSD = (x.flatten(0, 1) for x in (q_BHTD, k_BHSD, v_BHSD))
        shape, D = (q_NTD.shape[1], k_NSD.shape[1]), q_NTD.shape[2]
        if mask_TS is None:
            attn_bias_TS = q_NTD.new_full(shape, -math.inf).triu(1)
        else:
            attn_bias_TS = q_NTD.new_zeros(shape).masked_fill_(~mask_TS, -math.inf)
        scores_NTS = torch.baddbmm(attn_bias_TS, q_NTD, k_NSD.mT, alpha=1 / math.sqrt(D))
        weights_NTS = scores_NTS.softmax(dim=-1, dtype=torch.float32).type_as(v_NSD)
        ctx.save_for_backward(q_NTD, k_NSD, v_NSD, weights_NTS)
        return (weights_NTS @ v_NSD).unflatten(0, q_BHTD.shape[:2])  # a fork's values may be narrower than its keys

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y_BHTD: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_NTD, k_NSD, v_NSD, weights_NTS = ctx.saved_tensors
        grad_y_NTD, scale = grad_y_BHTD.flatten(0, 1), 1 / math.sqrt(q_NTD.shape[-1])
        grad_weights_NTS = grad_y_NTD @ v_NSD.mT
        grad_scores_NTS = torch.ops.aten._softmax_backward_data(grad_weights_NTS, weights_NTS, -1, weights_NTS.dtype)
        grad_q_NTD = (grad_scores_NTS @ k_NSD).mul_(scale)
        grad_k_NSD = (grad_scores_NTS.mT @ q_NTD).mul_(scale)
        grad_v_NSD = weights_NTS.mT @ grad_y_NTD
        grad_q, grad_k, grad_v = (x.unflatten(0, grad_y_BHTD.shape[:2]) for x in (grad_q_NTD, grad_k_NSD, grad_v_NSD))
        return grad_q, grad_k, grad_v, None
