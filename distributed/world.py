"""Rank and number of processes, from the launcher's environment variables; usable before torch is imported."""

import os


def num_processes() -> int:
    """Return the number of processes on all machines."""
    return int(os.environ.get("WORLD_SIZE", 1))


def process_rank() -> int:
    """Return the rank of this process among all processes, from 0."""
    return int(os.environ.get("RANK", 0))


def is_main_process() -> bool:
    """Return whether this is process 0, the one that prints."""
    return process_rank() == 0
