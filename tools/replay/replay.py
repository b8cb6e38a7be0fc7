"""Replay of one step: retrain it silently, compare with the log, and show what happened in it."""

import os
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoint.manifest import read_manifest
from checkpoint.unshard import read_weights
from config.errors import ConfigError
from config.paths import expand_user_path
from config.schema import TrainConfig
from data.corpus import load_corpus
from data.files import copy_folder
from data.loader import load_batch, split_micro_batches
from distributed.launch import join_process_group, uses_cpu
from distributed.launch_checks import check_launch
from distributed.nested import shared_temporary_folder
from distributed.world import is_main_process
from model.gpt import GPTModel
from model.seeds import derive_seed
from run.load import copy_initial_weights, load_run
from tools.replay.audit import audit
from tools.replay.recorded_run import RecordedRun, describe_outcome, print_on_main
from tools.replay.settings import ReplayConfig
from training.block_stats import total_norm
from training.gradients import complete_gradients, trainable_parameters
from training.optimizer import apply_schedules, build_optimizer
from training.prepare_model import missing_compiler, prepare_network

NUM_WORST_TOKENS, MAX_TEXT_LENGTH = 5, 120  # shown per sequence: tokens, characters


def main(config: ReplayConfig) -> None:
    """Replay the step or audit the run; under a launcher all processes train together, and the main one reports.

    Raises:
        ConfigError: There is no such run or step, or it cannot be retrained here.
        RunError: The audit found something.
        Preempted: A stop signal was received.
    """
    if (config.step is None) == (not config.audit):
        raise ConfigError("step: name a step of the run to replay, or --audit N to retrain N intervals of it")
    run = RecordedRun(expand_user_path("run", config.run))
    check_launch(run.config)
    join_process_group(run.config)
    if run.other_code:
        print_on_main(run.other_code)
    with shared_temporary_folder("replay-") as folder:
        if config.step is None:
            audit(run, config.audit, folder)
        else:
            replay_step(run, config.step, config, folder)


def replay_step(run: RecordedRun, step: int, config: ReplayConfig, folder: Path) -> None:
    """Retrain up to the step, then save the checkpoint after it or show the step."""
    check_arguments(step, run, config)  # before hours of training, not after
    before = run.checkpoint_before(step)
    saved_step = read_manifest(before).step if before else 0
    why_inexact = run.why_inexact(saved_step, step)
    if saved_step < step - 1:
        start = before or "the initial weights"
        retrained = run.retrain(before, step - 1, folder)
        outcome = describe_outcome(run, retrained, why_inexact)
        print_on_main(f"steps {saved_step + 1} to {step - 1}: retrained from {start}; {outcome}")
        if retrained.failure:
            raise retrained.failure
        before = retrained.checkpoint
    profile = (step, step) if config.profile else None
    retrained = run.retrain(before, step, folder, {"tracking.block_stats": True, "profile": profile})
    print_on_main(str(retrained.failure or f"step {step}: {describe_outcome(run, retrained, why_inexact)}"))
    if not is_main_process():
        return
    if config.profile:
        for trace in retrained.checkpoint.parent.parent.glob("trace-*.json"):
            shutil.move(trace, Path(config.profile, trace.name))  # replaces an older one
    if config.save_to:
        if retrained.failure:
            raise retrained.failure
        copy_folder(retrained.checkpoint, Path(config.save_to))
        return
    if step in retrained.rows:
        # The log has null where an update was skipped.
        row = retrained.rows[step]
        print_block_stats({name: float("nan") if value is None else value for name, value in row.items()})
    print_sequences(run, before, step, config)


def check_arguments(step: int, run: RecordedRun, config: ReplayConfig) -> None:
    """Refuse a step that the run does not have, and folders that cannot be written."""
    if step > run.config.steps:
        raise ConfigError(f"step: {step} is beyond the {run.config.steps} steps of {run.path}")
    if (first := run.initial_step) >= step:
        raise ConfigError(f"step: {step} is in the run that {run.path} branched from after step {first}; replay that")
    if config.save_to and os.path.lexists(config.save_to):
        raise ConfigError(f"save_to: {config.save_to!r} exists; name a new folder")
    folders = {"save_to": config.save_to and Path(config.save_to).absolute().parent, "profile": config.profile}
    for setting, folder in folders.items():
        try:
            if folder:
                Path(folder).mkdir(parents=True, exist_ok=True)
                TemporaryFile(dir=folder).close()
        except OSError as error:
            value = getattr(config, setting)
            raise ConfigError(f"{setting}: {value!r}: cannot write in {folder}: {error.strerror}") from None


def print_block_stats(row: dict) -> None:
    """Print the norms of the whole model, and a line for each block."""
    names = list(dict.fromkeys(key.split("/")[1] for key in row if key.startswith("layers/")))
    loss, grad_norm, lr = (row[f"train/{name}"] for name in ("loss", "grad_norm", "lr"))
    print_on_main(f"loss {loss:.6g}, gradient norm {grad_norm:.6g}, learning rate {lr:.6g}")
    if not names:  # the update was skipped
        return
    print_on_main(f"{'block':>6}" + "".join(f"{name:>16}" for name in names))
    for block in range(sum(key.startswith(f"layers/{names[0]}/") for key in row)):
        print_on_main(f"{block:>6}" + "".join(f"{row[f'layers/{name}/{block}']:>16.6g}" for name in names))


