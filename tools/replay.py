"""Retrain one step of a run and show the loss of each of its sequences: python -m tools.replay RUN STEP.

The run is retrained from the newest checkpoint before the step, by the code of train.py, and each `state/digest` on the
way is compared with the logged one. Nothing is written. docs/debugging.md finds the cause of a NaN with it.
"""

from typing import Annotated

from model.settings import PositiveInt, Settings
from runtime.config.help import POSITIONAL


class ReplayConfig(Settings):
    """Retrains one step of a run and shows the loss of each of its sequences."""

    run: Annotated[str, POSITIONAL]
    """The run directory."""

    step: Annotated[PositiveInt, POSITIONAL]
    """The step to retrain, from 1; also one that the run did not complete because of a NaN."""

    num_sequences: PositiveInt = 8
    """Number of sequences to show, those with the highest losses first."""


if __name__ == "__main__":  # before anything slow is imported; it calls `main` below and never returns
    from runtime.cli.scripts import run_and_exit

    run_and_exit("tools.replay", ReplayConfig)

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from data.corpus import Corpus
from data.loader import Batch, BatchLoader
from model.loss import count_targets
from runtime.config.errors import ConfigError
from runtime.config.paths import expand_user_path
from runtime.config.stored_settings import config_of
from runtime.distributed.launch import join_launch
from runtime.distributed.launch_checks import check_launch
from runtime.distributed.state_hash import state_digest
from train import build_state, train_step, warm_up
from trainer.checkpoint.identity import FACTS, SUMMATION_ORDER
from trainer.checkpoint.manifest import InvalidCheckpoint, Manifest, validate
from trainer.checkpoint.provenance import launch_facts, provenance
from trainer.checkpoint.saver import load_checkpoint
from trainer.optimizer import apply_schedules
from trainer.results import NonFiniteError
from trainer.run.directory import Run, Session
from trainer.run.resolve import resolve
from trainer.state import TrainState

MAX_TEXT_LENGTH = 120  # characters of a sequence
RELATIVE_TOLERANCES = {"train/loss": 1e-3, "train/grad_norm": 5e-2}  # of values that were computed with other rounding


def main(config: ReplayConfig) -> None:
    """Replay the step; under a launcher all processes train together, and the main one prints.

    Raises:
        ConfigError: there is no such run or step, or it cannot be retrained here.
        RunError: the loss of an earlier step is not finite.
    """
    # Restore the newest state before the step, and load the batches from there on.
    run = Run(expand_user_path("run", config.run))
    state, corpus, first, differences = restore(run, config.step)
    accelerator, settings = state.accelerator, state.config
    rank, num_processes = accelerator.process_index, accelerator.num_processes
    global_batches = corpus.global_batches(settings)
    loader = BatchLoader(
        corpus.train, global_batches, settings.micro_batch_size, accelerator.device, rank, num_processes
    )
    warm_up(state, loader.load(first)[0])

    # Retrain the steps; before the last one, compute the loss of each of its sequences.
    logged, rows, sequences = {row["step"]: row for row in run.metrics()}, [], []
    for step in range(first, config.step):
        micro_batches, is_last = loader.load(step), step + 1 == config.step
        if is_last:
            sequences = gather_object(sequences_with_losses(state, step, micro_batches))
        try:
            train_step(state, step, micro_batches)
            result = state.results.current()
        except NonFiniteError as error:
            if not is_last:
                raise
            accelerator.print(error.cause)
            break
        digest, loss = str(state_digest(state.network, state.optimizer)), result.means["loss"]
        again = {"state/digest": digest, "train/loss": loss, "train/grad_norm": result.grad_norm}
        rows.append((logged.get(step + 1, {}), again))
        if is_last:
            accelerator.print(f"step {step + 1}: loss = {loss:.6g}, gradient norm = {result.grad_norm:.6g}")
    accelerator.print(describe_outcome(rows, differences))
    if not accelerator.is_main_process:
        return

    # Print the sequences of the global batch: index in the training set, loss and text, the highest loss first.
    indices = global_batches.indices(config.step - 1)
    names = [f"sample {index}" for index in indices]
    if len(indices) != len(sequences):  # the StepDataset of a fork makes other rows of the samples
        names = [f"row {row}" for row in range(len(sequences))]
    named = zip(names, sequences, strict=True)
    order = sorted(named, key=lambda item: (math.isfinite(item[1][0]), -item[1][0]))
    not_finite = sum(not math.isfinite(loss) for loss, *_ in sequences)
    print(f"sequences of step {config.step}: {len(order)}, {not_finite} of them not finite; highest losses first:")
    for name, (loss, tokens, labels) in order[: config.num_sequences]:
        targets = [position for position, label in enumerate(labels) if label != -100]
        tokens = tokens[: targets[-1] + 1 if targets else None]
        text = corpus.tokenizer.decode(tokens, skip_special_tokens=False) if corpus.tokenizer else str(tokens)
        mark = "" if math.isfinite(loss) else ", NOT FINITE"
        print(f"  {name}: loss {loss:.4f}{mark}; {text[:MAX_TEXT_LENGTH]!r}")


