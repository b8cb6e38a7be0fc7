"""Changes become code and settings; the user's working tree, index and worktrees stay unchanged."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from config.errors import ConfigError
from tools.experiment import change
from tools.experiment.change import checked_out, parse_change


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of three commits and a branch in place of this one; returns a function that runs git in it."""
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setattr(change, "ROOT", root)
    for name, value in change.AUTHOR.items():
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


def test_parse_change_settings_need_no_git(monkeypatch, tmp_path):
    monkeypatch.setattr(change, "ROOT", tmp_path)
    found = parse_change("--model.mlp relu2 --name 'a b'")
    assert found.settings == ("--model.mlp", "relu2", "--name", "a b") and found.commit is None
    with checked_out(found) as folders:
        assert folders == (tmp_path, tmp_path)


def test_settings_are_trained_by_head(repository):
    (repository.root / "train.py").write_text("print('edited')\n")
    with checked_out(parse_change("--x 1")) as (code, changed):
        assert code == changed and (code / "train.py").read_text() == "print(2)\n"
    assert repository("worktree", "list").count("\n") == 1


def test_code_inside_a_larger_repository_is_refused(repository, monkeypatch):
    (repository.root / "sub").mkdir()
    monkeypatch.setattr(change, "ROOT", repository.root / "sub")
    assert parse_change("--x 1").commit is None
    with pytest.raises(ConfigError, match="is inside the git repository"):
        parse_change("other")


@pytest.mark.parametrize(
    ("file", "line", "listed"),
    [
        ("data/text.py", "x = 1", True),
        ("training/evaluation.py", "x = 1", True),
        ("train.py", "torch.manual_seed(0)", True),
        ("model/gpt.py", "x = 1", False),
        ("docs/seeds.md", "seed", False),
        ("tests/data/test_x.py", "seed = 1", False),
    ],
)
def test_data_files_of_change(file, line, listed, repository):
    path = repository.root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line + "\n")
    repository("add", ".")
    repository("commit", "--quiet", "--message", "x")
    assert parse_change("HEAD").data_files == ([file] if listed else [])


def test_data_file_moved_elsewhere_is_listed(repository):
    (repository.root / "data").mkdir()
    (repository.root / "data" / "text.py").write_text("x = 1\n")
    repository("add", ".")
    repository("commit", "--quiet", "--message", "x")
    repository("mv", "data/text.py", "text.py")
    assert parse_change(".").data_files == ["text.py"]


def test_parse_change_branch_uses_merge_base(repository):
    found = parse_change("other --seed 3")
    assert found.base == repository("rev-parse", "main~1").strip() and found.settings == ("--seed", "3")
    assert "+print('mine')" in found.diff and found.num_lines == 1
    assert found.commits_behind == 1
    assert parse_change("HEAD").base == repository("rev-parse", "HEAD^").strip()
    assert parse_change("HEAD").commits_behind == 0
    with checked_out(found) as (code, changed):
        assert (code / "train.py").read_text() == (changed / "train.py").read_text() == "print(1)\n"
        assert (changed / "mine.py").exists() and not (code / "mine.py").exists()


def test_parse_change_onto_applies_to_another_commit(repository):
    found = parse_change("other", onto="HEAD")
    assert (found.base, found.commits_behind) == (repository("rev-parse", "HEAD").strip(), 0)
    with checked_out(found) as (code, changed):
        assert (code / "train.py").read_text() == (changed / "train.py").read_text() == "print(2)\n"
        assert (changed / "mine.py").exists() and not (code / "mine.py").exists()
    with pytest.raises(ConfigError, match="onto: 'HEAD' applies to code"):
        parse_change("--seed 3", onto="HEAD")


def test_parse_change_working_tree_stays_unchanged(repository):
    (repository.root / "train.py").write_text("print('changed')\n")
    (repository.root / "new.py").write_text("x = 1\n")
    (repository.root / "notes.txt").write_text("not code")
    before = repository("status", "--porcelain"), repository("for-each-ref")
    found = parse_change(".")
    with checked_out(found) as (code, changed):
        assert (code / "train.py").read_text() == "print(2)\n" and not (code / "new.py").exists()
        assert (changed / "train.py").read_text() == "print('changed')\n" and (changed / "new.py").exists()
        assert not (changed / "notes.txt").exists()
    assert (repository("status", "--porcelain"), repository("for-each-ref")) == before
    kept = found.save_diff(repository.root / "lab")
    repository("stash", "--include-untracked", "--", "train.py", "new.py")
    repository("apply", str(kept))
    assert (repository.root / "train.py").read_text() == "print('changed')\n", "the diff does not reproduce the change"


