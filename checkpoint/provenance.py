"""Where a result comes from: the versions, the commit and how it was computed, kept in every checkpoint."""

import platform
import subprocess
from pathlib import Path

import accelerate
import torch
from accelerate import Accelerator

from checkpoint.identity import code_hash
from config.schema import TrainConfig
from model.gpt import GPTModel


def provenance() -> dict[str, str | None]:
    """Versions of what computes, the hash of the code that trains, and the commit of this repository: None outside a
    checkout, `-dirty` after changes."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
        "code": code_hash(),
        "git_commit": _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"),
    }


def arrangement(accelerator: Accelerator) -> dict[str, str | int | None]:
    """How a run is computed: what of it may change its bits, and is no setting of it."""
    from distributed.launch import num_shards  # a benchmark asks for the provenance alone, where less is installed

    return {
        "mixed_precision": accelerator.mixed_precision,
        "processes": accelerator.num_processes,
        "shards": num_shards(accelerator),
        "threads": torch.get_num_threads() if accelerator.device.type == "cpu" else None,
    }


def network_size(config: TrainConfig) -> dict[str, int]:
    """`parameters`, and `flops_per_token` to train on one, of the network that these settings make; without memory."""
    with torch.device("meta"):
        network = GPTModel(config.model)
    return {"parameters": network.num_parameters(), "flops_per_token": network.flops_per_token(config.seq_len)}


def uncommitted_changes() -> str | None:
    """What of this repository's code is not as in its commit, as a patch; new files of Python too."""
    new = (_git("ls-files", "-z", "--others", "--exclude-standard", "*.py") or "").split("\0")
    patches = [_git("diff", "HEAD"), *(_git("diff", "--no-index", "/dev/null", file) for file in new if file)]
    return "\n".join(filter(None, patches)) or None


def _git(*arguments: str) -> str | None:
    try:
        # Git refuses a clone of another user, as in a container, for fear of code that the clone could bring. Its code
        # is running already.
        command = ["git", "-c", "safe.directory=*", *arguments]
        done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, timeout=60)
    except (FileNotFoundError, subprocess.TimeoutExpired):  # or it waits, as for a disk that is gone
        return None
    return done.stdout.decode(errors="replace").strip("\n") or None  # a patch may end with a line of one space
