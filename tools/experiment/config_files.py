"""Config files in the command line of an arm."""

import os
from hashlib import sha256
from pathlib import Path

from config.paths import expand_user_path
from data.files import write_once
from tools.experiment import change


def copy_config_files(words: list[str], folder: Path, code: Path | None = None) -> list[str]:
    """Copy config files into subfolders named by a hash of their content; return the words with the copies' paths.

    With `code`, a config file of this repository is replaced by the one in that folder. An edit of a file during an
    experiment then changes no run. The copies keep the names of the files, from which train.py derives that of a run.
    """

    def copy(name: str) -> str:
        file = Path(os.path.abspath(expand_user_path("config", name)))
        if code and file.is_relative_to(change.ROOT) and (code / file.relative_to(change.ROOT)).exists():
            file = code / file.relative_to(change.ROOT)
        if not file.is_file():
            return name
        content = file.read_bytes()
        return str(write_once(folder / sha256(content).hexdigest()[:12] / file.name, content))

    copied = []
    for before, word in zip(["", *words], words, strict=False):
        option, equals, value = word.partition("=")
        if before == "--config":
            word = copy(word)
        elif option == "--config" and equals:
            word = f"{option}={copy(value)}"
        copied.append(word)
    return copied
