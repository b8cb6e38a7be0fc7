"""Read YAML without its guesses: the type of a setting decides what a word such as `010`, `1e3`, `1:30` or `yes` means.

YAML 1.1 would read 8, '1e3', 90 and true. Here every word is a string, as on a command line, except null.
"""

from collections.abc import Hashable
from typing import Any

import yaml


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


def compose(text: str) -> yaml.Node | None:
    """Return the nodes of a YAML text, None if it has none; raise yaml.YAMLError or RecursionError."""
    return yaml.compose(text, _Loader)


def construct(node: yaml.Node) -> Any:
    """Return the lists, dicts, strings and None of a node; raise yaml.YAMLError, also for a key that is set twice."""
    return _Loader("").construct_document(node)
