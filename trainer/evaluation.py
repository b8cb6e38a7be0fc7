"""Validation metrics, bitwise the same on any number of processes."""

import math
from collections.abc import Callable

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from data.corpus import Corpus
from data.loader import load_batch, model_inputs
from model.loss import count_targets
from runtime.config.errors import RunError
from runtime.distributed.collectives import all_gather
from runtime.distributed.sharding import reshard
from runtime.distributed.signals import Interrupted, never_stop
from trainer.generations import unsharded
from trainer.results import NonFiniteError, fill_slots, fsum_or_nan, mean, sum_dtype


@torch.no_grad()
def evaluate(
    model,
    corpus: Corpus,
    micro_batch_size: int,
    accelerator: Accelerator,
    name: str = "val",
    should_stop: Callable[[], bool] = never_stop,
    report: Callable[[int], None] | None = None,
) -> dict[str, float]:
    """Evaluate the model on the whole validation set; called by all processes together.

    To evaluate on another set, pass `dataclasses.replace(corpus, validation=OTHER)` and its `name`.

    The set is split into the same batches for any number of processes W; process r evaluates batches r, r + W, ....
    The sums of all batches are gathered and added with exact rounding, so the result does not depend on W.

    `should_stop` is asked before each batch, and has the same answer on all processes. `report` is called after each
    batch with the number of samples that all processes have evaluated.

    Returns:
        `val/loss` (nats per target token), `val/perplexity`, `val/NAME` of the auxiliary metrics of the model (see
        docs/forking.md) and of the corpus; if the corpus provides them, `val/entropy` (the lowest possible expected
        `val/loss`), `val/excess_loss` (their difference), `val/bits_per_byte` and `val/bytes` (of the text of the
        targets). Of a model that does not predict the next token, only `val/loss` and `val/NAME`, without those of
        `score_logits`.

    Raises:
        RunError: the names of the metrics, or their order, differ between batches.
        Interrupted: `should_stop()` is true.
    """
    validation, predicts_next_token = corpus.validation, accelerator.unwrap_model(model).predicts_next_token
    score = corpus.score_logits if predicts_next_token else None
    assert validation is not None, "evaluation.every is set"
    rank, num_processes = accelerator.process_index, accelerator.num_processes
    starts, rows = range(0, len(validation), micro_batch_size), []
    names_of_batches: set[tuple[str, ...]] = set()
    model.eval()
    network = unsharded(accelerator.unwrap_model(model)).eval() if corpus.score_model else None
    for first in range(0, len(starts), num_processes):
        if should_stop():
            reshard(model)
            model.train()
            raise Interrupted

        num_read = min((first + num_processes) * micro_batch_size, len(validation))
        if draw_until := getattr(validation, "draw_until", None):
            draw_until(num_read)

        # A process without a batch runs the first batch again and discards the result, because all processes must run
        # a sharded model equally often.
        index = first + rank
        start = starts[index] if index < len(starts) else 0
        samples = load_batch(validation, range(start, min(start + micro_batch_size, len(validation))))
        batch = {key: tensor.to(accelerator.device) for key, tensor in samples.items()}

        # Compute the loss, and the metrics of the model and of the corpus.
        logits_to_keep = 0 if score else None  # 0: all
        inputs = model_inputs(batch)
        logits, loss_sum, auxiliary = model(**inputs, num_items_in_batch=1, logits_to_keep=logits_to_keep)
        sums = {"loss": (loss_sum, count_targets(batch["labels"], predicts_next_token)), **auxiliary}
        sums |= score(logits, batch) if score else {}
        if corpus.score_model:
            # The compiler would need seconds for shapes that no training step has.
            with torch.compiler.set_stance("force_eager"), accelerator.autocast():
                sums |= corpus.score_model(network, batch)

        # Keep them in a row: the sum and the count of each metric, without the names.
        names_of_batches.add(tuple(sums))
        values = [value for pair in sums.values() for value in pair]
        rows.append(torch.zeros(len(values), dtype=sum_dtype(accelerator.device), device=accelerator.device))
        fill_slots(rows[-1], values if index < len(starts) else [])  # no synchronisation before the last batch
        if report:
            report(num_read)
    reshard(model)
    model.train()

    # A column has one name: check that all batches of all processes report the same names in the same order.
    everywhere = gather_object(list(names_of_batches)) if num_processes > 1 else names_of_batches
    names, *others = sorted(set(everywhere))
    if others:
        raise RunError(f"each batch must report the same metrics in the same order, not {names} and {others[0]}")

    # Add up the rows.
    columns = all_gather(torch.stack(rows)).flatten(0, 1).T.tolist()  # sums and counts of each name, by batch
    totals = dict(zip(names, zip(columns[::2], columns[1::2], strict=True), strict=True))
    metrics = {key: mean(sums, counts) for key, (sums, counts) in totals.items()}
    loss_sums, target_counts = totals["loss"]
    if predicts_next_token:  # otherwise the loss is not the negative log-likelihood of the text
        metrics["perplexity"] = math.exp(min(metrics["loss"], 700))
    # The entropy and the size of the dataset count only if the batches had the targets for which the dataset has them.
    if predicts_next_token and getattr(validation, "num_targets", None) in (None, fsum_or_nan(target_counts)):
        if (entropy_nats := getattr(validation, "entropy_nats", None)) is not None:
            metrics["entropy"] = mean([entropy_nats], target_counts)
            metrics["excess_loss"] = metrics["loss"] - metrics["entropy"]
        if num_bytes := getattr(validation, "num_bytes", None):
            metrics["bits_per_byte"] = mean(loss_sums, [num_bytes]) / math.log(2)
            metrics["bytes"] = num_bytes
    return {f"{name}/{key}": value for key, value in metrics.items()}


def check_finite_val_loss(metrics: dict[str, float | None], step: int) -> None:
    """Raise if the last validation loss is not a finite number, so that such a run does not end as finished.

    Raises:
        NonFiniteError: `val/loss` in the metrics of the last step is NaN, infinite or null.
    """
    loss = metrics.get("val/loss", 0.0)
    if loss is None or not math.isfinite(loss):
        raise NonFiniteError(f"step {step}: the validation loss is {loss}, so this run has no result")
