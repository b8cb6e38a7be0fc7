"""Error rates of the sequential test by simulation, and its parts against scipy and exact cases."""

import math

import numpy as np
import pytest
from scipy import stats

from tools.experiment.compute_multiplier import estimate_compute_multiplier
from tools.experiment.sequential_test import (
    MAX_MORE_SEEDS,
    MIN_SEEDS,
    TOTAL_ALPHA,
    Difference,
    additional_seeds,
    alpha_spent,
    decide,
    estimate_difference,
    nominal_alphas,
    welch_quantile,
)

LAST = 24
MANY = 20_000


def intervals(baseline, candidate):
    """Differences and half-widths, [experiments, analyses], of many experiments at once."""
    n = np.arange(MIN_SEEDS, candidate.shape[1] + 1)
    means, variances = [], []
    for arm in (baseline, candidate):
        mean = arm.cumsum(1)[:, n - 1] / n
        means.append(mean)
        variances.append(((arm**2).cumsum(1)[:, n - 1] / n - mean**2).clip(0) / (n - 1))
    errors = np.sqrt(sum(variances))
    return means[1] - means[0], errors * welch_quantile(np.array(nominal_alphas(int(n[-1]))), *variances, n)


def simulated(deviations, effect, seed):
    draw = np.random.default_rng(seed).normal
    return draw(0, deviations[0], (MANY, LAST)), draw(effect, deviations[1], (MANY, LAST))


@pytest.mark.parametrize("deviations", [(0.004, 0.004), (0.004, 0.012), (0.004, 0.022), (0.022, 0.004), (0.02, 0.0)])
def test_false_alarms_without_effect_stay_below_five_percent(deviations):
    """With an analysis after every seed and a stop at the first verdict."""
    middle, reach = intervals(*simulated(deviations, 0.0, seed=1))
    false_alarms = (np.abs(middle) > reach).any(1).mean()
    assert 0.02 < false_alarms < 0.05


@pytest.mark.parametrize(("in_both", "low", "high"), [(True, 0.0, 0.05), (False, 0.05, 0.08)])
def test_false_alarms_with_non_gaussian_noise(in_both, low, high):
    """A sixth of the runs ends with a much higher loss.

    With such noise in one arm alone the means are equal, but most runs of that arm are better.
    """
    draw = np.random.default_rng(5)

    def arm(probability):
        missed = draw.random((MANY, LAST)) < probability
        return draw.normal(0, 0.0071, (MANY, LAST)) + 0.032 * (missed - probability)

    middle, reach = intervals(arm(1 / 6 if in_both else 0.0), arm(1 / 6))
    assert low < (np.abs(middle) > reach).any(1).mean() < high


@pytest.mark.parametrize(
    ("gain", "loss", "low", "high"), [(0.1, 0.5, 0.35, 0.42), (0.1, 2.3, 0.35, 0.42), (0.05, 0.25, 0.1, 0.18)]
)
def test_rare_failures_are_seen_too_late(gain, loss, low, high):
    """Of an idea that gains in five seeds of six, the first seeds often show nothing else.

    The estimand, the mean of the log, is equal in the first and third case, and much worse in the second. This is how
    often the verdict is better, as docs/experiments.md says.
    """
    draw = np.random.default_rng(9)
    fails = draw.random((MANY, 12)) < 1 / 6
    candidate = draw.normal(0, 0.04, (MANY, 12)) + np.where(fails, loss, -gain)
    middle, reach = intervals(draw.normal(0, 0.04, (MANY, 12)), candidate)
    is_decided = np.abs(middle) > reach
    first = np.where(is_decided.any(1), is_decided.argmax(1), -1)
    is_better = (middle + reach < 0)[np.arange(MANY), first]
    assert low < is_better.mean() < high


@pytest.mark.parametrize("deviations", [(0.004, 0.004), (0.004, 0.022)])
def test_intervals_cover_the_effect_at_all_analyses(deviations):
    middle, reach = intervals(*simulated(deviations, -0.006, seed=2))
    assert (np.abs(middle + 0.006) > reach).any(1).mean() < 0.05


def test_false_equivalence_stays_below_five_percent():
    margin = 0.006
    middle, reach = intervals(*simulated((0.004, 0.006), margin, seed=3))
    assert ((middle - reach >= -margin) & (middle + reach <= margin)).any(1).mean() < 0.05


def test_large_effect_is_detected_with_few_seeds():
    middle, reach = intervals(*simulated((0.01, 0.01), -0.03, seed=4))
    seeds = MIN_SEEDS + (middle + reach < 0).argmax(1)
    assert (middle + reach < 0).any(1).all() and seeds.mean() < 5.5


def test_nominal_alphas_spend_total_alpha():
    """With a known standard deviation the recursion is exact."""
    sums = np.random.default_rng(5).normal(size=(200_000, 12)).cumsum(1)[:, MIN_SEEDS - 1 :]
    z = np.abs(sums) / np.sqrt(np.arange(MIN_SEEDS, 13))
    decided = (z > stats.norm.isf(np.array(nominal_alphas(12)) / 2)).any(1).mean()
    spent = alpha_spent(12)
    assert decided == pytest.approx(spent, abs=4 * math.sqrt(spent / 200_000))
    assert nominal_alphas(20)[:4] == nominal_alphas(6), "levels depend on later analyses"
    assert alpha_spent(MIN_SEEDS - 1) == 0, "nothing before the first analysis"
    assert alpha_spent(10**9) < TOTAL_ALPHA == pytest.approx(alpha_spent(10**12), abs=1e-6)


