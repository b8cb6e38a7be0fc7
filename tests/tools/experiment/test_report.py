"""The report of races and confirmations as text, as JSON and as a picture; damaged files do not end it."""

import json
import os
import re
from pathlib import Path
from typing import get_args

import pytest
from matplotlib.figure import Figure

from runtime.config.errors import ConfigError
from tests.conftest import ROOT
from tools.experiment import change, report
from tools.experiment.picture import draw, label
from tools.experiment.verdicts import Verdict

A, B, NOTHING, FAILS = "--model.effect_a 0.7", "--model.effect_b 0.8", "--model.effect_c 1.0001", "--model.fails true"
CHANGE = r"[+-]\d+\.\d%"


def test_sentence_of_a_better_idea_has_its_losses(experiments):
    text = experiments.race(A, NOTHING, FAILS, json=False)
    [first, *_] = experiments.race(A, NOTHING, FAILS)["rounds"]
    ends = [first["baseline_excess_loss"] * first["ideas"][0][end] for end in ("low", "high")]
    assert -0.2 < ends[0] < ends[1] < -0.05
    in_nats = re.escape("{:+.4f} to {:+.4f}".format(*ends))
    losses = rf"loss 0\.90\d\d -> 0\.7[78]\d\d nats/token \(-13\.\d%; 95%: {in_nats} nats/token\)"
    interval = rf"excess loss -(29|30)\.\d% \({CHANGE} to {CHANGE}\)"
    assert re.search(f"^Better: {A}: {losses}, {interval}$", text, re.MULTILINE)
    first, last = text.splitlines()[0], text.splitlines()[-1]
    assert re.fullmatch(r".*/races/\w{8}\.json: \d+ runs, [12] of them failed, 0\.00 hours", first)
    assert last == f"picture: {experiments.race_file().with_suffix('.png')}"
    assert "\nRound 1, on the baseline: loss 0.90" in text and f"\nRound 2, on {A}: loss 0.7" in text
    assert f"failed: {FAILS}: the loss is nan" in text and f"\nFound: {A}\n" in text
    header = next(line for line in text.splitlines() if line.startswith("idea "))
    names = "idea, excess loss, 95% interval, verdict, q, runs, failed, steps, tokens, flops, seconds, parameters"
    assert re.split(r"  +", header) == names.split(", ")
    [row] = [line for line in text.split("Round 2")[0].splitlines() if line.startswith(f"{A} ")]
    assert re.search(rf" better +\S+ +\d+ +{' +'.join(['1.00'] * 3)} +\d\.\d\d +1.00$", row)


def test_sentence_without_a_known_entropy_has_the_loss_alone(experiments):
    """Of a metric, too."""
    text = experiments.race(B, metric="val/other", json=False)
    assert re.search(rf"Better: {B}: val/other 1\.\d+ -> 1\.\d+ \(-10\.\d%\), val/other -10", text)
    assert "\nRound 1, on the baseline: val/other 1.4" in text
    assert "excess loss" not in text and "nats" not in text


def test_progress_names_what_a_run_changes(experiments):
    experiments.race(A, "--steps", "90", "--model.sham", "3", jobs=1)
    printed = experiments.errors
    assert re.search(r"^\[run 1\] baseline, seed 0: loss 0\.[89]\d+$", printed, re.MULTILINE)
    assert re.search(rf"^\[run \d+\] {A}, seed 1: loss 0\.8\d+$", printed, re.MULTILINE)


def test_one_idea_has_its_sentence_whatever_the_verdict(experiments):
    assert f"\nNo gain: {NOTHING}: loss 0.90" in experiments.race(NOTHING, json=False)


def test_why_may_be_written_after_the_idea_has_raced(experiments, patches):
    path = Path(patch := patches.effect("a", 1, 0.7))
    assert [idea["why"] for idea in experiments.race(patch, A, runs=4)["ideas"]] == ["", ""]
    path.write_text(f"Less noise.\n{path.read_text()}")
    assert {idea["idea"]: idea["why"] for idea in experiments.race(patch, A)["ideas"]} == {patch: "Less noise.", A: ""}
    assert [idea["why"] for idea in experiments.race(A, runs=4)["ideas"]] == [""]
    assert [idea["why"] for idea in experiments.race(A, note="A guess.")["ideas"]] == ["A guess."]


