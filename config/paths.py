"""Paths in settings."""

from pathlib import Path

from config.errors import ConfigError


def expand_user_path(setting: str, path: str | Path) -> Path:
    """Return the path with ~ or ~USER replaced by the home directory.

    Args:
        setting: what the error message names.
        path: the value of the setting.

    Raises:
        ConfigError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        problem = f"{str(path)!r} is in the home directory of a user that this machine does not have"
        raise ConfigError(f"{setting}: {problem}") from None
