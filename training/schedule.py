"""Scheduled values and due actions as pure functions of the config and the step: nothing to save, nothing to step."""

import math
from collections.abc import Callable
from typing import Any

from config.errors import unhandled_choice
from config.schema import ScheduleConfig, TrainConfig


def lr(peak: float, config: TrainConfig, step: int) -> float:
    """Return the learning rate of step `step` (from 0), given the one at the peak."""
    return peak * lr_scale(config.schedule, step, config.steps)


def ema_decay(largest: float, config: TrainConfig, step: int) -> float:
    """Return the decay of the weights' EMA (evaluation.ema_decay) at the update of step `step`.

    It is lower in the beginning, so that the initial weights lose their influence at any length of a run:
    (1 + step) / (10 + step), the rule of TensorFlow's ExponentialMovingAverage.
    """
    return min(largest, (1 + step) / (10 + step))


# Scheduled settings by the last part of their name: entries of the optimizer's groups, `grad_clip` and `dropout`.
# Each is a function of the base value (of the setting, or of the optimizer's group), of all settings, and of the step
# (from 0).
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


def scheduled_value(name: str, base: Any, config: TrainConfig, step: int) -> Any:
    """Return the value of the setting `name` at step `step` (from 0), given its base value; None stays None."""
    return SCHEDULES[name](base, config, step) if name in SCHEDULES and base is not None else base


def lr_scale(config: ScheduleConfig, step: int, steps: int) -> float:
    """Return the learning rate of step `step` (from 0) of `steps` as a fraction of the peak."""
    lowest = config.min_lr_ratio
    match config.name:
        case "constant":
            lowest = shape = 1.0
        case "linear":
            shape = 1 - _decay_progress(config.decay_steps or steps, config, step, steps)
        case "cosine":
            shape = 0.5 * (1 + math.cos(math.pi * _decay_progress(config.decay_steps or steps, config, step, steps)))
        case "wsd":
            shape = 1 - _decay_progress(config.decay_steps or math.ceil(0.2 * steps), config, step, steps)
        case other:
            raise unhandled_choice("schedule.name", other)
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    return lowest + (1 - lowest) * shape


def _decay_progress(decay_steps: int, config: ScheduleConfig, step: int, steps: int) -> float:
    """Return the progress of a decay that ends with the run: 0 before it starts, 1 just after the last step."""
    longest = max(1, steps - config.warmup_steps)
    return max(0.0, 1 - (steps - step) / min(decay_steps, longest))
