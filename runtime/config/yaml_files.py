"""Read YAML without its guesses: the type of a setting decides what a word such as `010`, `1e3`, `1:30` or `yes` means.

YAML 1.1 would read 8, '1e3', 90 and true. Here every word is a string, as on a command line, except null.
"""

from collections.abc import Hashable
from typing import Any

import yaml

from runtime.config.errors import ConfigError


class _Loader(yaml.BaseLoader):
    def construct_scalar(self, node: yaml.ScalarNode) -> str | None:
        is_null = node.style is None and node.value in ("", "~", "null")  # style: the quotes
        return None if is_null else super().construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value} is set twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """Return the lists, dicts, strings and None of a text; raise ConfigError, with the line, for invalid YAML."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ConfigError("nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{line}{error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(str(error)) from None
