"""The setting `launch` of everything that trains many runs."""

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from runtime.config.errors import ConfigError


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
        if (settings := accelerate_settings(words)) is not None:
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
        # Unlike Path.is_file of Python 3.11, isfile raises nothing for a word that is too long for a path.
        contents = [sha256(file.read_bytes()).hexdigest() for file in files if os.path.isfile(file)]
        return [self.precision, self.processes, *self.command, *contents]


def accelerate_settings(words: list[str]) -> dict[str, Any] | None:
    """Return the settings of an `accelerate launch` command: its file's, then its options'; None for other commands."""
    names = [Path(word).name for word in words]
    spellings = ("launch", "accelerate-launch", "accelerate.commands.launch")
    index = next((index for index, name in enumerate(names) if name in spellings), None)
    if index is None or "accelerate" not in " ".join(names[: index + 1]):
        return None
    from accelerate.commands.config.config_args import default_config_file  # imports torch
    from accelerate.commands.launch import launch_command_parser

    given = launch_command_parser().parse_known_args([*words[index + 1 :], "train.py"])[0]
    # Without --config_file, Accelerate reads the file written by `accelerate config`, unless --cpu is given.
    path = Path(given.config_file or ("" if given.cpu else default_config_file))
    file = yaml.safe_load(path.read_bytes()) or {} if path.is_file() else {}  # YAML includes JSON
    return file | {name: getattr(given, name) for name in getattr(given, "nondefault", ())}
