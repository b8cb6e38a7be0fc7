"""The statistics of experiment.py against scipy's own, exact cases, and simulations of what they promise."""

import math

import numpy as np
import pytest
from scipy import stats

from experiments.sequential_test import (
    ALL_LOOKS,
    FIRST_LOOK,
    Difference,
    decide,
    difference,
    factor,
    looks,
    more_runs,
    quantile,
    spent,
    worth,
)

LAST = 24
MANY = 20_000


def intervals(baseline, candidate):
    """Means and reaches at every look, [experiments, looks], of many experiments at once."""
    means, variances = [], []
    for side in (baseline, candidate):
        runs = [side[:, :n] for n in range(FIRST_LOOK, side.shape[1] + 1)]
        means.append(np.stack([part.mean(1) for part in runs], 1))
        variances.append(np.stack([part.var(1, ddof=1) / part.shape[1] for part in runs], 1))
    n = np.arange(FIRST_LOOK, baseline.shape[1] + 1)
    reach = np.sqrt(sum(variances)) * quantile(np.array(looks(baseline.shape[1])), variances, n)
    return means[1] - means[0], reach


def simulated(deviations, effect, seed):
    draw = np.random.default_rng(seed).normal
    return [draw(mean, deviation, (MANY, LAST)) for mean, deviation in zip((0, effect), deviations, strict=True)]


@pytest.mark.parametrize("deviations", [(0.004, 0.004), (0.004, 0.012), (0.004, 0.022), (0.022, 0.004), (0.02, 0.0)])
def test_an_idea_that_does_nothing_is_called_better_or_worse_at_most_5_times_of_100(deviations):
    """Whoever looks after every seed and stops at the first verdict."""
    middle, reach = intervals(*simulated(deviations, 0.0, seed=1))
    false_alarms = (np.abs(middle) > reach).any(1).mean()
    assert 0.02 < false_alarms < 0.05


@pytest.mark.parametrize(("of_both", "low", "high"), [(True, 0.0, 0.05), (False, 0.05, 0.08)])
def test_false_alarms_where_a_sixth_of_the_runs_misses_something(of_both, low, high):
    """Deviations of no bell, as the page has them of relu2. With it on one side alone the means agree all the same, but
    most runs of that side are better."""
    draw = np.random.default_rng(5)

    def side(share):
        missed = draw.random((MANY, LAST)) < share
        return draw.normal(0, 0.0071, (MANY, LAST)) + 0.032 * (missed - share)

    middle, reach = intervals(side(1 / 6 if of_both else 0.0), side(1 / 6))
    assert low < (np.abs(middle) > reach).any(1).mean() < high


@pytest.mark.parametrize("deviations", [(0.004, 0.004), (0.004, 0.022)])
def test_the_interval_holds_whenever_one_stops(deviations):
    """Of an idea that does something, too: at no look does it lack the true difference, in 95 of 100 experiments."""
    middle, reach = intervals(*simulated(deviations, -0.006, seed=2))
    assert (np.abs(middle + 0.006) > reach).any(1).mean() < 0.05


def test_no_difference_is_said_of_a_larger_one_at_most_5_times_of_100():
    margin = 0.006
    middle, reach = intervals(*simulated((0.004, 0.006), margin, seed=3))
    assert ((middle - reach >= -margin) & (middle + reach <= margin)).any(1).mean() < 0.05


def test_a_real_difference_is_found_soon():
    middle, reach = intervals(*simulated((0.01, 0.01), -0.03, seed=4))
    seeds = FIRST_LOOK + (middle + reach < 0).argmax(1)
    assert (middle + reach < 0).any(1).all() and seeds.mean() < 5.5


