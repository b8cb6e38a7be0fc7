"""Errors whose messages are for the user: setting, value, remedy."""


class RunError(RuntimeError):
    """A run cannot continue."""


class ConfigError(ValueError):
    """A setting or an input that the user must change; the message names it, its value and a remedy."""


def unhandled_choice(setting: str, choice: str) -> ConfigError:
    """Return the error for a choice that the schema allows, but that the code reading the setting does not handle."""
    return ConfigError(f"{setting}: {choice!r} is not implemented; add it where {setting} is read")
