"""The exponential moving average (EMA) of the weights, which is evaluated in their place.

It is part of the optimizer's state, so it is saved, sharded and hashed like the rest of that state. An optimizer that
averages weights itself keeps them in the same place, `ema` in the state of each weight.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from runtime.config.errors import ConfigError
from runtime.private_torch import foreach_lerp_


def track_ema(optimizer: Optimizer, decay: float) -> None:
    """Update an EMA of the weights after every step of the optimizer: `ema` in the state of each weight.

    A step raises ConfigError if the optimizer changes these tensors itself.

    Args:
        optimizer: its groups get the entry `ema_decay`, which trainer/schedule.py lowers in the first steps.
        decay: the fraction of the average that each update keeps, below 1.
    """
    for group in optimizer.param_groups:
        group["ema_decay"] = decay
    optimizer.register_step_pre_hook(_record_averages)
    optimizer.register_step_post_hook(_update)


def _record_averages(optimizer: Optimizer, *_) -> None:
    for group in optimizer.param_groups:
        group["averages_before"] = _averages(optimizer, group)


def _averages(optimizer: Optimizer, group: dict[str, Any]) -> list[tuple[int, int] | None]:
    """Return a pair for each weight that changes if its average is replaced or written; None if it has no average."""
    averages = [optimizer.state.get(weight, {}).get("ema") for weight in group["params"]]
    return [None if average is None else (id(average), average._version) for average in averages]


@torch.no_grad()
def _update(optimizer: Optimizer, *_) -> None:
    for group in optimizer.param_groups:
        if _averages(optimizer, group) != group.pop("averages_before", None):
            raise ConfigError(
                f"evaluation.ema_decay: {group.get('initial_ema_decay', group['ema_decay'])}, but the optimizer keeps "
                "an average itself; use null"
            )
        states = [(weight, optimizer.state[weight]) for weight in group["params"] if optimizer.state.get(weight)]
        tracked = [(weight, state["ema"]) for weight, state in states if "ema" in state]
        for weight, state in states:
            if "ema" not in state:
                state["ema"] = weight.detach().clone()
        if tracked:
            weights, averages = zip(*tracked, strict=True)
            foreach_lerp_(averages, weights, 1 - group["ema_decay"])


@contextmanager
def ema_weights(optimizer: Optimizer) -> Iterator[None]:
    """Replace the weights by their EMA, if the optimizer tracks one, and restore their bits on exit."""
    _swap(optimizer)
    try:
        yield
    finally:
        _swap(optimizer)


@torch.no_grad()
def _swap(optimizer: Optimizer) -> None:
    for weight, state in optimizer.state.items():
        if "ema" in state:
            trained = weight.clone()
            weight.copy_(state["ema"])
            state["ema"].copy_(trained)
