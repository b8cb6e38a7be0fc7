"""What confirm trains, compares and prints."""

import json
import re
import time
from types import SimpleNamespace

import pytest

from runtime.config.errors import ConfigError
from tools.experiment import sandbox

A, B, C, NOTHING = "--model.effect_a 0.7", "--model.effect_b 0.8", "--model.effect_c 0.9", "--model.effect_c 1.0001"


def names(confirmation):
    return [(one["variant"], one["against"]) for one in confirmation["differences"]]


def seeds(experiments):
    return sorted({run["seed"] for run in experiments.trained()})


def test_stack_of_the_newest_race_is_confirmed(experiments):
    experiments.race("--model.effect_b 0.9")
    raced = {*experiments.started()}
    experiments.race(C, A, B)
    raced |= {*experiments.started()}
    found = experiments.confirm()
    assert found["version"] == 1 and found["ideas"] == [A, B, C] and found["compared"] == "excess loss"
    every, two = f"{A} + {B} + {C}", f"{A} + {B}"
    pairs = [(every, "baseline"), (A, "baseline"), (two, A), (every, two)]
    pairs += [(every, f"all without {A}"), (every, f"all without {B}")]  # without C it is a step
    assert names(found) == pairs
    effects = [0.7 * 0.8 * 0.9 - 1, -0.3, -0.2, -0.1, -0.3, -0.2]
    for difference, effect in zip(found["differences"], effects, strict=True):
        assert difference["effect"] == pytest.approx(effect, abs=0.01) and difference["verdict"] == "better"
        assert difference["low"] < effect < difference["high"] < 0 and difference["q"] <= 0.05
        assert (difference["runs"], difference["failed"], difference["size"]) == (3, 0, 1)
    trained = experiments.started()
    assert len(trained) == len(set(trained)) == 6 * 3 and not raced & {*trained}
    assert seeds(experiments) == [5000, 5001, 5002]
    lines = [line for line in experiments.errors.splitlines() if not line.startswith("checked ")]
    start, first, second = lines[:3]
    assert start == "checking the baseline and the ideas ..."
    assert first.startswith(f"confirming {every}, found by ")
    assert re.fullmatch(r"confirm: 18 runs, about \d\.\d minutes of one core or GPU, \d\.\d minutes from now", second)

    assert experiments.confirm() == found and not experiments.started()
    more = experiments.confirm(seeds=4)
    assert len(experiments.started()) == 6 and seeds(experiments) == [5003] and more["differences"][0]["runs"] == 4
    text = experiments.confirm(seeds=4, json=False)
    assert text.startswith(f"Confirmation on seeds that no race has used:\n    A: {A}\n    B: {B}\n    C: {C}\n"), text
    compared = [tuple(re.split("  +", line)[:2]) for line in text.splitlines()[6:]]
    pairs = [("A + B + C", "baseline"), ("A", "baseline"), ("A + B", "A"), ("A + B + C", "A + B")]
    assert compared == [*pairs, ("A + B + C", "all without A"), ("A + B + C", "all without B")], text
    assert len(list(experiments.folder().glob("confirmations/*.json"))) == 1
    again = experiments.race(C, A, B)
    assert again["stack"] == [A, B, C] and not experiments.started(), "reserved seeds are in no race"


def test_runs_of_races_are_not_in_a_confirmation(experiments):
    """Whose seeds are lucky there."""
    experiments.hook(
        "if settings['seed'] < 5000 and settings['model.effect_c'] != 1:\n    settings['model.effect_a'] = 0.5"
    )
    assert experiments.race(NOTHING)["stack"] == [NOTHING]
    [difference] = experiments.confirm()["differences"]
    assert difference["verdict"] == "no gain" and abs(difference["effect"]) < 0.01


def test_named_ideas_at_sizes_on_other_data(experiments):
    found = experiments.confirm(A, B, "--optimizer.lr", "1.5", sizes="1,4", data_seed=3, seeds=2)
    pairs = [(f"{A} + {B}", "baseline"), (A, "baseline"), (f"{A} + {B}", A), (f"{A} + {B}", f"all without {A}")]
    assert names(found) == pairs * 2 and [one["size"] for one in found["differences"]] == [1] * 4 + [4] * 4
    assert found["data_seed"] == 3 and all(one["effect"] < -0.1 for one in found["differences"])
    trained = experiments.trained()
    assert {run["data.seed"] for run in trained} == {3} and {run["model.d_model"] for run in trained} == {64, 128}
    assert {(run["model.d_model"], run["steps"], run["optimizer.lr"]) for run in trained} == {
        (64, 100, 1.5),
        (128, 400, 0.75),
    }
    costs = [line for line in experiments.errors.splitlines() if line.startswith("confirm:")]
    assert costs[0] == "confirm: 16 runs, whose time is known after the first one"
    assert len(costs) == 2 and costs[1].startswith("confirm: 16 runs, about ")
    assert "data.seed 3" in experiments.confirm(
        A, B, "--optimizer.lr", "1.5", sizes="1,4", data_seed=3, seeds=2, json=False
    )
    other = experiments.confirm(A, B, "--optimizer.lr", "1.5", seeds=2)
    assert "confirm: 8 runs, whose" in experiments.errors, "the other data are another baseline"
    assert other["data_seed"] is None and len(experiments.started()) == 8
    assert len(list(experiments.folder().glob("confirmations/*.json"))) == 2
    experiments.confirm(C, "--optimizer.lr", "1.5", seeds=2, data_seed=4)
    assert "whose time" not in experiments.errors, "a confirmation has trained the baseline"