def test_report_has_the_why_of_an_idea_and_lines_to_read(experiments, patches, monkeypatch):
    """The why is the note, or the first line of a patch; the lines are of changed code alone."""
    monkeypatch.setattr(change, "lines_to_read", lambda diff: ["train.py:3: files: open(x)"] if diff else [])
    patch = patches.write("a.patch", "# 1\n", "# 1, changed\n", header="Less noise.\n\n")
    [idea] = experiments.race(patch, runs=4)["ideas"]
    assert (idea["why"], idea["lines_to_read"]) == ("Less noise.", ["train.py:3: files: open(x)"])
    text = experiments.report(json=False)
    assert f"\nwhy: {patch}: Less noise.\nread: {patch}: train.py:3: files: open(x)\n" in text
    noted = experiments.race(A, runs=4, note="A guess.", json=False)
    assert f"\nwhy: {A}: A guess.\n" in noted and "\nread: " not in noted
    assert experiments.race(A, B, note="A guess.", error=ConfigError).startswith("note: is for a single idea")


def test_all_races_and_confirmations_are_listed(experiments):
    """The newest last."""
    message = experiments.report(error=ConfigError)
    assert "has no results" in message
    assert json.loads(experiments.output) == {"version": 1, "exit_code": 2, "message": message}
    experiments.race(A, B)
    experiments.race(NOTHING, "--optimizer.lr", "1.5")
    experiments.confirm(A, seeds=2)
    results = experiments.report()
    assert results["version"] == 1 and len(results["results"]) == 3
    assert [one.get("stack") or one["ideas"] for one in results["results"][::2]] == [[A, B], [A]]
    assert results["results"][1]["ideas"][0]["verdict"] == "no gain"
    text = experiments.report(json=False)
    assert text.index("Round 2") < text.index("No gain") < text.index("Confirmation on seeds")
    assert not experiments.started()


def test_reference_page_has_exactly_the_fields_of_json(experiments):
    race, confirmation = experiments.race(A, B, compute_multiplier=True), experiments.confirm(A, seeds=2)
    out = experiments.race(A, "--model.big true", max_parameters=1.2)["ideas"]
    assert any(idea["message"] for idea in out), "one is out"
    objects = {
        "A race": [race],
        "A round of a race": race["rounds"],
        "An idea of a race": [*race["ideas"], *out, *(idea for entry in race["rounds"] for idea in entry["ideas"])],
        "A confirmation": [confirmation],
        "A difference of a confirmation": confirmation["differences"],
    }
    page = (ROOT / "docs" / "experiments_reference.md").read_text()
    for heading, some in objects.items():
        [section] = re.findall(rf"(?ms)^### {heading}\n(.*?)^###", page)
        documented = re.findall(r"`(\w+)`", " ".join(re.findall(r"(?m)^\| (`.*?`) \|", section)))
        assert len(some) and all(sorted(one) == sorted(documented) for one in some), heading


def test_running_race_is_reported(experiments):
    experiments.hook("if settings['seed'] == 1:\n    os.kill(os.getppid(), 15)\n    import time\n    time.sleep(60)")
    experiments.race(A, jobs=1, error=SystemExit)
    [result] = experiments.report()["results"]
    assert result["runs"] == 1 and result["ideas"][0]["verdict"] == "unknown" and result["ideas"][0]["effect"] is None
    assert f"\nUnknown: {A}\n" in experiments.report(json=False)


