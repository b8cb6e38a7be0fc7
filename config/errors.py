"""Errors whose messages are for the user: setting, value, remedy."""


class RunError(RuntimeError):
    """A run cannot continue."""


class ConfigError(ValueError):
    """A setting or an input that the user must change; the message names it, its value and a remedy."""
