"""Git operations of a chain: apply ideas to a commit, move the branch, and update the working tree."""

import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from config.errors import ConfigError
from config.paths import expand_user_path
from tools.experiment import change
from tools.experiment.change import AUTHOR, Change, apply_diff, commit_on, diff_of, git, resolve_commits, split_idea
from tools.experiment.settings import refuse_options
from tools.research.recipe import parse_settings, set_values


@dataclass(frozen=True)
class Idea:
    """Code and settings that can be applied to any commit."""

    text: str
    diff: str = ""
    settings: str = ""
    """Part of a command line, quoted as for a shell."""


def parse_idea(text: str) -> Idea:
    """Parse the argument of `try`; raise ConfigError if it is neither settings nor code, or sets a run's own option."""
    words = split_idea(text)
    code = words.pop(0) if not words[0].startswith("--") else ""
    parse_settings(words)
    refuse_options(words)
    if not code:
        diff = ""
    elif (patch := expand_user_path("idea", code)).is_file():
        diff = patch.read_bytes().decode(errors="surrogateescape")
    else:
        diff = diff_of(*resolve_commits(code))
    return Idea(text, diff, shlex.join(words))


def apply_ideas(ideas: Iterable[Idea], parent: str, recipe: str) -> tuple[Change, Change]:
    """Apply ideas to a commit, one after the other; settings are written into the recipe, a path in the repository.

    Return the change, and its code alone, without the settings. Raise ConfigError if an idea conflicts with the commit,
    or all of them together change nothing.
    """
    commit, values = parent, {}
    for idea in ideas:
        commit = apply_diff(idea.diff, commit) if idea.diff.strip() else commit
        values |= parse_settings(shlex.split(idea.settings))
    code = Change((), parent, commit, diff_of(parent, commit) if commit != parent else "")
    if values:
        text = set_values(git("show", f"{commit}:{recipe}") + "\n", values)
        with TemporaryDirectory() as folder:
            file = Path(folder, "recipe.yaml")
            file.write_bytes(text.encode(errors="surrogateescape"))
            blob = git("hash-object", "-w", str(file))
        commit = commit_on(commit, "update-index", "--cacheinfo", f"100644,{blob},{recipe}")
    if not files_between(parent, commit):
        raise ConfigError("idea: it changes nothing in the head of the chain; there is nothing to compare")
    return Change((), parent, commit, diff_of(parent, commit)), code


def write_commit(commit: str, parent: str, message: str) -> str:
    """Create a commit with the same files on another parent, by the user that git is configured for; return it."""
    author = {} if git("config", "--default", "", "user.email") else AUTHOR
    return git("commit-tree", f"{commit}^{{tree}}", "-p", parent, "-m", message, **author)


def tip(branch: str) -> str:
    """Return the commit that a branch points to, "" if there is no such branch."""
    return git("for-each-ref", "--format=%(objectname)", f"refs/heads/{branch}")


def current_branch() -> str:
    """Return the branch that is checked out, "" if there is none."""
    return git("branch", "--show-current")


def require_clean_tree() -> None:
    """Raise ConfigError if the working tree has uncommitted changes."""
    changed = git("diff", "--name-only", "HEAD").split("\n")
    changed += git("ls-files", "--others", "--exclude-standard", "*.py").split("\n")
    if names := [name for name in changed if name]:
        raise ConfigError(f"the working tree has changes ({', '.join(names[:3])}); commit or stash them first")


def edited_files(branch: str, before: str, after: str) -> list[str]:
    """Return the files that differ between two commits and whose version in the working tree is neither of the two.

    The list is empty if the branch is not checked out.
    """
    if current_branch() != branch:
        return []
    files = files_between(before, after)
    there = blobs_in_tree(files)
    ours, theirs = blobs(before, files), blobs(after, files)
    return [file for file in files if there.get(file) not in (ours.get(file), theirs.get(file))]


def refuse_edits(branch: str, before: str, after: str) -> None:
    """Raise ConfigError if moving the branch between two commits would overwrite edits of the working tree."""
    if edited := edited_files(branch, before, after):
        raise ConfigError(f"the working tree has other changes in {', '.join(edited[:3])}; stash them first")


def move_branch(branch: str, before: str, after: str) -> None:
    """Move a branch to another commit; if it is checked out, update the files of the working tree first.

    Raises:
        ConfigError: another process has moved it.
    """
    if current_branch() == branch:
        write_files(after, files_between(before, after))
    git("update-ref", f"refs/heads/{branch}", after, before)


def switch_to(branch: str, commit: str) -> None:
    """Check out a branch, after creating it at `commit` if it does not exist; the working tree must be clean."""
    require_clean_tree()
    if not tip(branch):
        git("branch", branch, commit)
    git("switch", "--quiet", branch)


def write_files(commit: str, files: list[str]) -> None:
    """Restore files of a commit in the index and the working tree."""
    present = blobs(commit, files)
    for file in files:
        git("reset", "--quiet", commit, "--", file)
        if file in present:
            git("checkout", "--quiet", commit, "--", file)
        else:
            (change.ROOT / file).unlink(missing_ok=True)


def undo_idea(branch: str, head: str, commit: str) -> bool:
    """Remove an idea from the working tree unless its files have been edited since; return whether it was removed."""
    files = files_between(head, commit) if current_branch() == branch else []
    if blobs_in_tree(files) == blobs(head, files) or edited_files(branch, head, commit):
        return False
    write_files(head, files)
    return True


def files_between(before: str, after: str) -> list[str]:
    """Return the files in which two commits differ."""
    return [file for file in git("diff", "--name-only", "--no-renames", "-z", before, after).split("\0") if file]


def blobs(commit: str, files: list[str]) -> dict[str, str]:
    """Return the hash of each file that a commit has."""
    listed = git("ls-tree", "-r", "-z", commit, "--", *files).split("\0") if files else []
    return {name: entry.split()[2] for entry, _, name in (line.partition("\t") for line in listed if line)}


def blobs_in_tree(files: list[str]) -> dict[str, str]:
    """Return the hash of each file that the working tree has."""
    there = [file for file in files if os.path.lexists(change.ROOT / file)]
    return dict(zip(there, git("hash-object", "--", *there).split(), strict=True)) if there else {}
