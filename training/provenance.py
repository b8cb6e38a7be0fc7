"""Where a result comes from: the versions and the commit, kept in every checkpoint and in W&B."""

import platform
import subprocess
from pathlib import Path

import accelerate
import torch


def provenance() -> dict[str, str | None]:
    """Versions of what computes, and the commit of this repository; None outside a checkout, `-dirty` after changes."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
        "git_commit": _git_commit(),
    }


def _git_commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
