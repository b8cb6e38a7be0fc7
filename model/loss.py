"""The training objective, and its gradient in chunks, without materialising the logits of all positions.

The suffix of a name is the shape of the tensor, with the letters of model/gpt.py. N is the number of positions in a
batch (B x T), or in a chunk of it.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import GPTConfig

MetricSums = dict[str, tuple[Tensor | float, Tensor | float]]
"""{name: (sum, count)}: sums and counts are added over batches and processes, and sum / count is logged. Every forward
must report the same names in the same order."""

# Largest size of a chunk's logits in float32. On a CPU the logits should fit into the cache. On a GPU they should be
# large enough to keep it busy.
CHUNK_BYTES = {"cpu": 2**25, "cuda": 2**30}
# A chunk may have this many rows even if its logits then exceed CHUNK_BYTES, as on a CPU with a vocabulary of more than
# 65,536. With fewer rows, adding each chunk's [V, C] weight gradient to the sum would dominate the time.
MIN_CHUNK_ROWS = 128
# GPU kernels work on tiles of this many rows.
TILE_ROWS = {"cpu": 1, "cuda": 128}


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """Return `cap tanh(logits / cap)` (Gemma 2, arXiv:2408.00118, section 2), or the logits if there is no cap."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def loss_of_logits(logits_NV: Tensor, targets_N: Tensor, config: GPTConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the training objective without a teacher; edit this function to change the loss, chunked or not.

    Args:
        logits_NV: output of the output projection, at least float32, before any soft-capping.
        targets_N: int64, -100 where ignored.
        config: settings of the model.

    Returns:
        objective: 0-dim, summed over the targets, in nats.
        metrics: auxiliary metrics by name, 0-dim sums over the targets; their mean is logged, see docs/forking.md.
    """
    logits_NV = soft_cap(logits_NV, config.logit_softcap)
    return F.cross_entropy(logits_NV, targets_N, ignore_index=-100, reduction="sum"), {}


def align_targets(labels_BT: Tensor, predicts_next_token: bool) -> Tensor:
    """Return the target of each position, [B, T]: the next label if `predicts_next_token`, otherwise its own label.

    The target is -100 where there is none. The last position of a row has no next label.
    """
    return F.pad(labels_BT[:, 1:], (0, 1), value=-100) if predicts_next_token else labels_BT


def count_targets(labels_BT: Tensor, predicts_next_token: bool) -> Tensor:
    """Return the number of targets, 0-dim int64."""
    return (align_targets(labels_BT, predicts_next_token) != -100).sum()


class Targets(NamedTuple):
    """The targets of N positions.

    A fork that trains on another key of the batch, such as a weight of each token, adds a field, [N, ...], passes it to
    `NextTokenLoss` and reads it in `objective_of_logits`.
    """

    tokens_N: Tensor
    """The target of each position (see align_targets), int64, -100 where ignored."""
    teacher_NV: Tensor | None = None
    """Logits of a teacher, already soft-capped, which `teacher_weight` and `temperature` mix into the objective."""
    teacher_weight: float = 0.0
    temperature: float = 1.0

    def rows(self, first: int, count: int) -> "Targets":
        """Return the targets of `count` positions from `first` on."""
        tensors = {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}
        return self._replace(**{name: value[first : first + count] for name, value in tensors.items()})


def objective_of_logits(logits_NV: Tensor, targets: Targets, config: GPTConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the training objective: `loss_of_logits`, mixed with the KL divergence from a teacher if there is one.

    With a teacher the objective is (1 - weight) loss + weight temperature^2 KL(teacher || model). Both distributions
    are at `temperature`. With the factor temperature^2 the gradient has about the same size at every temperature
    (Hinton et al. 2015, arXiv:1503.02531, section 2). The metrics then include `loss`, without the teacher's term, and
    `teacher_kl`, the divergence in nats.
    """
    loss, metrics = loss_of_logits(logits_NV, targets.tokens_N, config)
    if targets.teacher_NV is None:
        return loss, metrics

    # KL(teacher || model), summed over the targets.
    weight, temperature = targets.teacher_weight, targets.temperature
    log_p_NV = (at_least_float32(targets.teacher_NV) / temperature).log_softmax(-1)
    log_q_NV = (soft_cap(logits_NV, config.logit_softcap) / temperature).log_softmax(-1)
    divergence_N = F.kl_div(log_q_NV, log_p_NV, log_target=True, reduction="none").sum(-1)
    divergence = (divergence_N * (targets.tokens_N != -100)).sum()

    objective = (1 - weight) * loss + weight * temperature**2 * divergence
    return objective, {"loss": loss, **metrics, "teacher_kl": divergence}