def test_idea_that_changes_nothing_is_confirmed_as_such(experiments):
    [found] = experiments.confirm("--model.effect_a 1.0", seeds=2)["differences"]
    assert found["effect"] == 0 and found["verdict"] == "identical"
    assert len(experiments.started()) == 2, "the runs of one variant"


@pytest.mark.slow
def test_patches_are_confirmed(experiments, patches):
    """Where there is no sandbox, each command says so before it runs code, also that of a folder."""
    one, two = patches.effect("one", 1, 0.7), patches.effect("two", 2, 0.8)
    warning = "the code of ideas runs without a sandbox, read it first: "
    sandbox.warn.cache_clear()
    assert experiments.race(str(patches.folder))["stack"] == [one, two]
    assert experiments.errors.count(warning) == 1
    sandbox.warn.cache_clear()  # as in another process
    found = experiments.confirm()
    assert experiments.errors.count(warning) == 1
    assert [one["verdict"] for one in found["differences"]] == ["better"] * 4


def test_stack_of_equal_flops_is_confirmed_at_equal_flops(experiments):
    big = "--model.big true --model.effect_a 0.5"
    experiments.race(big, equal="flops")
    [difference] = experiments.confirm(equal="flops")["differences"]
    assert difference["effect"] == pytest.approx(1.5 * 0.5 - 1, abs=0.02)
    assert {run["steps"] for run in experiments.trained() if run["model.big"]} == {67}


def test_failed_run_is_a_result(experiments):
    experiments.hook("settings['model.fails'] = settings['model.effect_a'] != 1 and settings['seed'] == 5001")
    found = experiments.confirm(A, B)
    verdicts = {(one["variant"], one["against"]): one["verdict"] for one in found["differences"]}
    both = f"{A} + {B}"
    assert verdicts == {
        (both, "baseline"): "failed",
        (A, "baseline"): "failed",
        (both, A): "better",
        (both, f"all without {A}"): "failed",
    }
    assert len(experiments.started()) == 12 and found["failures"] == ["the loss is nan"]
    assert {one["failed"] for one in found["differences"]} == {1}
    assert experiments.confirm(C)["failures"] == [], "those of others"


def test_nothing_is_better_that_fails_more_often(experiments):
    """One run of four of the baseline fails, and two of four with the idea."""
    experiments.hook(
        "is_idea, seed = settings['model.effect_a'] == 0.7, settings['seed']\n"
        "settings['model.fails'] = seed == 5000 or is_idea and seed == 5001"
    )
    [difference] = experiments.confirm(A, seeds=4)["differences"]
    assert difference["effect"] == pytest.approx(-0.3, abs=0.01) and difference["verdict"] == "unknown"


def test_stopped_confirmation_resumes(experiments):
    experiments.hook("if settings['seed'] == 5001:\n    os.kill(os.getppid(), 15)\n    import time\n    time.sleep(60)")
    experiments.confirm(A, jobs=1, error=SystemExit)
    assert json.loads(experiments.output)["exit_code"] == 75
    before = {name for name in experiments.started() if name.endswith("-5000")}
    experiments.hook("")
    assert experiments.confirm(A)["differences"][0]["runs"] == 3
    assert len(before) == 2 and not before & {*experiments.started()}


def test_minutes_start_no_run_that_would_end_late(experiments, monkeypatch):
    """By a clock on which each run takes a minute."""
    clock = SimpleNamespace(monotonic=lambda: 60 * len(experiments.started()), sleep=time.sleep)
    for module in ("experiment.runs", "jobs.runner"):
        monkeypatch.setattr(f"tools.{module}.time", clock)
    [difference] = experiments.confirm(A, seeds=20, minutes=6, jobs=1)["differences"]
    assert 4 <= len(experiments.started()) <= 6 and 2 <= difference["runs"] <= 3


def test_settings_of_all_runs_choose_the_race(experiments):
    experiments.race(A, "--optimizer.lr", "1.5")
    assert experiments.confirm("--optimizer.lr", "1.5")["ideas"] == [A]
    assert "has found a better one; give the settings of a race and check out its commit, or" in experiments.confirm(
        error=ConfigError
    )


def test_damaged_race_is_no_obstacle(experiments):
    experiments.race(A)
    (experiments.folder() / "races" / "x.json").write_text("{")
    assert experiments.confirm()["ideas"] == [A]


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        ([], {}, "has found a better one; give the settings of a race and check out its commit, or"),
        (["--data.path x"], {}, "changes which tokens are predicted"),
        (["--model.nope 1"], {}, "is not a setting"),
        ([A, "--model.effect_a 0.8"], {}, "set model.effect_a; confirm them one by one"),
        ([A], {"sizes": "1,x"}, "sizes: '1,x' must be numbers of at least 1"),
        ([A], {"sizes": "0.5"}, "sizes: "),
        ([A], {"sizes": ""}, "sizes: "),
        (
            ["--model.n_kv_heads 1"],
            {"sizes": "1,2"},
            "sizes: --model.n_kv_heads 1: model.n_kv_heads: 1 cannot grow 1.5 times, as the width of the baseline does",
        ),
        ([A, "--config", "absent.yaml"], {}, "config: absent.yaml: No such file or directory"),
    ],
)
def test_refused_before_anything_is_written(words, options, message, experiments):
    assert message in experiments.confirm(*words, error=ConfigError, **options)
    printed = json.loads(experiments.output)
    assert printed["exit_code"] == 2 and message in printed["message"] and not list(experiments.lab.iterdir())
