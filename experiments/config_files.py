"""Config files in the command line of an arm."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from data.files import write_once


def copy_config_files(words: list[str], folder: Path) -> list[str]:
    """Copy config files into subfolders named by a hash of their content; return the words with the copies' paths.

    An edit of a file during an experiment then changes no run. The copies keep the names of the files, from which
    train.py derives the name of a run.
    """

    def copy(name: str) -> str:
        file = Path(name).expanduser()
        if not file.is_file():
            return name
        content = file.read_bytes()
        return str(write_once(folder / sha256(content).hexdigest()[:12] / file.name, content))

    return replace_config_files(words, copy)


def replace_config_files(words: list[str], rename: Callable[[str], str]) -> list[str]:
    """Return a command line with `rename` applied to the name of each config file."""
    replaced = []
    for before, word in zip(["", *words], words, strict=False):
        option, equals, value = word.partition("=")
        if before == "--config":
            word = rename(word)
        elif option == "--config" and equals:
            word = f"{option}={rename(value)}"
        replaced.append(word)
    return replaced
