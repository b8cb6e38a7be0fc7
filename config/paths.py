"""Paths in settings."""

from pathlib import Path

from config.errors import ConfigError


def expand_user_path(setting: str, path: str | Path) -> Path:
    """Expand ~ or ~USER in a path; raise ConfigError, which names `setting`, if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{setting}: {str(path)!r} names a user that this machine does not have") from None
