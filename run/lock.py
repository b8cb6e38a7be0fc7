"""The lock of a run directory: only one training at a time writes into it."""

import os
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from config.errors import ConfigError
from data.files import lock

LOCK_FILE = ".lock"
IN_USE = "is in use: another training is running in it"


class RunLock:
    """Holds the lock file of a run directory; the file is inside it, because several paths may name the directory."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._file: TextIO | None = None

    def acquire(self) -> None:
        """Take the lock, and create the directory if it is absent; raise ConfigError if another process holds it.

        A lock that is held already is released: that directory has been moved aside.
        """
        self.release()
        self.directory.mkdir(parents=True, exist_ok=True)
        file = self._file = open(self.directory / LOCK_FILE, "w")  # noqa: SIM115 - open while it is locked
        os.register_at_fork(after_in_child=file.close)  # data loader processes may outlive a killed run by seconds
        is_ours = False
        with suppress(FileNotFoundError):  # another training that starts afresh has just moved the directory aside
            is_ours = lock(file) and os.path.samefile(file.fileno(), self.directory / LOCK_FILE)
        if not is_ours:
            raise ConfigError(f"{self.directory} {IN_USE}; choose another name")

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._file is not None:
            self._file.close()


def is_locked(directory: Path) -> bool:
    """Return whether a process, on any machine, is training in the directory."""
    if not (file := directory / LOCK_FILE).exists():
        return False
    with open(file, "a") as opened:
        return not lock(opened)
