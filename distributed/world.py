"""Which of the processes that a launcher started this one is; known before torch is imported."""

import os


def num_processes() -> int:
    """How many processes the launcher started in all."""
    return int(os.environ.get("WORLD_SIZE", 1))


def is_main_process() -> bool:
    """Whether this process is the one that prints; known before there is a process group."""
    return int(os.environ.get("RANK", 0)) == 0
