"""Whether the gain of a winner holds elsewhere: on other data, for twice the steps and with a larger model."""

import json
import math
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtime.config.errors import ConfigError
from runtime.config.parser import parse_tool
from tests.conftest import ROOT, environment
from tests.tools.experiment.test_race import RECIPE, A, B, stop_at
from tools.experiment import baseline, reach, runs, verdicts
from tools.experiment.corpus import LIBRARY
from tools.experiment.settings import ExperimentConfig

# The gain of A holds with twice the steps, turns into a loss on text, and is hidden by noise in a larger model.
ELSEWHERE = """
if settings["model.effect_a"] != 1:
    if settings["data.source"] == "text":
        settings["model.effect_a"] = 1.3
    if settings["model.d_model"] == 128:
        settings["model.effect_a"] = 1.0 if settings["seed"] % 2 else 0.5
"""
TEXT = "--data.source text --data.path corpus"


def reach_of(result, idea):
    [found] = [one["reach"] for one in result["ideas"] if one["idea"] == idea]
    return {one["change"]: one for one in found}


def test_winner_is_measured_elsewhere(experiments):
    experiments.hook(ELSEWHERE)
    result = experiments.race(A, reach=True, other_data=TEXT)
    found = reach_of(result, A)
    assert {name: one["holds"] for name, one in found.items()} == {
        "on text": "no",
        "at twice the steps": "yes",
        "at four times the size": "unknown",
    }
    assert found["on text"]["effect"] == pytest.approx(0.3, abs=0.02) and found["on text"]["verdict"] == "worse"
    assert found["at twice the steps"]["effect"] == pytest.approx(-0.3, abs=0.02)
    # Where the first seeds decide, there are no more; the others go where they do not.
    assert [one["runs"] for one in found.values()] == [4, 4, reach.MAX_SEEDS]
    assert all(one["low"] < one["effect"] < one["high"] for one in found.values())
    elsewhere = [run for run in experiments.trained() if run["seed"] >= 5000]
    kinds = {(run["data.source"], run["steps"], run["model.d_model"]) for run in elsewhere}
    assert kinds == {("text", 100, 64), ("stories", 200, 64), ("stories", 400, 128)}
    assert {run["data.path"] for run in elsewhere if run["data.source"] == "text"} == {"corpus"}
    assert {run["data.num_samples"] for run in elsewhere if run["data.source"] != "text"} == {200, 400}

    text = experiments.race(A, reach=True, other_data=TEXT, json=False)
    assert not experiments.started() and "    holds on text: no (+" in text and "at twice the steps: yes (-" in text
    [of_report] = [one for one in experiments.report()["results"] if one["kind"] == "race"]
    assert reach_of(of_report, A) == found
    assert [run["seed"] for run in experiments.trained()] == [], "the report trains nothing"


@pytest.mark.slow
def test_each_winner_is_compared_with_the_baseline_that_it_joined(experiments):
    result = experiments.race(A, B, reach=True)
    assert result["stack"] == [A, B]
    for idea, effect in ((A, -0.3), (B, -0.2)):
        found = reach_of(result, idea)
        assert {*found} == {"at twice the steps", "at four times the size"}
        assert all(one["effect"] == pytest.approx(effect, abs=0.02) for one in found.values())
    confirmed = experiments.confirm(sizes="1,4", seeds=4)
    assert {run["model.d_model"] for run in experiments.trained() if run["model.effect_a"] == 0.7} == {64}, (
        "of the larger ones, only the stack without A is new"
    )
    assert len(confirmed["differences"]) == 8


def test_race_on_text_is_measured_on_stories(experiments):
    experiments.hook(ELSEWHERE)
    result = experiments.race("--model.effect_b 0.7", *TEXT.split(), reach=True)
    assert reach_of(result, "--model.effect_b 0.7")["on stories"]["holds"] == "yes"
    stories = [run for run in experiments.trained() if run["data.source"] == "stories"]
    assert {(run["data.facts"], run["data.path"], run["data.num_samples"]) for run in stories} == {(1024, None, 100)}


