"""Refuse training state that no checkpoint contains: a resumed run would silently differ in its bits.

A checkpoint contains the parameters and persistent buffers of the model and the tensors in `optimizer.state`.
Everything else must be a function of the config and the step.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from config.errors import ConfigError
from training.schedule import SCHEDULES

COLLECTIONS = list | tuple | deque
MAX_COPIED = 2**20  # elements; larger tensors, such as masks, are not watched


def check_optimizer_state(network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError if the optimizer's state has a value other than tensors."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in network.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not torch.is_tensor(value):
                place = f"state[{key!r}] of {names.get(parameter, 'a parameter')}"
                kind, shown = type(value).__name__, str(value)[:40]
                raise ConfigError(
                    f"optimizer: {type(optimizer).__name__} keeps {place} as {kind} ({shown}), and checkpoints contain "
                    f"only tensors, so a resumed run would lose it; use a tensor: state[{key!r}] = torch.tensor(...)"
                )


class UnsavedState:
    """Values that no checkpoint contains, as they were first seen, to detect those that training changes.

    They are the public attributes that are numbers, strings or tensors, or lists and dicts of these, of every module
    (non-persistent buffers too), of the optimizer, and of its parameter groups; except those that a schedule sets. An
    attribute that is None or missing at the start may be filled in the first steps, like a cache.
    """

    def __init__(self, network: nn.Module, optimizer: torch.optim.Optimizer):
        self.network, self.optimizer = network, optimizer
        self.first = {name: _copy(value) for name, value in self._current_values()}

    def check(self) -> None:
        """Raise ConfigError if training has changed a recorded value."""
        for name, value in self._current_values():
            before = self.first.get(name)
            if before is None:
                self.first[name] = _copy(value)
                continue
            if _is_same(before, value):
                continue
            is_in_place = torch.is_tensor(before) and torch.is_tensor(value)
            change = "in place" if is_in_place else f"from {str(before)[:40]} to {str(value)[:40]}"
            is_of_model = name.startswith("model.")
            remedy = "register it as a buffer" if is_of_model else "keep it as a tensor in optimizer.state"
            raise ConfigError(
                f"{name}: training changed this attribute {change}, and checkpoints do not contain it, so a resumed "
                f"run would start from its first value again; {remedy}, or, if every step computes it again, let its "
                "name begin with an underscore"
            )

    def _current_values(self) -> Iterator[tuple[str, Any]]:
        not_watched = SCHEDULES.keys() | ({"p"} if "dropout" in SCHEDULES else set())
        not_watched |= {"training", "state", "params", "param_groups"}
        owners: list[tuple[str, dict[str, Any]]] = []
        for name, module in self.network.named_modules():
            prefix = f"model.{name}" if name else "model"
            unsaved = {key: module._buffers[key] for key in module._non_persistent_buffers_set}
            owners.append((prefix, vars(module) | unsaved))
        owners.append(("optimizer", vars(self.optimizer)))
        owners += [(f"optimizer.param_groups[{i}]", group) for i, group in enumerate(self.optimizer.param_groups)]
        for prefix, attributes in owners:
            for key, value in attributes.items():
                if _is_data(value) and not key.startswith(("_", "initial_")) and key not in not_watched:
                    yield f"{prefix}.{key}", value


def _is_data(value: Any) -> bool:
    """Return whether a value is watched."""
    if isinstance(value, Mapping):
        return all(map(_is_data, value.values()))
    if isinstance(value, COLLECTIONS):
        return all(map(_is_data, value))
    if torch.is_tensor(value):
        return value.numel() <= MAX_COPIED and not isinstance(value, nn.Parameter)
    return isinstance(value, int | float | str)


def _copy(value: Any) -> Any:
    """Copy a watched value; a mapping becomes a dict, and any other collection a list."""
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, COLLECTIONS):
        return [_copy(item) for item in value]
    return value.clone() if torch.is_tensor(value) else value


def _is_same(before: Any, now: Any) -> bool:
    """Compare a copy with the present value."""
    if isinstance(before, dict):
        is_alike = isinstance(now, Mapping) and before.keys() == now.keys()
        return is_alike and all(_is_same(item, now[key]) for key, item in before.items())
    if isinstance(before, list):
        return isinstance(now, COLLECTIONS) and len(before) == len(now) and all(map(_is_same, before, now))
    if torch.is_tensor(before) or torch.is_tensor(now):
        is_alike = torch.is_tensor(before) and torch.is_tensor(now)
        is_alike = is_alike and before.shape == now.shape and before.dtype == now.dtype
        return is_alike and torch.equal(before, now.to(before.device))
    return before == now or (before != before and now != now)
