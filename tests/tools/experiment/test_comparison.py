"""One idea against the baseline: verdicts on ideas whose effect is known, what is refused, and that it resumes."""

import json
import time

import pytest
from pydantic import ValidationError

from config.errors import ConfigError, RunError
from tests.tools.experiment.conftest import FAKE, fake_scorer
from tools.experiment import comparison, judge, report
from tools.experiment.settings import ReportConfig
from tools.jobs import runner

BETTER, TINY = "--model.effect_a 0.9", "--model.effect_a 1.002"


def test_better_idea_and_its_compute_multiplier(run_experiment):
    found = run_experiment(BETTER, speedup=True)
    assert found["verdict"] == "better" and found["seeds"] == 3
    assert found["low"] < -0.1 < found["high"] < 0 and found["effect"] == pytest.approx(-0.1, abs=0.01)
    ratio, low, high = found["compute_multiplier"]
    assert low < 1 / 0.9 < high and ratio == pytest.approx(1 / 0.9, abs=0.01)
    assert found["cost"]["parameters"] == [1000, 1000]
    names = run_experiment.started()
    assert len(names) == len(set(names)) == 6 + 8
    assert {name.rpartition("-")[0] for name in names} >= {found["baseline"], found["candidate"]}
    again = run_experiment(BETTER, speedup=True)
    assert again == found and not run_experiment.started()


def test_worse_idea(run_experiment):
    found = run_experiment("--optimizer.lr 3.0")
    assert found["verdict"] == "worse" and found["effect"] == pytest.approx(0.128, abs=0.015)


def test_difference_within_the_margin_is_no_difference(run_experiment):
    found = run_experiment(TINY, margin=0.05)
    assert found["verdict"] == "no difference" and -0.05 <= found["low"] < 0.002 < found["high"] <= 0.05