def test_race_on_stories_is_measured_on_the_text_of_the_library(experiments, monkeypatch):
    monkeypatch.setattr(reach, "TEXT", {"data.source": "text", "data.path": str(LIBRARY)})
    prepared = []
    monkeypatch.setattr(
        baseline, "prepare_library", lambda recipe: prepared.append((recipe.data or {}).get("data.path"))
    )
    assert reach_of(experiments.race(A, reach=True), A)["on text"]["holds"] == "yes"
    assert prepared == [None, str(LIBRARY)]
    assert {run["data.path"] for run in experiments.trained() if run["seed"] >= 5000} == {None, str(LIBRARY)}


def test_reach_is_measured_in_the_minutes_that_are_left(experiments):
    assert reach_of(experiments.race(A, minutes=60, reach=False), A) == {}
    assert reach_of(experiments.race(A), A) == {} and not experiments.started()
    assert {one["holds"] for one in reach_of(experiments.race(A, minutes=60), A).values()} == {"yes"}
    experiments.race("--model.effect_c 1.0001", minutes=60)
    assert not [run for run in experiments.trained() if run["steps"] > 100], "nothing was found"


def test_change_that_does_not_fit_into_the_minutes_is_left_out(experiments, monkeypatch):
    experiments.race(A)

    def is_too_long(self, variant=None):
        return variant is not None and variant.settings["model.d_model"] == 128

    monkeypatch.setattr(runs.Runs, "is_time_spent", is_too_long)
    found = reach_of(experiments.race(A, minutes=10), A)
    assert {name: one["runs"] for name, one in found.items()} == {"at twice the steps": 4, "at four times the size": 0}


@pytest.mark.parametrize(("flops", "is_late"), [(1, False), (9, False), (11, True)])
def test_run_is_judged_by_its_flops(flops, is_late, tmp_path, monkeypatch):
    """The baseline takes a minute, and ten are left."""
    monkeypatch.setattr(runs, "read_results", lambda folder: {"a-0": runs.Result("a-0", 1.0, elapsed=60.0)})
    of_a: Any = SimpleNamespace(digest="a", flops=7.0)
    jobs: Any = SimpleNamespace(end_time=time.monotonic() + 600)
    found = runs.Runs(tmp_path, of_a, jobs, 0)
    variant: Any = SimpleNamespace(flops=7.0 * flops)
    assert found.is_time_spent(variant) == is_late
    jobs.end_time = math.inf
    assert not found.is_time_spent(variant)


def test_stopped_measurement_resumes(experiments):
    experiments.race(A)
    experiments.hook(stop_at(5002))
    experiments.race(A, jobs=1, reach=True, error=SystemExit)
    before = {name for name in experiments.started() if not name.endswith("-5002")}
    experiments.hook("")
    assert {one["holds"] for one in reach_of(experiments.race(A, reach=True), A).values()} == {"yes"}
    assert before and not before & {*experiments.started()}


def test_other_data_that_cannot_be_used_are_named(experiments):
    experiments.race(A, reach=True, other_data="--steps 3")
    assert "reach: other_data: steps is no setting of the data; give it to all runs" in experiments.errors
    assert "at twice the steps" in experiments.race(A, reach=True, json=False)
    experiments.race("--model.crashes true", A, reach=True, other_data="--data.nope 1")
    assert "reach: --data.nope is not a setting" in experiments.errors


# The effect at several sizes


def test_trends_with_the_size(experiments):
    """B gains less in a larger model, and A turns into a loss."""
    experiments.hook(
        "if settings['model.d_model'] == 128:\n"
        "    settings['model.effect_a'] **= -0.5\n    settings['model.effect_b'] **= 0.5"
    )
    found = experiments.confirm(A, B, sizes="1,4", seeds=4)
    trends = {(one["variant"], one["against"]): one for one in found["trends"]}
    both = f"{A} + {B}"
    assert trends[A, "baseline"]["trend"] == "changes sign" and trends[both, A]["trend"] == "shrinks"
    shrinks = trends[both, A]
    assert (shrinks["from"], shrinks["to"]) == (1, 4) and shrinks["low"] < shrinks["change"] < shrinks["high"]
    assert shrinks["change"] == pytest.approx(0.8**-0.5 - 1, abs=0.02) and shrinks["low"] > 0
    assert "shrinks" in experiments.confirm(A, B, sizes="1,4", seeds=4, json=False)
    assert experiments.confirm(A, B, seeds=4)["trends"] == []


