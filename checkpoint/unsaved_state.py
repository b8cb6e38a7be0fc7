"""Refuse training state that no checkpoint contains: a resumed run would silently differ in its bits.

A checkpoint contains the parameters and persistent buffers of the model and the tensors in `optimizer.state`.
Everything else must be a function of the config and the step.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from config.errors import ConfigError
from training.schedule import SCHEDULES

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
    """Values that no checkpoint contains, recorded at the start to detect those that training changes.

    They are the public attributes that are numbers or tensors of every module (non-persistent buffers too), of the
    optimizer, and of its parameter groups; except those that a schedule sets.
    """

    def __init__(self, network: nn.Module, optimizer: torch.optim.Optimizer):
        self.network, self.optimizer = network, optimizer
        self.at_start = {
            name: value.clone() if torch.is_tensor(value) else value for name, value in self._current_values()
        }

    def check(self) -> None:
        """Raise ConfigError if training has changed a recorded value."""
        for name, value in self._current_values():
            before = self.at_start.get(name)
            if before is None or torch.is_tensor(before) != torch.is_tensor(value) or _is_same(before, value):
                continue
            change = "in place" if torch.is_tensor(value) else f"from {before} to {value}"
            is_of_model = name.startswith("model.")
            remedy = "register it as a buffer" if is_of_model else "keep it as a tensor in optimizer.state"
            raise ConfigError(
                f"{name}: training changed this attribute {change}, and checkpoints do not contain it, so a resumed "
                f"run would start from its first value again; {remedy}, or, if every step computes it again, let its "
                "name begin with an underscore"
            )

    def _current_values(self) -> Iterator[tuple[str, Any]]:
        scheduled = SCHEDULES.keys() | ({"p"} if "dropout" in SCHEDULES else set())
        owners: list[tuple[str, dict[str, Any]]] = []
        for name, module in self.network.named_modules():
            prefix = f"model.{name}" if name else "model"
            unsaved = {key: module._buffers[key] for key in module._non_persistent_buffers_set}
            owners.append((prefix, vars(module) | unsaved))
        owners.append(("optimizer", vars(self.optimizer)))
        owners += [(f"optimizer.param_groups[{i}]", group) for i, group in enumerate(self.optimizer.param_groups)]
        for prefix, attributes in owners:
            for key, value in attributes.items():
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                is_small_tensor = torch.is_tensor(value) and value.numel() <= MAX_COPIED
                if (is_number or is_small_tensor) and not key.startswith(("_", "initial_")) and key not in scheduled:
                    yield f"{prefix}.{key}", value


def _is_same(before: Any, now: Any) -> bool:
    if isinstance(before, Tensor):
        return before.shape == now.shape and before.dtype == now.dtype and torch.equal(before, now.to(before.device))
    return before == now or (before != before and now != now)