def test_estimate_difference_matches_scipy_welch_interval():
    baseline, candidate = [0.40, 0.41, 0.405, 0.399], [0.37, 0.365, 0.39, 0.35]
    found = estimate_difference(baseline, candidate)
    theirs = stats.ttest_ind(candidate, baseline, equal_var=False).confidence_interval(1 - nominal_alphas(4)[-1])
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high))
    assert (found.mean, found.seeds) == (pytest.approx(-0.03475), 4)
    assert estimate_difference(baseline[:2], candidate[:2]).high == math.inf
    assert estimate_difference([1.0] * 3, [1.5] * 3).low == 0.5


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-3, -1, "better"),
        (1, 3, "worse"),
        (-1, 3, "unknown"),
        (-3, 1, "unknown"),
        (-0.2, 0.1, "no difference"),
        (0.1, 0.2, "no difference"),
    ],
)
def test_decide_returns_verdict(low, high, verdict):
    assert decide(Difference((low + high) / 2, low, high, 1.0, 3), margin=0.5) == verdict


def test_additional_seeds_shrink_interval_as_required():
    baseline = [0.40, 0.41, 0.405, 0.399]
    found = estimate_difference(baseline, [loss - 0.004 for loss in baseline])
    more = additional_seeds(found, margin=0.001)
    spread = [stats.norm.isf((i + 0.5) / (4 + more)) for i in range(4 + more)]
    scale = np.std(baseline, ddof=1) / np.std(spread, ddof=1)
    later = estimate_difference([scale * x for x in spread], [scale * x - 0.004 for x in spread])
    assert 1.0 < (later.high - later.low) / 2 / 0.004 * 1.2 < 1.5
    assert additional_seeds(estimate_difference([1.0, 2.0, 3.0], [1.0, 2.0, 3.1]), margin=1e-4) == MAX_MORE_SEEDS
    assert additional_seeds(Difference(-0.7, -3.0, 1.0, 0.5, 3), 1e-4) == 14


def test_compute_multiplier_recovers_known_ratio():
    def loss(share):
        return 0.4 * share**-0.9

    draw = np.random.default_rng(6)
    shares = [share for share in (0.5, 0.7, 1.0, 1.4, 2.0) for _ in range(2)]
    held, ratios = 0, []
    for _ in range(200):
        noise = iter(np.exp(draw.normal(0, 0.01, 30)))
        budgets = [(share, loss(share) * next(noise)) for share in shares]
        baseline, candidate = ([loss(share) * next(noise) for _ in range(4)] for share in (1.0, 1.13))
        ratio, low, high = estimate_compute_multiplier(budgets, baseline, candidate)
        held += low < 1.13 < high
        ratios.append(ratio)
    assert np.median(ratios) == pytest.approx(1.13, abs=0.01) and 190 <= held <= 198


@pytest.mark.parametrize("noise", [(0.01, 1e-4), (1e-4, 0.01)], ids=["curve", "difference"])
def test_compute_multiplier_includes_each_error(noise):
    """The noise of the budgets' runs and that of both arms widen the interval about as much as they move the ratio."""
    draw = np.random.default_rng(7)
    shares = [share for share in (0.5, 0.7, 1.4, 2.0) for _ in range(3)]
    logs, widths = [], []
    for _ in range(100):
        budgets = [(share, share**-0.9 * math.exp(draw.normal(0, noise[0]))) for share in shares]
        baseline, candidate = (list(np.exp(draw.normal(mean, noise[1], 6))) for mean in (0, -0.1))
        ratio, low, high = estimate_compute_multiplier(budgets, baseline, candidate)
        logs.append(math.log(ratio))
        widths.append(math.log(high / low))
    assert 3.5 < np.median(widths) / np.std(logs) < 6


def test_compute_multiplier_covers_with_few_budgets():
    """Five runs leave two degrees of freedom, so that the normal interval would be too narrow by half."""
    draw, held = np.random.default_rng(8), 0
    for _ in range(300):
        budgets = [(share, share**-0.9 * math.exp(draw.normal(0, 0.003))) for share in (0.5, 0.7, 1.0, 1.4, 2.0)]
        _, low, high = estimate_compute_multiplier(budgets, [1.0, 1.0], [1.4**-0.9] * 2)
        held += low < 1.4 < high
    assert 280 <= held <= 296


def test_compute_multiplier_clips_to_budgets():
    budgets = [(share, 1 / share) for share in (0.5, 0.7, 1.0, 1.4, 2.0)]

    def ratio(budgets, loss):
        found = estimate_compute_multiplier(budgets, [1.0, 1.0], [loss, loss])
        return found and found[0]

    assert ratio(budgets, 0.1) == pytest.approx(2.0)
    assert ratio(budgets, 10.0) == pytest.approx(0.5)
    assert ratio([(share, share) for share, _ in budgets], 0.9) is None
    assert ratio(budgets[:2], 0.9) is None