def test_the_looks_together_spend_what_they_may():
    """Of normal sums with a known deviation, for which the recursion is exact."""
    sums = np.random.default_rng(5).normal(size=(200_000, 12)).cumsum(1)[:, FIRST_LOOK - 1 :]
    z = np.abs(sums) / np.sqrt(np.arange(FIRST_LOOK, 13))
    decided = (z > stats.norm.isf(np.array(looks(12)) / 2)).any(1).mean()
    assert decided == pytest.approx(spent(12), abs=4 * math.sqrt(spent(12) / 200_000))
    assert looks(20)[:4] == looks(6), "what a look is worth does not depend on how many follow"
    assert spent(10**9) < ALL_LOOKS == pytest.approx(spent(10**12), abs=1e-6)


def test_a_look_is_the_interval_of_welch_at_its_level():
    baseline, candidate = [0.40, 0.41, 0.405, 0.399], [0.37, 0.365, 0.39, 0.35]
    found = difference(baseline, candidate)
    theirs = stats.ttest_ind(candidate, baseline, equal_var=False).confidence_interval(1 - looks(4)[-1])
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high))
    assert (found.mean, found.runs) == (pytest.approx(-0.03475), 4)
    assert difference(baseline[:2], candidate[:2]).high == math.inf
    assert difference([1.0] * 3, [1.5] * 3).low == 0.5


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
def test_verdicts(low, high, verdict):
    assert decide(Difference((low + high) / 2, low, high, 1.0, 3), margin=0.5) == verdict


def test_how_many_more_would_tell_is_about_right():
    baseline = [0.40, 0.41, 0.405, 0.399]
    found = difference(baseline, [loss - 0.004 for loss in baseline])
    more = more_runs(found, margin=0.001)
    spread = [stats.norm.isf((i + 0.5) / (4 + more)) for i in range(4 + more)]
    scale = np.std(baseline, ddof=1) / np.std(spread, ddof=1)
    later = difference([scale * x for x in spread], [scale * x - 0.004 for x in spread])
    assert 1.0 < (later.high - later.low) / 2 / 0.004 * 1.2 < 1.5
    assert more_runs(difference([1.0, 2.0, 3.0], [1.0, 2.0, 3.1]), margin=1e-4) is None


def test_worth_is_read_off_the_curve_of_the_baseline():
    def loss(share):
        return 0.4 * share**-0.9

    draw = np.random.default_rng(6)
    shares = [share for share in (0.5, 0.7, 1.0, 1.4, 2.0) for _ in range(2)]
    held, ratios = 0, []
    for _ in range(200):
        noise = iter(np.exp(draw.normal(0, 0.01, 30)))
        budgets = [(share, loss(share) * next(noise)) for share in shares]
        baseline, candidate = ([loss(share) * next(noise) for _ in range(4)] for share in (1.0, 1.13))
        found = worth(budgets, float(np.mean(baseline)), difference(baseline, candidate))
        held += found.low < 1.13 < found.high
        ratios.append(found.ratio)
    assert np.median(ratios) == pytest.approx(1.13, abs=0.01) and held >= 190


def test_worth_beyond_the_budgets_is_a_limit_and_of_no_curve_none():
    budgets = [(share, 1 / share) for share in (0.5, 0.7, 1.0, 1.4, 2.0)]
    assert worth(budgets, 1.0, Difference(-0.9, -0.95, -0.85, 0.01, 3)).ratio == pytest.approx(2.0)
    assert worth(budgets, 1.0, Difference(9.0, 8.0, 10.0, 0.01, 3)).ratio == pytest.approx(0.5)
    assert worth([(share, share) for share, _ in budgets], 1.0, Difference(-0.1, -0.2, 0.0, 0.01, 3)) is None
    assert worth(budgets[:2], 1.0, Difference(-0.1, -0.2, 0.0, 0.01, 3)) is None


def test_ratios_by_turns():
    middle, low, high = factor([1.1, 1.2, 1.15])
    assert low < middle < high and middle == pytest.approx((1.1 * 1.2 * 1.15) ** (1 / 3))
    assert factor([1.1])[1:] == (0.0, math.inf)
