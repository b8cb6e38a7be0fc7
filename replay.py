"""Opens a step of a run, or audits a run: python replay.py RUN STEP, python replay.py RUN --audit 3.

A run is a pure function of its config, its seed and the step. So any step of it is trained again from the checkpoint
before, silently, and every fingerprint on the way is compared with the one that the run logged. docs/debugging.md shows
how to find what is wrong with a step, docs/audit.md what an audit proves.
"""

from dataclasses import dataclass, replace

from jsonargparse.typing import NonNegativeInt, PositiveInt


@dataclass
class ReplayConfig:
    """Opens a step of a run, or audits a run."""

    run: str
    """The directory of a run."""

    step: PositiveInt | None = None
    """The step to open: its sequences, the loss of each, and what the update did to every block."""

    stop: str | None = None
    """Instead of opening the step, write the checkpoint after it into this folder."""

    audit: NonNegativeInt = 0
    """Instead of opening a step, train so many of the intervals between checkpoints again and compare all that the run
    logged and saved. Chosen at random; as many as there are or more: all."""

    num_sequences: PositiveInt = 8
    """Sequences of the step to show, those with the highest loss."""

    arithmetic: bool = True
    """Whether to show what other arithmetic makes of the step: bf16 and fp32, compiled and not."""

    profile: str | None = None
    """A folder for a Chrome trace of the step."""


def with_step_named(words: list[str]) -> list[str]:
    """RUN STEP as RUN --step STEP."""
    begins_so = len(words) > 1 and not words[0].startswith("-") and words[1].isdecimal()
    return [words[0], "--step", *words[1:]] if begins_so else words


if __name__ == "__main__":  # before anything slow is imported
    import sys

    from cli.scripts import run_and_exit

    sys.argv[1:] = with_step_named(sys.argv[1:])
    run_and_exit("replay", ReplayConfig)

import os
import shutil
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryFile

import torch
import torch.nn.functional as F
from torch import Tensor

from audit.audit import Run, audit, outcome, say
from checkpoint.manifest import read_manifest, step_directory
from checkpoint.unshard import read_weights
from config.errors import ConfigError
from config.paths import expanded
from config.schema import TrainConfig
from data.corpus import Batches, load_corpus
from data.files import copy_folder
from distributed.launch import join_process_group, uses_cpu
from distributed.launch_checks import check_request
from distributed.nested import temporary_folder
from distributed.world import is_main_process
from model.gpt import GPTModel
from model.seeds import derive_seed
from run.load import copy_initial_weights, load_run
from training.block_stats import total_norm
from training.gradients import trainable_parameters, zero_missing_gradients
from training.optimizer import build_optimizer, set_schedules
from training.prepare_model import no_compiler, prepare_network
from training.step import split_micro_batches

NUM_WORST, TEXT_SHOWN = 5, 120  # tokens, characters


def main(config: ReplayConfig) -> None:
    """Open the step, or audit the run; under a launcher all processes train together, and the main one reports.

    Raises:
        ConfigError: there is no such run or step, or it cannot be trained again here.
        RunError: the audit found something.
        Preempted: a signal asked to stop.
    """
    if (config.step is None) == (not config.audit):
        raise ConfigError("step: name a step of the run to open, or --audit N to train N intervals of it again")
    run = Run(expanded("run", config.run))
    check_request(run.config)
    join_process_group(run.config)
    if note := run.other_code():
        say(note)
    with temporary_folder("replay-") as folder:
        if config.audit:
            audit(run, config.audit, folder)
        else:
            open_step(run, config, folder)


