"""The learning rate as a function of the step. There is no scheduler object: nothing to save, nothing to step."""

import math

from config import ScheduleConfig, no_code_for


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
