"""`make trial` names the first difference after a kill, and says how the defaults changed against HEAD."""

import subprocess
import sys
from unittest.mock import Mock

import pytest

from runtime.distributed.launch_checks import device_problems
from tests.conftest import ROOT, TINY_STORIES, train
from tools import trial
from tools.experiment import change
from tools.trial import TrialError, changed_results, compare_rows


@pytest.mark.parametrize(
    "words, message",
    [
        (["--model.mlp", "no_such_mlp"], "model.mlp: no_such_mlp must be one of "),
        (["--colour", "red"], "colour is not a setting"),
        (["--verify_steps", "x"], "verify_steps: x must be a positive integer"),
    ],
)
def test_trial_refuses_setting_with_one_message(words, message):
    command = [sys.executable, "-m", "tools.trial", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"tools.trial: error: {message}"), done.stderr
    assert done.stderr.count("error") == done.stderr.count("\n") == 1


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


def test_trial_needs_metrics():
    with pytest.raises(TrialError, match="the run logged no metrics, so nothing was compared"):
        compare_rows([], [])


def test_trial_names_changed_results():
    assert changed_results({"stories": {"train/loss": 5.0}}, {"stories": {"train/loss": 5.0}}) == [
        "stories: state/digest is not logged, so the bits cannot be compared"
    ]
    before = {"stories": {"state/digest": "1", "train/loss": 5.0}}
    after = {"stories": {"state/digest": "1", "train/loss": 5.0, "added": 3}}
    assert changed_results(before, after) == []
    after["stories"]["state/digest"] = "4"
    assert changed_results(before, after) == ["stories: state/digest is 4, 1 before"]


def test_trial_trains_on_cpu_beside_one_gpu(monkeypatch):
    """A launch of two processes on one GPU is refused."""
    environments = []
    monkeypatch.setattr(trial.subprocess, "Popen", lambda *_, env, **__: environments.append(env))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    trial.start_ranks("train.py", [])
    assert [device_problems(environment) for environment in environments] == [[], []]


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


def test_trial_with_initial_model_leaves_its_sizes_alone():
    """Of the model, only dropout is a setting of the run; also if a config file names the initial model."""
    words = trial.trial_words(["--init_from", "runs/x", "--model.window", "8"])
    assert [word for word in words if word.startswith("--model.")] == ["--model.dropout", "--model.window"]
    assert words[words.index("--seq_len") + 1] == "128" and words[-2:] == ["--model.window", "8"]
    assert trial.trial_words([]) == trial.TRIAL.split()


@pytest.mark.slow
def test_trial_from_an_initial_model(runs, capsys):
    """Its sizes are not those of TRIAL."""
    train(*TINY_STORIES, "--model.n_layers", 3, "--steps", 2, "--out_dir", runs, "--name", "initial")
    trial.main(trial.TrialConfig(settings=["--init_from", str(runs / "initial")]))
    assert "resumed run: the same metrics" in (printed := capsys.readouterr().out) and "Everything holds." in printed


def test_trial_adds_what_verify_says_of_a_lost_state(monkeypatch):
    for name in ("run_script", "train_and_kill", "read_rows"):
        monkeypatch.setattr(trial, name, Mock())
    monkeypatch.setattr(trial, "Run", Mock(return_value=Mock(sessions=lambda: [Mock(step=5)])))
    monkeypatch.setattr(trial, "compare_rows", Mock(side_effect=TrialError("step 6: is all state saved?")))
    printed = "PASS  another check\nFAIL  resuming is bitwise: model.num_calls\n"
    monkeypatch.setattr(trial, "run_ranks", lambda script, words: (1, printed, ""))
    with pytest.raises(TrialError, match="step 6: is all state saved.\nverify.py: FAIL .* model.num_calls"):
        trial.main(trial.TrialConfig())


@pytest.mark.slow
def test_trial_names_attribute_that_lost_its_state(monkeypatch):
    start_ranks = trial.start_ranks
    monkeypatch.setenv("STATE", "model attribute")
    program = "tests/programs/stateful_train.py"
    monkeypatch.setattr(trial, "start_ranks", lambda script, arguments: start_ranks(program, arguments))
    with pytest.raises(TrialError, match="(?s)is all state saved.*after the resume: model.num_calls"):
        trial.main(trial.TrialConfig(verify_steps=4))