def open_step(run: Run, config: ReplayConfig, folder: Path) -> None:
    """Train until the step, then show it."""
    step, before = config.step, run.checkpoint_before(config.step)
    if step > run.config.steps:
        raise ConfigError(f"step: {step} is beyond the {run.config.steps} steps of {run.path}")
    if step <= run.begin:
        raise ConfigError(f"step: {step} is of the run that {run.path} branched from after step {run.begin}; open that")
    first = read_manifest(before).step if before else 0
    check_places(config, run)  # now, and not after hours of training
    why = run.differs_here(first, step)
    if first < step - 1:
        again = run.retrain(before, step - 1, folder)
        begin = before or "the beginning"
        say(f"steps {first + 1} to {step - 1}: trained again from {begin}; {outcome(run, again, why)}")
        if again.failure:
            raise again.failure
        before = again.checkpoint
    profile = (step, step) if config.profile else None
    again = run.retrain(before, step, folder, {"tracking.block_stats": True, "profile": profile})
    failure = str(again.failure or "").partition(" To see what happened")[0]
    say(failure or f"step {step}: {outcome(run, again, why)}")
    if not is_main_process():
        return
    if config.profile:
        for trace in again.checkpoint.parent.parent.glob("trace-*.json"):
            shutil.move(trace, Path(config.profile, trace.name))  # in place of an older one
    if config.stop:
        if again.failure:
            raise again.failure
        copy_folder(again.checkpoint, Path(config.stop))
        return
    if step in again.rows:
        # Of an update that was skipped the log has null.
        show_blocks({name: float("nan") if value is None else value for name, value in again.rows[step].items()})
    show_sequences(run, before, step, config)


def check_places(config: ReplayConfig, run: Run) -> None:
    """Refuse folders in a run, those that cannot be written, and for a checkpoint the name of one of another step."""
    if config.stop and os.path.lexists(config.stop):
        raise ConfigError(f"stop: {config.stop!r} is there already; name a new folder")
    name = step_directory(Path(), config.step).name
    if config.stop and Path(config.stop).name.startswith("step-") and Path(config.stop).name != name:
        raise ConfigError(f"stop: {config.stop!r} is not how a checkpoint of that step may be called; name it {name}")
    for setting, place in {"stop": config.stop, "profile": config.profile}.items():
        if place and (inside := run_around(Path(place), run)):
            raise ConfigError(f"{setting}: {place!r} is inside the run {inside}; name a folder that is in no run")
    folders = {"stop": config.stop and Path(config.stop).absolute().parent, "profile": config.profile}
    for setting, folder in folders.items():
        try:
            if folder:
                Path(folder).mkdir(parents=True, exist_ok=True)
                TemporaryFile(dir=folder).close()
        except OSError as error:
            given = getattr(config, setting)
            raise ConfigError(f"{setting}: {given!r}: cannot write in {folder}: {error.strerror}") from None


def run_around(place: Path, run: Run) -> Path | None:
    """The run in whose directory a place is: this one, or another."""
    resolved = place.resolve()
    for directory in (resolved, *resolved.parents):
        if directory == run.path.resolve():
            return run.path
        if (directory / "config.yaml").is_file() and (directory / "checkpoints").is_dir():
            return directory
    return None


def show_blocks(row: dict) -> None:
    """The norms of every block, a line each, and those of the whole model."""
    names = list(dict.fromkeys(key.split("/")[1] for key in row if key.startswith("layers/")))
    say(
        f"loss {row['train/loss']:.6g}, gradient norm {row['train/grad_norm']:.6g}, learning rate {row['train/lr']:.6g}"
    )
    say(f"{'block':>6}" + "".join(f"{name:>16}" for name in names))
    for block in range(sum(key.startswith(f"layers/{names[0]}/") for key in row)):
        say(f"{block:>6}" + "".join(f"{row[f'layers/{name}/{block}']:>16.6g}" for name in names))


