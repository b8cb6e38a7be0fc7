"""The validation loss: over fixed samples, the same number on any number of processes."""

import math

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from data.corpus import Corpus
from data.loader import load_batch
from training.metrics import NonFiniteError, mean


@torch.no_grad()
def evaluate(model, corpus: Corpus, micro_batch_size: int, accelerator: Accelerator) -> dict[str, float]:
    """Validation metrics over the whole validation set of a corpus; called by all processes together.

    The set is cut into the same batches for any number of processes W; process r runs batches r, r + W, .... The
    batches' sums are gathered one by one, and their sum is exactly rounded, so W changes no bit of the result.

    Returns:
        `val/loss` (nats per target token), `val/perplexity`, `val/NAME` of what else the model (see GPTModel.forward)
        and the corpus report; and where the corpus knows them `val/entropy` (the lowest expected `val/loss`),
        `val/excess_loss`, `val/bits_per_byte` and `val/bytes` (of the text that the targets stand for).
    """
    validation, score = corpus.validation, corpus.score
    rank, num_processes = accelerator.process_index, accelerator.num_processes
    starts, mine = range(0, len(validation), micro_batch_size), []
    model.eval()
    for first in range(0, len(starts), num_processes):
        # A process that has no batch left repeats the first one and drops its result: all processes run the model
        # equally often, as a sharded model needs.
        index = first + rank
        start = starts[index] if index < len(starts) else 0
        samples = load_batch(validation, range(start, min(start + micro_batch_size, len(validation))))
        batch = {name: tensor.to(accelerator.device) for name, tensor in samples.items()}
        logits, loss_sum, *sums = model(**batch, num_items_in_batch=1, logits_to_keep=0 if score else None)
        if index < len(starts):
            sums = {"loss": (loss_sum, (batch["labels"][:, 1:] != -100).sum()), **dict(*sums)}
            mine.append(sums | (score(logits, batch) if score else {}))
    model.train()
    of_batches = gather_object([{name: (float(s), float(n)) for name, (s, n) in sums.items()} for sums in mine])
    totals = {name: tuple(zip(*(sums[name] for sums in of_batches), strict=True)) for name in of_batches[0]}
    metrics = {f"val/{name}": mean(sums, counts) for name, (sums, counts) in totals.items()}
    metrics["val/perplexity"] = math.exp(min(metrics["val/loss"], 700))
    loss_sums, target_counts = totals["loss"]
    if (entropy_nats := getattr(validation, "entropy_nats", None)) is not None:
        metrics["val/entropy"] = mean([entropy_nats], target_counts)
        metrics["val/excess_loss"] = metrics["val/loss"] - metrics["val/entropy"]
    if num_bytes := getattr(validation, "num_bytes", None):
        metrics["val/bits_per_byte"] = mean(loss_sums, [num_bytes]) / math.log(2)
        metrics["val/bytes"] = num_bytes
    return metrics


def require_finite_loss(metrics: dict[str, float | None], step: int) -> None:
    """Refuse to call a run finished whose last validation loss is no number.

    Raises:
        NonFiniteError: `metrics` of the last step have a `val/loss` that is NaN, infinite or null.
    """
    loss = metrics.get("val/loss", 0.0)
    if loss is None or not math.isfinite(loss):
        raise NonFiniteError(f"step {step}: the validation loss is {loss}, so this run has no result")
