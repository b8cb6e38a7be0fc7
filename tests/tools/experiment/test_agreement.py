"""The agreement of a testbed with known effects, on the fake train.py."""

import json

import pytest
import yaml

from runtime.config.errors import ConfigError, RunError
from tests.tools.experiment.test_race import OWN_RATE, RATE
from tools.experiment import agreement, runs
from tools.experiment.settings import AgreementConfig

EFFECTS = [
    {"name": "a", "change": "--model.effect_a 0.7", "effect": "better", "half": "choose"},
    {"name": "b", "change": "--model.effect_b 0.8", "effect": "worse", "half": "choose"},
    {"name": "c", "change": "--model.effect_c 1.4", "effect": "worse", "half": "choose"},
    {"name": "own rate", "change": "--model.sham 1 --model.effect_a 0.9", "effect": "better", "half": "report"},
    {"name": "disputed", "change": "--model.x true", "effect": "disputed"},
]


@pytest.fixture
def agree(experiments, tmp_path, monkeypatch):
    """Return a function that compares the testbed with EFFECTS, and returns the object of --json."""
    (tmp_path / "effects.yaml").write_text(yaml.safe_dump(EFFECTS))
    monkeypatch.setattr(agreement, "EFFECTS", tmp_path / "effects.yaml")

    def run(**options):
        words = {"jobs": 2, "json": True, "seeds": 3, "folder": str(experiments.lab), **options}
        return experiments._run(agreement.main, AgreementConfig(ideas_and_settings=[*RATE], **words), None)

    return run


def test_signs_are_counted(agree, experiments):
    result = agree()
    effects = {row["name"]: row for row in result["effects"]}
    assert effects.keys() == {"a", "b", "c"}, "those of the other half and disputed ones do not count"
    assert [effects[name]["effect"] for name in "abc"] == pytest.approx([-0.3, -0.2, 0.4], abs=0.02)
    assert result["right"] == 2 and result["clearly_wrong"] == 1
    names = experiments.started()
    assert len(names) == 3 * 3 + 6, "the baseline has twice the runs of an idea"
    assert agree() == result and not experiments.started()
    text = agree(json=False)
    assert "2 of 3 signs right, 1 clearly wrong" in text and "better WRONG" in text
    [file] = experiments.folder().glob("agreement/*.json")
    assert json.loads(file.read_text()) == result


def test_arms_are_chosen_by_other_seeds_than_those_that_are_compared(agree, experiments):
    experiments.hook(OWN_RATE)
    assert agree(half="report")["effects"][0]["effect"] == pytest.approx(0.9 * 2**0.25 - 1, abs=0.02)
    result = agree(half="report", tune="optimizer.lr=0.5,1,2")
    [row] = result["effects"]
    assert row["factors"] == {"optimizer.lr": 0.5} and result["baseline_factors"] == {"optimizer.lr": 1}
    assert row["effect"] == pytest.approx(-0.1, abs=0.02) and result["right"] == 1
    measured = {
        (settings["model.sham"], settings["optimizer.lr"]) for settings in experiments.trained() if settings["seed"]
    }
    assert len(measured) == 2, "only the best arm of each was trained with other seeds than 0"


def test_what_was_not_measured_is_named(agree, experiments):
    assert agree(minutes=1e-9)["not_measured"] == ["a", "b", "c"] and not experiments.started()
    experiments.hook("if settings['model.effect_b'] == 0.8:\n    raise SystemExit('no memory')")
    result = agree()
    assert result["not_measured"] == ["b"] and result["right"] == 2
    assert "not measured: b" in agree(json=False)


def test_idea_whose_seconds_cannot_be_measured_is_not_measured(agree, monkeypatch):
    def equalize(self, variant, equal):
        if variant.settings["model.effect_b"] == 0.8:
            raise RunError("took too long")
        return variant

    monkeypatch.setattr(runs.Runs, "equalize", equalize)
    result = agree(equal="seconds", seeds=2)
    assert result["not_measured"] == ["b"] and result["right"] == 2


def test_baseline_that_fails_ends_the_comparison(agree, experiments):
    is_baseline = "all(settings[f'model.effect_{name}'] == 1 for name in 'abc')"
    experiments.hook(f"if {is_baseline}:\n    raise SystemExit('no')")
    with pytest.raises(RunError, match="the baseline does not train"):
        agree()
    assert len(experiments.started()) < 12, "of 15 that are planned"


def test_setting_that_cannot_be_tuned_is_refused(agree, experiments):
    with pytest.raises(ConfigError, match="tune: model.nothing: None is no number"):
        agree(tune="model.nothing=1,2")
    assert not list(experiments.lab.iterdir())