def show_sequences(run: Run, before: Path | None, step: int, config: ReplayConfig) -> None:
    """The step's sequences with the highest losses, and what other arithmetic makes of the step."""
    corpus = load_corpus(run.config)
    device = "cuda" if torch.cuda.is_available() and not uses_cpu(os.environ) else "cpu"
    torch.manual_seed(run.config.seed)
    model = GPTModel(run.config.model)
    if before:
        read_weights(before, read_manifest(before), model.state_dict())
    elif run.config.init_from:
        copy_initial_weights(model, load_run(run.config.init_from))
    optimizer = build_optimizer(model.to(device), run.config.optimizer)  # it freezes what a fork does not train
    set_schedules(optimizer, model, run.config_then(step), step - 1)  # dropout
    indices = corpus.order(run.config).indices(step - 1)
    batch = {name: tensor.to(device) for name, tensor in Batches(corpus.train)[list(indices)].items()}
    ours = run.computed(step)["mixed_precision"] or "no"
    token_losses = torch.cat(compute(model, batch, step, run.config, ours)[0])
    targets = batch["labels"][:, 1:] != -100
    means = token_losses.sum(1) / targets.sum(1).clamp(min=1)
    with torch.no_grad():  # the loss that is trained on may be another than the mean over the tokens
        rows = [{name: tensor[i : i + 1] for name, tensor in batch.items()} for i in range(len(indices))]
        alone = [model(**row, num_items_in_batch=n)[1] for row, n in zip(rows, targets.sum(1), strict=True)]
    not_finite = ~torch.stack(alone).isfinite()
    order = torch.where(not_finite, torch.inf, means.nan_to_num(nan=torch.inf)).argsort(descending=True)
    say(f"sequences of step {step}, the {min(len(order), config.num_sequences)} of {len(order)} with the highest loss:")
    for row in order[: config.num_sequences].tolist():
        own = f", and alone the model's loss is {alone[row]:.4g}" if not_finite[row] else ""
        words = batch["input_ids"][row].tolist()
        words = words[: max([2, *targets[row].nonzero().flatten().add(2).tolist()])]  # no padding
        text = corpus.tokenizer.decode(words, skip_special_tokens=False) if corpus.tokenizer else str(words)
        worst = token_losses[row].nan_to_num(nan=torch.inf).argsort(descending=True)[:NUM_WORST].tolist()
        show = corpus.tokenizer.decode if corpus.tokenizer else str
        tokens = [f"{show([words[t + 1]])!r} at {t + 1}: {token_losses[row, t]:.2f}" for t in worst if targets[row, t]]
        say(f"  sample {indices[row]}: loss {means[row]:.4f}{own}; {text[:TEXT_SHOWN]!r}")
        say(f"    worst tokens: {', '.join(tokens)}")
    if config.arithmetic:
        show_arithmetic(run, model, batch, step)


def show_arithmetic(run: Run, model: GPTModel, batch: dict[str, Tensor], step: int) -> None:
    """The loss and the gradient's norm of the step in fp32 and bf16, eager and compiled."""
    targets = (batch["labels"][:, 1:] != -100).sum()
    say(f"{'arithmetic':>16}{'loss':>14}{'gradient norm':>16}")
    for precision in ("no", "bf16"):
        for compiled in (False, True):
            if compiled and no_compiler(targets.device):
                continue
            fresh = deepcopy(model)
            prepare_network(fresh, replace(run.config, compile=compiled), targets.device)
            losses, norm = compute(fresh, batch, step, run.config, precision, gradients=True)
            name = precision.replace("no", "fp32") + (", compiled" if compiled else "")
            say(f"{name:>16}{torch.cat(losses).sum() / targets:>14.6f}{norm:>16.6f}")


def compute(
    model: GPTModel, batch: dict[str, Tensor], step: int, config: TrainConfig, precision: str, gradients: bool = False
) -> tuple[list[Tensor], float]:
    """The loss of each token of a global batch, [B, T - 1] in parts, with that step's dropout; the gradient's norm."""
    targets, token_losses, size = (batch["labels"][:, 1:] != -100).sum(), [], config.micro_batch_size
    for index, micro_batch in enumerate(split_micro_batches(batch, size)):
        torch.manual_seed(derive_seed(config.seed, "dropout", step - 1, index))
        labels = micro_batch.pop("labels")
        device = labels.device.type
        with torch.set_grad_enabled(gradients), torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            logits = model(**micro_batch)[0]
        losses = F.cross_entropy(logits[:, :-1].float().mT, labels[:, 1:], reduction="none")
        if gradients:
            (losses.sum() / targets).backward()
        token_losses.append(losses.detach())
    if not gradients:
        return token_losses, 0.0
    zero_missing_gradients(parameters := trainable_parameters(model))
    return token_losses, total_norm(parameter.grad for parameter in parameters)
