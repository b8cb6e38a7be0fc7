"""The tokenizer in RUN/tokenizer: a copy, so that the model of a run can be used without the corpus.

Every checkpoint has the hashes of its files. Loading and auditing a run compare them, and train.py restores
a damaged copy from the corpus.
"""

from pathlib import Path

from checkpoint.manifest import readable_checkpoints
from data.files import copy_folder, move_aside, sha256


def hash_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below the folder, by its path in it; {} if there is no such folder."""
    files = {file.relative_to(folder): file for file in sorted(folder.rglob("*")) if file.is_file()}
    return {
        name.as_posix(): sha256(file)
        for name, file in files.items()
        if not any(part.startswith(".") for part in name.parts)  # hidden files, such as those of a file manager
    }


def changed_files(folder: Path, expected: dict[str, str]) -> str:
    """Return the files of the folder that are changed, missing or new, separated by commas; "" if there are none."""
    found = hash_files(folder)
    return ", ".join(sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)))


def expected_hashes(run: Path) -> dict[str, str] | None:
    """Return the hashes of the tokenizer's files from the newest checkpoint that has them; None if none does."""
    known = (manifest.tokenizer for manifest in readable_checkpoints(run / "checkpoints").values())
    return next(filter(None, known), None)


def keep_tokenizer(corpus: Path, run: Path) -> None:
    """Copy the tokenizer of the corpus to RUN/tokenizer, unless RUN/tokenizer has the hashes in the checkpoints.

    If the corpus has another tokenizer than the checkpoints, print that and copy nothing.
    """
    theirs, kept = corpus / "tokenizer", run / "tokenizer"
    expected = expected_hashes(run) or hash_files(theirs)
    changed = changed_files(kept, expected)
    if not changed:
        return
    if changed_there := changed_files(theirs, expected):
        print(
            f"{kept} is not the tokenizer of this run ({changed}) and cannot be restored, because {theirs} differs "
            f"from it, too ({changed_there}). Training continues, but the model cannot be used."
        )
        return
    if kept.exists():
        print(f"{kept} was damaged ({changed}): it is moved to {move_aside(kept)} and restored from {theirs}.")
    copy_folder(theirs, kept)
