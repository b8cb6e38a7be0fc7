"""Rank and number of processes, from the launcher's environment variables; usable before torch is imported."""

import os
from collections.abc import Mapping

from runtime.config.errors import ConfigError


def num_processes() -> int:
    """Return the number of processes on all machines."""
    if (number := read_number("WORLD_SIZE", 1)) == 0:
        raise ConfigError("WORLD_SIZE: 0 processes; unset it, or use accelerate launch or torchrun")
    return number


def process_rank() -> int:
    """Return the rank of this process among all processes, from 0.

    A RANK without other processes is left behind in a shell.
    """
    return read_number("RANK", 0) if num_processes() > 1 else 0


def read_number(variable: str, default: int, environment: Mapping[str, str] | None = None) -> int:
    """Return the number in an environment variable, or the default; raise ConfigError if it has no number."""
    value = (os.environ if environment is None else environment).get(variable, str(default))
    if not value.isdecimal():
        raise ConfigError(f"{variable}: {value!r} is not a number; unset it, or use accelerate launch or torchrun")
    return int(value)


def is_main_process() -> bool:
    """Return whether this is process 0, the one that prints. A process whose RANK is wrong prints that."""
    try:
        return process_rank() == 0
    except ConfigError:
        return True
