"""Refuse training state that no checkpoint contains: a resumed run would silently differ in its bits.

A checkpoint contains the parameters and persistent buffers of the model and the tensors in `optimizer.state`.
Everything else must be a function of the config and the step.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from config.errors import ConfigError
from training.schedule import SCHEDULES

MAX_WATCHED = 2**20  # elements; larger tensors, such as masks, are not watched


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
        self.first: dict[str, tuple[str, str]] = {}  # by name: fingerprint and text
        self.check()

    def check(self) -> None:
        """Raise ConfigError if training has changed a recorded value."""
        for name, value, fingerprint in self._current_values():
            text = "a tensor" if torch.is_tensor(value) else str(value)[:40]
            before, text_before = self.first.setdefault(name, (fingerprint, text))
            if before == fingerprint:
                continue
            remedy = (
                "register it as a buffer" if name.startswith("model.") else "keep it as a tensor in optimizer.state"
            )
            raise ConfigError(
                f"{name}: training changed this attribute from {text_before} to {text}, and checkpoints do not contain "
                f"it, so a resumed run would start from its first value again; {remedy}, or, if every step computes it "
                "again, let its name begin with an underscore"
            )

    def _current_values(self) -> Iterator[tuple[str, Any, str]]:
        not_watched = SCHEDULES.keys() | ({"p"} if "dropout" in SCHEDULES else set())  # p of nn.Dropout
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
                if not key.startswith(("_", "initial_")) and key not in not_watched and (found := _fingerprint(value)):
                    yield f"{prefix}.{key}", value, found


def _fingerprint(value: Any) -> str | None:
    """Return a string that is equal only for equal values; None for a value that is not watched."""
    if isinstance(value, Mapping):
        value = [part for item in value.items() for part in item]
    if isinstance(value, list | tuple | deque):
        parts = [_fingerprint(part) for part in value]
        return None if None in parts else f"[{', '.join(map(str, parts))}]"
    if torch.is_tensor(value):
        if value.numel() > MAX_WATCHED or isinstance(value, nn.Parameter):
            return None
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {list(value.shape)} {sha256(content).hexdigest()}"
    return repr(value) if isinstance(value, int | float | str) else None
