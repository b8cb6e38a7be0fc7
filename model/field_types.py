"""Types of settings: the range of a number is declared with its field.

The command line refuses values that do not have the type of their field; `invalid_values` checks settings that come
from elsewhere, such as a stored run or code.
"""

import math
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from jsonargparse.typing import restricted_number_type

LARGEST_FLOAT = 3.4028234e38  # of float32
LARGEST_INT = 2**63 - 1  # of int64

_DESCRIPTIONS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    types.NoneType: "null",
}


def _restricted(name: str, base: type, bounds: list[tuple[str, float]], description: str) -> Any:
    restricted: Any = restricted_number_type(name, base, bounds)
    check = restricted.__new__
    # Settings are plain numbers: torch.compile in torch 2.11 splits the graph at a subclass of float.
    restricted.__new__ = lambda cls, value: base(check(cls, value))
    _DESCRIPTIONS[restricted] = description
    return restricted


if TYPE_CHECKING:  # a restricted type is made at run time, which a type checker cannot follow
    PositiveInt = NonNegativeInt = int
    PositiveFloat = NonNegativeFloat = OpenUnitInterval = HalfOpenUnitInterval = PositiveUnitInterval = float
    UpTo256 = UpTo1000 = UpTo1024 = UpTo100000 = TimeoutSeconds = int
else:
    PositiveInt = _restricted("PositiveInt", int, [(">", 0)], "a positive integer")
    NonNegativeInt = _restricted("NonNegativeInt", int, [(">=", 0)], "a non-negative integer")
    PositiveFloat = _restricted("PositiveFloat", float, [(">", 0)], "a positive number")
    NonNegativeFloat = _restricted("NonNegativeFloat", float, [(">=", 0)], "a non-negative number")
    OpenUnitInterval = _restricted("OpenUnitInterval", float, [(">", 0), ("<", 1)], "a number above 0 and below 1")
    HalfOpenUnitInterval = _restricted(
        "HalfOpenUnitInterval", float, [(">=", 0), ("<", 1)], "a number from 0 to below 1"
    )
    PositiveUnitInterval = _restricted(
        "PositiveUnitInterval", float, [(">", 0), ("<=", 1)], "a number above 0 and at most 1"
    )
    # Upper bounds: larger values would hang the machine.
    UpTo256 = _restricted("UpTo256", int, [(">=", 0), ("<=", 256)], "an integer from 0 to 256")
    UpTo1000 = _restricted("UpTo1000", int, [(">=", 0), ("<=", 1000)], "an integer from 0 to 1000")
    UpTo1024 = _restricted("UpTo1024", int, [(">", 0), ("<=", 1024)], "an integer from 1 to 1024")
    UpTo100000 = _restricted("UpTo100000", int, [(">=", 0), ("<=", 100_000)], "an integer from 0 to 100000")
    # Clocks that count nanoseconds in int64 overflow above 2**31 seconds.
    TimeoutSeconds = _restricted("TimeoutSeconds", int, [(">", 0), ("<", 2**31)], f"an integer from 1 to {2**31 - 1}")


def describe(annotation: Any) -> str:
    """Describe the values of a type in words, such as "a positive integer or null"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe, arguments))
    if origin is tuple:
        return f"[{', '.join(map(describe, arguments))}]"
    if origin is list:
        return f"a list, each item {describe(arguments[0])}"
    if origin is dict:
        return f"a mapping of {describe(arguments[0])} to {describe(arguments[1])}"
    return _DESCRIPTIONS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def accepts(annotation: Any, value: Any) -> bool:
    """Return whether a value has a type that a field may be annotated with. A list is accepted for a tuple."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return value in arguments
    if origin in (Union, types.UnionType):
        return any(accepts(argument, value) for argument in arguments)
    if origin is tuple:
        is_sequence = isinstance(value, list | tuple) and len(value) == len(arguments)
        return is_sequence and all(map(accepts, arguments, value))
    if origin is list:
        return isinstance(value, list) and all(accepts(arguments[0], item) for item in value)
    if origin is dict:
        key_type, item_type = arguments
        return isinstance(value, dict) and all(accepts(key_type, k) and accepts(item_type, v) for k, v in value.items())
    if annotation is Any:
        return True
    if annotation is bool or not issubclass(annotation, (int, float)):
        return isinstance(value, annotation)
    allowed = int if issubclass(annotation, int) else int | float
    if isinstance(value, bool) or not isinstance(value, allowed):
        return False
    try:
        annotation(value)
    except (ValueError, OverflowError):
        return False
    return True


def invalid_values(settings: Any, prefix: str = "") -> list[str]:
    """Describe each field of a dataclass, and of nested dataclasses, whose value does not have the field's type.

    Numbers must also be finite, and be representable in float32 or int64.
    """
    problems = []
    for field in fields(settings):
        value, name = getattr(settings, field.name), prefix + field.name
        if is_dataclass(field.type):
            problems += invalid_values(value, f"{name}.")
        elif not accepts(field.type, value):
            shown = "null" if value is None else value
            problems.append(f"{name}: {shown} must be {describe(field.type)}")
        else:
            problems += _unrepresentable(name, value)
    return problems


def _unrepresentable(name: str, value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [problem for key, item in value.items() for problem in _unrepresentable(f"{name}.{key}", item)]
    if isinstance(value, list | tuple):
        return [problem for item in value for problem in _unrepresentable(name, item)]
    if isinstance(value, float) and not (math.isfinite(value) and abs(value) <= LARGEST_FLOAT):
        return [f"{name}: {value} must be a finite number of at most {LARGEST_FLOAT:.1e}"]
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        return [f"{name}: {value} is too large; use one below 2**63"]
    return []
