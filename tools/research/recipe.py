"""Edit settings in the text of a recipe, keeping its comments."""

import re
from collections.abc import Sequence
from typing import Any

import yaml

from config.errors import ConfigError
from config.yaml_files import read_strings


def parse_settings(words: Sequence[str]) -> dict[str, str]:
    """Return settings given as `--section.name VALUE` or `--section.name=VALUE`; raise ConfigError for other words."""
    settings, remaining = {}, list(words)
    while remaining:
        option, equals, value = remaining.pop(0).partition("=")
        if not re.fullmatch(r"--\w+(\.\w+)?", option) or option == "--config" or not (equals or remaining):
            raise ConfigError(f"idea: {option} must be --section.name VALUE, a setting of train.py")
        settings[option[2:]] = value if equals else remaining.pop(0)
    return settings


def set_values(text: str, values: dict[str, str]) -> str:
    """Return the text of a YAML file with values of settings replaced or added.

    Raises:
        ConfigError: the file is not written as lines of `name: value` in sections.
    """
    lines = text.splitlines()
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        # Without a section, a new setting goes above the first one.
        begin = next((index for index, line in enumerate(lines) if re.match(r"\w", line)), 0)
        end = len(lines)
        if section:
            headings = [index for index, line in enumerate(lines) if re.match(rf"{section}:\s*(#.*)?$", line)]
            if not headings:
                lines += ["", f"{section}:"]
            begin = headings[0] + 1 if headings else len(lines)
            end = next((index for index in range(begin, len(lines)) if re.match(r"[^\s#]", lines[index])), len(lines))
        indent = "  " * bool(section)
        same = [index for index in range(begin, end) if re.match(rf"{indent}{key}:", lines[index])]
        if same:
            lines[same[0]] = f"{indent}{key}: {value}"
        else:
            lines.insert(begin, f"{indent}{key}: {value}")
    edited = "\n".join(lines) + "\n"
    try:
        wrong = flatten(edited) != flatten(text) | {name: read_strings(value) for name, value in values.items()}
    except (yaml.YAMLError, AttributeError):
        wrong = True
    if wrong:
        raise ConfigError(f"config: {', '.join(values)} cannot be set in the recipe; write each setting as one line")
    return edited


def flatten(text: str) -> dict[str, Any]:
    """Return the settings of a YAML file by `section.name`."""
    flat: dict[str, Any] = {}
    for name, value in (read_strings(text) or {}).items():
        flat |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return flat