def restore(run: Run, step: int) -> tuple[TrainState, Corpus, int, list[str]]:
    """Build the state of a run from its newest checkpoint before `step`.

    Returns:
        The state, the corpus, the step of the checkpoint, and why the bits may differ from those of the run.
    """
    # The settings and the launch of the session that computed the step: the last one that started before it.
    session = next((session for session in reversed(run.sessions()) if session.step < step), Session(0))
    # A CUDA graph changes no loss, except by rounding with three or more processes, and the CPU has none.
    config = config_of(session.config or run.settings).replace(cuda_graph=None)
    if step > config.steps:
        raise ConfigError(f"step: {step} is beyond the {config.steps} steps of {run.path}")
    checkpoint = checkpoint_before(run, step, config.branch_from)
    os.environ["ACCELERATE_MIXED_PRECISION"] = session.mixed_precision or "no"
    check_launch(config)

    # Build the state as train.py does, and load the checkpoint.
    resolved, corpus, models = resolve(
        config.replace(branch_from=None, init_from=None if checkpoint else config.init_from)
    )
    accelerator = Accelerator(**join_launch(resolved))
    if session.threads and accelerator.num_processes == 1:
        torch.set_num_threads(session.threads)
    state = build_state(resolved, run, accelerator, models)
    first, source = 0, "the initial weights"
    if checkpoint:
        path, manifest = checkpoint
        load_checkpoint(path, state)
        first, source = manifest.step, str(path)

    # Say how the launch and the code of the session differ from those of this process.
    then, now = vars(session), launch_facts(accelerator) | provenance()
    names = [name for name in ("device", *FACTS, *SUMMATION_ORDER, "torch") if None not in (then[name], now[name])]
    differences = [f"{name} {then[name]} in the run, {now[name]} here" for name in names if then[name] != now[name]]
    facts = f"; {', '.join(differences)}" if differences else ""
    accelerator.print(f"steps {first + 1} to {step}, retrained from {source}{facts}")
    if accelerator.device.type == "cuda" and not resolved.exact:
        differences.append("a GPU without exact")
    return state, corpus, first, differences


def checkpoint_before(run: Run, step: int, branch_from: str | None) -> tuple[Path, Manifest] | None:
    """Return the newest valid checkpoint before `step`, of the run or the one that it branched from.

    Return None if the run must be retrained from its initial weights.
    """
    for path, manifest in run.manifests().items():
        with suppress(InvalidCheckpoint):
            if manifest.step < step:
                return path, validate(path)
    if branch_from is None:
        return None
    try:
        if (manifest := validate(Path(branch_from))).step < step:
            return Path(branch_from), manifest
    except InvalidCheckpoint as invalid:
        raise ConfigError(f"branch_from: {invalid}; no checkpoint before step {step} is left") from None
    raise ConfigError(f"step: {step} is not a step of {run.path}, but of the run that it branched from: {branch_from}")


@torch.no_grad()
def sequences_with_losses(
    state: TrainState, step: int, micro_batches: list[Batch]
) -> list[tuple[float, list[int], list[int]]]:
    """Return (loss, tokens, labels) of each local sequence of `step` (from 0).

    The loss is the training objective divided by the number of targets of the sequence.

    In each forward only one sequence of a micro-batch has targets. So every one has the shapes, the dropout and the
    precision of the training step, whatever its loss is made of.
    """
    apply_schedules(state.optimizer, state.network, state.config, step)  # a fork may schedule dropout
    losses: list[Tensor] = []
    rows = [row for batch in micro_batches for row in zip(batch["input_ids"], batch["labels"], strict=True)]
    for index, batch in enumerate(micro_batches):
        for row, targets in enumerate(batch["labels"]):
            labels = torch.full_like(batch["labels"], -100)
            labels[row] = targets
            state.seed_micro_batch(step, index, len(micro_batches))
            _, loss_sum, _ = state.model(**{**batch, "labels": labels}, num_items_in_batch=1.0)
            losses.append(loss_sum / count_targets(labels, state.network.predicts_next_token).clamp(min=1))
    pairs = zip(torch.stack(losses).tolist(), rows, strict=True)
    return [(loss, tokens.tolist(), labels.tolist()) for loss, (tokens, labels) in pairs]


def describe_outcome(rows: list[tuple[dict[str, Any], dict[str, Any]]], differences: list[str]) -> str:
    """Say whether the retrained steps are those of the run.

    Args:
        rows: a logged row, {} if the step was not logged, and the values of the retrained step, for each step.
        differences: why digests may differ.
    """
    digests = [logged["state/digest"] == row["state/digest"] for logged, row in rows if "state/digest" in logged]
    if not digests:
        return "not compared: the run logged no digest of these steps"
    if all(digests):
        return f"reproduced bitwise ({len(digests)} digest(s))"

    # With other rounding the digests differ, and the losses and gradient norms agree.
    different = f"{digests.count(False)} of {len(digests)} digest(s) differ"
    compared = []
    for name, tolerance in RELATIVE_TOLERANCES.items():
        pairs = [(logged[name], row[name]) for logged, row in rows if name in logged]
        for then, now in pairs:
            # JSON has null for a number that is not finite.
            same = math.isclose(then, now, rel_tol=tolerance) if then is not None else not math.isfinite(now)
            if not same:
                return f"NOT reproduced: {name} was {then} in the run and is {now:.6g} here"
        compared += [f"{len(pairs)} {name} within {tolerance:.1%}"] if pairs else []
    if not compared:
        return f"NOT reproduced: {different}, and the run logged no loss of these steps to compare"
    if not differences:
        return (
            f"NOT reproduced bitwise: {different}, although the code, the launch and the version of torch are those of "
            f"the run; only another kind of processor would explain it ({', '.join(compared)})"
        )
    return (
        f"reproduced up to rounding: {', '.join(compared)}; {different}, perhaps because of {', '.join(differences)}; "
        "the update of the last step changes its digest alone, so it is not compared"
    )
