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
tests/experiments/test_sequential_test.py.
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
# point where there are few runs and one arm varies several times as much as the other: 5% in all.
TOTAL_ALPHA = 0.04
MAX_MORE_SEEDS = 200  # that are estimated
NUM_NODES = 100  # of the quadrature over the region where no analysis has stopped


def alpha_spent(n: int, total_alpha: float = TOTAL_ALPHA) -> float:
    """Return the two-sided type I error spent by all analyses up to n runs of each arm."""
    return total_alpha * (1 - math.sqrt((MIN_SEEDS - 1) / n))


@cache
def nominal_alphas(last: int, total_alpha: float = TOTAL_ALPHA) -> tuple[float, ...]:
    """Return the level of each analysis from MIN_SEEDS to `last`, as of a single test.

    The density of the sum of n standard normal differences, restricted to paths that no analysis has stopped, is
    propagated from analysis to analysis at the nodes of a Gauss-Legendre quadrature.
    """
    nodes, weights = np.polynomial.legendre.leggauss(NUM_NODES)
    levels, sums, density = [], np.zeros(1), np.ones(1)
    for n in range(MIN_SEEDS, last + 1):
        is_first = n == MIN_SEEDS
        scale = math.sqrt(MIN_SEEDS if is_first else 1)
        alpha = alpha_spent(n, total_alpha) - (0.0 if is_first else alpha_spent(n - 1, total_alpha))
        upper = 40 * math.sqrt(n)
        boundary = optimize.root_scalar(_crossing_error, (sums, density, scale, alpha), bracket=(0.0, upper)).root
        levels.append(2 * float(stats.norm.sf(boundary / math.sqrt(n))))
        inside = boundary * nodes
        density = boundary * weights * (stats.norm.pdf((inside[:, None] - sums) / scale) / scale @ density)
        sums = inside
    return tuple(levels)


def _crossing_error(boundary: float, sums: np.ndarray, density: np.ndarray, scale: float, alpha: float) -> float:
    """Return the probability that the sum crosses the boundary on either side at this analysis, minus alpha."""
    outside = stats.norm.cdf((-boundary - sums) / scale) + stats.norm.sf((boundary - sums) / scale)
    return float(density @ outside) - alpha


def welch_p_value(first: list[float], second: list[float]) -> float | None:
    """Return the two-sided p-value of Welch's t-test; None with fewer than two samples in a group.

    It is valid for a single analysis, as in compare.py.
    """
    if min(len(first), len(second)) < 2:
        return None
    ours, theirs = ((statistics.fmean(losses), statistics.stdev(losses), len(losses)) for losses in (first, second))
    if ours[1] == theirs[1] == 0:
        return float(ours[0] == theirs[0])
    return float(stats.ttest_ind_from_stats(*ours, *theirs, equal_var=False).pvalue)


@dataclass(frozen=True)
class Difference:
    """Mean of the candidate minus mean of the baseline at one analysis, with its repeated confidence interval."""

    mean: float
    low: float
    """Lower end of the interval; -inf before the first analysis."""
    high: float
    standard_error: float
    seeds: int
    """Runs of each arm."""


def estimate_difference(baseline: list[float], candidate: list[float], total_alpha: float = TOTAL_ALPHA) -> Difference:
    """Return the difference of the means of equally many runs of both arms, with its interval at this analysis."""
    n = len(baseline)
    mean = statistics.fmean(candidate) - statistics.fmean(baseline)
    if n < MIN_SEEDS:
        return Difference(mean, -math.inf, math.inf, math.inf, n)
    variances = [statistics.variance(losses) / n for losses in (baseline, candidate)]
    error = math.sqrt(sum(variances))
    half_width = error * float(welch_quantile(nominal_alphas(n, total_alpha)[-1], variances, n)) if error else 0.0
    return Difference(mean, mean - half_width, mean + half_width, error, n)


def welch_quantile(level: Any, variances: list[Any], n: Any) -> Any:
    """Return the two-sided quantile of Student's t with the Welch-Satterthwaite degrees of freedom.

    Arguments and result are numbers, or arrays of one shape.

    Args:
        level: two-sided significance level.
        variances: variances of both means.
        n: runs of each arm.
    """
    freedom = (n - 1) * sum(variances) ** 2 / sum(variance**2 for variance in variances)
    return stats.t.isf(level / 2, freedom)


def decide(difference: Difference, margin: float) -> str:
    """Return the verdict on a difference of losses: better, worse, no difference or unknown.

    An interval within the equivalence margin is "no difference", even where it excludes zero.
    """
    if -margin <= difference.low and difference.high <= margin:
        return "no difference"
    return "better" if difference.high < 0 else "worse" if difference.low > 0 else "unknown"


def additional_seeds(difference: Difference, margin: float, total_alpha: float = TOTAL_ALPHA) -> int:
    """Estimate how many more seeds of each arm would decide if mean and variances stayed; at most MAX_MORE_SEEDS."""
    deviation = difference.standard_error * math.sqrt(difference.seeds)
    required = max(abs(difference.mean), margin - abs(difference.mean))  # half-width that excludes zero or the margin
    for n, level in enumerate(nominal_alphas(MAX_MORE_SEEDS, total_alpha), start=MIN_SEEDS):
        if n > difference.seeds and stats.t.isf(level / 2, 2 * n - 2) * deviation / math.sqrt(n) < required:
            return n - difference.seeds
    return MAX_MORE_SEEDS
