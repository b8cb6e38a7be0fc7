"""The base class of all settings. It is in model/ because model/ imports no other package of this repository."""

from dataclasses import dataclass
from typing import Annotated, Any, Self

import pydantic
from annotated_types import Lt
from pydantic import BaseModel, ConfigDict

# Integers reach torch and NumPy as int64.
PositiveInt = Annotated[pydantic.PositiveInt, Lt(2**63)]
NonNegativeInt = Annotated[pydantic.NonNegativeInt, Lt(2**63)]


@dataclass(frozen=True)
class Unused:
    """Metadata of a setting: it has no effect if the setting `name` has one of the `values`.

    For example `zipf: Annotated[float, Unused("data.facts", 0)]`. `unused_settings` in runtime/config/unused.py finds
    the settings that a user gave in vain. The values without effect are named, not the others, so that a value that a
    fork adds, such as a new source of data, may use any setting. If there is a second rule, `also`, the setting has no
    effect where both apply.
    """

    name: str
    values: tuple[Any, ...]
    also: Self | None

    def __init__(self, name: str, *values: Any, also: Self | None = None):
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "also", also)


class Settings(BaseModel):
    """Frozen, typed settings. Each field is a setting; `--help` shows its default and its docstring.

    Raises:
        pydantic.ValidationError: a ValueError for unknown names, values of another type, infinity and NaN.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_by_name=True,  # also a field with an alias
        defer_build=True,
    )

    @classmethod
    def from_flat(cls, settings: dict[str, Any]) -> Self:
        """Return validated settings from values named like `optimizer.lr`."""
        nested: dict[str, Any] = {}
        for key, value in settings.items():
            section, _, name = key.rpartition(".")
            (nested.setdefault(section, {}) if section else nested)[name] = value
        return cls.model_validate(nested)

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with some settings changed; `**{"optimizer.lr": 0.1}` changes one of a section."""
        settings = dict(self)
        for name, value in changes.items():
            section, _, name_in_section = name.partition(".")
            settings[section] = settings[section].replace(**{name_in_section: value}) if name_in_section else value
        return type(self).model_validate(settings)
