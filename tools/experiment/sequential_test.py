"""Group sequential test for the difference of two mean losses, analysed again after every seed.

Analyses take place after n = 3, 4, 5, ... runs of each arm. A 95% interval computed afresh at every analysis would be
wrong at one of them more often than 5 times in 100, so every analysis spends a part of the type I error (Lan and
DeMets, "Discrete sequential boundaries for clinical trials", 1983). The part depends on n alone and the sum over all n
stays below 5%: the number of runs need not be fixed in advance, and more can be added. The nominal level of an analysis
follows from the recursive integration of Armitage, McPherson and Rowe ("Repeated significance tests on accumulating
data", 1969), which accounts for the data that analyses have in common. The intervals are repeated confidence intervals
(Jennison and Turnbull, "Interim analyses: the repeated confidence interval approach", 1989): they hold under any
stopping rule.

With few runs the variances are unknown and may be unequal, so an analysis uses the quantile of Student's t at its
nominal level in place of the normal one (Pocock, "Group sequential methods", 1977), with the degrees of freedom of
Welch ("The generalization of Student's problem", 1947). This is an approximation, whose error rates are simulated in
tests/tools/experiment/test_sequential_test.py.

The baseline may have more runs than the candidate, all of them trained before the first analysis. The means then still
have independent increments in the information 1 / (1 / n + 1 / m), so the same recursion gives the levels. But with few
runs of the candidate Welch's approximation is too liberal, the more so the smaller the level: UNEQUAL_SIZES corrects
for it, at the default level alone.

A test that is unlikely to call the candidate better may stop early (futility). This is non-binding: it can only lower
the rate of false positives, and the intervals stay valid whether it is heeded or not.
"""

import math
import statistics
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from scipy import optimize, stats

MIN_SEEDS = 3  # runs of each arm at the first analysis: two estimate a variance too poorly to stop
# Two-sided type I error that all analyses together spend. Student's t with Welch's degrees of freedom adds up to half a
# percentage point where runs are few and one arm varies several times as much as the other; the sum stays below 5%.
TOTAL_ALPHA = 0.04
UNEQUAL_SIZES = 0.75  # factor on the type I error where the arms have unequal numbers of runs
# Stop if the probability of being called better at the last analysis is below MIN_POWER, assuming an effect OPTIMISM
# standard errors better than the estimate. 47% of gains of 1.2 standard deviations are then detected in 12 seeds, 38%
# without this optimism, 48% without the early stop.
MIN_POWER, OPTIMISM = 0.1, 1.5
MAX_DEVIATIONS = 6  # standard deviations of the candidate's first loss above the baseline's mean
MAX_MORE_SEEDS = 200  # upper bound of the estimated number of further seeds
NUM_NODES = 100  # nodes of the quadrature over the region where no analysis has stopped


def alpha_spent(n: int, total_alpha: float = TOTAL_ALPHA) -> float:
    """Return the two-sided type I error spent by all analyses up to n runs of each arm."""
    return total_alpha * (1 - math.sqrt((MIN_SEEDS - 1) / n))


def information(n: int, baseline_seeds: int = 0) -> float:
    """Return the precision of the difference at n runs of the candidate, relative to that of one run of each arm.

    `baseline_seeds` are the runs of the baseline, if they are more; 0: as many as of the candidate.
    """
    return 2 / (1 / n + 1 / max(n, baseline_seeds))


@cache
def nominal_alphas(last: int, total_alpha: float = TOTAL_ALPHA, baseline_seeds: int = 0) -> tuple[float, ...]:
    """Return the nominal level, that of a single test, of each analysis from MIN_SEEDS to `last` runs.

    The density of the difference, weighted by its information and restricted to paths that no analysis has stopped, is
    propagated from analysis to analysis at the nodes of a Gauss-Legendre quadrature.
    """
    nodes, weights = np.polynomial.legendre.leggauss(NUM_NODES)
    total_alpha *= UNEQUAL_SIZES if baseline_seeds else 1
    levels, sums, density, before, spent = [], np.zeros(1), np.ones(1), 0.0, 0.0
    for n in range(MIN_SEEDS, last + 1):
        now, alpha = information(n, baseline_seeds), alpha_spent(n, total_alpha) - spent
        scale, upper = math.sqrt(now - before), 40 * math.sqrt(now)
        boundary = optimize.root_scalar(_crossing_error, (sums, density, scale, alpha), bracket=(0.0, upper)).root
        levels.append(2 * float(stats.norm.sf(boundary / math.sqrt(now))))
        inside = boundary * nodes
        density = boundary * weights * (stats.norm.pdf((inside[:, None] - sums) / scale) / scale @ density)
        sums, before, spent = inside, now, spent + alpha
    return tuple(levels)


