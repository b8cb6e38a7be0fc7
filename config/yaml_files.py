"""Read YAML safely: without aliases, a few of which expand to gigabytes, and without duplicate keys."""

from collections.abc import Hashable
from typing import Any

import yaml

from config.errors import ConfigError


class _SafeLoader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()
            line = alias.start_mark.line + 1
            raise ConfigError(f"the alias *{alias.anchor} in line {line} is not supported; repeat its value")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if duplicates := [key for key in keys if keys.count(key) > 1]:
            raise yaml.MarkedYAMLError(problem=f"{duplicates[0]!r} is set twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


class _StringLoader(_SafeLoader):
    """Leaves every scalar a string, except null: the type of its setting determines what it means."""

    yaml_implicit_resolvers = {
        first_letter: [(tag, pattern) for tag, pattern in resolvers if tag == "tag:yaml.org,2002:null"]
        for first_letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def read_yaml(text: str) -> Any:
    """Parse YAML with YAML's types, as yaml.safe_dump writes it; raise yaml.YAMLError, or ConfigError for an alias."""
    return yaml.load(text, _SafeLoader)


def read_strings(text: str) -> Any:
    """Read lists and mappings of YAML text as `read_yaml` does, but their numbers and booleans stay strings.

    So `010`, `1:30` and `1e3` mean the same in a file as on a command line. YAML 1.1 would read 8, 90 and '1e3'.
    """
    return yaml.load(text, _StringLoader)
