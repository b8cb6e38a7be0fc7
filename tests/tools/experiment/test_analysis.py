"""Error rates of a screen by simulation, and its analysis against exact cases and scipy."""

import json
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from tools.experiment import report
from tools.experiment.analysis import LOOKS, analyze, least_squares
from tools.experiment.design import extend_design

DEVIATION = 0.08  # of the log of the excess loss over seeds, as measured on configs/lab.yaml


@cache
def design(num_ideas, num_rows):
    """A screen that a quarter of the ideas joins when half of the runs are done."""
    early = num_ideas - num_ideas // 4
    rows = extend_design(np.zeros((0, early), bool), num_rows // 2)
    rows = np.pad(rows, ((0, 0), (0, num_ideas - early)))
    return np.r_[rows, extend_design(rows, num_rows - len(rows))]


def draw_noise(kind, rows, generator):
    """Noise of mean zero of the log of the loss, and which runs fail."""
    normal, failed = DEVIATION * generator.normal(size=len(rows)), np.zeros(len(rows), bool)
    if kind == "log-normal":
        return DEVIATION * (np.exp(generator.normal(size=len(rows))) - np.exp(0.5)), failed
    if kind == "heteroscedastic":  # a third of the ideas multiply the deviation by 2.5 each, at most twice
        return normal * 2.5 ** np.minimum(rows[:, ::3].sum(1), 2), failed
    failed = generator.random(len(rows)) < 1 / 6
    if kind == "ten times the loss":
        return normal + np.log(10) * (failed - 1 / 6), np.zeros(len(rows), bool)
    return normal, failed if kind == "not finite" else np.zeros(len(rows), bool)


def simulate(num_ideas, num_rows, fraction_real, kind, looks, seed):
    """False discovery proportion, intervals, those that cover, and power: at the first discovery, and at the end."""
    generator, rows = np.random.default_rng(seed), design(num_ideas, num_rows)
    effects, real = np.zeros(num_ideas), np.zeros(num_ideas, bool)
    real[generator.permutation(num_ideas)[: round(fraction_real * num_ideas)]] = True
    effects[real] = generator.choice([-1, 1], real.sum()) * generator.uniform(0.05, 0.3, real.sum())
    noise, failed = draw_noise(kind, rows, generator)
    log_losses = np.where(failed, np.nan, rows @ effects + noise)
    outcomes = []
    for look in np.linspace(num_rows / 4, num_rows, looks).astype(int):
        ideas = analyze([""] * num_ideas, rows[:look], log_losses[:look]).ideas
        found = np.array([idea.verdict != "unknown" for idea in ideas])
        right = [
            idea.verdict == ("better" if effect < 0 else "worse") for idea, effect in zip(ideas, effects, strict=True)
        ]
        false = (found & ~(real & right)).sum()
        intervals = [
            (idea.low, np.expm1(e), idea.high) for idea, e in zip(ideas, effects, strict=True) if np.isfinite(idea.low)
        ]
        covered = sum(low <= effect <= high for low, effect, high in intervals)
        power = (found & real).sum() / max(1, real.sum())
        outcomes.append((false / max(1, found.sum()), len(intervals), covered, power, found.any()))
    first = next((outcome for outcome in outcomes if outcome[-1]), outcomes[-1])
    return np.array([first, outcomes[-1]], float)[:, :4]


NOISES = ["normal", "log-normal", "heteroscedastic", "ten times the loss", "not finite"]


def check_error_rates(num_ideas, num_rows, fractions_real, kind, looks, repeats):
    outcomes = np.array(
        [
            simulate(num_ideas, num_rows, fraction, kind, looks, (num_ideas, index, repeat))
            for index, fraction in enumerate(fractions_real)
            for repeat in range(repeats)
        ]
    )
    assert outcomes[..., 0].mean(0).max() < 0.05
    coverage = outcomes[..., 2] / outcomes[..., 1]
    assert (coverage.mean(0) > 0.95 - 2 * coverage.std(0) / np.sqrt(len(outcomes))).all()


@pytest.mark.parametrize("kind", NOISES)
def test_error_rates_of_small_screens(kind):
    check_error_rates(8, 48, (0, 1 / 3), kind, looks=3, repeats=25)


@pytest.mark.slow
@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize(("num_ideas", "num_rows"), [(8, 48), (23, 96), (40, 160)])
def test_error_rates_of_large_screens(num_ideas, num_rows, kind):
    check_error_rates(num_ideas, num_rows, (0, 0.1, 1 / 3), kind, looks=12, repeats=100)


def test_one_idea_matches_t_tests():
    generator = np.random.default_rng(0)
    on = np.arange(20) % 4 == 0
    losses = generator.normal(0, np.where(on, 0.2, 0.05))
    (idea,) = analyze(["idea"], on[:, None], losses).ideas
    assert np.log1p(idea.effect) == pytest.approx(losses[on].mean() - losses[~on].mean())
    welch = stats.ttest_ind(losses[on], losses[~on], equal_var=False).confidence_interval()
    usual = stats.ttest_ind(losses[on], losses[~on]).confidence_interval()
    width = np.log1p(idea.high) - np.log1p(idea.low)
    assert width > usual.high - usual.low and width == pytest.approx(welch.high - welch.low, rel=0.25)


def test_robust_intervals_are_hardly_wider():
    rows = extend_design(np.zeros((0, 8), bool), 96)
    features = np.c_[np.ones(96), rows]
    ratios = []
    for seed in range(20):
        losses = np.random.default_rng(seed).normal(size=96)
        fit = least_squares(rows, losses)
        exact, squares, *_ = np.linalg.lstsq(features, losses)
        errors = np.sqrt(squares / 87 * np.diag(np.linalg.inv(features.T @ features)))[1:]
        assert fit.estimate == pytest.approx(exact[1:])
        ratios.append(fit.half_width / errors / stats.t.isf(0.025, 87))
    assert 1 <= np.min(ratios) + 1e-9 and np.mean(ratios) < 1.12


def test_interval_of_a_noisy_idea_covers():
    """One idea of 23 multiplies the deviation by four."""
    rows = extend_design(np.zeros((0, 23), bool), 96)
    generator = np.random.default_rng(1)
    losses = generator.normal(size=(200, 96)) * np.where(rows[:, 0], 4, 1)
    fits = [least_squares(rows, values) for values in losses]
    assert np.mean([abs(fit.estimate[0]) < fit.half_width[0] for fit in fits]) > 0.925


def test_too_few_runs_decide_nothing():
    rows = extend_design(np.zeros((0, 8), bool), 30)
    for runs in range(11):
        screen = analyze(["idea"] * 8, rows[:runs], np.arange(runs) / 10)
        assert screen.runs == runs and {idea.verdict for idea in screen.ideas} == {"unknown"}
        if runs <= 9:
            assert all(idea["effect"] is idea["q"] is None for idea in screen.to_json()["ideas"])
    json.dumps(screen.to_json(), allow_nan=False)


def test_json_has_the_documented_keys():
    rows = design(8, 48)
    losses = rows @ np.log([0.8, *[1.0] * 7]) + np.random.default_rng(0).normal(0, 0.02, 48)
    parsed = json.loads(
        json.dumps(analyze([f"--a {i}" for i in range(8)], rows, losses, {"parameters": rows[:, 0] + 1.0}).to_json())
    )
    assert parsed["runs"] == 48 and parsed["failed"] == 0
    first = parsed["ideas"][0]
    assert first["idea"] == "--a 0" and first["verdict"] == "better" and first["failed"] == 0
    assert first["low"] < -0.2 < first["high"] < 0 and first["effect"] == pytest.approx(-0.2, abs=0.03)
    assert first["p"] < first["q"] < 0.05 and first["parameters"] == 2 and first["seconds"] is None
    assert all(idea["verdict"] == "unknown" for idea in parsed["ideas"][1:])


def test_q_values_include_factor_for_looks():
    rows = design(8, 48)
    ideas = analyze([""] * 8, rows, rows[:, 0] * 0.1 + np.random.default_rng(2).normal(0, 0.08, 48)).ideas
    p = np.array([idea.p for idea in ideas])
    assert [idea.q for idea in ideas] == pytest.approx(stats.false_discovery_control(np.minimum(1, LOOKS * p)))


def test_failing_idea_is_blamed_alone():
    rows = extend_design(np.zeros((0, 23), bool), 96)
    generator = np.random.default_rng(0)
    effects = np.zeros(23)
    effects[1] = -0.3
    fails = rows[:, 0] & (generator.random(96) < 0.7)
    screen = analyze([""] * 23, rows, np.where(fails, np.inf, rows @ effects + generator.normal(0, 0.08, 96)))
    bad, good, *others = screen.ideas
    assert bad.verdict == "failed" and bad.failed == fails.sum() == screen.failed
    assert good.verdict == "better" and good.failed == 0
    assert not any(idea.failed or idea.verdict == "failed" for idea in others)


def test_idea_that_always_fails_has_no_effect():
    rows = extend_design(np.zeros((0, 8), bool), 48)
    screen = analyze([""] * 8, rows, np.where(rows[:, 0], np.nan, np.random.default_rng(0).normal(size=48)))
    assert screen.to_json()["ideas"][0]["effect"] is None and screen.ideas[0].verdict == "failed"
    assert not np.isnan([idea.effect for idea in screen.ideas[1:]]).any()


def test_costs_and_equal_compute():
    """An idea that gains 10% for a fifth more compute gains less than the compute would; one that saves time gains."""
    rows, generator = design(8, 48), np.random.default_rng(0)
    seconds = np.exp(rows @ np.log([1.2, 0.9, 1, 1, 1, 1, 1, 0.8]))
    losses = rows @ np.log([0.9, 1, 1, 1, 1, 1, 1, 0.8**-1.2]) + generator.normal(0, 0.03, 48)
    screen = analyze([""] * 8, rows, losses, {"seconds": seconds, "flops": seconds**2}, seconds, (7, 0.8))
    slow, fast, *_, control = screen.ideas
    assert abs(np.log1p(control.equal_compute.effect)) < 1e-9
    assert (slow.seconds, fast.seconds, slow.flops) == pytest.approx((1.2, 0.9, 1.44))
    assert slow.verdict == "better" and slow.equal_compute.verdict == "worse"
    assert fast.verdict == "unknown" and fast.equal_compute.verdict == "better"
    slope = np.log1p(control.effect) / np.log(0.8)
    assert slope == pytest.approx(-1.2, abs=0.1)
    assert np.log1p(slow.equal_compute.effect) == pytest.approx(np.log1p(slow.effect) - slope * np.log(1.2))


def test_worth_of_compute_needs_the_control():
    rows, seconds = design(8, 48), np.ones(48)
    losses = np.random.default_rng(0).normal(0, 0.3, 48)
    screen = analyze([""] * 8, rows, losses, {"seconds": seconds}, seconds, (7, 0.8))
    assert screen.ideas[7].low < 0 < screen.ideas[7].high
    assert all(idea.equal_compute is None for idea in screen.ideas)


def test_control_is_not_among_the_discoveries():
    """Its certain effect would double the level at which the first of the others is called a discovery."""
    rows, generator = design(8, 48), np.random.default_rng(2)
    losses = 5 * rows[:, 7] + rows[:, 0] * 0.1 + generator.normal(0, 0.08, 48)
    ideas = analyze([""] * 8, rows, losses, control=(7, 0.8)).ideas
    p = np.array([idea.p for idea in ideas[:7]])
    assert [idea.q for idea in ideas[:7]] == pytest.approx(stats.false_discovery_control(np.minimum(1, LOOKS * p)))
    assert ideas[7].verdict == "worse" and ideas[7].q == LOOKS * ideas[7].p


def test_interaction_of_two_accepted_ideas():
    rows, generator = extend_design(np.zeros((0, 8), bool), 200), np.random.default_rng(0)
    effects = rows[:, :3] @ [-0.3, -0.4, -0.5] + 0.3 * (rows[:, 0] & rows[:, 1])
    screen = analyze([*"abcdefgh"], rows, effects + generator.normal(0, 0.08, 200))
    assert [one.ideas for one in screen.interactions][0] == ("a", "b") and len(screen.interactions) == 3
    largest, *others = screen.interactions
    assert largest.verdict == "worse" and largest.low < np.expm1(0.3) < largest.high
    assert largest.runs == (rows[:, 0] & rows[:, 1]).sum()
    assert all(one.verdict == "unknown" for one in others)


def test_idea_with_rare_failures_is_seldom_better():
    """Its mean of the log is equal: it gains 10% in five runs of six, and loses 50% in the sixth."""
    rows, generator = extend_design(np.zeros((0, 8), bool), 96), np.random.default_rng(0)
    is_better = []
    for _ in range(60):
        effect = np.where(generator.random(96) < 1 / 6, 0.5, -0.1)
        losses = rows[:, 0] * effect + generator.normal(0, DEVIATION, 96)
        is_better.append(analyze([""] * 8, rows, losses).ideas[0].verdict == "better")
    assert np.mean(is_better) < 0.1


def test_unknown_excess_losses_are_left_out(tmp_path):
    """Null, where a fork has other targets."""
    row = {"step": 1, "val/excess_loss/plot": 1.0, "val/excess_loss/names": None}
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "metrics.jsonl").write_text(json.dumps(row))
    record = SimpleNamespace(runs=[SimpleNamespace(name="one", loss=2.0)])
    assert report.excess_by_kind(record, tmp_path) == {"plot": 1.0}
