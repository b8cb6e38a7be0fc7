"""JSON objects: validated when read, and written without values that JSON lacks (NaN, infinity)."""

import json
import math
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


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


def from_json(value: Any, kind: type[T]) -> T:
    """Return a value read from JSON as a dataclass; unknown keys are ignored.

    Raises:
        ValueError: a value is missing or of another type; the message names it.
    """
    try:
        return _adapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)
