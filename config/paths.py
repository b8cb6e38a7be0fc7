"""Paths in settings."""

from pathlib import Path

from config.errors import ConfigError


def expand_user_path(setting: str, path: str | Path) -> Path:
    """Return the path with ~ or ~USER replaced by the home directory.

    Args:
        setting: its name, for the error message.
        path: the value of the setting.

    Raises:
        ConfigError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{setting}: {str(path)!r} names a user that this machine does not have") from None
