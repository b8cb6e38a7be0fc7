"""`make trial` compares a fork with the commit that it began from, and names the first difference."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tools.experiment import change
from tools.trial import TrialError, check_defaults, compare_defaults, compare_rows, find_base


@pytest.mark.slow
def test_trial_ends_with_one_message():
    command = [sys.executable, "-m", "tools.trial", "--model.mlp", "no_such_mlp"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    [message] = done.stderr.strip().splitlines()
    assert done.returncode == 1 and message.startswith("tools.trial: error: train.py: error: model.mlp: no_such_mlp")


@pytest.mark.parametrize(
    "resumed, message",
    [
        ([{"step": 1, "train/loss": 3.0}], "step 1: train/loss is 3.0 after a kill and a resume, 2.0 without"),
        ([{"step": 1, "train/loss": 2.0, "extra": 1}], "step 1: extra is 1 after a kill and a resume, None without"),
        ([], "0 rows after a kill and a resume, 1 without"),
    ],
)
def test_trial_names_first_difference(resumed, message):
    with pytest.raises(TrialError, match=message):
        compare_rows([{"step": 1, "train/loss": 2.0}], resumed)


def test_trial_refuses_moved_defaults():
    base = {"stories": {"state/digest": "1", "train/loss": 5.0}, "dropped": {"state/digest": "2"}}
    compare_defaults(base, {"stories": {"state/digest": "1", "train/loss": 5.0}, "added": {"state/digest": "3"}})
    moved = {"stories": {"state/digest": "4", "train/loss": 5.0}}
    with pytest.raises(TrialError, match="^defaults moved: .*stories: state/digest is 4, 1 before"):
        compare_defaults(base, moved)


@pytest.fixture
def fork_repository(tmp_path, monkeypatch):
    """A git repository whose checked-out branch is one commit ahead of main."""
    monkeypatch.setattr(change, "ROOT", tmp_path)
    change.git("init", "--quiet", "--initial-branch", "main")
    for branch in ("main", "fork"):
        (tmp_path / "code.py").write_text(f"# {branch}")
        change.git("add", ".")
        change.git("commit", "--quiet", "--message", branch, **change.AUTHOR)
        change.git("checkout", "--quiet", "-B", "fork")
    return tmp_path


def test_trial_compares_defaults_with_merge_base(fork_repository):
    upstream = change.git("rev-parse", "main")
    assert find_base(None) == upstream
    assert find_base("HEAD") == change.git("rev-parse", "fork") != upstream


def test_trial_reports_uncompared_defaults(fork_repository, capsys):
    check_defaults("HEAD")
    check_defaults("no_such_branch")
    unchanged, unknown = capsys.readouterr().out.splitlines()
    assert unchanged.startswith("defaults: not compared: ") and "--base COMMIT" in unchanged
    assert unknown.startswith("defaults: not compared: git merge-base fails: ")
