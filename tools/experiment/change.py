"""The change under test, as given on the command line: settings, code, or both.

In a git repository arms with different code are trained from separate worktrees, in a temporary folder that is always
removed, so that edits of the working tree during an experiment reach neither arm. The next experiment removes those of
a killed one. The working tree and patches become commits that no branch contains, which git deletes after some weeks;
the diff is kept.
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
from config.paths import expand_user_path
from data.files import temporary_folder, write_once

ROOT = Path(__file__).parents[2]
AUTHOR = {f"GIT_{who}_{what}": "experiment" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

# Abandoned worktrees are found by these names. The host is part of the name: a machine that shares the repository must
# not remove the worktrees of another.
FOLDER, WORKTREES = f"mini-gpt-experiment-{socket.gethostname()}_", ("baseline", "candidate")
# Overrides user settings that would run programs, change the code in `git apply`, or escape file names.
OVERRIDES = ("core.hooksPath=/dev/null", "apply.whitespace=nowarn", "core.quotePath=false")
# Files that define the data and the evaluation; in other Python files, a changed line that mentions a seed counts, too.
DATA_FILES = ("data/", "training/evaluation.py")


@dataclass(frozen=True)
class Change:
    """The difference between candidate and baseline."""

    settings: tuple[str, ...] = ()
    """Words of a command line."""
    base: str | None = None
    """Commit that trains the baseline; None outside of a git repository, where this code trains both arms as it is."""
    commit: str | None = None
    """Commit that trains the candidate; equal to `base` if only settings change."""
    diff: str = ""
    """Diff from base to commit."""
    commits_behind: int = 0
    """Commits of HEAD that the base lacks."""

    @property
    def num_lines(self) -> int:
        """Number of lines that the diff adds or removes."""
        return len(re.findall(r"^(?:\+(?!\+\+ )|-(?!-- ))", self.diff, re.MULTILINE))

    @property
    def has_code(self) -> bool:
        """True if Python files change."""
        return bool(re.search(r"^diff --git .*\.py$", self.diff, re.MULTILINE))

    @property
    def data_files(self) -> list[str]:
        """Changed files that define the data, the evaluation or the seeding, and so what the losses mean."""
        changed = []
        for part in re.split(r"^diff --git ", self.diff, flags=re.MULTILINE)[1:]:
            before, _, name = part.split("\n", 1)[0].removeprefix("a/").rpartition(" b/")
            is_code = name.endswith(".py") and not name.startswith("tests/")
            seeds = is_code and re.search(r"^[+-](?!\+\+ |-- ).*seed", part, re.MULTILINE)
            if before.startswith(DATA_FILES) or name.startswith(DATA_FILES) or seeds:
                changed.append(name)
        return changed

    def save_diff(self, folder: Path) -> Path | None:
        """Write the diff into a folder, named by a hash of its content; return its path, None without code."""
        if not self.diff:
            return None
        content = self.diff.encode(errors="surrogateescape")
        return write_once(folder / f"{sha256(content).hexdigest()[:12]}.diff", content)


def split_idea(text: str) -> list[str]:
    """Split an idea into its words; raise ConfigError if a quotation mark is missing, or there are no words."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"idea: {text!r} cannot be parsed: {error}") from None
    if not any(words):
        raise ConfigError("idea: '' is empty; give settings, a git branch, a patch file, or . for the working tree")
    return words


def parse_change(text: str, onto: str | None = None) -> Change:
    """Parse the first argument of tools.experiment.

    Args:
        text: settings of train.py, such as `--model.mlp relu2`; or a git branch or commit, a patch file, or `.` for
            the changes of the working tree, optionally followed by settings of the candidate alone.
        onto: commit to which the code is applied first; None: the commit on which it is based.

    Raises:
        ConfigError: the text is none of these, or changes nothing.
    """
    words = split_idea(text)
    if words[0].startswith("--"):
        if onto:
            raise ConfigError(f"onto: {onto!r} applies to code, and {text!r} has settings only; leave it out")
        head = git("rev-parse", "HEAD") if is_repository() else None
        return Change(tuple(words), head, head)
    base, commit = resolve_commits(words[0])
    if onto:
        diff, base = diff_of(base, commit), find_commit(onto)
        if not base:
            raise ConfigError(f"onto: {onto!r} is not a git branch or commit here")
        commit = apply_diff(diff, base)
    if git("rev-parse", f"{base}^{{tree}}") == git("rev-parse", f"{commit}^{{tree}}"):
        what = "the working tree has no changes" if words[0] == "." else f"{words[0]!r} changes nothing"
        raise ConfigError(f"idea: {what} relative to {base[:12]}; there is nothing to compare")
    is_ancestor = git("merge-base", "HEAD", commit) == commit  # such a commit is compared with its parent
    behind = 0 if is_ancestor else int(git("rev-list", "--count", f"{base}..HEAD"))
    return Change(tuple(words[1:]), base, commit, diff_of(base, commit), behind)


