"""One optimizer step, the same function for train.py, verify.py and the benchmarks."""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from config.schema import TrainConfig
from data.loader import Batch
from data.sampler import BatchSizes
from model.gpt import GPTModel
from model.seeds import derive_seed
from training.block_stats import BlockStatistics
from training.gradients import backward, loss_scale, normalize_and_clip, prime_ddp, trainable_parameters
from training.metrics import MetricsQueue, PendingStep, forward_with_metrics
from training.optimizer import apply_schedules
from training.schedule import scheduled_value
from training.stop import StopRequest


class GradientReducer(Protocol):
    """Sums gradients over micro-batches and processes in place of DDP."""

    def add_micro_batch(self, num_micro_batches: int) -> None:
        """Take the gradients of one of `num_micro_batches` micro-batches; after the last, `.grad` is the global sum."""


@dataclass
class TrainState:
    """The objects that a step reads and changes."""

    config: TrainConfig
    accelerator: Accelerator
    network: GPTModel
    """The bare model."""
    model: nn.Module
    """`network` as Accelerate prepared it: wrapped in DDP, sharded by FSDP2, or with autocast alone."""
    optimizer: torch.optim.Optimizer
    global_batches: BatchSizes
    """Only the sizes are read."""
    metrics_queue: MetricsQueue
    block_statistics: BlockStatistics
    reducer: GradientReducer | None = None
    """None: DDP or FSDP2 averages the gradients over the processes, or there is one process."""

    def __post_init__(self) -> None:
        self.parameters = trainable_parameters(self.network)
        # torch.manual_seed also seeds CUDA, and without a GPU it records a stack trace in each call, which is slow.
        on_cpu = self.accelerator.device.type == "cpu"
        self.seed_all = torch.default_generator.manual_seed if on_cpu else torch.manual_seed


def count_targets(batch: Batch) -> Tensor:
    """Count the target tokens, 0-dim int64: labels other than -100, except the first, which nothing predicts."""
    return (batch["labels"][:, 1:] != -100).sum()


def prime(state: TrainState, micro_batch: Batch) -> None:
    """Run one forward and backward and discard the gradients; called by all processes together.

    It compiles, and fixes the order in which DDP sums (see prime_ddp), so that a resumed run sums in the same order.
    """
    _, loss, auxiliary = forward_with_metrics(state.model, **micro_batch, num_items_in_batch=1.0)
    prime_ddp(loss, state.model, state.accelerator)
    state.optimizer.zero_grad()
    state.metrics_queue.register_names(auxiliary)


def train_step(
    state: TrainState, step: int, micro_batches: list[Batch], stop_request: StopRequest | None = None
) -> PendingStep:
    """Update the weights once with the gradient of the mean loss over the target tokens of the global batch.

    The number of target tokens on all processes is known only after the all-reduce of the step's metrics. Each
    micro-batch therefore contributes (sum of its losses) / (tokens in the global batch), times the loss scale of fp16.
    Once all gradients are summed, the pass that clips them divides them by (targets / tokens), times that scale.

    Args:
        state: its weights, moments and metrics change.
        step: from 0.
        micro_batches: those of this process, in order.
        stop_request: tells all processes, with the metrics, if this one has to stop.

    Returns:
        The metrics of the step, to be read by `state.metrics_queue.read`.

    Raises:
        NonFiniteError: with `on_nonfinite: skip`, if more than `max_skipped` updates in a row had an infinite or NaN
            loss or gradient. With `stop`, `state.metrics_queue.read` raises it after the next step.
    """
    config, accelerator, queue = state.config, state.accelerator, state.metrics_queue
    apply_schedules(state.optimizer, state.network, config, step)
    scale = loss_scale(accelerator.mixed_precision, step, queue.skipped)
    global_tokens = float(state.global_batches.size(step) * config.seq_len)
    # DDP and FSDP2 average the gradients over the processes. Multiplying the loss by their number makes that a sum.
    ddp_factor = 1 if state.reducer else queue.num_processes
    num_targets = torch.stack([count_targets(micro_batch) for micro_batch in micro_batches]).sum()
    num_micro_batches, outputs = len(micro_batches), []
    for index, micro_batch in enumerate(micro_batches):
        is_last = index == num_micro_batches - 1
        state.seed_all(derive_seed(config.seed, "dropout", step, queue.rank * num_micro_batches + index))
        with nullcontext() if is_last else accelerator.no_sync(state.model):
            divisor = global_tokens / ddp_factor
            _, loss, auxiliary = forward_with_metrics(state.model, **micro_batch, num_items_in_batch=divisor)
            outputs.append((loss.detach() / ddp_factor, auxiliary))
            if is_last:
                stop = stop_request is not None and stop_request.is_set
                pending = queue.dispatch(step + 1, outputs, num_targets, global_tokens, stop)
            backward(scale * loss, state.model, accelerator)
        if state.reducer:
            state.reducer.add_micro_batch(num_micro_batches)
    # The setting itself, unless a fork schedules it; None: no clipping.
    max_norm = scheduled_value("grad_clip", config.optimizer.grad_clip, config, step) or math.inf
    denominator = (pending.num_targets() * (scale / global_tokens)).float()
    pending.copy_to_host(normalize_and_clip(state.parameters, denominator, max_norm))
    # The host waits for the metrics before the update only if they decide whether it is skipped.
    result = queue.read() if queue.max_skipped else None
    with state.block_statistics.record_update():
        if result is None or result.finite:
            state.optimizer.step()
    state.optimizer.zero_grad()
    return pending
