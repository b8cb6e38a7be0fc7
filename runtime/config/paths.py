"""Paths in settings."""

import os
import re
from pathlib import Path

from runtime.config.errors import ConfigError


def expand_user_path(setting: str, path: str | Path) -> Path:
    """Expand ~ or ~USER in a path.

    Raise ConfigError, which names `setting`, if the path is empty, as an unset variable of a shell leaves it, if there
    is no such user, or if the path has an environment variable, such as $HOME or ${HOME}. Other names may have a dollar
    sign.
    """
    if not str(path):
        raise ConfigError(f"{setting}: '' is no path; name one, such as . for the current directory")
    expanded = re.sub(r"\$(?:{([A-Z]\w*)}|([A-Z]\w*))", lambda match: os.path.expandvars(match[0]), str(path))
    if expanded != str(path):
        raise ConfigError(f"{setting}: {str(path)!r} has a variable that only a shell expands; write {expanded!r}")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{setting}: {str(path)!r} names a user that this machine does not have") from None
