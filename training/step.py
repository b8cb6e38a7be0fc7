"""One optimizer step, the same function for train.py, verify.py and the benchmarks."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from config.schema import TrainConfig
from data.loader import Batch
from model.gpt import GPTModel
from model.seeds import derive_seed
from training.block_stats import BlockStatistics
from training.gradients import backward, first_backward, loss_scale, normalize_and_clip, trainable_parameters
from training.metrics import MetricsQueue, PendingStep
from training.optimizer import apply_schedules
from training.schedule import scheduled_value


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
    """`network` as Accelerate prepared it: in DDP, sharded by FSDP2 or alone; under autocast if precision is mixed."""
    optimizer: torch.optim.Optimizer
    metrics_queue: MetricsQueue
    block_statistics: BlockStatistics
    reducer: GradientReducer | None = None
    """None: DDP or FSDP2 averages the gradients over the processes, or there is one process."""

    def __post_init__(self) -> None:
        self.parameters = trainable_parameters(self.network)

    def seed_generators(self, seed: int) -> None:
        """Seed the random generators of the CPU and of this process's device.

        torch.manual_seed would also record a stack trace for each kind of device that is not in use, which is slow.
        """
        torch.default_generator.manual_seed(seed)
        if (device := self.accelerator.device).type != "cpu":
            torch.get_device_module(device).manual_seed(seed)


def count_targets(batch: Batch) -> Tensor:
    """Count the target tokens, 0-dim int64: labels other than -100, from position 1 on (none predicts position 0)."""
    return (batch["labels"][:, 1:] != -100).sum()


def warm_up(state: TrainState, micro_batch: Batch) -> None:
    """Run one forward and backward and discard the gradients; called by all processes together.

    This compiles the model and fixes the order of DDP's buckets (see first_backward), so that a resumed run sums the
    gradients in the same order.
    """
    _, loss, auxiliary = state.model(**micro_batch, num_items_in_batch=1.0)
    first_backward(loss, state.model, state.accelerator)
    state.optimizer.zero_grad()
    state.metrics_queue.register_names(auxiliary)


def train_step(
    state: TrainState, step: int, micro_batches: list[Batch], stop_requested: Callable[[], bool] = lambda: False
) -> PendingStep:
    """Update the weights once with the gradient of the mean loss over the target tokens of the global batch.

    The mean is loss_sum / N: the summed loss divided by the number of target tokens, both of all processes. N is known
    only after an all-reduce, which overlaps the last backward. The backward passes therefore divide by M, the number of
    all tokens in the global batch (sequences x seq_len), and normalize_and_clip corrects the summed gradients:

        backward:            gradients of scale * loss_sum / M, where scale is the loss scale of fp16, otherwise 1
        normalize_and_clip:  divides them by scale * N / M

    Args:
        state: updated in place.
        step: from 0.
        micro_batches: the local micro-batches of this step, in order.
        stop_requested: whether this process has a reason to stop; sent to all processes with the metrics.

    Returns:
        The metrics of the step, which `state.metrics_queue.read` reads (with `on_nonfinite: skip` it already has).

    Raises:
        NonFiniteError: with `on_nonfinite: skip`, if more than `max_skipped` updates in a row had an infinite or NaN
            loss or gradient. With `on_nonfinite: stop`, `state.metrics_queue.read` raises it, at most a step later.
    """
    config, accelerator, queue = state.config, state.accelerator, state.metrics_queue
    apply_schedules(state.optimizer, state.network, config, step)
    # fp16's loss scale: like GradScaler's, but computed from the step and the skipped updates, which are checkpointed.
    scale = loss_scale(accelerator.mixed_precision, step, queue.num_skipped)
    global_tokens = float(queue.batches.size(step) * config.seq_len)  # M
    # A reducer sums gradients over processes. DDP and FSDP2 average them, so each process divides by its part of M.
    loss_divisor = global_tokens if state.reducer else global_tokens / queue.num_processes
    local_targets = torch.stack([count_targets(micro_batch) for micro_batch in micro_batches]).sum()
    num_micro_batches = len(micro_batches)
    outputs = []
    for index, micro_batch in enumerate(micro_batches):
        is_last = index == num_micro_batches - 1
        # The index in the global batch, so that dropout does not depend on the number of processes.
        global_index = queue.rank * num_micro_batches + index
        state.seed_generators(derive_seed(config.seed, "dropout", step, global_index))
        with nullcontext() if is_last else accelerator.no_sync(state.model):
            _, loss, auxiliary = state.model(**micro_batch, num_items_in_batch=loss_divisor)
            outputs.append((loss.detach(), auxiliary))
            if is_last:  # start the all-reduce of the metrics now, so that it overlaps the last backward
                pending = queue.dispatch(step + 1, outputs, local_targets, loss_divisor, stop_requested())
            backward(scale * loss, state.model, accelerator)
        if state.reducer:
            state.reducer.add_micro_batch(num_micro_batches)
    # grad_clip is constant unless SCHEDULES has an entry for it; None: no clipping.
    max_norm = scheduled_value("grad_clip", config.optimizer.grad_clip, config, step) or math.inf
    global_targets = pending.wait_for_num_targets()  # N
    grad_divisor = (global_targets * (scale / global_tokens)).float()  # from float64, the dtype of the metrics
    grad_norm = normalize_and_clip(state.parameters, grad_divisor, max_norm)
    pending.copy_to_host(grad_norm)
    # With on_nonfinite: skip, the host must read this step's metrics now to decide whether to update.
    result = queue.read(wait=True) if queue.max_skipped else None
    with state.block_statistics.record_update():
        if result is None or result.finite:
            state.optimizer.step()
    state.optimizer.zero_grad()
    return pending