def _crossing_error(boundary: float, sums: np.ndarray, density: np.ndarray, scale: float, alpha: float) -> float:
    """Return the probability that the sum crosses the boundary on either side at this analysis, minus alpha."""
    outside = stats.norm.cdf((-boundary - sums) / scale) + stats.norm.sf((boundary - sums) / scale)
    return float(density @ outside) - alpha


@dataclass(frozen=True)
class Difference:
    """Mean of the candidate minus mean of the baseline at one analysis, with its repeated confidence interval."""

    mean: float
    low: float
    """Lower end of the interval; -inf before the first analysis."""
    high: float
    standard_error: float
    seeds: int
    """Runs of the candidate."""
    baseline_seeds: int = 0
    """Runs of the baseline, if they are more; 0: as many as of the candidate."""
    total_alpha: float = TOTAL_ALPHA


def estimate_difference(baseline: list[float], candidate: list[float], total_alpha: float = TOTAL_ALPHA) -> Difference:
    """Return the difference of the means, with its interval at this analysis.

    The losses are by seed. The baseline has as many as the candidate at every analysis, or a larger number that is the
    same at every analysis; then `total_alpha` must be the default, or ValueError is raised.
    """
    n, baseline_seeds = len(candidate), len(baseline) if len(baseline) > len(candidate) else 0
    if baseline_seeds and total_alpha != TOTAL_ALPHA:
        raise ValueError(f"total_alpha: {total_alpha} is not calibrated for unequal numbers of runs")
    mean = statistics.fmean(candidate) - statistics.fmean(baseline)
    if n < MIN_SEEDS:
        return Difference(mean, -math.inf, math.inf, math.inf, n, baseline_seeds, total_alpha)
    variances = [statistics.variance(losses) / len(losses) for losses in (baseline, candidate)]
    error, level = math.sqrt(sum(variances)), nominal_alphas(n, total_alpha, baseline_seeds)[-1]
    half_width = error * float(welch_quantile(level, variances, n, max(n, baseline_seeds))) if error else 0.0
    return Difference(mean, mean - half_width, mean + half_width, error, n, baseline_seeds, total_alpha)


def welch_quantile(level: Any, variances: list[Any], n: Any, baseline_seeds: Any) -> Any:
    """Return the two-sided quantile of Student's t with the Welch-Satterthwaite degrees of freedom.

    `variances` are those of both means, that of the baseline first. Arguments and result are numbers, or arrays of one
    shape.
    """
    ours, theirs = variances
    freedom = (ours + theirs) ** 2 / (ours**2 / (baseline_seeds - 1) + theirs**2 / (n - 1))
    return stats.t.isf(level / 2, freedom)


def decide(difference: Difference, margin: float) -> str:
    """Return the verdict on a difference of losses: better, worse, no difference or unknown.

    An interval within the equivalence margin is "no difference", even where it excludes zero.
    """
    if -margin <= difference.low and difference.high <= margin:
        return "no difference"
    return "better" if difference.high < 0 else "worse" if difference.low > 0 else "unknown"


def conditional_power(difference: Difference, last: int) -> float:
    """Return the probability that the analysis at `last` runs calls the candidate better.

    The effect is assumed to be better than the estimate by OPTIMISM standard errors.
    """
    n, baseline_seeds, error = difference.seeds, difference.baseline_seeds, difference.standard_error
    if n >= last or not error:
        return float(difference.high < 0)
    fraction = information(n, baseline_seeds) / information(last, baseline_seeds)
    level = nominal_alphas(last, difference.total_alpha, baseline_seeds)[-1]
    boundary = float(stats.t.isf(level / 2, last + max(last, baseline_seeds) - 2)) * math.sqrt(fraction)
    expected = difference.mean / error - (1 - fraction) * OPTIMISM  # mean at the last analysis, in standard errors
    return float(stats.norm.cdf((-boundary - expected) / math.sqrt(fraction * (1 - fraction))))


def additional_seeds(difference: Difference, margin: float) -> int:
    """Estimate how many more runs would decide if mean and variances stayed; at most MAX_MORE_SEEDS."""
    n, baseline_seeds = difference.seeds, difference.baseline_seeds
    required = max(abs(difference.mean), margin - abs(difference.mean))  # half-width that excludes zero or the margin
    last = baseline_seeds - 1 if baseline_seeds else MAX_MORE_SEEDS
    for later, level in enumerate(nominal_alphas(last, difference.total_alpha, baseline_seeds), start=MIN_SEEDS):
        ratio = information(n, baseline_seeds) / information(later, baseline_seeds)
        error = difference.standard_error * math.sqrt(ratio)
        if later > n and stats.t.isf(level / 2, later + max(later, baseline_seeds) - 2) * error < required:
            return later - n
    return MAX_MORE_SEEDS
