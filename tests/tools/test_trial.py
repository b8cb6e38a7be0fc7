"""`make trial` names the first difference after a kill, and says how the defaults changed against HEAD."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tools import trial
from tools.experiment import change
from tools.trial import TrialError, changed_results, compare_rows


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


def test_trial_names_changed_results():
    before = {"stories": {"state/digest": "1", "train/loss": 5.0}}
    after = {"stories": {"state/digest": "1", "train/loss": 5.0, "added": 3}}
    assert changed_results(before, after) == []
    after["stories"]["state/digest"] = "4"
    assert changed_results(before, after) == ["stories: state/digest is 4, 1 before"]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git repository with one commit."""
    monkeypatch.setattr(change, "ROOT", tmp_path)
    change.git("init", "--quiet", "--initial-branch", "main")
    (tmp_path / "code.py").write_text("x = 1\n")
    change.git("add", ".")
    change.git("commit", "--quiet", "--message", "first", **change.AUTHOR)
    return tmp_path


def test_trial_reports_defaults_against_head(repository, capsys, monkeypatch):
    """An edit in place changes them, which is no failure; a new setting does not."""
    trained = [{"stories": {"state/digest": "1"}}, {"stories": {"state/digest": "1"}}]
    results = iter([])
    monkeypatch.setattr(trial, "train_at_defaults", lambda folder: next(results))
    trial.report_defaults("HEAD")
    (repository / "code.py").write_text("x = 2\n")
    results = iter(trained)
    trial.report_defaults("HEAD")
    results = iter([trained[0], {"stories": {"state/digest": "2"}}])
    trial.report_defaults("HEAD")
    trial.report_defaults("no_such_branch")
    unchanged, same, edited, unknown = capsys.readouterr().out.splitlines()
    head = change.git("rev-parse", "HEAD")[:12]
    assert unchanged == f"defaults: no code differs from {head}; --base COMMIT names an earlier one"
    assert same == f"defaults: the same bits as {head}"
    assert edited == (
        f"defaults: other results than {head}, as after an edit in place: stories: state/digest is 2, 1 before"
    )
    assert unknown.startswith("defaults: not compared: git rev-parse fails: ")
