"""Whether two recipes differ, asked again after every seed: the statistics of experiment.py, with their sources.

The question is asked at looks: after n = 3, 4, 5, ... runs of each side. An interval that is right in 95 of 100 cases
at one look is wrong more often at one of many, so each look spends a part of the 5 (Lan and DeMets, "Discrete
sequential boundaries for clinical trials", 1983). That part depends on n alone, and the sum of all never reaches the 5:
so the number of runs need not be known beforehand, and more may be added afterwards. How wide that makes a look follows
from the recursive integration of Armitage, McPherson and Rowe ("Repeated significance tests on accumulating data",
1969), which counts what the looks have in common. The intervals are the repeated confidence intervals of Jennison and
Turnbull ("Interim analyses: the repeated confidence interval approach", 1989): they hold whenever and why ever one
stops.

With few runs the deviations are unknown and may be unequal: a look takes the quantile of Student's t at its level
instead of the normal one (Pocock, "Group sequential methods", 1977), with the degrees of freedom of Welch ("The
generalization of Student's problem", 1947). That is an approximation, which
tests/experiments/test_sequential_test.py simulates.
"""

import math
import statistics
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import optimize, stats

FIRST_LOOK = 3  # runs of each side: from two, a deviation is known too badly to stop by
# Of the 5 of 100 false alarms: as many as the looks together spend. Student's t for Welch's degrees of freedom adds
# half a one where there are few runs and one side varies some times as much as the other.
ALL_LOOKS = 0.04
NODES = 100  # of the integral over what has not been decided


def spent(n: int) -> float:
    """The false alarms, two-sided, that the looks until n runs a side may raise together."""
    return ALL_LOOKS * (1 - math.sqrt((FIRST_LOOK - 1) / n))


@cache
def looks(last: int) -> tuple[float, ...]:
    """The level of each look from FIRST_LOOK to `last`: by itself, as if there were no others.

    Sums of independent normal differences, of variance n after n runs, are followed from look to look: their density
    where no look has decided, at the nodes of a Gauss-Legendre quadrature.
    """
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    levels, sums, density = [], np.zeros(1), np.ones(1)
    for n in range(FIRST_LOOK, last + 1):
        first = n == FIRST_LOOK
        scale = math.sqrt(FIRST_LOOK if first else 1)
        due = spent(n) - (0.0 if first else spent(n - 1))
        bound = optimize.brentq(crossing, 0.0, 40 * math.sqrt(n), args=(sums, density, scale, due))
        levels.append(2 * float(stats.norm.sf(bound / math.sqrt(n))))
        inside = bound * nodes
        density = bound * weights * (stats.norm.pdf((inside[:, None] - sums) / scale) / scale @ density)
        sums = inside
    return tuple(levels)


def crossing(bound: float, sums: np.ndarray, density: np.ndarray, scale: float, due: float) -> float:
    """By how much more than `due` is the probability to come from the sums before beyond the bound, on either side."""
    outside = stats.norm.cdf((-bound - sums) / scale) + stats.norm.sf((bound - sums) / scale)
    return float(density @ outside) - due


def welch(one: list[float], other: list[float]) -> float | None:
    """Welch's t-test: how probable means at least so far apart are if both recipes have the same; None with less than
    two samples of each. For a question that is asked once, as by compare.py."""
    if min(len(one), len(other)) < 2:
        return None
    ours, theirs = ((statistics.fmean(losses), statistics.stdev(losses), len(losses)) for losses in (one, other))
    if ours[1] == theirs[1] == 0:
        return float(ours[0] == theirs[0])
    return float(stats.ttest_ind_from_stats(*ours, *theirs, equal_var=False).pvalue)


@dataclass(frozen=True)
class Difference:
    """Of the means of two recipes, the second less the first, after a look."""

    mean: float
    low: float
    high: float
    """The repeated confidence interval of 95%: -inf to inf before the first look."""
    error: float
    """The standard error of the mean difference."""
    runs: int
    """Of each side."""


