"""An idea becomes code and settings; the user's tree, index and list of worktrees stay as they are."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from config.errors import ConfigError
from experiments import candidate
from experiments.candidate import laid_out, read_idea


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """One of three commits and a branch, in the place of ours; gives what git prints in it."""
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setattr(candidate, "ROOT", root)
    for name, value in candidate.NOBODY.items():
        monkeypatch.setenv(name, value)

    def git(*words):
        return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout

    git("init", "--quiet", "--initial-branch=main")
    for number in range(3):
        (root / "train.py").write_text(f"print({number})\n")
        git("add", ".")
        git("commit", "--quiet", "--message", str(number))
        if number == 1:
            git("branch", "other")
    git("checkout", "--quiet", "other")
    (root / "mine.py").write_text("print('mine')\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "mine")
    git("checkout", "--quiet", "main")
    git.root = root
    return git


def test_settings_need_no_git(monkeypatch, tmp_path):
    monkeypatch.setattr(candidate, "ROOT", tmp_path)
    found = read_idea("--model.mlp relu2 --name 'a b'")
    assert found.settings == ("--model.mlp", "relu2", "--name", "a b") and found.commit is None
    with laid_out(found) as folders:
        assert folders == (tmp_path, tmp_path)


def test_a_branch_is_compared_with_the_commit_it_left_and_a_commit_with_its_parent(repository):
    found = read_idea("other --seed 3")
    assert found.base == repository("rev-parse", "main~1").strip() and found.settings == ("--seed", "3")
    assert "+print('mine')" in found.diff and found.num_lines == 1
    assert read_idea("HEAD").base == repository("rev-parse", "HEAD^").strip()
    with laid_out(found) as (code, changed):
        assert (code / "train.py").read_text() == (changed / "train.py").read_text() == "print(1)\n"
        assert (changed / "mine.py").exists() and not (code / "mine.py").exists()


def test_the_working_tree_is_an_idea_and_stays_as_it_is(repository):
    (repository.root / "train.py").write_text("print('changed')\n")
    (repository.root / "new.py").write_text("x = 1\n")
    (repository.root / "notes.txt").write_text("not code")
    before = repository("status", "--porcelain"), repository("for-each-ref")
    found = read_idea(".")
    with laid_out(found) as (code, changed):
        assert (code / "train.py").read_text() == "print(2)\n" and not (code / "new.py").exists()
        assert (changed / "train.py").read_text() == "print('changed')\n" and (changed / "new.py").exists()
        assert not (changed / "notes.txt").exists()
    assert (repository("status", "--porcelain"), repository("for-each-ref")) == before
    kept = found.keep(repository.root / "lab")
    repository("stash", "--include-untracked", "--", "train.py", "new.py")
    repository("apply", str(kept))
    assert (repository.root / "train.py").read_text() == "print('changed')\n", "the diff brings it back"


def test_a_patch_is_against_the_commit_and_not_against_what_is_changed_besides(repository, tmp_path):
    (repository.root / "train.py").write_text("print('patched')\n")
    (tmp_path / "idea.patch").write_text(repository("diff"))
    (repository.root / "train.py").write_text("print('dirty')\n")
    with laid_out(read_idea(f"{tmp_path / 'idea.patch'} --x 1")) as (code, changed):
        assert (code / "train.py").read_text() == "print(2)\n"
        assert (changed / "train.py").read_text() == "print('patched')\n"
    assert (repository.root / "train.py").read_text() == "print('dirty')\n"


@pytest.mark.parametrize("error", [None, ConfigError("x"), KeyboardInterrupt()])
def test_no_worktree_is_left_behind(error, repository):
    try:
        with laid_out(read_idea("other")) as (code, _):
            assert repository("worktree", "list").count("\n") == 3
            if error:
                raise error
    except type(error) as raised:
        assert raised is error
    assert repository("worktree", "list").count("\n") == 1 and not code.exists()


@pytest.mark.parametrize("folder_is_gone", [False, True])
def test_worktrees_of_a_killed_experiment_go_at_the_next_start_and_a_living_ones_stay(
    folder_is_gone, repository, tmp_path
):
    repository("worktree", "add", "--quiet", "--detach", str(tmp_path / "baseline"))  # the user's own
    found = read_idea("other")
    killed = os.fork()
    if not killed:
        with laid_out(found):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(killed, 0)
    assert repository("worktree", "list").count("\n") == 4
    [left] = {line.split()[0] for line in repository("worktree", "list").splitlines() if "/idea " in line}
    if folder_is_gone:  # as after the machine was started anew
        shutil.rmtree(Path(left).parent)
    with laid_out(found) as (living, _):
        assert repository("worktree", "list").count("\n") == 4 and not Path(left).parent.exists()
        with laid_out(found):
            assert repository("worktree", "list").count("\n") == 6 and (living / "train.py").exists()
    assert repository("worktree", "list").count("\n") == 2


def test_a_worktree_that_cannot_be_made_leaves_none(repository, monkeypatch):
    found = read_idea("other")
    broken = candidate.Idea(found.settings, found.base, "0" * 40, found.diff)
    with pytest.raises(ConfigError, match="git worktree fails"), laid_out(broken):
        pass
    assert repository("worktree", "list").count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no-such-branch", "'no-such-branch' is no git branch"),
        ("", "is empty"),
        ("'", "cannot be read"),
        (".", "the working tree has no changes"),
        ("-x", "'-x' is no git branch"),
        ("~nobody_here/x.patch", "is the home of a user whom this machine does not know"),
    ],
)
def test_what_is_no_idea_is_refused(text, message, repository):
    with pytest.raises(ConfigError, match=message):
        read_idea(text)


def test_a_patch_that_does_not_apply_is_refused_with_the_reason_of_git(repository, tmp_path):
    (tmp_path / "idea.patch").write_text("--- a/train.py\n+++ b/train.py\n@@ -1 +1 @@\n-print(7)\n+print(8)\n")
    with pytest.raises(ConfigError, match="git apply fails: .*train.py"):
        read_idea(str(tmp_path / "idea.patch"))
