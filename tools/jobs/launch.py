"""The setting `launch` of everything that trains many runs."""

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from config.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """The command that starts runs, with the precision and number of processes that it sets."""

    command: tuple[str, ...] = ()
    """Words before train.py."""
    precision: str | None = "no"
    """Mixed precision; None if unknown before a run starts, for example because the command is a script."""
    processes: int | None = 1

    @classmethod
    def parse(cls, launch: str | None) -> "Launch":
        """Parse the setting `launch`; None starts this Python.

        Raises:
            ConfigError: its program is not found, or a quotation mark is missing.
        """
        try:
            words = shlex.split(launch) if launch else [sys.executable]
        except ValueError as error:
            raise ConfigError(f"launch: {launch!r} cannot be parsed: {error}") from None
        if not words or shutil.which(words[0]) is None:
            raise ConfigError(f"launch: {launch!r} does not start with a program on the PATH; activate the environment")
        if any("accelerate" in Path(word).name for word in words):
            from distributed.launch_file import parse_launch_command  # imports torch

            if (settings := parse_launch_command(words, os.getcwd())) is not None:
                processes = settings.get("num_processes")
                return cls(tuple(words), settings.get("mixed_precision") or "no", processes and int(processes))
        program = Path(words[0]).name
        inherits_environment = program.startswith(("python", "torchrun")) and "accelerate" not in " ".join(words[1:])
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no") if inherits_environment else None
        return cls(tuple(words), precision, None if launch else 1)

    @property
    def identity(self) -> list[Any]:
        """Precision and processes; if either is unknown, also the command and hashes of the files that it names."""
        if None not in (self.precision, self.processes):
            return [self.precision, self.processes]
        files = [Path(word) for word in self.command[1:]]
        contents = [sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()]
        return [self.precision, self.processes, *self.command, *contents]
