"""YAML that others wrote, read safely: no alias, for a few of them make gigabytes, and no key that is set twice."""

from collections.abc import Hashable
from typing import Any

import yaml

from config.errors import ConfigError


class _SafeLoader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()
            line = alias.start_mark.line + 1
            raise ConfigError(f"the alias *{alias.anchor} in line {line} is not read; write out what it stands for")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.MarkedYAMLError(problem=f"{twice[0]!r} is set twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


class _WordLoader(_SafeLoader):
    """Leaves what a value means to whoever knows its type: it tells text and null apart, and nothing else."""

    yaml_implicit_resolvers = {
        first_letter: [(tag, pattern) for tag, pattern in resolvers if tag == "tag:yaml.org,2002:null"]
        for first_letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def read_yaml(text: str) -> Any:
    """What was written by `yaml.safe_dump`, with the types that it had.

    Raises:
        yaml.YAMLError: it is no YAML, or has a key twice.
        ConfigError: it has an alias.
    """
    return yaml.load(text, _SafeLoader)


def read_words(text: str) -> Any:
    """The lists and mappings of a YAML text, whose numbers and switches stay the text that they are written as.

    So `010`, `1:30` and `1e3` mean in a file what they mean on a command line, and not what YAML has them for.

    Raises:
        yaml.YAMLError: it is no YAML, or has a key twice.
        ConfigError: it has an alias.
    """
    return yaml.load(text, _WordLoader)