class NextTokenLoss:
    """The loss of predicting each label from the position before it, or from its own (`predicts_next_token`: False).

    Attributes:
        chunked: whether to compute the logits, the loss and the gradient of one chunk of positions after another, so
            that memory does not grow with B x T x V (without a teacher, whose logits are not in chunks). On a Zen 5, a
            step with a vocabulary of 50,257 then took half of the memory and 0.7 of the time (docs/performance.md).
            None: only if the logits take more than one chunk.
    """

    def __init__(self, config: GPTConfig, chunked: bool | None = None, predicts_next_token: bool = True):
        self.config, self.chunked, self.predicts_next_token = config, chunked, predicts_next_token
        self.differentiate = differentiate_loss
        self.linear: Callable[[Tensor, Tensor], Tensor] = F.linear  # trainer/cpu_kernels.py may choose another

    def chunk_rows(self, num_rows: int, vocab_size: int, device_type: str) -> int | None:
        """Return the number of positions in a chunk; None if all `num_rows` are computed at once."""
        rows = rows_per_chunk(num_rows, vocab_size, device_type)
        is_chunked = num_rows > rows if self.chunked is None else self.chunked
        return rows if is_chunked else None

    def compile(self) -> None:
        """Compile the operations on a chunk's logits.

        They are fused, so that a GPU reads the logits twice and writes their gradient once. Uncompiled, each operation
        reads and writes a tensor of this size.
        """
        self.differentiate = torch.compile(differentiate_loss)

    def __call__(
        self,
        hidden_BTC: Tensor,
        weight_VC: Tensor,
        labels_BT: Tensor,
        num_items_in_batch: Tensor | float | None = None,
        auxiliary: Mapping[str, Tensor] = MappingProxyType({}),
        **other_targets: Any,
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Compute the loss.

        Args:
            hidden_BTC: input of the output projection.
            weight_VC: the output projection.
            labels_BT: int64, unshifted, -100 where ignored.
            num_items_in_batch: divisor of the summed loss; None: the number of targets here.
            auxiliary: terms that are added to the loss of each target, by name, 0-dim.
            other_targets: the other fields of Targets, such as the teacher's, with N = B x T.

        Returns:
            loss: 0-dim, at least float32, in nats.
            metrics: the auxiliary metrics of `objective_of_logits` and the terms of `auxiliary` as (sum, number of
                targets), detached. With `auxiliary`, the metrics also have "loss": the "loss" of `objective_of_logits`
                if it reports one, otherwise the loss without the auxiliary terms.
        """
        hidden_NC, targets_N = hidden_BTC.flatten(0, 1), align_targets(labels_BT, self.predicts_next_token).flatten()
        targets = Targets(targets_N, **other_targets)

        # Sum the objective over the targets, in chunks or at once.
        chunk_rows = self.chunk_rows(len(hidden_NC), len(weight_VC), hidden_NC.device.type)
        if chunk_rows is not None:
            # Without this, a validation would compute gradients: in ChunkedLoss, ctx.needs_input_grad is true for a
            # parameter even under no_grad.
            weight_VC = weight_VC if torch.is_grad_enabled() else weight_VC.detach()
            loss_sum, metrics = ChunkedLoss.apply(hidden_NC, weight_VC, targets, chunk_rows, self)
        else:
            logits_NV = self.linear(hidden_NC, weight_VC)
            loss_sum, metrics = objective_of_logits(at_least_float32(logits_NV), targets, self.config)

        # Add the auxiliary terms to the loss of each target.
        num_targets = (targets_N != -100).sum()
        if auxiliary:
            sums = {name: term * num_targets for name, term in auxiliary.items()}
            metrics = {"loss": loss_sum, **metrics, **sums}
            loss_sum = loss_sum + sum(sums.values())

        loss = loss_sum / (num_targets if num_items_in_batch is None else num_items_in_batch)
        return loss, {name: (value.detach(), num_targets) for name, value in metrics.items()}


def rows_per_chunk(num_rows: int, vocab_size: int, device_type: str) -> int:
    """Return the number of rows in a chunk.

    Chunks have the same number of rows if possible, because torch.compile compiles again for a second shape.
    """
    device_type = device_type if device_type in TILE_ROWS else "cpu"
    tile = TILE_ROWS[device_type]
    max_rows = max(MIN_CHUNK_ROWS, CHUNK_BYTES[device_type] // (4 * vocab_size) // tile * tile)
    num_chunks = max(1, math.ceil(num_rows / max_rows))
    return math.ceil(num_rows / num_chunks / tile) * tile


def at_least_float32(logits: Tensor) -> Tensor:
    """Cast to float32 unless the dtype is at least as wide, because sums in bfloat16 lose digits."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def differentiate_loss(
    logits_NV: Tensor, targets: Targets, config: GPTConfig, needs_gradient: bool
) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    """Return the results of `objective_of_logits` and the gradient of the objective, [N, V] in the dtype of the logits.

    The gradient is autograd's, so that it is right for whatever a fork writes in `loss_of_logits`. On a Zen 5, a closed
    form for cross-entropy took 0.92 to 1.12 times as long (benchmarks/LOG.md, 2026-11-26).

    Args:
        logits_NV: logits in the dtype of the computation.
        targets: of the same positions.
        config: settings of the model.
        needs_gradient: if false, None is returned in place of the gradient.
    """

    def objective(logits_NV: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return objective_of_logits(at_least_float32(logits_NV), targets, config)

    if not needs_gradient:
        return *objective(logits_NV), None

    # torch.compile would break the graph at torch.autograd.grad, but it can compile torch.func. Uncompiled, torch.func
    # takes more memory, because it records the gradient for a second derivative (create_graph=True), and it does not
    # support autograd functions without setup_context.
    if torch.compiler.is_compiling():
        gradient_NV, (loss, metrics) = torch.func.grad_and_value(objective, has_aux=True)(logits_NV)
        return loss, metrics, gradient_NV
    with torch.enable_grad():
        logits_NV = logits_NV.detach().requires_grad_()
        loss, metrics = objective(logits_NV)
    (gradient_NV,) = torch.autograd.grad(loss, logits_NV)
    return loss.detach(), {name: value.detach() for name, value in metrics.items()}, gradient_NV


class ChunkedLoss(torch.autograd.Function):
    """Computes `objective_of_logits(hidden @ weight.T)` in chunks of rows; only the objective can be differentiated.

    The gradients are computed in the forward, while a chunk's logits are in memory (Hsu et al. 2024, "Liger Kernel",
    arXiv:2410.10989), so that no matrix product is computed twice. The backward only scales them. Until then, the
    gradient of the hidden states, [N, C] in their dtype, and the gradient of the output projection, [V, C] in at least
    float32, are in memory.
    """

    @staticmethod
    def forward(
        ctx,
        hidden_NC: Tensor,
        weight_VC: Tensor,
        targets: Targets,
        chunk_rows: int,
        loss_function: NextTokenLoss,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        # Matrix products are in the dtype of autocast or, without it, of the hidden states; sums at least in float32.
        device, needs_gradient = hidden_NC.device.type, any(ctx.needs_input_grad)
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_NC.dtype
        sum_dtype = torch.promote_types(dtype, torch.float32)

        total = hidden_NC.new_zeros((), dtype=sum_dtype)
        metrics: dict[str, Tensor] = {}
        # The loop below writes the gradient of each chunk into a part of grad_hidden_NC. Without gradients it writes
        # nothing, but still needs a tensor to split.
        grad_hidden_NC = torch.empty_like(hidden_NC) if needs_gradient else hidden_NC
        grad_weight_VC = torch.zeros_like(weight_VC, dtype=sum_dtype) if needs_gradient else None
        with torch.autocast(device, enabled=False):
            weight = weight_VC.to(dtype)
            chunks = hidden_NC.to(dtype).split(chunk_rows), grad_hidden_NC.split(chunk_rows)
            for index, (hidden, grad_hidden) in enumerate(zip(*chunks, strict=True)):  # [chunk_rows, C] each
                # The logits of the chunk, its loss and the gradient of its logits.
                logits = loss_function.linear(hidden, weight)  # [chunk_rows, V]
                chunk_targets = targets.rows(index * chunk_rows, chunk_rows)
                loss_sum, sums, grad_logits = loss_function.differentiate(
                    logits, chunk_targets, loss_function.config, needs_gradient
                )
                total += loss_sum
                metrics = {name: metrics.get(name, 0) + value for name, value in sums.items()}

                # The gradients of the hidden states and of the output projection.
                if grad_logits is not None and grad_weight_VC is not None:
                    grad_hidden.copy_(loss_function.linear(grad_logits, weight.t()))
                    # addmm_ adds the product without a temporary [V, C]. On a Zen 5 that was 1.19 times as fast for a
                    # vocabulary of 50,257, but slower in chunks of 512 or more rows (benchmarks/LOG.md, 2026-11-24).
                    # addmm_ needs all tensors in one dtype. Runs with `exact`, which enables deterministic algorithms,
                    # do not use it: on a CPU it computes with MKL, which they avoid (trainer/cpu_kernels.py).
                    if chunk_rows < 512 and sum_dtype == dtype and not torch.are_deterministic_algorithms_enabled():
                        grad_weight_VC.addmm_(grad_logits.t(), hidden)
                    else:
                        grad_weight_VC += loss_function.linear(grad_logits.t(), hidden.t())

                del logits, grad_logits  # frees their memory before the next chunk allocates as much
        ctx.save_for_backward(grad_hidden_NC, grad_weight_VC)
        ctx.weight_dtype = weight_VC.dtype
        return total, metrics

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss: Tensor, _) -> tuple[Tensor | None, ...]:
        # The gradient of the weight is scaled in place, because it may be the largest tensor of the step. A second
        # backward therefore raises an error.
        grad_hidden_NC, grad_weight_VC = ctx.saved_tensors
        return grad_hidden_NC * grad_loss, grad_weight_VC.mul_(grad_loss).to(ctx.weight_dtype), *[None] * 3
