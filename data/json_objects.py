"""JSON objects: validated when read, and written without values that JSON lacks (NaN, infinity)."""

import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints


def finite_or_null(metrics: Mapping[Any, Any]) -> dict[Any, Any]:
    """Replace NaN and infinities, which JSON does not have, by null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in metrics.items()
    }


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object; raise ValueError if the text is something else."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} instead of a JSON object")
    return value


def from_json(value: Any, kind: Any, name: str) -> Any:
    """Convert a value read from JSON to the type `kind`.

    `kind` is a plain type, a union, dict[str, ...], tuple[...] or a dataclass with fields of these types. For a
    dataclass unknown keys are ignored, and missing ones get the default of their field.

    Raises:
        ValueError: the value does not have this type; the message names the offending part by its path below `name`.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        for one in arguments:
            try:
                return from_json(value, one, name)
            except ValueError:
                pass
    elif origin is dict and isinstance(value, dict):
        return {key: from_json(item, arguments[1], f"{name}.{key}") for key, item in value.items()}
    elif origin is tuple and isinstance(value, list) and len(value) == len(arguments):
        return tuple(from_json(item, one, name) for item, one in zip(value, arguments, strict=True))
    elif isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        if missing := [f.name for f in fields(kind) if f.name not in value and f.default is MISSING]:
            raise ValueError(f"{name} has no {missing[0]}")
        present = {key: hint for key, hint in hints.items() if key in value}
        return kind(**{key: from_json(value[key], hint, f"{name}.{key}") for key, hint in present.items()})
    elif type(value) is kind or (kind is float and type(value) is int):
        return value
    raise ValueError(f"{name} is {str(value)[:40]!r}, not of type {getattr(kind, '__name__', kind)}")
