"""Choose the checkpoint to resume from, and refuse settings that would change the run."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from data.sampler import BatchSizes
from model.config import GPTConfig
from runtime.config.errors import ConfigError, OtherRunError
from runtime.config.schema import TrainConfig
from runtime.config.stored_settings import complete_settings, read_settings, unknown_settings
from runtime.distributed.signals import never_stop
from trainer.checkpoint.identity import compare_facts, compare_summation_order, compare_versions, describe_code
from trainer.checkpoint.manifest import InvalidCheckpoint, Manifest, newest_valid, validate
from trainer.run.directory import Run
from trainer.schedule import SCHEDULES, due_after, scheduled_value

# Settings that may differ when a run is resumed: they change its weights by rounding at most, or are compared
# otherwise (steps by the scheduled values, data.path and the paths of data.mix by data.hash, init_from by init_hash,
# teacher.path by teacher.hash).
FREE_SETTINGS = {
    *("name", "out_dir", "steps", "resume", "compile", "on_nonfinite", "max_skipped_in_a_row", "check_replicas_every"),
    *("cuda_graph", "timeout_seconds", "activation_checkpointing", "chunked_loss", "stop_after", "profile"),
    *("checkpoint", "evaluation", "tracking", "data.num_workers", "data.path", "init_from", "teacher.path"),
}
FIXED_SETTINGS = {"evaluation.ema_decay"}  # exceptions to FREE_SETTINGS: the EMA is part of the optimizer's state
# Filled in when the run starts if they are null.
RESOLVED_AT_START = {"global_batch_size", "model.vocab_size", "data.hash", "data.seed", "branch_from"}
HASHES_OF = {"init_hash": "init_from", "teacher.hash": "teacher.path"}  # filled in too, unless that is null
# Settings that a branch must have in common with the checkpoint it starts from, besides those of the model.
FIXED_IN_BRANCH = {"optimizer.name", *FIXED_SETTINGS}


@dataclass(frozen=True)
class StartingPoint:
    """The state that a session starts from: step 0, or a checkpoint."""

    checkpoint: Path | None = None
    step: int = 0
    """Completed steps."""
    tokens: int = 0
    """Training tokens until `step`."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Metrics of `step`."""
    is_branch: bool = False
    """Whether the checkpoint is of another run."""
    evaluated: bool = False
    """Whether no evaluation of `step` is missing. A branch leaves that of its first step to its parent."""

    @property
    def parent(self) -> Run | None:
        """The run of the checkpoint, of a branch that starts now."""
        return Run(self.checkpoint.resolve().parent.parent) if self.checkpoint and self.is_branch else None


def starts_afresh(config: TrainConfig) -> bool:
    """Return whether an existing run is moved aside: with `resume: never`, except when a launcher restarts it."""
    return config.resume == "never" and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) == 0


def resumed_settings(run: Run, config: TrainConfig) -> dict[str, Any] | None:
    """Return the flat settings of the existing run; None if there is none, or it is moved aside."""
    return None if starts_afresh(config) else read_settings(run.path / "config.yaml")


def with_stored_model(config: TrainConfig, stored: dict[str, Any]) -> TrainConfig:
    """Fill in `model` settings that the user did not give, from the stored, flat settings of a run with `init_from`."""
    model = {name: stored[f"model.{name}"] for name in GPTConfig.model_fields}
    given = {name: getattr(config.model, name) for name in config.model.model_fields_set}
    return config.replace(model=model | given, init_hash=config.init_hash or stored["init_hash"])


def differing_settings(stored: dict[str, Any], config: TrainConfig) -> dict[str, str]:
    """Return the settings of `config` that would change the weights of a run with the `stored` ones, with a message."""
    given = config.flat()

    # The settings that differ. A null that is filled in later is no difference.
    filled_in = RESOLVED_AT_START | {name for name, source in HASHES_OF.items() if given[source] is not None}
    messages = {
        key: f"{key}: {stored[key]} in the run, {value} now"
        for key, value in given.items()
        if value != stored[key] and not (value is None and key in filled_in)
    } | unknown_settings(stored)

    # Those among them that may differ: single settings, or all of a section.
    free = set(FREE_SETTINGS)
    mix, given_mix = stored["data.mix"], given["data.mix"]
    if stored["data.hash"] is None:
        free.discard("data.path")  # it alone identifies data without a hash, such as a source that a fork added
    elif mix and given_mix and [*mix.values()] == [*given_mix.values()]:
        free.add("data.mix")  # the weights are equal, and the keys are paths
    return {
        key: message
        for key, message in messages.items()
        if key in FIXED_SETTINGS or not free & {key, key.partition(".")[0]}
    }


def is_fixed_in_branch(setting: str) -> bool:
    """Return whether a branch must have the value of its checkpoint."""
    return setting.startswith("model.") or setting in FIXED_IN_BRANCH