def test_damaged_lines_are_skipped(experiments):
    experiments.race(A)
    before = experiments.report()
    digest = json.loads(experiments.race_file().read_text())["rounds"][0]["baseline"]["digest"]
    row = '{"run": "%s", "loss": %s}'
    rows = [
        "{",
        "[1]",
        '{"run": 3}',
        row % (f"{digest}-x", 1.0),
        row % (f"{digest}-9", "null"),
        row % (f"{digest}-9", 0),
    ]
    with (experiments.folder() / "results.jsonl").open("a") as file:
        file.write("\n".join(rows) + "\n")
    assert experiments.report() == before
    assert len(re.findall(r"results\.jsonl, line \d+ is skipped: ", experiments.errors)) == len(rows)
    assert experiments.race(A)["stack"] == [A] and not experiments.started()


def test_damaged_races_do_not_hide_others(experiments):
    experiments.race(A)
    before, own = experiments.report()["results"], experiments.race_file()
    damaged = [b"{", b"[]", b"{}", b'{"version": 1}', b"\xff", b""]
    for name in ("races", "confirmations"):
        (experiments.folder() / name).mkdir(exist_ok=True)
        for number, content in enumerate(damaged):
            (experiments.folder() / name / f"{number}.json").write_bytes(content)
    report, text = experiments.report(), experiments.report(json=False)
    assert report["results"] == before and len(report["damaged"]) == 2 * len(damaged)
    for number in range(len(damaged)):
        for name in ("races", "confirmations"):
            message = f"{name}/{number}.json cannot be read: "
            assert message in text and any(message in line for line in report["damaged"])
    own.write_text("{")
    assert f"{own} cannot be read" in experiments.race(A, error=ConfigError)


def test_results_without_files(experiments):
    experiments.race(A)
    (experiments.folder() / "results.jsonl").unlink()
    [result] = experiments.report()["results"]
    assert result["runs"] == 0 and result["ideas"][0]["verdict"] == "unknown"


def test_very_wide_interval_is_not_printed(experiments):
    """Four times as many nats in one run of two, in the fourth of the baseline as well."""
    experiments.hook("settings['model.effect_b'] = 0.01 if settings['seed'] % 2 else 1.0")
    result = experiments.race(NOTHING, runs=6)
    [idea] = result["ideas"]
    assert idea["high"] > 1000
    assert " -  unknown, gains at most 100.0%" in experiments.race(NOTHING, runs=6, json=False)


# The picture


@pytest.fixture
def figures(monkeypatch):
    """The figures that are written."""
    figures, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), savefig(self, *a, **k)))
    return figures


@pytest.mark.slow
def test_picture_shows_rounds_effects_and_costs(experiments, monkeypatch, figures):
    monkeypatch.setattr(report, "draw", draw)
    worse, longer = "--model.effect_c 1.4", "--steps 90 --model.effect_a 0.6"
    result = experiments.race(longer, B, NOTHING, FAILS, worse)
    assert experiments.race_file().with_suffix(".png").stat().st_size > 10_000
    axes, costs = figures[-1].axes
    rows = [name.get_text() for name in axes.get_yticklabels()]
    expected = []
    for entry in result["rounds"]:
        expected += [None, *(idea["idea"] for idea in entry["ideas"])]
    assert [row if expected[i] else None for i, row in enumerate(rows)] == expected
    assert rows[0].startswith("round 1, on the baseline (0.90") and rows[6].startswith("round 2, on the best so far")
    header, *cells = (name.get_text().split() for name in costs.get_yticklabels())
    assert header == ["effect", "runs", "steps", "FLOPs", "seconds", "params"]
    best = result["rounds"][0]["ideas"][0]
    assert cells[1][:4] == [f"{100 * best['effect']:+.1f}%", str(best["runs"]), "0.90", "0.90"]
    failed = rows.index(FAILS)
    assert cells[failed][0] == f"{result['failed']}-{result['failed']}"
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert (
        {*legend} == {idea["verdict"] for entry in result["rounds"] for idea in entry["ideas"]} > {"better", "failed"}
    )
    weights = {name.get_text(): name.get_weight() for name in axes.get_yticklabels()[:6]}
    assert weights[longer] == "bold" and weights[B] == "normal"
    low, high = axes.get_xlim()
    assert low == -high and 1 - 0.6 / 0.9 < high < 0.4, "all gains are inside"


