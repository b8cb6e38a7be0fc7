"""The validation loss: over fixed samples, the same number on any number of processes."""

import math

import torch
from accelerate import Accelerator
from torch.utils.data import Dataset

from data.corpus import Batches
from training.step_totals import NonFiniteError


@torch.no_grad()
def evaluate(model, validation: Dataset, micro_batch_size: int, accelerator: Accelerator) -> dict[str, float]:
    """Validation metrics over the whole validation set; called by all processes together.

    The set is cut into the same batches for any number of processes W; process r runs batches r, r + W, .... The
    batches' loss sums are gathered one by one and added in their order, so W changes no bit of the result.

    Returns:
        `val/loss` (nats per target token), `val/perplexity`; and where the corpus knows them `val/floor` (the lowest
        expected `val/loss`) and `val/bits_per_byte`.
    """
    batches = Batches(validation)
    rank, num_processes = accelerator.process_index, accelerator.num_processes
    starts = range(0, len(validation), micro_batch_size)
    sums = torch.zeros(2, len(starts), device=accelerator.device)
    model.eval()
    for first in range(0, len(starts), num_processes):
        # A process that has no batch left repeats the first one and drops its result: all processes run the model
        # equally often, as a sharded model needs.
        index = first + rank
        start = starts[index] if index < len(starts) else 0
        samples = batches[range(start, min(start + micro_batch_size, len(validation)))]
        batch = {name: tensor.to(accelerator.device) for name, tensor in samples.items()}
        _, loss_sum = model(**batch, num_items_in_batch=1)
        if index < len(starts):
            sums[0, index] = loss_sum
            sums[1, index] = (batch["labels"][:, 1:] != -100).sum()
    model.train()
    loss_sums, target_counts = accelerator.reduce(sums, "sum").tolist()  # zeros elsewhere: exact
    loss_sum, num_targets = math.fsum(loss_sums), math.fsum(target_counts)
    loss = loss_sum / num_targets if num_targets else math.nan
    metrics = {"val/loss": loss, "val/perplexity": math.exp(min(loss, 700))}
    if floor_nats := getattr(validation, "floor_nats", None):
        metrics["val/floor"] = floor_nats / num_targets if num_targets else math.nan
    if num_bytes := getattr(validation, "num_bytes", None):
        metrics["val/bits_per_byte"] = loss_sum / num_bytes / math.log(2)
    return metrics


def require_finite_loss(metrics: dict[str, float | None], step: int) -> None:
    """Refuse to call a run finished whose last validation loss is no number.

    Raises:
        NonFiniteError: `metrics` of the last step have a `val/loss` that is NaN, infinite or null.
    """
    loss = metrics.get("val/loss", 0.0)
    if loss is None or not math.isfinite(loss):
        raise NonFiniteError(f"step {step}: the validation loss is {loss}, so this run has no result")
