"""The loss of a language model, also without ever holding the logits of all positions."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from model.kernels import linear

# Logits of a chunk, in bytes of float32: what stays in the cache of a CPU, and what keeps a GPU busy.
CHUNK_BYTES = {"cpu": 2**25, "cuda": 2**30}
# Each chunk adds to the gradient of the whole weight, which with few rows would be most of the work.
MIN_CHUNK_ROWS = 128


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """What is done to the logits before they are returned or make a loss: nothing, or `softcap tanh(logits / softcap)`
    (Gemma 2, arXiv:2408.00118, section 2)."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def loss_of_logits(
    logits_NV: Tensor, targets_N: Tensor, z_loss: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums over the targets of the loss, of its cross-entropy and of the squared log-sum-exp, which without z_loss
    is 0; at least float32, for bfloat16 sums lose digits. All gradients are autograd's of this, or `gradient_by_hand`.
    """
    logits = capped(logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)), softcap)
    cross_entropy = F.cross_entropy(logits, targets_N, ignore_index=-100, reduction="sum")
    if not z_loss:
        return cross_entropy, cross_entropy, torch.zeros_like(cross_entropy)
    z_squared = logits.logsumexp(dim=-1).masked_fill(targets_N == -100, 0).square().sum()
    return cross_entropy + z_loss * z_squared, cross_entropy, z_squared


def loss_of_chunk(
    logits_NV: Tensor, targets_N: Tensor, z_loss: float, softcap: float | None, needs_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The three of `loss_of_logits`, [3], and the gradient of the first, [N, V] in the dtype of the logits."""

    def loss_and_sums(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        sums = loss_of_logits(logits_NV, targets_N, z_loss, softcap)
        return sums[0], torch.stack(sums)

    if not needs_gradient:
        return loss_and_sums(logits_NV)[1], None
    if softcap is None:
        return gradient_by_hand(logits_NV, targets_N, z_loss)
    gradient_NV, (_, sums) = torch.func.grad_and_value(loss_and_sums, has_aux=True)(logits_NV)
    return sums, gradient_NV


def gradient_by_hand(logits_NV: Tensor, targets_N: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """As `loss_of_chunk`, of logits to which nothing is done: in two thirds of the memory, and compiled in nine tenths
    of the time (benchmarks/LOG.md)."""
    sum_dtype = torch.promote_types(logits_NV.dtype, torch.float32)
    ignored_N1, target_N1 = (targets_N == -100)[:, None], targets_N[:, None].clamp_min(0)
    log_probabilities = F.log_softmax(logits_NV, dim=-1, dtype=sum_dtype)
    cross_entropy = F.nll_loss(log_probabilities, targets_N, ignore_index=-100, reduction="sum")
    log_z_N1 = logits_NV.gather(1, target_N1).to(sum_dtype) - log_probabilities.gather(1, target_N1)
    z_squared = log_z_N1.masked_fill(ignored_N1, 0).square().sum()
    sums = torch.stack((cross_entropy + z_loss * z_squared, cross_entropy, z_squared))
    scores = log_probabilities.exp_()
    if z_loss:
        scores *= 1 + 2 * z_loss * log_z_N1
    at_target_N1 = (scores.gather(1, target_N1) - 1).masked_fill_(ignored_N1, 0)
    scores = scores.masked_fill_(ignored_N1, 0).to(logits_NV.dtype)
    # The scatter comes last, into the tensor that is written anyway: torch.compile makes one kernel of all before it.
    return sums, scores.scatter_(1, target_N1, at_target_N1.to(scores.dtype))


def next_token_loss(
    hidden_BTC: Tensor,
    weight_VC: Tensor,
    labels_BT: Tensor,
    num_items_in_batch: Tensor | float | None = None,
    chunked: bool | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    of_chunk: Callable[..., tuple[Tensor, Tensor | None]] = loss_of_chunk,
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Cross-entropy, in nats, of predicting each label from the position before it; see GPTModel.forward.

    Args:
        hidden_BTC: what the output projection multiplies, [B, T, C].
        weight_VC: the output projection [V, C].
        labels_BT: int64 [B, T], -100 where there is nothing to learn.
        num_items_in_batch: what the sum is divided by; None: the number of targets here.
        chunked: whether to go through the positions in chunks, each from its logits to its gradient at once, so that
            memory does not grow with B x T x V. None: if the logits take more than one chunk.
        z_loss: how much of the squared log-sum-exp of each target's logits is added, which keeps it near 0 (Chowdhery
            et al. 2022, "PaLM", arXiv:2204.02311, section 5); customary is 1e-4. In chunks it takes no product more.
        softcap: what the logits are held below, by `capped`.
        of_chunk: `loss_of_chunk`, or that compiled: a GPU then reads the logits twice and writes them once, instead of
            a dozen times.

    Returns:
        loss: what is to be differentiated, 0-dim.
        sums: what GPTModel.forward may return besides: `loss`, the cross-entropy alone, and with z_loss `z_loss`, the
            squared log-sum-exp before its factor, each as (sum, number of targets).
    """
    # The last position predicts nothing and the first label is predicted by nothing: T - 1 targets a row.
    hidden, targets = hidden_BTC[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten()
    chunk = max(MIN_CHUNK_ROWS, CHUNK_BYTES.get(hidden.device.type, 2**25) // (4 * len(weight_VC)))
    if chunked or (chunked is None and len(hidden) > chunk):
        of_chunk = partial(of_chunk, z_loss=z_loss, softcap=softcap)
        weight = weight_VC if torch.is_grad_enabled() else weight_VC.detach()  # which a Function would not notice
        loss_sum, cross_entropy, z_squared = ChunkedCrossEntropy.apply(hidden, weight, targets, chunk, of_chunk)
    else:
        loss_sum, cross_entropy, z_squared = loss_of_logits(linear(hidden, weight_VC), targets, z_loss, softcap)
    num_targets = (targets != -100).sum()
    sums = {"loss": (cross_entropy.detach(), num_targets)}
    if z_loss:
        sums["z_loss"] = (z_squared.detach(), num_targets)
    return loss_sum / (num_targets if num_items_in_batch is None else num_items_in_batch), sums


class ChunkedCrossEntropy(torch.autograd.Function):
    """The sums of `loss_of_chunk` of `hidden @ weight.T`, `chunk` rows at a time; only the first can be differentiated.

    The gradients of a chunk follow from its probabilities while these are at hand (Hsu et al. 2024, "Liger Kernel",
    arXiv:2410.10989): no product is done twice, and the backward has but to scale them.
    """

    @staticmethod
    def forward(ctx, hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, chunk: int, of_chunk: Callable) -> Tensor:
        device, needs_gradient = hidden_NC.device.type, any(ctx.needs_input_grad)
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_NC.dtype
        sum_dtype = torch.promote_types(dtype, torch.float32)
        totals = hidden_NC.new_zeros(3, dtype=sum_dtype)
        hidden_gradient = torch.empty_like(hidden_NC) if needs_gradient else hidden_NC
        weight_gradient = torch.zeros_like(weight_VC, dtype=sum_dtype) if needs_gradient else None
        with torch.autocast(device, enabled=False):
            weight = weight_VC.to(dtype)
            rows = hidden_NC.to(dtype).split(chunk), targets_N.split(chunk), hidden_gradient.split(chunk)
            for hidden, targets, gradient in zip(*rows, strict=True):
                sums, scores = of_chunk(linear(hidden, weight), targets, needs_gradient=needs_gradient)
                totals += sums
                if needs_gradient:
                    gradient.copy_(linear(scores, weight.t()))
                    # With few rows a second matrix of the weight's size costs as much as the product.
                    if chunk < 512 and sum_dtype == dtype and not torch.are_deterministic_algorithms_enabled():
                        weight_gradient.addmm_(scores.t(), hidden)
                    else:
                        weight_gradient += linear(scores.t(), hidden.t())
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        ctx.weight_dtype = weight_VC.dtype
        return totals

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient_3: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (hidden_gradient, weight_gradient), scale = ctx.saved_tensors, gradient_3[0]
        # In place, for it may be the largest tensor of the step: a second backward through this loss is an error.
        return hidden_gradient * scale, weight_gradient.mul_(scale).to(ctx.weight_dtype), None, None, None
