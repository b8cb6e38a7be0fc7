"""The average of the weights that is evaluated in their place: kept in the optimizer's state, so saved and sharded as
moments are, and in the digest of a step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer


def keep_average(optimizer: Optimizer, share: float) -> None:
    """Let every update be followed by that of an exponential average of the weights, `average` of their state, of which
    `average` of their group stays: at most this share (training/schedule.py)."""
    for group in optimizer.param_groups:
        group["average"] = share
    optimizer.register_step_post_hook(_update)


@torch.no_grad()
def _update(optimizer: Optimizer, *_) -> None:
    for group in optimizer.param_groups:
        states = [(weight, optimizer.state[weight]) for weight in group["params"] if optimizer.state.get(weight)]
        begun = [(weight, state["average"]) for weight, state in states if "average" in state]
        for weight, state in states:
            if "average" not in state:
                state["average"] = weight.detach().clone()
        if begun:
            weights, averages = zip(*begun, strict=True)
            torch._foreach_lerp_(averages, weights, 1 - group["average"])


@contextmanager
def averaged_weights(optimizer: Optimizer) -> Iterator[None]:
    """Inside, the weights are their averages, where the optimizer keeps them; afterwards they have their bits again."""
    _swap(optimizer)
    try:
        yield
    finally:
        _swap(optimizer)


@torch.no_grad()
def _swap(optimizer: Optimizer) -> None:
    for weight, state in optimizer.state.items():
        if "average" in state:
            trained = weight.clone()
            weight.copy_(state["average"])
            state["average"].copy_(trained)
