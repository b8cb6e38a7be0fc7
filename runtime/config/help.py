"""Settings in words: their names, the values that they take, and `--help`."""

import json
import textwrap
from collections.abc import Iterable, Iterator
from inspect import cleandoc
from shutil import get_terminal_size
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import MinLen
from pydantic.fields import FieldInfo

from model.settings import Settings, Unused

# Metadata of the settings of a tool, as in `runs: Annotated[list[str], POSITIONAL]`. POSITIONAL: an argument without
# `--`; a list takes one or more. PASSED_ON: all arguments that are not options of the tool, passed on to train.py.
POSITIONAL, PASSED_ON = "positional", "passed on"


def section_class(field: FieldInfo) -> type[Settings] | None:
    """Return the class of a field that is a group of settings, such as `optimizer`; None for a setting."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Settings) else None


def is_argument(field: FieldInfo) -> bool:
    """Return whether the value is given without the name of the setting."""
    return POSITIONAL in field.metadata or PASSED_ON in field.metadata


def all_fields(kind: type[Settings], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield each section and setting with its dotted name, such as `optimizer` and then `optimizer.lr`."""
    for name, field in kind.model_fields.items():
        name = prefix + (field.alias or name)
        yield name, field
        if section := section_class(field):
            yield from all_fields(section, f"{name}.")


def describe(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Describe the values of a type in words, such as "a positive integer or null"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe(arguments[0], arguments[1:])
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (Union, UnionType):
        return " or ".join(map(describe, arguments))
    if origin is tuple:
        return f"[{', '.join(map(describe, arguments))}]"
    if origin is list:
        return f"a list, each item {describe(arguments[0])}"
    if origin is dict:
        return f"a mapping of {describe(arguments[0])} to {describe(arguments[1])}"
    if annotation in (int, float):
        return _describe_number("integer" if annotation is int else "number", metadata)
    if annotation is str and any(isinstance(item, MinLen) for item in metadata):
        return "a non-empty string"
    return {str: "a string", bool: "true or false", NoneType: "null"}.get(annotation, str(annotation))


def _describe_number(noun: str, metadata: Iterable[Any]) -> str:
    limits = {}
    for item in metadata:
        for limit in getattr(item, "metadata", [item]):  # those of pydantic.Field are within it
            limits |= {name: getattr(limit, name) for name in ("gt", "ge", "lt", "le") if hasattr(limit, name)}
    if limits.get("lt") == 2**63:
        del limits["lt"]
    if limits in ({"gt": 0}, {"ge": 0}):
        return f"a {'positive' if 'gt' in limits else 'non-negative'} {noun}"
    words = {"gt": "above", "ge": "of at least", "lt": "below", "le": "at most"}
    bounds = " and ".join(f"{word} {limits[name]}" for name, word in words.items() if name in limits)
    return f"{'an' if noun == 'integer' else 'a'} {noun} {bounds}".strip()


def show(value: Any) -> str:
    """Return a value as it is written in a config file."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(show, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{show(key)}: {show(item)}' for key, item in value.items())}}}"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value) or "''"


def explain(errors: Iterable[Any], fields: dict[str, FieldInfo], values: dict[str, Any]) -> dict[str, str]:
    """Return a message `setting: value; remedy` for each setting in the errors of a pydantic.ValidationError.

    `fields` and `values` are named like `optimizer.lr`.
    """
    problems = {}
    for problem in errors:
        names = [".".join(map(str, problem["loc"][:length])) for length in range(len(problem["loc"]), 0, -1)]
        name = next((name for name in names if name in fields), "")  # the rest is a place within its value
        if problem["type"] == "value_error":  # raised by a validator, with its own message
            problems.setdefault(name, problem["msg"].removeprefix("Value error, "))
            continue
        expected = f"must be {describe(fields[name].annotation, fields[name].metadata)}"
        if problem["type"] == "less_than" and problem.get("ctx") == {"lt": 2**63}:
            expected = "is too large; use one below 2**63"
        if problem["type"] == "missing" and name == names[0]:
            is_list = fields[name].annotation == list[str]
            problems[name] = f"{name}: missing; " + ("name at least one" if is_list else f"it {expected}")
            continue
        problems.setdefault(name, f"{name}: {show(values[name])} {expected}")
    return problems


def values_of(field: FieldInfo) -> str:
    """Describe the values and the default of a setting, such as "a positive integer; default 10"."""
    words = [describe(field.annotation, field.metadata)]
    if not field.is_required():
        words.append(f"default {show(field.default)}")
    for rule in field.metadata:
        if isinstance(rule, Unused):
            words.append(f"no effect with {_describe_rule(rule)}")
    return "; ".join(words)


def _describe_rule(rule: Unused) -> str:
    words = f"{rule.name}: {' or '.join(map(show, rule.values))}"
    return words if rule.also is None else f"{words} and {_describe_rule(rule.also)}"


def wrapped(text: str, indent: int = 0, hanging: int = 0) -> str:
    """Wrap each paragraph of a text to the width of the terminal, but at most 100 columns.

    All lines are indented by `indent` columns, those after the first one of a paragraph also by `hanging`.
    """
    width = min(get_terminal_size((100, 24)).columns, 100)
    first, others = " " * indent, " " * (indent + hanging)
    paragraphs = cleandoc(text).split("\n\n")
    return "\n\n".join(textwrap.fill(p, width, initial_indent=first, subsequent_indent=others) for p in paragraphs)


def print_help(kind: type[Settings], usage: str, intro: str) -> None:
    """Print the usage, and every setting with its description, values and default."""
    print(f"{wrapped(f'usage: {usage}', hanging=7)}\n\n{wrapped(intro)}\n")
    for name, field in all_fields(kind):
        if section := section_class(field):
            print(f"\n{wrapped(f'{name}: {section.__doc__}')}\n")
            continue
        name = name if is_argument(field) else f"--{name}"
        text = f"{' '.join((field.description or '').split())} ({values_of(field)})"
        print(f"  {name}\n{wrapped(text, indent=6)}")
