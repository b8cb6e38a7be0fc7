"""Schedules (learning rate, EMA decay), and when to log, evaluate and save.

All are pure functions of the config and the step, so a checkpoint needs no scheduler state.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, assert_never

from runtime.config.schema import ScheduleConfig, TrainConfig


def lr(peak: float, config: TrainConfig, step: int) -> float:
    """Return the learning rate of step `step` (from 0); `peak` is optimizer.lr."""
    return peak * lr_scale(config.schedule, step, config.steps)


def ema_decay(largest: float, config: TrainConfig, step: int) -> float:
    """Return the decay of the EMA of the weights at step `step` (from 0); `largest` is evaluation.ema_decay.

    As long as that is less, it is (1 + step) / (10 + step), as in TensorFlow's ExponentialMovingAverage, so that the
    EMA forgets the initial weights in a short run too.
    """
    return min(largest, (1 + step) / (10 + step))


# To schedule a setting, add its name here: a key of the optimizer's groups (lr, weight_decay, betas, ...), grad_clip,
# or a setting of the model that its modules read from an attribute of the same name, such as dropout. The function
# takes the configured value, the config and the step (from 0). A resume with other `steps` compares the values of all
# completed steps, also those of any other setting that is named here.
SCHEDULES: dict[str, Callable[[Any, TrainConfig, int], Any]] = {
    "lr": lr,
    "ema_decay": ema_decay,
}


@dataclass(frozen=True)
class Due:
    """Which actions follow a training step."""

    log: bool
    evaluate: bool
    """Compute the validation metrics and sample texts; after the last step, texts are sampled in any case."""
    save: bool
    compare: bool
    """Compare the states of the processes. Any other action compares them too (`step_metrics` in train.py)."""
    stop: bool = False
    """Save and end this session, although the run is not complete."""

    @property
    def anything(self) -> bool:
        """Whether any action is due; all of them need the result of the step."""
        return self.log or self.evaluate or self.save or self.compare or self.stop

    def and_stop(self) -> "Due":
        """Return the same actions and a stop, for which a checkpoint is saved."""
        return replace(self, save=True, stop=True)


def due_after(completed_steps: int, config: TrainConfig) -> Due:
    """Return the actions that follow step number `completed_steps`, counted from 1.

    At 0, the initial model, only `evaluate` counts.
    """
    samples_texts = config.evaluation.num_logged_generations + config.evaluation.num_scored_generations > 0
    due = Due(
        log=is_due(config.tracking.log_every, config, completed_steps),
        evaluate=is_due(config.evaluation.every, config, completed_steps)
        or (completed_steps == config.steps and samples_texts),
        save=is_due(config.checkpoint.every, config, completed_steps),
        compare=is_due(config.check_replicas_every, config, completed_steps),
    )
    return due.and_stop() if completed_steps == config.stop_after and completed_steps < config.steps else due


def is_due(every: int, config: TrainConfig, completed_steps: int) -> bool:
    """Return whether an action is due that runs every `every` steps, and after the last step; 0: never.

    The initial model counts as a multiple of `every`, unless the action runs after the last step alone.
    """
    at_multiple = every > 0 and completed_steps % every == 0 and every < config.steps
    return at_multiple or (every > 0 and completed_steps == config.steps)


def scheduled_value(name: str, base: Any, config: TrainConfig, step: int) -> Any:
    """Return the value of the setting `name` at step `step` (from 0): `base` if that is None or not scheduled."""
    return SCHEDULES[name](base, config, step) if name in SCHEDULES and base is not None else base


def lr_scale(config: ScheduleConfig, step: int, steps: int) -> float:
    """Return the learning rate of step `step` (from 0) of a run of `steps` steps, as a fraction of the peak."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    match config.name:
        case "constant":
            return 1.0
        case "linear":
            remaining = 1 - _decay_progress(config.decay_steps or steps, config, step, steps)
        case "cosine":
            progress = _decay_progress(config.decay_steps or steps, config, step, steps)
            remaining = 0.5 * (1 + math.cos(math.pi * progress))
        case "wsd":
            remaining = 1 - _decay_progress(config.decay_steps or math.ceil(0.2 * steps), config, step, steps)
        case other:
            assert_never(other)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining


def _decay_progress(decay_steps: int, config: ScheduleConfig, step: int, steps: int) -> float:
    """Return the completed fraction of a decay over the last `decay_steps` steps, or all steps after the warm-up."""
    steps_after_warmup = max(1, steps - config.warmup_steps)
    return max(0.0, 1 - (steps - step) / min(decay_steps, steps_after_warmup))