@pytest.mark.parametrize(
    ("verdicts_and_effects", "change", "expected"),
    [
        ([("better", -0.3), ("better", -0.5)], -0.2, "grows"),
        ([("better", -0.3), ("better", -0.1)], 0.2, "shrinks"),
        ([("better", -0.3), ("unknown", 0.1)], 0.4, "shrinks"),
        ([("unknown", 0.01), ("better", -0.2)], -0.2, "grows"),
        ([("worse", 0.1), ("worse", 0.4)], 0.3, "grows"),
        ([("better", -0.1), ("worse", 0.1)], 0.2, "changes sign"),
        ([("better", -0.3), ("better", -0.4)], 0.0, "unknown"),
    ],
)
def test_name_of_a_trend(verdicts_and_effects, change, expected):
    from tools.experiment.confirm import trend

    assert trend([{"verdict": one, "effect": effect} for one, effect in verdicts_and_effects], change) == expected


@pytest.mark.parametrize("repetitions", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_interval_of_a_trend_rarely_misses(repetitions):
    """Looked at with 4, 5, ... 16 seeds; the larger model scatters five times as much."""
    random, missed = np.random.default_rng(0), 0
    for _ in range(repetitions):
        values = random.normal(0, [[0.04], [0.04], [0.2], [0.2]], (4, 16))
        looks = [verdicts.compare([*values[:, :n]], [(1, 0, 2, 3)]) for n in range(4, 17)]
        missed += any(abs(look.effects[0]) > look.half_widths[0] for look in looks)
    assert missed / repetitions <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / repetitions)


def test_contrast_of_two_effects():
    groups = [[1.0, 1.1], [2.0, 2.1], [5.0, 5.1], [9.0, 9.1]]
    found = verdicts.compare(groups, [(0, 1), (2, 3), (1, 0, 2, 3)])
    assert found.effects == pytest.approx([1, 4, 3])
    assert found.standard_errors == pytest.approx([0.005**0.5, 0.005**0.5, 0.1])


# With the real train.py


@pytest.mark.slow
def test_real_reach(tmp_path):
    """A higher learning rate holds elsewhere; runs on text are not among those of the race."""
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"{number} is {'even' if number % 2 == 0 else 'odd'}. " * 20}) + "\n"
        for number in range(2000))
    )  # fmt: skip
    corpus, idea = tmp_path / "corpus", "--optimizer.lr 0.02"
    prepare = ["-m", "data.prepare", "--source", str(tmp_path / "text.jsonl"), "--tokenizer", "byte"]
    prepare += ["--validation", "hash:0.1", "--out", str(corpus)]
    race = ["-m", "tools.experiment", idea, "--rounds", "1", "--runs", "8", "--reach", "true", "--json", "true"]
    race += ["--other_data", f"--data.source text --data.path {corpus}", "--folder", str(tmp_path / "lab")]
    for command in (prepare, [*race, "--config", str(tmp_path / "tiny.yaml")]):
        done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["stack"] == [idea]
    found = reach_of(result, idea)
    assert {*found} == {"on text", "at twice the steps", "at four times the size"}
    assert all(one["runs"] >= 4 and one["failed"] == 0 for one in found.values())
    assert found["on text"]["holds"] == "yes"
    for folder in (tmp_path / "lab").iterdir():
        rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
        has_entropy = {row["excess_loss"] is not None for row in rows}
        assert len(has_entropy) == 1, "text and stories are in folders of their own"


def test_other_data_without_reach_is_refused():
    with pytest.raises(ConfigError, match="other_data: x has no effect with reach: false; leave it out"):
        parse_tool(ExperimentConfig, "tools.experiment", ["--reach", "false", "--other_data", "x"])
