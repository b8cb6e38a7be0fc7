"""Whether these settings may go on with a run or a checkpoint that others began, which settings are said by name."""

from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from checkpoint.manifest import Manifest
from config.errors import ConfigError
from config.schema import ScheduleConfig, TrainConfig, flat_settings
from run.stored_settings import complete_settings
from training.schedule import SCHEDULES, at_step

# What may change when a run goes on: nothing here moves the trajectory by more than rounding. Those of schedules are
# compared by what these gave so far; data.path and the paths of data.mix by data.hash, if there is one, init_from by
# init_hash.
OF_SCHEDULES = {"steps", *(f"schedule.{name}" for name in ("name", "warmup_steps", "decay_steps", "min_lr_ratio"))}
FREE_SETTINGS = OF_SCHEDULES | {
    *("name", "out_dir", "resume", "branch_from", "compile", "on_nonfinite"),
    *("max_skipped_in_a_row", "check_replicas_every", "timeout_seconds", "activation_checkpointing", "chunked_loss"),
    *("stop_after", "profile", "checkpoint", "evaluation", "tracking", "data.num_workers", "data.path", "init_from"),
}
# But this of them: what the optimizer keeps depends on it.
FIXED_SETTINGS = {"evaluation.ema_decay"}
# Filled in at a start where they are null.
RESOLVED_AT_START = {"global_batch_size", "model.vocab_size", "data.hash", "data.seed", "init_hash"}


def differences(before: dict[str, Any], config: TrainConfig) -> list[str]:
    """What going on with `config` would change of the trajectory of a run with the settings `before`, a line each."""
    now = flat_settings(asdict(config))
    yet_unknown = {key for key in RESOLVED_AT_START if now[key] is None}
    if config.init_from is None:
        yet_unknown.discard("init_hash")  # that there is none is known
    free = set(FREE_SETTINGS)
    if before["data.hash"] is None:
        free.discard("data.path")  # a source without a hash, as a fork's may be, is known by its path alone
    elif _same_shares(before["data.mix"], now["data.mix"]):
        free.add("data.mix")  # its keys are paths
    lines = []
    for key in sorted((before.keys() | now.keys()) - yet_unknown):
        section = key.split(".")[0]
        is_free = key not in FIXED_SETTINGS and not free.isdisjoint((key, section))
        if key not in now:
            if not is_free:
                lines.append(f"{key}: {before[key]} there, and no setting any more")
        elif before[key] != now[key] and not is_free:
            lines.append(f"{key}: {before[key]} there, {now[key]} now")
    return lines


def _same_shares(one: Any, other: Any) -> bool:
    """Whether both are mixtures of corpora with the same weights, in the same order."""
    return isinstance(one, dict) and isinstance(other, dict) and [*one.values()] == [*other.values()]


def check_resume(config: TrainConfig, path: Path, manifest: Manifest) -> None:
    """Refuse settings by which the updates until the checkpoint at `path` of the run itself would have been others.

    Raises:
        ConfigError: with those settings, with the first step of which a schedule says otherwise now, or if more steps
            are done.
    """
    before = complete_settings(manifest.config)
    if different := differences(before, config):  # config.yaml is gone, or was edited
        raise ConfigError("\n  ".join([f"{path} is of other settings, which going on would change:", *different]))
    old_schedule = ScheduleConfig(**{field.name: before[f"schedule.{field.name}"] for field in fields(ScheduleConfig)})
    is_unchanged = old_schedule == config.schedule and before["steps"] == config.steps
    to_compare = 0 if is_unchanged else min(manifest.step, config.steps)  # of millions it takes seconds
    then = replace(config, schedule=old_schedule, steps=before["steps"])
    values = {name: before[key] for key in before for name in SCHEDULES if key.endswith(f".{name}")}
    for step, (name, value) in product(range(to_compare), values.items()):
        old, new = at_step(name, value, then, step), at_step(name, value, config, step)
        if old != new:
            what = "learning rate" if name == "lr" else name
            raise ConfigError(
                f"steps: {config.steps} (before: {before['steps']}) and schedule: {asdict(config.schedule)} would have "
                f"given step {step} of this run the {what} {new}, but it had {old}; a run can be extended only until "
                "its decay begins (schedule.name: constant or wsd), or be continued as a new one: --name NEW "
                f"--branch_from {path}"
            )
    if config.steps < manifest.step:
        raise ConfigError(f"steps: {config.steps} is less than the {manifest.step} that {path} has already done")


def check_branch(config: TrainConfig, path: Path, manifest: Manifest) -> None:
    """Refuse to begin a new run with the weights and moments of a checkpoint that do not fit it.

    Raises:
        ConfigError: it is of another model or optimizer, or leaves nothing to do.
    """
    fixed = ("model.", "optimizer.name:", *(f"{name}:" for name in FIXED_SETTINGS))
    if different := [
        line for line in differences(complete_settings(manifest.config), config) if line.startswith(fixed)
    ]:
        what = "\n  ".join(different)
        raise ConfigError(f"branch_from: {path} is a checkpoint of another model or optimizer:\n  {what}")
    if config.steps <= manifest.step:
        raise ConfigError(f"steps: {config.steps} leaves nothing to do after the {manifest.step} of {path}")
