"""Refuse state that no checkpoint holds: a run with such state would resume without a word to other bits.

A checkpoint holds the parameters and persistent buffers of the model and the tensors in `optimizer.state`. Everything
else must be a function of the config and the step.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from config.errors import ConfigError
from training.schedule import SCHEDULES

MAX_COPIED = 2**20  # elements; larger tensors, such as masks, are not watched
REBUILT = "or, if every step computes it again, let its name begin with an underscore"


def check_optimizer_state(network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer with something other than tensors in its state.

    Raises:
        ConfigError: there is such a value; the message has its name, and how to save it.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in network.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not torch.is_tensor(value):
                kind, shown = type(value).__name__, str(value)[:40]
                place = f"state[{key!r}] of {names.get(parameter, 'a parameter')}"
                raise ConfigError(
                    f"optimizer: {type(optimizer).__name__} keeps {place} as {kind} ({shown}), and checkpoints hold "
                    "only tensors, so a resumed run would lose it; "
                    f"keep it as a tensor: state[{key!r}] = torch.tensor(...)"
                )


class UnsavedState:
    """Values that no checkpoint holds, as they were at the start, to find those that training changes.

    Watched are public attributes that are numbers or tensors: of every module (non-persistent buffers too), of the
    optimizer, and of its parameter groups; except those that a schedule sets.
    """

    def __init__(self, network: nn.Module, optimizer: torch.optim.Optimizer):
        self.network, self.optimizer = network, optimizer
        self.at_start = {
            name: value.clone() if torch.is_tensor(value) else value for name, value in self._current_values()
        }

    def check(self) -> None:
        """Refuse to save if training has changed a watched value.

        Raises:
            ConfigError: with its name, and how to save it.
        """
        for name, value in self._current_values():
            before = self.at_start.get(name)
            if before is None or torch.is_tensor(before) != torch.is_tensor(value) or _is_same(before, value):
                continue
            what = f"from {before} to {value}" if not torch.is_tensor(value) else "in place"
            owner = "the model" if name.startswith("model.") else "the optimizer"
            remedy = "register it as a buffer" if owner == "the model" else "keep it as a tensor in optimizer.state"
            raise ConfigError(
                f"{name}: training changed this attribute of {owner} {what}, and checkpoints do not hold it, so a "
                f"resumed run would start from its first value again; {remedy}, {REBUILT}"
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
