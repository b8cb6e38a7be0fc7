"""An idea, as experiment.py is given one, becomes code and settings: code in a worktree of its own, which is always
removed, so that neither side sees what is edited meanwhile; those of a killed experiment go when the next one starts.

The working tree, and a patch, become commits that no branch has, and git forgets these after some weeks; what they
change is kept as a diff.
"""

import os
import re
import shlex
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from config.errors import ConfigError
from config.paths import expanded
from data.files import temporary_folder, write_atomically

ROOT = Path(__file__).parent.parent
NOBODY = {f"GIT_{who}_{what}": "experiment" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

# Where worktrees lie, which a later start must know, and one on another machine must not take for its own.
FOLDER, PLACES = f"mini-gpt-experiment-{socket.gethostname()}_", ("baseline", "idea")
NO_HOOKS = ("-c", "core.hooksPath=/dev/null")
QUIETLY = {"capture_output": True, "start_new_session": True}  # Ctrl-C is for experiment.py to answer


@dataclass(frozen=True)
class Idea:
    """What the candidate has that the baseline has not."""

    settings: tuple[str, ...] = ()
    """Words of a command line."""
    base: str | None = None
    """The commit that the baseline is trained by; None: both are trained by this code as it is."""
    commit: str | None = None
    diff: str = ""
    """Between the two."""

    @property
    def num_lines(self) -> int:
        """Lines that the diff adds or takes away."""
        return len(re.findall(r"^(?:\+(?!\+\+ )|-(?!-- ))", self.diff, re.MULTILINE))

    def keep(self, folder: Path) -> Path | None:
        """Write the diff into a folder, named by its content."""
        if not self.diff:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{sha256(self.diff.encode(errors='surrogateescape')).hexdigest()[:12]}.diff"
        write_atomically(path, self.diff.encode(errors="surrogateescape"), by_several=True)
        return path


def read_idea(text: str) -> Idea:
    """Settings of train.py, as `--model.mlp relu2`; or code, as a git branch or commit, a patch file, or `.` for what
    the working tree has changed, and after it settings of the candidate alone, if any.

    Raises:
        ConfigError: it is none of these.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"idea: {text!r} cannot be read: {error}") from None
    if not words:
        raise ConfigError("idea: '' is empty; give settings, a git branch, a patch file, or . for the working tree")
    if words[0].startswith("--"):
        return Idea(tuple(words))
    base, commit = commits(words[0])
    if git("rev-parse", f"{base}^{{tree}}") == git("rev-parse", f"{commit}^{{tree}}"):
        what = "the working tree has no changes" if words[0] == "." else f"{words[0]!r} changes nothing"
        raise ConfigError(f"idea: {what} against {base[:12]}; there is nothing to compare")
    return Idea(
        tuple(words[1:]), base, commit, git("diff", "--binary", "--no-ext-diff", "--no-color", base, commit) + "\n"
    )


def commits(code: str) -> tuple[str, str]:
    """The commit that a piece of code stands on, and that of the code itself."""
    head = git("rev-parse", "HEAD")
    if code == ".":
        return head, snapshot("add", "--update", "--", ".")
    if (patch := expanded("idea", code)).is_file():
        return head, snapshot("apply", "--cached", str(patch.resolve()))
    try:
        commit = git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{code}^{{commit}}")
    except ConfigError:
        raise ConfigError(
            f"idea: {code!r} is no git branch or commit here, no patch file, and no settings, which begin with --"
        ) from None
    base = git("merge-base", "HEAD", commit)
    return (git("rev-parse", f"{commit}^") if base == commit else base), commit


def snapshot(*change: str) -> str:
    """A commit on HEAD with a change, made in an index of its own: the working tree and the user's index stay."""
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": str(Path(folder, "index")), **NOBODY}
        git("read-tree", "HEAD", **index)
        git(*change, **index)
        if change[0] == "add":  # new files too, where they are code
            new = git("ls-files", "-z", "--others", "--exclude-standard", "*.py", **index).split("\0")
            git("add", "--", *filter(None, new), **index) if any(new) else None
        return git("commit-tree", git("write-tree", **index), "-p", "HEAD", "-m", "An idea", **index)


@contextmanager
def laid_out(idea: Idea) -> Iterator[tuple[Path, Path]]:
    """The folders of the code that trains baseline and candidate.

    Raises:
        ConfigError: git cannot write them.
    """
    if idea.commit is None:
        yield ROOT, ROOT
        return
    with temporary_folder(Path(tempfile.gettempdir()), FOLDER) as folder:
        remove_abandoned()
        places = [folder / name for name in PLACES]
        try:
            for place, commit in zip(places, (idea.base, idea.commit), strict=True):
                git("worktree", "add", "--quiet", "--detach", str(place), commit)
            yield tuple(places)
        finally:
            remove(*places)


def with_its_files(words: list[str], code: Path) -> list[str]:
    """Words of a command line, in which a config file of this repository is that of `code`."""

    def own(name: str) -> str:
        path = Path(os.path.abspath(os.path.expanduser(name)))
        there = code / path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        return str(there) if there.exists() else name

    found = []
    for before, word in zip(["", *words], words, strict=False):
        option, equals, value = word.partition("=")
        is_value, has_value = before == "--config", option == "--config" and equals
        found.append(own(word) if is_value else f"{option}={own(value)}" if has_value else word)
    return found


def remove(*places: Path) -> None:
    """Worktrees, as far as they are there."""
    for place in places:
        subprocess.run(["git", "worktree", "remove", "--force", str(place)], cwd=ROOT, **QUIETLY)


def remove_abandoned() -> None:
    """The worktrees of experiments that were killed, whose folder is gone."""
    listed = git("worktree", "list", "--porcelain").splitlines()
    for place in (Path(line.removeprefix("worktree ")) for line in listed if line.startswith("worktree ")):
        if place.name in PLACES and place.parent.name.startswith(FOLDER) and not place.parent.exists():
            remove(place)


def git(*arguments: str, **environment: str) -> str:
    """What git prints.

    Raises:
        ConfigError: it fails, with its message.
    """
    try:
        done = subprocess.run(["git", *NO_HOOKS, *arguments], cwd=ROOT, env=os.environ | environment, **QUIETLY)
    except FileNotFoundError:
        raise ConfigError("idea: code is compared by git, which is not installed; settings need none") from None
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip() or "it gives no reason"
        raise ConfigError(f"idea: git {arguments[0]} fails: {message}")
    return done.stdout.decode(errors="surrogateescape").strip("\n")