def is_repository() -> bool:
    """Return whether this folder is the root of a git repository with a commit, and git is installed."""
    try:
        return bool(git("rev-parse", "HEAD")) and Path(git("rev-parse", "--show-toplevel")).samefile(ROOT)
    except ConfigError:
        return False


def diff_of(base: str, commit: str) -> str:
    """Return the diff between two commits as a patch that git can apply, whatever `git diff` is configured to print."""
    return git("diff-tree", "-p", "--binary", "--find-renames", base, commit) + "\n"


def find_commit(name: str) -> str:
    """Return the commit of a git branch or commit; "" if there is none."""
    try:
        return git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    except ConfigError:
        return ""


def resolve_commits(code: str) -> tuple[str, str]:
    """Return the commit on which a piece of code is based, and the commit of the code itself."""
    head = git("rev-parse", "HEAD")
    if not is_repository():
        top = git("rev-parse", "--show-toplevel")
        raise ConfigError(f"idea: {code!r} is code, but {ROOT} is inside the git repository {top}, not its root")
    if code == ".":
        return head, commit_on(head, "add", "--update", "--", ".")
    if (patch := expand_user_path("idea", code)).is_file():
        return head, commit_on(head, "apply", "--cached", str(patch.resolve()))
    commit = find_commit(code)
    if not commit:
        raise ConfigError(
            f"idea: {code!r} is not a git branch or commit here, a patch file, or settings, which begin with --"
        )
    try:
        base = git("merge-base", "HEAD", commit)
        return (git("rev-parse", "--verify", "--quiet", f"{commit}^") if base == commit else base), commit
    except ConfigError:
        raise ConfigError(
            f"idea: git has no earlier commit with which to compare {code!r}; in a shallow clone, run "
            "git fetch --unshallow"
        ) from None


def apply_diff(diff: str, parent: str) -> str:
    """Commit a diff on a parent, by a three-way merge where the lines around it differ; return the commit.

    Raises:
        ConfigError: the diff conflicts with the parent.
    """
    with tempfile.TemporaryDirectory() as folder:
        patch = Path(folder, "change.patch")
        patch.write_bytes(diff.encode(errors="surrogateescape"))
        return commit_on(parent, "apply", "--cached", "--3way", str(patch))


def commit_on(parent: str, *change: str) -> str:
    """Commit the result of a git command on a parent, in a separate index: working tree and index stay unchanged."""
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": str(Path(folder, "index")), **AUTHOR}
        git("read-tree", parent, **index)
        git(*change, **index)
        if change[0] == "add":  # new files of code as well
            git("add", "--", "*.py", **index)
        return git("commit-tree", git("write-tree", **index), "-p", parent, "-m", "Change under test", **index)


@contextmanager
def checked_out(change: Change) -> Iterator[tuple[Path, Path]]:
    """Yield the folders of the code that trains baseline and candidate; raise ConfigError if git cannot write them."""
    if change.base is None or change.commit is None:
        yield ROOT, ROOT
        return
    with temporary_folder(Path(tempfile.gettempdir()), FOLDER) as folder:
        remove_abandoned_worktrees()
        baseline, candidate = (folder / name for name in WORKTREES)
        commits = {baseline: change.base} | ({candidate: change.commit} if change.commit != change.base else {})
        try:
            for path, commit in commits.items():
                git("worktree", "add", "--quiet", "--detach", str(path), commit)
            yield baseline, [*commits][-1]
        finally:
            remove_worktrees(*commits)


def remove_worktrees(*paths: Path) -> None:
    """Remove the given worktrees that exist."""
    for path in paths:
        subprocess.run(
            ["git", "worktree", "remove", "--force", str(path)], cwd=ROOT, capture_output=True, start_new_session=True
        )


def remove_abandoned_worktrees() -> None:
    """Remove the worktrees of killed experiments, whose folders are gone."""
    listed = git("worktree", "list", "--porcelain").splitlines()
    for path in (Path(line.removeprefix("worktree ")) for line in listed if line.startswith("worktree ")):
        if path.name in WORKTREES and path.parent.name.startswith(FOLDER) and not path.parent.exists():
            remove_worktrees(path)


def git(*arguments: str, **environment: str) -> str:
    """Run git in this repository, in a separate session so that Ctrl-C reaches tools.experiment alone.

    Raises:
        ConfigError: git fails, with its message, or is not installed.
    """
    try:
        done = subprocess.run(
            ["git", *(word for setting in OVERRIDES for word in ("-c", setting)), *arguments],
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise ConfigError("idea: comparing code needs git; install it, or compare settings alone") from None
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip() or "no error message"
        raise ConfigError(f"git {arguments[0]} fails: {message}")
    return done.stdout.decode(errors="surrogateescape").strip("\n")