def print_sequences(run: RecordedRun, checkpoint: Path | None, step: int, config: ReplayConfig) -> None:
    """Print the step's sequences with the highest losses and, if requested, the step in other precisions.

    `checkpoint` has the weights before the step; None: the initial weights.
    """
    corpus = load_corpus(run.config)
    device = "cuda" if torch.cuda.is_available() and not uses_cpu(os.environ) else "cpu"
    torch.manual_seed(run.config.seed)
    model = GPTModel(run.config.model)
    if checkpoint:
        read_weights(checkpoint, read_manifest(checkpoint), model.state_dict())
    elif run.config.init_from:
        copy_initial_weights(model, load_run(run.config.init_from))
    optimizer = build_optimizer(model.to(device), run.config.optimizer)  # a fork may freeze parameters there
    apply_schedules(optimizer, model, run.config_at(step), step - 1)  # a fork may schedule dropout
    indices = corpus.global_batches(run.config).indices(step - 1)
    batch = {name: tensor.to(device) for name, tensor in load_batch(corpus.train, indices).items()}
    precision = run.session_at(step).mixed_precision or "no"
    token_losses = compute_step(model, batch, step, run.config, precision)
    is_target = batch["labels"][:, 1:] != -100
    means = token_losses.sum(1) / is_target.sum(1).clamp(min=1)
    with torch.no_grad():  # the training objective may be more than the mean cross-entropy
        alone = [{name: rows[i : i + 1] for name, rows in batch.items()} for i in range(len(indices))]
        objectives = [model(**one, num_items_in_batch=n)[1] for one, n in zip(alone, is_target.sum(1), strict=True)]
    is_offending = ~torch.stack(objectives).isfinite()
    order = torch.where(is_offending, torch.inf, means.nan_to_num(nan=torch.inf)).argsort(descending=True)
    num_shown = min(len(order), config.num_sequences)
    print_on_main(f"sequences of step {step}, the {num_shown} of {len(order)} with the highest loss:")
    for row in order[:num_shown].tolist():
        objective = f", training objective of this sequence alone {objectives[row]:.4g}" if is_offending[row] else ""
        text, worst = describe_tokens(corpus.tokenizer, batch["input_ids"][row], is_target[row], token_losses[row])
        print_on_main(f"  sample {indices[row]}: loss {means[row]:.4f}{objective}; {text[:MAX_TEXT_LENGTH]!r}")
        print_on_main(f"    worst tokens: {worst}")
    if config.arithmetic:
        print_precisions(run, model, batch, step)


def describe_tokens(tokenizer: Any, input_ids: Tensor, is_target: Tensor, losses: Tensor) -> tuple[str, str]:
    """Return the text of a sequence, [T], without padding, and its tokens with the highest losses.

    `is_target`, [T - 1], is True where the next token is a target. Without a tokenizer, token ids are shown.
    """
    tokens = input_ids[: max([2, *is_target.nonzero().flatten().add(2).tolist()])].tolist()
    positions = losses.nan_to_num(nan=torch.inf).argsort(descending=True)[:NUM_WORST_TOKENS].tolist()
    decode = tokenizer.decode if tokenizer else str
    worst = [f"{decode([tokens[t + 1]])!r} at {t + 1}: {losses[t]:.2f}" for t in positions if is_target[t]]
    text = tokenizer.decode(tokens, skip_special_tokens=False) if tokenizer else str(tokens)
    return text, ", ".join(worst)


def print_precisions(run: RecordedRun, model: GPTModel, batch: dict[str, Tensor], step: int) -> None:
    """Print the loss and the gradient norm of the step in fp32 and bf16, eager and compiled."""
    num_targets = (batch["labels"][:, 1:] != -100).sum()
    print_on_main(f"{'precision':>16}{'loss':>14}{'gradient norm':>16}")
    for precision in ("no", "bf16"):
        for compiled in (False, True):
            if compiled and missing_compiler(num_targets.device):
                continue
            network = deepcopy(model)
            prepare_network(network, replace(run.config, compile=compiled), num_targets.device)
            loss = compute_step(network, batch, step, run.config, precision, gradients=True).sum() / num_targets
            grad_norm = total_norm(complete_gradients(trainable_parameters(network)))
            name = precision.replace("no", "fp32") + (", compiled" if compiled else "")
            print_on_main(f"{name:>16}{loss:>14.6f}{grad_norm:>16.6f}")


def compute_step(
    model: GPTModel, batch: dict[str, Tensor], step: int, config: TrainConfig, precision: str, gradients: bool = False
) -> Tensor:
    """Return the token losses [B, T - 1] of a global batch (tensors [B, T]) with the dropout of `step` (from 1).

    With `gradients`, those of the mean loss are added to the `.grad` of the model's parameters.
    """
    num_targets, token_losses = (batch["labels"][:, 1:] != -100).sum(), []
    for index, micro_batch in enumerate(split_micro_batches(batch, config.micro_batch_size)):
        torch.manual_seed(derive_seed(config.seed, "dropout", step - 1, index))
        labels = micro_batch.pop("labels")
        device = labels.device.type
        with torch.set_grad_enabled(gradients), torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            logits = model(**micro_batch)[0]
        losses = F.cross_entropy(logits[:, :-1].float().mT, labels[:, 1:], reduction="none")
        if gradients:
            (losses.sum() / num_targets).backward()
        token_losses.append(losses.detach())
    return torch.cat(token_losses)
