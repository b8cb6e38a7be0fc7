"""What changes with the step, as functions of it. There is no scheduler object: nothing to save, nothing to step."""

import math
from collections.abc import Callable
from typing import Any

from config.errors import no_code_for
from config.schema import ScheduleConfig, TrainConfig


def lr(peak: float, config: TrainConfig, step: int) -> float:
    """The learning rate of the update of step `step`, of the one at the peak."""
    return peak * lr_scale(config.schedule, step, config.steps)


def ema_decay(largest: float, config: TrainConfig, step: int) -> float:
    """Return the decay of the weights' EMA (evaluation.ema_decay) at the update of step `step`.

    It is lower in the beginning, so that the initial weights lose their influence at any length of a run:
    (1 + step) / (10 + step), the rule of TensorFlow's ExponentialMovingAverage.
    """
    return min(largest, (1 + step) / (10 + step))


# The settings that change with the step, by the last part of their names: those of the groups of the optimizer,
# `grad_clip` and `dropout`. Each is a function of the value that the setting has, or a group of the optimizer in its
# place, of all settings, and of the step, from 0.
SCHEDULES: dict[str, Callable[[Any, TrainConfig, int], Any]] = {"lr": lr, "ema_decay": ema_decay}


def should_log(config: TrainConfig, completed_steps: int) -> bool:
    """Return whether training metrics are logged after so many steps."""
    return _is_due(config.tracking.log_every, config, completed_steps)


def should_evaluate(config: TrainConfig, completed_steps: int) -> bool:
    """Return whether the validation loss is measured after so many steps."""
    return _is_due(config.evaluation.every, config, completed_steps)


def should_save(config: TrainConfig, completed_steps: int) -> bool:
    """Return whether a checkpoint is saved after so many steps."""
    return _is_due(config.checkpoint.every, config, completed_steps) or completed_steps == config.stop_after


def should_compare_replicas(config: TrainConfig, completed_steps: int, saves: bool) -> bool:
    """Return whether the processes compare their states after so many steps: always before a save, unless never."""
    every = config.check_replicas_every
    return _is_due(every, config, completed_steps) or (saves and every > 0)


def _is_due(every: int, config: TrainConfig, completed_steps: int) -> bool:
    return every > 0 and (completed_steps % every == 0 or completed_steps == config.steps)


def at_step(name: str, value: Any, config: TrainConfig, step: int) -> Any:
    """What the setting `name`, whose value is `value`, is at step `step` (from 0). What is null stays null."""
    return SCHEDULES[name](value, config, step) if name in SCHEDULES and value is not None else value


def lr_scale(config: ScheduleConfig, step: int, steps: int) -> float:
    """The share of the peak learning rate that the update of step `step` (from 0) of `steps` uses."""
    lowest = config.min_lr_ratio
    match config.name:
        case "constant":
            lowest = shape = 1.0
        case "linear":
            shape = 1 - _decayed(config.decay_steps or steps, config, step, steps)
        case "cosine":
            shape = 0.5 * (1 + math.cos(math.pi * _decayed(config.decay_steps or steps, config, step, steps)))
        case "wsd":
            shape = 1 - _decayed(config.decay_steps or math.ceil(0.2 * steps), config, step, steps)
        case other:
            raise no_code_for("schedule.name", other)
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    return lowest + (1 - lowest) * shape


def _decayed(decay_steps: int, config: ScheduleConfig, step: int, steps: int) -> float:
    """How far a decay that ends with the run has come: 0 until it begins, and it would be 1 just after the run."""
    longest = max(1, steps - config.warmup_steps)
    return max(0.0, 1 - (steps - step) / min(decay_steps, longest))
