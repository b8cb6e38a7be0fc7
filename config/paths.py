"""Paths in settings."""

from pathlib import Path

from config.errors import ConfigError


def expanded(setting: str, path: str | Path) -> Path:
    """The path, with a home directory in place of ~ or ~USER.

    Raises:
        ConfigError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        problem = f"{str(path)!r} is the home of a user whom this machine does not know"
        raise ConfigError(f"{setting}: {problem}") from None
