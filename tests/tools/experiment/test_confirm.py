"""The table of confirm: measured on reserved seeds, beside the prediction of the screen."""

import json
import subprocess
import sys

import pytest

from config.errors import ConfigError, RunError
from tests.conftest import ROOT
from tools.experiment.confirm import ArmDifference, correct
from tools.experiment.ideas import CONTROL

A, B, C, SHAM = "--model.effect_a 0.7", "--model.effect_b 0.8", "--model.effect_c 0.9", "--model.sham 1"


def test_accepted_ideas_are_confirmed(run_experiment):
    run_experiment(A, B, C, SHAM, runs=36)
    screened = run_experiment.started()
    found = run_experiment.confirm()
    assert sorted(found["ideas"]) == [A, B, C], "neither the sham nor the control"
    assert [(row["arm"], row["against"]) for row in found["differences"]] == [
        ("all", "baseline"),
        *((idea, "baseline") for idea in (A, B, C)),
        *(("all", f"all without {idea}") for idea in (A, B, C)),
    ]
    together = found["differences"][0]
    assert together["effect"] == pytest.approx(0.7 * 0.8 * 0.9 - 1, abs=0.01) and together["verdict"] == "better"
    assert together["predicted"] == pytest.approx(0.7 * 0.8 * 0.9 - 1, abs=0.02)
    assert together["low"] < 0.7 * 0.8 * 0.9 - 1 < together["high"] < 0 and together["p"] < 0.05
    for row, effect in zip(found["differences"][1:], [-0.3, -0.2, -0.1] * 2, strict=True):
        assert row["effect"] == pytest.approx(effect, abs=0.01) and row["predicted"] == pytest.approx(effect, abs=0.02)
    names = run_experiment.started()
    assert len(names) == len(set(names)) == 8 * 3 and not {*names} & {*screened}
    assert {int(name.rpartition("-")[2]) for name in names} == {5000, 5001, 5002}
    again = run_experiment.confirm()
    assert again == found and not run_experiment.started() and len([*run_experiment.lab.glob("results/*")]) == 1
    text = run_experiment.confirm(json=False)
    assert "3 seeds of each arm that no screen has used" in text and f"all without {B}" in text


def test_named_ideas_at_sizes_on_other_data(run_experiment):
    found = run_experiment.confirm(A, B, "--optimizer.lr", "1.5", sizes="1,4", data_seed=3)
    assert [(row["size"], row["arm"]) for row in found["differences"]] == [
        (size, arm) for size in (1, 4) for arm in ("all", A, B, "all", "all")
    ]
    assert [row["against"] for row in found["differences"]][:5] == ["baseline"] * 3 + [B, A], "all without A is B alone"
    assert all(row["predicted"] is None for row in found["differences"]) and found["data_seed"] == 3
    configs = [json.loads(file.read_text()) for file in (run_experiment.lab / "runs").glob("*/config.yaml")]
    assert {one["data"]["seed"] for one in configs} == {3} and {one["optimizer"]["lr"] for one in configs} >= {1.5}
    assert {one["model"]["d_model"] for one in configs} == {64, 128}


def test_settings_of_all_runs_need_no_idea(run_experiment):
    """They choose the screen."""
    run_experiment(A, SHAM, "--optimizer.lr", "1.5", runs=24)
    assert run_experiment.confirm("--optimizer.lr", "1.5")["ideas"] == [A]
    assert "has no screen of these settings" in run_experiment.confirm(error=ConfigError)


@pytest.mark.parametrize(("last", "corrected"), [(0.025, [0.05, 0.03, 0.05]), (0.04, [0.06, 0.03, 0.06])])
def test_p_values_are_corrected(last, corrected):
    """By Holm's method: times 3, 2 and 1, and never less than a smaller one."""
    found = [(-0.1, 0.03), (0.2, 0.01), (-0.3, last)]
    differences = [ArmDifference(1, "all", "baseline", None, effect, -1, 1, p) for effect, p in found]
    correct(differences)
    assert [one.p for one in differences] == pytest.approx(corrected)
    other = "better" if corrected[0] <= 0.05 else "unknown"
    assert [one.verdict for one in differences] == [other, "worse", other]


@pytest.mark.parametrize(
    ("ideas", "message"),
    [
        ((), "has no screen of these settings; give those of the screen, or name ideas"),
        (("--data.path x",), "changes which tokens are predicted"),
        (("--model.effect_nope 1",), "is not a setting"),
        (("--model.effect_a 0.7", "--model.effect_a 0.8"), "set model.effect_a; confirm them one by one"),
    ],
)
def test_refused(ideas, message, run_experiment):
    assert message in run_experiment.confirm(*ideas, error=ConfigError)
    assert json.loads(run_experiment.printed[-1])["exit_code"] == 2 and not run_experiment.started()


def test_failed_run_is_an_error(run_experiment):
    assert "the loss is nan" in run_experiment.confirm("--model.fails true", error=RunError)
    assert not [*run_experiment.lab.glob("results/*")]


def test_best_of_exclusive_ideas_is_confirmed(run_experiment):
    run_experiment("--model.effect_a 0.8", "--model.effect_a 0.7", "--model.effect_b 0.7", runs=36)
    result = run_experiment.confirm()
    assert sorted(result["ideas"]) == ["--model.effect_a 0.7", "--model.effect_b 0.7"]
    assert any("left out: --model.effect_a 0.8 cannot be on" in line for line in run_experiment.printed)


def test_control_is_not_confirmed(run_experiment):
    """Even if fewer steps are better."""
    run_experiment.hook("if settings['steps'] == 80:\n    settings['model.effect_d'] = 0.5")
    result = run_experiment(A, SHAM, runs=24)
    assert {idea["verdict"] for idea in result["ideas"] if idea["idea"] == CONTROL} == {"better"}
    assert run_experiment.confirm()["ideas"] == [A]


def test_command_without_ideas_is_for_the_accepted_ones(tmp_path):
    command = [sys.executable, "-m", "tools.experiment", "confirm", "--lab", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "has no screen of these settings" in done.stderr