def test_picture_without_results_and_of_very_wide_intervals(tmp_path, figures):
    nothing = dict.fromkeys(("effect", "low", "high", "steps", "flops", "seconds", "parameters"))
    idea = {
        "idea": "$x$ _one_",
        "verdict": "unknown",
        "runs": 0,
        "failed": 0,
        "joined": False,
        "arm_of": "x",
        **nothing,
    }
    wide = idea | {"idea": "wide", "arm_of": "wide", "effect": 30.0, "low": -1.0, "high": 1e300}
    entry = {"round": 1, "stack": [], "baseline_loss": None, "ideas": [idea, wide]}
    race = {"rounds": [entry], "runs": 0, "failed": 0, "compared": "loss"}
    draw(race, tmp_path / "race.svg")
    text = (tmp_path / "race.svg").read_text()
    assert "$x$ _one_" in [name.get_text() for name in figures[0].axes[0].get_yticklabels()] and "wide" in text
    assert figures[0].axes[0].get_xlim() == (-1, 1)
    draw(race | {"rounds": [entry | {"ideas": []}]}, tmp_path / "empty.svg")


@pytest.mark.parametrize("verdict", [*get_args(Verdict), "refused", "withdrawn"])
def test_picture_knows_each_verdict(verdict, tmp_path, figures):
    nothing = dict.fromkeys(("effect", "low", "high", "steps", "flops", "seconds", "parameters"))
    idea = {"idea": "x", "verdict": verdict, "runs": 0, "failed": 0, "joined": False, "arm_of": "x", **nothing}
    entry = {"round": 1, "stack": [], "baseline_loss": 1.0, "ideas": [idea]}
    draw({"rounds": [entry], "runs": 0, "failed": 0, "compared": "loss"}, tmp_path / "race.svg")
    assert [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()] == [verdict]


def test_label_of_a_patch_is_its_name():
    assert label(f"a{os.sep}b/better.patch --model.x 1") == "better.patch --model.x 1"
    assert len(label("x" * 100)) == 60 and label("x" * 100).endswith("…")
    arm = label("x" * 100 + " [optimizer.lr x0.5]")
    assert len(arm) == 60 and arm.endswith("x… [lr x0.5]")
    two = label("--model.mlp relu2 [optimizer.lr x0.5, model.d_model x2]")
    assert two == "--model.mlp relu2 [lr x0.5, d_model x2]"
    assert label("--optimizer.betas [0.8,0.95]") == "--optimizer.betas [0.8,0.95]"


def test_picture_of_a_tuned_race_has_the_best_arm_of_each_idea(tmp_path, figures):
    known = dict.fromkeys(("effect", "low", "high", "steps", "flops", "seconds", "parameters"), 0.1)
    known |= {"verdict": "unknown", "runs": 1, "failed": 0, "joined": False}

    def arms(name, *texts):
        return [{"idea": text, "arm_of": name, **known} for text in texts]

    tuning = arms("baseline", "[optimizer.lr x2]", "[optimizer.lr x0.5]")
    ideas = [idea for n in range(12) for idea in arms(f"--x {n}", f"--x {n} [optimizer.lr x2]", f"--x {n}")]
    later = [idea | {"effect": None} for idea in ideas]
    rounds = [tuning, ideas, ideas, later]
    rounds = [{"round": n, "stack": [], "baseline_loss": 1.0, "ideas": found} for n, found in enumerate(rounds, 1)]
    draw({"rounds": rounds, "runs": 0, "failed": 0, "compared": "loss"}, tmp_path / "race.svg")
    rows = [name.get_text() for name in figures[0].axes[0].get_yticklabels()]
    best = [f"--x {n} [lr x2]" for n in range(12)]
    of_baseline = ["[optimizer.lr x2]", "[optimizer.lr x0.5]"]
    assert [row for row in rows if "round" not in row] == [*of_baseline, *best, *best[:10]]
    assert sum("round" in row for row in rows) == 3, "nothing was measured in the last one"