def difference(baseline: list[float], candidate: list[float]) -> Difference:
    """The difference of as many runs of each side, with its interval at this look."""
    n = len(baseline)
    mean = statistics.fmean(candidate) - statistics.fmean(baseline)
    if n < FIRST_LOOK:
        return Difference(mean, -math.inf, math.inf, math.inf, n)
    variances = [statistics.variance(side) / n for side in (baseline, candidate)]
    error = math.sqrt(sum(variances))
    reach = error * float(quantile(looks(n)[-1], variances, n)) if error else 0.0
    return Difference(mean, mean - reach, mean + reach, error, n)


def quantile(level: float, variances: list[float], n: int) -> float:
    """Student's, two-sided, with the degrees of freedom that Welch and Satterthwaite give the sum of two variances of
    means of n. Of arrays, an array."""
    freedom = (n - 1) * sum(variances) ** 2 / sum(variance**2 for variance in variances)
    return stats.t.isf(level / 2, freedom)


def decide(found: Difference, margin: float) -> str:
    """better, worse, no difference (of more than the margin, which goes before the other two) or unknown; of losses."""
    if -margin <= found.low and found.high <= margin:
        return "no difference"
    return "better" if found.high < 0 else "worse" if found.low > 0 else "unknown"


def more_runs(found: Difference, margin: float, most: int = 200) -> int | None:
    """About how many more runs of each side would decide, if mean and deviations stay; None: more than `most`."""
    deviation = found.error * math.sqrt(found.runs)
    enough = max(abs(found.mean), margin - abs(found.mean))
    for n, level in enumerate(looks(most), start=FIRST_LOOK):
        if n > found.runs and stats.t.isf(level / 2, 2 * n - 2) * deviation / math.sqrt(n) < enough:
            return n - found.runs
    return None


@dataclass(frozen=True)
class Worth:
    """How many times the steps the baseline needs to be as good as the candidate, with its interval of 95%. The budgets
    that it was trained for are the limits: an end that is one of them may lie anywhere beyond."""

    ratio: float
    low: float
    high: float


def worth(budgets: list[tuple[float, float]], baseline: float, found: Difference, level: float = 0.05) -> Worth | None:
    """What a difference is in steps, by runs of the baseline for shorter and longer.

    log(loss) as a function of x = log(steps of the run / steps of the experiment) is fitted by least squares with a
    parabola, from which b x + c x^2 = log(candidate / baseline) gives x. Its interval is that of the difference, sent
    through the curve, and the curve's own error by the delta method: at each end the root of the sum of squares (MOVER:
    Zou and Donner, "Construction of confidence intervals about effect measures", 2008).

    Args:
        budgets: of every run of the baseline its share of the steps, and its loss, above the floor where that is known.
        baseline: the mean of those at a share of 1.

    Returns:
        None where the losses do not fall with more steps, or are too few.
    """
    shares, losses = (np.array(column, float) for column in zip(*budgets, strict=True))
    if len(set(shares)) < 3 or len(shares) < 5 or losses.min() <= 0:
        return None
    (curvature, slope, _), covariance = np.polyfit(np.log(shares), np.log(losses), 2, cov=True)
    if slope >= 0:
        return None
    ends = math.log(shares.min()), math.log(shares.max())

    def steps_for(change: float) -> float:
        """log(share) at which the loss has changed by so much."""
        ratio = max(1 + change / baseline, 1e-9)
        root = slope**2 + 4 * curvature * math.log(ratio)
        if root < 0:  # the parabola turns before
            return ends[change < 0]
        return min(max(2 * math.log(ratio) / (slope - math.sqrt(root)), ends[0]), ends[1])

    x, low, high = (steps_for(change) for change in (found.mean, found.high, found.low))
    gradient = np.array([x**2, x]) / (slope + 2 * curvature * x)
    error = math.sqrt(gradient @ covariance[:2, :2] @ gradient) * float(stats.t.isf(level / 2, len(shares) - 3))
    low, high = max(x - math.hypot(x - low, error), ends[0]), min(x + math.hypot(high - x, error), ends[1])
    return Worth(math.exp(x), math.exp(low), math.exp(high))


def factor(ratios: list[float], level: float = 0.05) -> tuple[float, float, float]:
    """The geometric mean of ratios that were measured by turns, and its interval, Student's for their logarithms."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), 0.0, math.inf
    reach = statistics.stdev(logs) / math.sqrt(len(logs)) * float(stats.t.isf(level / 2, len(logs) - 1))
    return math.exp(mean), math.exp(mean - reach), math.exp(mean + reach)
