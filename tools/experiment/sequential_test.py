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
MAX_MORE_SEEDS = 200  # upper bound of the estimated number of further seeds
NUM_NODES = 100  # nodes of the quadrature over the region where no analysis has stopped


def alpha_spent(n: int) -> float:
    """Return the two-sided type I error spent by all analyses up to n runs of each arm."""
    return TOTAL_ALPHA * (1 - math.sqrt((MIN_SEEDS - 1) / n))


@cache
def nominal_alphas(last: int) -> tuple[float, ...]:
    """Return the nominal level, that of a single test, of each analysis from MIN_SEEDS to `last` runs.

    The density of the difference, weighted by n and restricted to paths that no analysis has stopped, is propagated
    from analysis to analysis at the nodes of a Gauss-Legendre quadrature.
    """
    nodes, weights = np.polynomial.legendre.leggauss(NUM_NODES)
    levels, sums, density, before, spent = [], np.zeros(1), np.ones(1), 0, 0.0
    for n in range(MIN_SEEDS, last + 1):
        alpha = alpha_spent(n) - spent
        scale, upper = math.sqrt(n - before), 40 * math.sqrt(n)
        boundary = optimize.root_scalar(_crossing_error, (sums, density, scale, alpha), bracket=(0.0, upper)).root
        levels.append(2 * float(stats.norm.sf(boundary / math.sqrt(n))))
        inside = boundary * nodes
        density = boundary * weights * (stats.norm.pdf((inside[:, None] - sums) / scale) / scale @ density)
        sums, before, spent = inside, n, spent + alpha
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
    """Runs of each arm."""


def estimate_difference(baseline: list[float], candidate: list[float]) -> Difference:
    """Return the difference of the means of equally many values, with its interval at this analysis."""
    n, mean = len(candidate), statistics.fmean(candidate) - statistics.fmean(baseline)
    if n < MIN_SEEDS:
        return Difference(mean, -math.inf, math.inf, math.inf, n)
    variances = [statistics.variance(values) / n for values in (baseline, candidate)]
    error = math.sqrt(sum(variances))
    half_width = error * float(welch_quantile(nominal_alphas(n)[-1], variances[0], variances[1], n)) if error else 0.0
    return Difference(mean, mean - half_width, mean + half_width, error, n)


def welch_quantile(level: Any, first: Any, second: Any, n: Any) -> Any:
    """Return the two-sided quantile of Student's t with the Welch-Satterthwaite degrees of freedom.

    `first` and `second` are the variances of two means of n values. Arguments and result are numbers, or arrays of one
    shape.
    """
    return stats.t.isf(level / 2, (first + second) ** 2 * (n - 1) / (first**2 + second**2))


def decide(difference: Difference, margin: float) -> str:
    """Return the verdict on a difference of losses: better, worse, no difference or unknown.

    An interval within the equivalence margin is "no difference", even where it excludes zero.
    """
    if -margin <= difference.low and difference.high <= margin:
        return "no difference"
    return "better" if difference.high < 0 else "worse" if difference.low > 0 else "unknown"


def additional_seeds(difference: Difference, margin: float) -> int:
    """Estimate how many more runs would decide if mean and variances stayed; at most MAX_MORE_SEEDS."""
    n = difference.seeds
    required = max(abs(difference.mean), margin - abs(difference.mean))  # half-width that excludes zero or the margin
    for later, level in enumerate(nominal_alphas(MAX_MORE_SEEDS), start=MIN_SEEDS):
        error = difference.standard_error * math.sqrt(n / later)
        if later > n and stats.t.isf(level / 2, 2 * later - 2) * error < required:
            return later - n
    return MAX_MORE_SEEDS