@pytest.mark.parametrize("setting", ["diff.noprefix=true", "apply.whitespace=fix", "core.quotePath=true"])
def test_git_settings_change_no_code(setting, repository):
    repository("config", *setting.split("="))
    (repository.root / "é.py").write_text("print('trailing space') \n")
    found = parse_change(".")
    applied = change.apply_diff(found.diff, "HEAD")
    assert change.git("rev-parse", f"{applied}^{{tree}}") == change.git("rev-parse", f"{found.commit}^{{tree}}")
    assert found.has_code


def test_parse_change_patch_ignores_uncommitted_changes(repository, tmp_path):
    (repository.root / "train.py").write_text("print('patched')\n")
    (tmp_path / "idea.patch").write_text(repository("diff"))
    (repository.root / "train.py").write_text("print('dirty')\n")
    with checked_out(parse_change(f"{tmp_path / 'idea.patch'} --x 1")) as (code, changed):
        assert (code / "train.py").read_text() == "print(2)\n"
        assert (changed / "train.py").read_text() == "print('patched')\n"
    assert (repository.root / "train.py").read_text() == "print('dirty')\n"


@pytest.mark.parametrize("error", [None, ConfigError("x"), KeyboardInterrupt()])
def test_checked_out_removes_worktrees(error, repository):
    try:
        with checked_out(parse_change("other")) as (code, _):
            assert repository("worktree", "list").count("\n") == 3
            if error:
                raise error
    except type(error) as raised:
        assert raised is error
    assert repository("worktree", "list").count("\n") == 1 and not code.exists()


@pytest.mark.parametrize("folder_is_gone", [False, True])
def test_checked_out_removes_only_abandoned_worktrees(folder_is_gone, repository, tmp_path):
    repository("worktree", "add", "--quiet", "--detach", str(tmp_path / "baseline"))  # the user's own
    found = parse_change("other")
    killed = os.fork()
    if not killed:
        with checked_out(found):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(killed, 0)
    assert repository("worktree", "list").count("\n") == 4
    [left] = {line.split()[0] for line in repository("worktree", "list").splitlines() if "/candidate " in line}
    if folder_is_gone:  # as after a reboot
        shutil.rmtree(Path(left).parent)
    with checked_out(found) as (living, _):
        assert repository("worktree", "list").count("\n") == 4 and not Path(left).parent.exists()
        with checked_out(found):
            assert repository("worktree", "list").count("\n") == 6 and (living / "train.py").exists()
    assert repository("worktree", "list").count("\n") == 2


def test_checked_out_failure_leaves_no_worktree(repository, monkeypatch):
    found = parse_change("other")
    broken = change.Change(found.settings, found.base, "0" * 40, found.diff)
    with pytest.raises(ConfigError, match="git worktree fails"), checked_out(broken):
        pass
    assert repository("worktree", "list").count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no-such-branch", "'no-such-branch' is not a git branch"),
        ("", "is empty"),
        ("'", "cannot be parsed"),
        (".", "the working tree has no changes"),
        ("-x", "'-x' is not a git branch"),
        ("~nobody_here/x.patch", "names a user that this machine does not have"),
    ],
)
def test_parse_change_refuses_invalid_text(text, message, repository):
    with pytest.raises(ConfigError, match=message):
        parse_change(text)


def test_parse_change_without_earlier_commit_is_refused(repository):
    first = repository("rev-list", "--max-parents=0", "HEAD").strip()
    unrelated = repository("commit-tree", "HEAD^{tree}", "-m", "unrelated").strip()
    for commit in (first, unrelated):
        with pytest.raises(ConfigError, match=f"compare '{commit}'; in a shallow clone, run git fetch --unshallow"):
            parse_change(commit)
    with pytest.raises(ConfigError, match="onto: 'nothing' is not a git branch"):
        parse_change("other", onto="nothing")


def test_parse_change_inapplicable_patch_shows_git_message(repository, tmp_path):
    (tmp_path / "idea.patch").write_text("--- a/train.py\n+++ b/train.py\n@@ -1 +1 @@\n-print(7)\n+print(8)\n")
    with pytest.raises(ConfigError, match="git apply fails: .*train.py"):
        parse_change(str(tmp_path / "idea.patch"))