def test_equal_arms_train_separate_seeds(run_experiment):
    found = run_experiment("--model.sham 0", margin=0.03)
    assert found["verdict"] == "no difference" and found["baseline"] == found["candidate"]
    seeds = [int(name.rpartition("-")[2]) for name in run_experiment.started()]
    assert sorted(seed // 1000 for seed in seeds) == [0] * found["seeds"] + [1] * found["seeds"]


def test_equal_weights_are_identical(run_experiment):
    found = run_experiment("--model.sham 1")
    assert found["verdict"] == "identical" and len(run_experiment.started()) == 2


def test_unknown_and_more_seeds(run_experiment):
    found = run_experiment(TINY, max_seeds=4, jobs=1, margin=1e-5)
    assert found["verdict"] == "unknown" and found["seeds"] == 4 and found["more_seeds"] > 0
    assert len(run_experiment.started()) == 8
    more = run_experiment(TINY, max_seeds=6, jobs=1, margin=1e-5)
    assert len(run_experiment.started()) == 4 and more["seeds"] == 6
    text = run_experiment(TINY, max_seeds=6, jobs=1, margin=1e-5, json=False)
    assert "more seeds of each arm would decide" in text


def test_baseline_is_shared_by_ideas(run_experiment):
    run_experiment(BETTER)
    before = run_experiment.started()
    run_experiment("--optimizer.lr 2.0")
    assert run_experiment.started() and not {*run_experiment.started()} & {*before}


@pytest.mark.parametrize("jobs", [1, 8])
def test_result_does_not_depend_on_concurrent_runs(jobs, run_experiment):
    """Eight concurrent runs train seeds ahead of the one that decides."""
    found = run_experiment(BETTER, jobs=jobs)
    assert found["seeds"] == 3 and len(run_experiment.started()) == (6 if jobs == 1 else 8)


def test_max_seeds_below_three_is_refused(run_experiment):
    with pytest.raises((ConfigError, ValidationError), match="max_seeds"):
        run_experiment(BETTER, max_seeds=2)


def test_diverging_idea_is_failed(run_experiment):
    found = run_experiment("--optimizer.lr 0", jobs=1)
    assert found["verdict"] == "failed" and "the loss is nan" in found["message"]
    assert f"; log: {run_experiment.lab}/runs/logs/{found['candidate']}-0.log" in found["message"]
    assert len(run_experiment.started()) == 2, "one run of each arm"
    assert "Failed: --optimizer.lr 0: does not train: " in run_experiment("--optimizer.lr 0", json=False)


def test_failure_of_a_later_seed_is_failed(run_experiment):
    run_experiment.hook(
        "if settings['model.effect_a'] == 0.9 and settings['seed'] == 2:\n    settings['model.fails'] = True"
    )
    assert run_experiment(BETTER)["verdict"] == "failed"


def test_broken_baseline_is_an_error(run_experiment):
    assert "the loss is nan" in run_experiment("--optimizer.lr 1", "--optimizer.lr", "0", error=RunError)
    assert "--x is not a setting" in run_experiment(BETTER, "--x", "3", error=ConfigError)
    assert not [*run_experiment.lab.glob("results/*")]


@pytest.mark.parametrize(("code", "message"), [("os.kill(os.getpid(), 9)", "SIGKILL"), ("sys.exit(75)", "elsewhere")])
def test_killed_or_stopped_run_is_no_verdict(code, message, run_experiment):
    run_experiment.hook(f"if settings['model.effect_a'] == 0.9:\n    {code}")
    assert message in run_experiment(BETTER, error=RunError)
    assert not [*run_experiment.lab.glob("results/*")]
    run_experiment.hook("")
    assert run_experiment(BETTER)["verdict"] == "better"


def test_stopped_comparison_resumes(run_experiment):
    hook = (
        "import signal, time\nif settings['seed'] == 1:\n    os.kill(os.getppid(), signal.SIGTERM)\n    time.sleep(60)"
    )
    run_experiment.hook(hook)
    run_experiment(BETTER, jobs=1, error=SystemExit)
    assert json.loads(run_experiment.printed[-1])["exit_code"] == 75
    run_experiment.hook("")
    assert run_experiment(BETTER, jobs=1)["verdict"] == "better" and len(run_experiment.started()) == 4


@pytest.mark.slow
def test_minutes_stop_runs_in_progress(run_experiment):
    run_experiment.hook("import time\nif settings['seed'] == 1:\n    time.sleep(60)")
    start = time.monotonic()
    found = run_experiment(BETTER, minutes=3 / 60, json=True)
    assert time.monotonic() - start < 30 and found["verdict"] == "unknown" and found["seeds"] == 1
    assert "minutes: the time is spent; run the same command again to resume" in run_experiment.printed


@pytest.mark.parametrize(("metric", "effect"), [("val/shifted", -0.04), ("val/loss", 0.86 / 0.9 - 1)])
def test_metric_is_compared(metric, effect, run_experiment):
    """The excess loss minus 1 is negative in both arms; its difference is absolute."""
    found = run_experiment(BETTER, metric=metric, margin=0.001)
    assert found["verdict"] == "better" and found["effect"] == pytest.approx(effect, abs=0.005)
    assert found["is_ratio"] == (metric == "val/loss")
    text = run_experiment(BETTER, metric=metric, margin=0.001, json=False)
    assert ("changes the loss by -0.0" in text) == (metric == "val/shifted")
    assert json.loads(json.dumps(found), parse_constant=lambda name: 1 / 0)


def test_metric_that_is_always_zero(run_experiment):
    found = run_experiment(BETTER, metric="val/nothing")
    assert found["verdict"] == "no difference" and found["effect"] == 0 and found["is_ratio"] is False


def test_metric_that_is_not_logged_is_refused(run_experiment):
    assert "is not logged" in run_experiment(BETTER, metric="val/x", error=ConfigError)


def test_loss_below_the_entropy_is_failed(run_experiment):
    found = run_experiment("--model.effect_a -0.1")
    assert found["verdict"] == "failed" and "below the entropy of the data" in found["message"]


def test_sizes(run_experiment):
    found = run_experiment(BETTER, sizes="1,4")
    [larger] = found["sizes"]
    assert (found["size"], larger["size"], larger["verdict"]) == (1, 4, "better")
    assert larger["cost"]["tokens"][0] == 4 * found["cost"]["tokens"][0]
    assert larger["cost"]["parameters"] == [2000, 2000]
    text = run_experiment(BETTER, sizes="1,4", json=False)
    assert "Better at 4 times the parameters: " in text
    assert run_experiment(BETTER, sizes="4")["cost"]["parameters"] == [2000, 2000]
    for wrong in ("1,x", "0.5", ""):
        assert "sizes: " in run_experiment(BETTER, sizes=wrong, error=ConfigError)


def test_tune_searches_both_arms_on_separate_seeds(run_experiment):
    found = run_experiment(BETTER, "--optimizer.lr", "0.5", tune="optimizer.lr")
    assert found["verdict"] == "better" and found["effect"] == pytest.approx(-0.1, abs=0.01)
    assert run_experiment.printed.count("tune: optimizer.lr 1") == 2, "at which the loss is least"
    names = run_experiment.started()
    assert len(names) == 2 * 5 * 2 + 2 * found["seeds"]
    assert {int(name.rpartition("-")[2]) for name in names[:20]} == {2000, 2001}
    assert "tune: 'data.source' is 'stories'" in run_experiment(BETTER, tune="data.source", error=ConfigError)


def test_failed_budgets_keep_the_result(run_experiment):
    run_experiment.hook("if settings['steps'] == 50:\n    settings['model.fails'] = True")
    found = run_experiment(BETTER, speedup=True)
    assert found["verdict"] == "better" and found["compute_multiplier"][0] == pytest.approx(1 / 0.9, abs=0.02)


@pytest.mark.parametrize("idea", ["--data.path x", "--evaluation.num_samples 6"])
def test_other_targets_are_refused(idea, run_experiment):
    assert "changes which tokens are predicted" in run_experiment(idea, error=ConfigError)
    assert not run_experiment.started()


@pytest.mark.parametrize("option", ["--seed", "--out_dir=x"])
def test_common_settings_of_single_runs_are_refused(option, run_experiment):
    assert "is set for each run" in run_experiment(BETTER, option, "7", error=ConfigError)


def test_branch_is_trained_by_its_own_code(run_experiment, write_patch):
    git, source = write_patch.git, run_experiment.root / "train.py"
    git("checkout", "--quiet", "-b", "mine")
    source.write_text(FAKE.replace("EFFECT = 40", "EFFECT = 30"))
    found = run_experiment(".")
    assert found["verdict"] == "better" and found["effect"] == pytest.approx(-0.25, abs=0.02)
    git("commit", "--quiet", "--all", "--message", "an idea")
    again = run_experiment("mine")
    assert again["effect"] == found["effect"] and not run_experiment.started()
    [diff] = (run_experiment.lab / "diffs").iterdir()
    assert "+EFFECT = 30" in diff.read_text()
    assert run_experiment("mine --optimizer.lr 9.0")["verdict"] == "worse", "settings of the candidate alone"


def test_edits_during_a_comparison_reach_no_run(run_experiment, write_patch):
    source, config = run_experiment.root / "train.py", run_experiment.root / "configs" / "lab.yaml"
    config.write_text('{"optimizer.lr": 1.0}')
    write_patch.git("commit", "--quiet", "--all", "--message", "a config")
    edit = """'{"optimizer.lr": 3.0}'"""
    run_experiment.hook(f"open({str(source)!r}, 'w').write('1 / 0')\nopen({str(config)!r}, 'w').write({edit})")
    found = run_experiment(BETTER)
    assert found["verdict"] == "better" and source.read_text() == "1 / 0"
    trained = [json.loads(file.read_text()) for file in (run_experiment.lab / "runs").glob("*/config.yaml")]
    assert len(trained) == 6 and {settings["optimizer"]["lr"] for settings in trained} == {1.0}


def test_code_that_changes_nothing_is_refused(run_experiment, write_patch):
    page = run_experiment.root / "README.md"
    page.write_text("before")
    write_patch.git("add", ".")
    write_patch.git("commit", "--quiet", "--message", "a page")
    page.write_text("after")
    assert "changes neither code that trains nor a setting" in run_experiment(".", error=ConfigError)


def test_broken_checks_are_failed(run_experiment, write_patch):
    found = run_experiment(write_patch("x.patch", "# 1\n", "# 1\nBROKEN = 1\n"))
    assert found["verdict"] == "failed" and "breaks checks of verify.py: cache: 3.7e-02" in found["message"]
    assert not run_experiment.started()


def test_problem_found_by_the_judge_is_failed(run_experiment, write_patch, monkeypatch):
    problem = {"problem": "its logits depend on later tokens"}
    monkeypatch.setattr(judge, "run_scorer", lambda *words: [one | problem for one in fake_scorer(*words)])
    found = run_experiment(write_patch("x.patch", "EFFECT = 40", "EFFECT = 30"))
    assert found["verdict"] == "failed" and "later tokens" in found["message"]


def test_loss_of_changed_code_is_the_judges(run_experiment, write_patch, monkeypatch):
    """The patch logs half of the excess loss."""

    def measure(baseline, runs):
        return [one | {"loss": one["loss"] + 0.2} for one in fake_scorer(baseline, runs)]

    monkeypatch.setattr(judge, "run_scorer", measure)
    found = run_experiment(write_patch("x.patch", "EFFECT = 40", "EFFECT = 20"))
    assert found["verdict"] == "no difference" or abs(found["effect"]) < 0.02


@pytest.mark.parametrize(("error", "exit_code"), [(RunError, 1), (OSError, 1), (KeyboardInterrupt, 130)])
def test_json_has_one_object_for_errors(error, exit_code, run_experiment, monkeypatch):
    def fail(*_):
        raise error("x")

    monkeypatch.setattr(judge, "arm_losses", fail)
    run_experiment(BETTER, error=error)
    assert json.loads(run_experiment.printed[-1]) == {"verdict": None, "exit_code": exit_code, "message": "x"}


@pytest.mark.parametrize(("launch", "at_once"), [(None, 2), ("bash", 1)])
def test_runs_at_once_and_their_threads(launch, at_once, run_experiment, monkeypatch):
    monkeypatch.setattr(runner, "available_cores", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = []

    def run(self):
        found.extend([self.jobs.max_running, self.jobs.threads])
        raise RunError("x")

    monkeypatch.setattr(comparison.Comparison, "run", run)
    run_experiment(BETTER, jobs=None, launch=launch, error=RunError)
    assert found == [at_once, None if launch else 1]


def test_report(run_experiment, capsys):
    lab = str(run_experiment.lab)
    with pytest.raises(ConfigError, match="has no results"):
        report.main(ReportConfig(lab=lab))
    run_experiment(BETTER)
    run_experiment("--optimizer.lr 3.0")
    run_experiment("--model.effect_b 0.9", "--model.effect_c 0.8", runs=4)
    run_experiment.printed.clear()
    report.main(ReportConfig(lab=lab))
    text = "\n".join(run_experiment.printed)
    assert f"Better: {BETTER} changes the loss by -1" in text and "Worse: --optimizer.lr 3.0" in text
    assert "4 runs, 0 of them failed" in text
    report.main(ReportConfig(lab=lab, json=True))
    printed = json.loads(run_experiment.printed[-1])
    assert [row["verdict"] for row in printed["results"]] == ["better", "worse"] and printed["screens"][0]["runs"] == 4


def test_candidate_that_cannot_be_scored_is_failed(run_experiment, write_patch, monkeypatch):
    def crash(*_):
        raise RunError("its runs cannot be scored: IndexError")

    monkeypatch.setattr(judge, "run_scorer", crash)
    found = run_experiment(write_patch("x.patch", "EFFECT = 40", "EFFECT = 20"))
    assert found["verdict"] == "failed" and "cannot be scored: IndexError" in found["message"]


@pytest.mark.parametrize(("ideas", "option"), [((BETTER,), "runs"), ((BETTER, "--model.sham 1"), "max_seeds")])
def test_options_of_the_other_mode_are_refused(ideas, option, run_experiment):
    kind = "several ideas" if option == "runs" else "one idea"
    assert run_experiment(*ideas, error=ConfigError, **{option: 9}) == f"{option}: is for {kind}; leave it out"
