"""The learning rate as a function of the step. There is no scheduler object: nothing to save, nothing to step."""

import math

from config import ScheduleConfig


def lr_scale(config: ScheduleConfig, step: int, steps: int) -> float:
    """The share of the peak learning rate that the update of step `step` (from 0) of `steps` uses."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.name == "constant":
        return 1.0
    decay_steps = config.decay_steps
    if decay_steps is None:
        decay_steps = math.ceil(0.2 * steps) if config.name == "wsd" else steps
        decay_steps = min(decay_steps, steps - config.warmup_steps)
    progress = max(0.0, 1 - (steps - step) / decay_steps)  # 0 until the decay begins; would be 1 just after the run
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if config.name == "cosine" else 1 - progress
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape
