"""What the levels of a chain promise, by simulation with its sequential test, and exact cases."""

import numpy as np
import pytest
from scipy import special

from tools.experiment.sequential_test import MIN_SEEDS, nominal_alphas
from tools.research.online_fdr import RATE, fraction, next_level, wealth

MOST, IDEAS, CHAINS = 12, 100, 600
SEEDS = np.arange(MIN_SEEDS, MOST + 1)


@pytest.fixture(scope="module")
def nominal():
    """Return a function that interpolates the nominal levels of all analyses, [chains, analyses], in total levels."""
    grid = np.geomspace(1e-7, 0.2, 20)
    table = np.log([nominal_alphas(MOST, float(total)) for total in grid])
    return lambda totals: np.exp([np.interp(np.log(totals), np.log(grid), column) for column in table.T]).T


def is_better(baseline, candidate, nominal_levels):
    """Whether the test of each chain calls the candidate better at one of its analyses."""
    means, variances = [], []
    for arm in (baseline, candidate):
        sums, squares = (values.cumsum(1)[:, MIN_SEEDS - 1 :] for values in (arm, arm**2))
        means.append(sums / SEEDS)
        variances.append((squares - sums**2 / SEEDS) / (SEEDS - 1) / SEEDS)
    freedom = (SEEDS - 1) * sum(variances) ** 2 / (variances[0] ** 2 + variances[1] ** 2)
    t = (means[0] - means[1]) / np.sqrt(sum(variances))
    return (special.stdtr(freedom, -t) < nominal_levels / 2).any(1)


def simulate(nominal, strict, real, deviations=(1, 1)):
    """Return the accepted and the falsely accepted ideas of many chains, whose ideas share the baseline of a head."""
    random = np.random.default_rng(1)
    baselines = deviations[0] * random.normal(size=(CHAINS, MOST))
    discoveries = [[] for _ in range(CHAINS)]
    accepted, false = np.zeros(CHAINS), np.zeros(CHAINS)
    for number in range(IDEAS):
        levels = np.array([next_level(number, found, strict) for found in discoveries])
        is_real = random.random(CHAINS) < real
        candidates = deviations[1] * random.normal(size=(CHAINS, MOST)) - 2.5 * is_real[:, None]
        better = is_better(baselines, candidates, nominal(2 * levels))
        for chain in np.flatnonzero(better):
            discoveries[chain].append(number + 1)
        baselines[better] = deviations[0] * random.normal(size=(better.sum(), MOST))
        accepted += better
        false += better & ~is_real
    return accepted, false


@pytest.mark.parametrize("deviations", [(1, 1), (1, 2)])
def test_false_discovery_rate_stays_below_rate(nominal, deviations):
    accepted, false = simulate(nominal, strict=False, real=0.1, deviations=deviations)
    assert (false / np.maximum(accepted, 1)).mean() < 0.05
    assert false.sum() > 0 and (accepted.mean() > 7 or deviations != (1, 1)), "of about 10 real ideas"


@pytest.mark.parametrize(("strict", "deviations"), [(True, (1, 1)), (True, (1, 3)), (False, (1, 1))])
def test_chain_of_nothing_rarely_accepts_an_idea(nominal, strict, deviations):
    _, false = simulate(nominal, strict, real=0.0, deviations=deviations)
    assert 0 < (false > 0).mean() < 0.05


def test_levels_spend_no_more_than_the_wealth():
    assert sum(map(fraction, range(1, 10**5))) == pytest.approx(1, abs=0.03)
    spent = sum(next_level(number, [], strict=True) for number in range(1000))
    assert 0.8 * RATE < spent < RATE
    assert wealth([0.001, 0.002], [], strict=True) == pytest.approx(RATE - 0.003)
    assert wealth([0.01], [1]) == pytest.approx(RATE - 0.01)


def test_discovery_raises_the_next_level():
    assert next_level(3, [3]) > next_level(0, []) > next_level(3, [])
    # LORD++ after discoveries at tests 1 and 3
    expected = RATE / 2 * fraction(5) + RATE / 2 * fraction(4) + RATE * fraction(2)
    assert next_level(4, [1, 3]) == pytest.approx(expected)
    assert next_level(4, [1, 3], strict=True) == pytest.approx(RATE * fraction(5))