def check_resume(run: Run, config: TrainConfig, manifest: Manifest | None) -> None:
    """Raise OtherRunError if the existing run would have trained otherwise with this config.

    A setting that is not free differs, or another number of steps changes a scheduled value of a completed step. The
    message names the settings, and `--branch_from` if these settings can continue from the newest checkpoint.

    `manifest` is that of the checkpoint to resume from, None if the run has none; the config is resolved.
    """
    stored, step = (complete_settings(manifest.config), manifest.step) if manifest else (run.settings, 0)
    different = differing_settings(stored, config)
    if config.steps < step:
        different["steps"] = f"steps: {config.steps} is less than the {step} completed steps"
    if config.steps != stored["steps"] and not different:
        old_config = config.replace(steps=stored["steps"])
        # Unscheduled values by name: optimizer.lr is base_values["lr"].
        base_values = {name: stored[key] for key in stored for name in SCHEDULES if f".{key}".endswith(f".{name}")}
        for now, (name, value) in product(range(run.first_step(), step), base_values.items()):
            old, new = scheduled_value(name, value, old_config, now), scheduled_value(name, value, config, now)
            if old != new:
                change = f"in step {now}, {'the learning rate' if name == 'lr' else name} was {old} and would be {new}"
                different["steps"] = f"steps: {stored['steps']} in the run, {config.steps} now: {change}"
                break
        # A fork may let the sizes and the lengths of the batches depend on the number of steps.
        old_sizes, sizes = BatchSizes.from_config(old_config), BatchSizes.from_config(config)
        for now in range(run.first_step(), step) if not different else ():
            old, new = (each.tokens_before(now + 1, config.seq_len) for each in (old_sizes, sizes))
            if (old, old_sizes.size(now)) != (new, sizes.size(now)):
                change = f"until step {now + 1}, the run had {old:,} tokens and would have {new:,}"
                different["steps"] = f"steps: {stored['steps']} in the run, {config.steps} now: {change}"
                break
    if different:
        remedy = "choose another name, or start afresh with --resume never (that run is moved aside, not deleted)"
        can_branch = not any(is_fixed_in_branch(name) or name in ("branch_from", "init_hash") for name in different)
        if can_branch and (newest := next(iter(run.manifests().items()), None)) and newest[1].step < config.steps:
            remedy = f"to continue with these settings, branch: --name NEW --branch_from {newest[0]}; or {remedy}"
        if different.keys() == {"micro_batch_size"}:  # it may follow from another number of processes
            remedy = f"to resume, give --micro_batch_size {stored['micro_batch_size']}; {remedy}"
        lines = "\n  ".join(different.values())
        raise OtherRunError(
            f"{run.path} has a run with other settings, which resuming would change:\n  {lines}\n{remedy}"
        )


def choose_starting_point(
    run: Run, config: TrainConfig, facts: dict[str, Any], should_stop: Callable[[], bool] = never_stop
) -> StartingPoint:
    """Choose the newest valid checkpoint of the run, else `branch_from`, else step 0; print how code and launch differ.

    `facts` are the `provenance` and `launch_facts` of this session. Raise ConfigError if all checkpoints of the run are
    damaged, or the chosen one does not fit the config or the launch; Interrupted if `should_stop()` is true.
    """
    path, manifest, rejected = newest_valid(run.checkpoints, should_stop)
    for reason in rejected:
        print(f"Checkpoint skipped: {reason}")
    if manifest is not None or (run.path / "config.yaml").exists():
        check_resume(run, config, manifest)

    if path is None or manifest is None:
        # A run that has lost its checkpoints does not silently start again. That it has had one is known from
        # status.json, which names the newest, or from a session that began at one.
        steps = [session.step for session in run.sessions()]
        if status := run.status():
            steps.append(status.step)
        if rejected or max(steps, default=0) > run.first_step():
            raise ConfigError(
                f"no valid checkpoint is left in {run.checkpoints}; repair one, or start afresh with --resume never"
            )
        if config.branch_from is None:
            return StartingPoint(evaluated=not due_after(0, config).evaluate)

        # A new branch: the model and the optimizer are those of its checkpoint.
        path = Path(config.branch_from)
        try:
            manifest = validate(path, should_stop)
        except InvalidCheckpoint as invalid:
            raise ConfigError(f"branch_from: {invalid}") from None
        messages = differing_settings(complete_settings(manifest.config), config)
        if different := [line for name, line in messages.items() if is_fixed_in_branch(name)]:
            settings = "\n  ".join(different)
            raise ConfigError(f"branch_from: {path} is a checkpoint of another model or optimizer:\n  {settings}")
        if config.steps <= manifest.step:
            steps_of_parent = f"the {manifest.step} steps of {path}"
            raise ConfigError(f"steps: {config.steps} leaves no step to train after {steps_of_parent}")
    elif "mixed_precision" in compare_facts(vars(manifest), facts):
        raise ConfigError(
            f"mixed_precision: {facts['mixed_precision']} in this launch, but {path} was trained with "
            f"{manifest.mixed_precision}; launch with that, or start a new run: --name NEW --branch_from {path}"
        )

    # Say how the code and the launch differ from those that trained the checkpoint.
    trained_with = vars(manifest) | manifest.provenance
    if "code" in compare_facts(trained_with, facts):
        print(f"Other code: {path} was trained by {describe_code(trained_with)}, and this is {describe_code(facts)}.")
    is_complete = manifest.step >= config.steps
    if (versions := compare_versions(trained_with, facts)) and not is_complete:
        changes = ", ".join(f"{name} {facts[name]} instead of {trained_with[name]}" for name in versions)
        print(f"Resumed with {changes}: from here on the bits may differ.")
    if (changed := compare_summation_order(trained_with, facts, config.exact)) and not is_complete:
        counts = ", ".join(f"{facts[name]} {name} instead of {trained_with[name]}" for name in changed)
        print(f"Resumed with {counts}: from here on the bits may differ by rounding.")
    is_branch = path.parent != run.checkpoints
    evaluated = manifest.evaluated or is_branch or not due_after(manifest.step, config).evaluate
    return StartingPoint(path, manifest.step, manifest.tokens, manifest.metrics, is_branch, evaluated)
