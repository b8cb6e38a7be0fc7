"""Provenance of a result: versions, commit and processes, stored in every checkpoint and session."""

import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

import accelerate
import torch
from accelerate import Accelerator

from runtime.distributed.launch import num_shards, uses_cpu
from runtime.machine.cpu import processor_name
from trainer.checkpoint.identity import ROOT, code_hash, training_code

# A patch that applies, whatever the user's configuration (diff.external, color.ui, diff.noprefix, textconv) says.
PLAIN_DIFF = (
    *("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--binary"),
    *("--src-prefix=a/", "--dst-prefix=b/", "--unified=3"),
)
MAX_NEW_FILE_BYTES = 10**7  # a larger file is data, which a patch does not keep


@cache  # the code of this process, even if its files are edited later; git is slow on a network disk
def provenance(root: Path = ROOT) -> dict[str, str | None]:
    """Return the versions of Python, torch and Accelerate, the hash of the code that trains, the commit and the device.

    `git_commit` is None outside a git checkout, and ends in `-dirty` where a tracked file below `root` differs from it.
    """
    commit = _git(root, "describe", "--always", "--abbrev=40", "--exclude=*")
    is_dirty = commit and _git(root, "diff", "--name-only", "HEAD", "--", ".")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
        "code": code_hash(root),
        "git_commit": f"{commit}-dirty" if is_dirty else commit,
        "device": "cpu" if uses_cpu(os.environ) else "cuda" if torch.cuda.is_available() else "mps",
    }


def launch_facts(accelerator: Accelerator) -> dict[str, str | int | None]:
    """Return the facts about the launch that may change the bits of a run without being settings of it."""
    device = accelerator.device
    return {
        "mixed_precision": accelerator.mixed_precision,
        "processes": accelerator.num_processes,
        "shards": num_shards(accelerator),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
    }


def uncommitted_changes(root: Path = ROOT) -> bytes | None:
    """Return the uncommitted changes below `root`, and new files of code, as a patch; None if there are none.

    New files are Python files and, up to MAX_NEW_FILE_BYTES, all others that count as code (`training_code`), such as
    kernels. `root` may be a folder of a larger repository: the patch has nothing outside it, and its paths are relative
    to it.
    """
    files = training_code(root).items()
    code = {file.relative_to(root).as_posix() for file, content in files if len(content) <= MAX_NEW_FILE_BYTES}
    new = (_git(root, "ls-files", "-z", "--others", "--exclude-standard") or "").split("\0")
    patches = [_git(root, *PLAIN_DIFF, "--relative", "HEAD", "--", ".")]
    for file in new:
        if file.endswith(".py") or file in code:
            patches.append(_git(root, *PLAIN_DIFF, "--no-index", "/dev/null", file))
    changes = "\n".join(filter(None, patches))
    return f"{changes}\n".encode(errors="surrogateescape") if changes else None


def _git(root: Path, *arguments: str) -> str | None:
    """Return the output of a git command that runs in `root`; None if it is empty or the command cannot be run."""
    if (git := shutil.which("git")) is None:
        return None
    # By default git refuses a clone that another user owns, as in a container, since its hooks could run that user's
    # code. The code of this clone is running already.
    command = [git, "-c", "safe.directory=*", *arguments]
    environment = os.environ | {"GIT_DIFF_OPTS": ""}  # otherwise it overrides --unified
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:  # its disk does not respond
        return None
    # A patch keeps bytes that are not UTF-8, and may end with a line of one space.
    return done.stdout.decode(errors="surrogateescape").strip("\n") or None
