"""Errors that a user sees: their messages name the setting, its value and the remedy."""


class RunError(RuntimeError):
    """Why a run cannot go on, found by all processes together; the message says it to the user."""


class ConfigError(ValueError):
    """A setting or an input that the user must change: the message says which, what it is and what would be right."""


def no_code_for(setting: str, choice: str) -> ConfigError:
    """The error of the place that reads a setting, for a choice that it does not know."""
    return ConfigError(f"{setting}: {choice!r} is a choice without code; add it where {setting} is read")
