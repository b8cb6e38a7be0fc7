"""The tokenizer that a run keeps in RUN/tokenizer, so that its model can be used when the corpus is gone.

Every checkpoint of the run has the hashes of its files. run/load.py and the audit compare them, and a start rebuilds a
damaged tokenizer from the corpus.
"""

from pathlib import Path

from checkpoint.manifest import readable_checkpoints
from data.files import copy_folder, move_aside, sha256


def file_hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file in the folder and below, by its path there; {} without such a folder."""
    files = {file.relative_to(folder): file for file in sorted(folder.rglob("*")) if file.is_file()}
    return {
        name.as_posix(): sha256(file)
        for name, file in files.items()
        if not any(part.startswith(".") for part in name.parts)  # hidden files are a file manager's, not a tokenizer's
    }


def changed_files(folder: Path, expected: dict[str, str]) -> str:
    """The files of the folder that are not as expected, missing or new, in words; "" if none is."""
    found = file_hashes(folder)
    return ", ".join(sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)))


def expected_hashes(run: Path) -> dict[str, str] | None:
    """What the newest checkpoint of the run that knows it says of its tokenizer; None if none does."""
    known = (manifest.tokenizer for manifest in readable_checkpoints(run / "checkpoints").values())
    return next(filter(None, known), None)


def keep_tokenizer(corpus: Path, run: Path) -> None:
    """Make RUN/tokenizer that of the corpus, unless it is what the run's checkpoints expect; or say why not."""
    theirs, kept = corpus / "tokenizer", run / "tokenizer"
    expected = expected_hashes(run) or file_hashes(theirs)
    changed = changed_files(kept, expected)
    if not changed:
        return
    if elsewhere := changed_files(theirs, expected):
        print(
            f"{kept} is not what this run was trained with ({changed}), and cannot be made anew: {theirs} is not "
            f"either ({elsewhere}). Training goes on, and the model cannot be used."
        )
        return
    if kept.exists():
        print(f"{kept} was damaged ({changed}), and is made anew from {theirs}; what was there is {move_aside(kept)}.")
    copy_folder(theirs, kept)
