"""Settings that a user gave and that have no effect, because of the value of another setting."""

from collections.abc import Container, Iterator
from functools import reduce
from typing import Any, NamedTuple

from model.settings import Settings, Unused
from runtime.config.help import all_fields, section_class, show


class UnusedSetting(NamedTuple):
    """A setting without effect, by its dotted name, and the setting that makes it so."""

    name: str
    value: Any
    because: str
    reason: str
    """The other setting with its value, such as "data.source: text"; of a rule with `also`, both of them."""
    is_default: bool

    @property
    def problem(self) -> str:
        """The message that refuses the setting."""
        return f"{self.name}: {show(self.value)} has no effect with {self.reason}; leave it out, or change the other"


def unused_settings(config: Settings, has_model: bool = True, typed: Container[str] = ()) -> Iterator[UnusedSetting]:
    """Yield the settings that are `Unused`, if their value asks for something.

    0, false and null do not, and neither does a default that nobody typed: the output of --print_config is a config.

    Args:
        config: all settings of a run.
        has_model: whether `model` has its final values; otherwise its settings are left out.
        typed: names of settings that the command line gave.
    """
    for name, field in all_fields(type(config)):
        if section_class(field) or (name.startswith("model.") and not has_model):
            continue
        value = _value(config, name)
        is_default = value == field.default
        if not value or (is_default and name not in typed):
            continue
        for rule in field.metadata:
            if isinstance(rule, Unused) and (reasons := _reasons(rule, config)):
                yield UnusedSetting(name, value, rule.name, " and ".join(reasons), is_default)


def _reasons(rule: Unused, config: Settings) -> list[str]:
    """Return the settings with their values because of which a rule applies; [] if it does not."""
    other = _value(config, rule.name)
    if other not in rule.values:
        return []
    reasons = [f"{rule.name}: {show(other)}"]
    if rule.also is None:
        return reasons
    others = _reasons(rule.also, config)
    return [*reasons, *others] if others else []


def _value(config: Settings, name: str) -> Any:
    return reduce(getattr, name.split("."), config)
