"""The compute multiplier: steps that the baseline would need for the candidate's loss, relative to its own."""

import math
import statistics

import numpy as np
from scipy import stats

from tools.experiment.sequential_test import welch_quantile

# Budgets that the baseline is trained for too, relative to the steps of the experiment.
BUDGETS = (0.5, 0.5**0.5, 2**0.5, 2.0)
# Significance level of the difference and of the curve. An experiment stops at the seed that decides it, which lowers
# the coverage by up to one percentage point: at this level, simulated intervals cover the ratio in 95% to 99% of cases.
LEVEL = 0.04


Estimate = tuple[float, float, float]
"""A ratio and its 95% interval."""


def estimate_compute_multiplier(
    budgets: list[tuple[float, float]], baseline: list[float], candidate: list[float]
) -> Estimate | None:
    """Convert a difference in loss into a multiple of the steps, by runs of the baseline on shorter and longer budgets.

    The multiple is that of the steps at which the baseline reaches the candidate's loss. It is clipped to the range of
    BUDGETS, and so is its interval: an end of that range is a bound.

    A parabola in x = log(budget) is fitted to log(loss) by least squares; solving b x + c x^2 =
    log(candidate / baseline) gives x. The interval combines Welch's interval of the difference, mapped through the
    curve, with the curve's own error by the delta method, as the root of the sum of squares at each end (MOVER: Zou and
    Donner, "Construction of confidence intervals about effect measures", 2008).

    Args:
        budgets: (steps relative to the experiment, loss) of every run of the baseline.
        baseline: losses of the baseline on budget 1, of two seeds or more.
        candidate: as many losses of the candidate.

    Returns:
        None where the losses do not fall with more steps, are not positive, or are too few for the fit.
    """
    relative_steps, losses = (np.array(column, float) for column in zip(*budgets, strict=True))
    if len(set(relative_steps)) < 3 or len(relative_steps) < 5 or losses.min() <= 0:
        return None
    (curvature, slope, _), covariance = np.polyfit(np.log(relative_steps), np.log(losses), 2, cov=True)
    if slope >= 0:
        return None
    mean = statistics.fmean(baseline)
    change = statistics.fmean(candidate) - mean
    variances = [statistics.variance(losses) / len(losses) for losses in (baseline, candidate)]
    quantile = float(welch_quantile(LEVEL, variances[0], variances[1], len(candidate))) if any(variances) else 0.0
    half_width = math.sqrt(sum(variances)) * quantile
    ends = math.log(relative_steps.min()), math.log(relative_steps.max())

    def log_steps(change: float) -> float:
        """Return log(relative steps) at which the baseline's loss has changed by `change`."""
        ratio = max(1 + change / mean, 1e-9)
        root = slope**2 + 4 * curvature * math.log(ratio)
        if root < 0:  # the parabola turns before it reaches this loss
            return ends[1] if change < 0 else ends[0]
        return min(max(2 * math.log(ratio) / (slope - math.sqrt(root)), ends[0]), ends[1])

    x, low, high = (log_steps(value) for value in (change, change + half_width, change - half_width))
    gradient = np.array([x**2, x]) / (slope + 2 * curvature * x)
    error = math.sqrt(gradient @ covariance[:2, :2] @ gradient)
    error *= float(stats.t.isf(LEVEL / 2, len(relative_steps) - 3))
    low, high = max(x - math.hypot(x - low, error), ends[0]), min(x + math.hypot(high - x, error), ends[1])
    return math.exp(x), math.exp(low), math.exp(high)
