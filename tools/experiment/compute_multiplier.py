"""The compute multiplier: steps that the baseline would need for the loss of a variant, relative to its own."""

import math

import numpy as np
from scipy.special import stdtrit

# Budgets that the baseline is trained for too, relative to the steps of the experiment, and runs of each.
BUDGETS = (0.5, 0.5**0.5, 2**0.5, 2.0)
SEEDS_OF_BUDGET = 2
LEVEL = 0.05

Estimate = tuple[float, float, float]
"""A ratio and its 95% interval."""


def estimate_compute_multiplier(budgets: list[tuple[float, float]], variant: list[float]) -> Estimate | None:
    """Convert the log loss of a variant into a multiple of the baseline's steps, by its runs on other budgets.

    The multiple is that of the steps at which the baseline reaches the variant's loss. It is clipped to the range of
    BUDGETS, and so is its interval: an end of that range is a bound. The interval holds at a single look.

    A parabola in x = log(budget) is fitted to the log losses by least squares; solving a + b x + c x^2 = (mean log loss
    of the variant) gives x. The interval adds the variance of that mean to the curve's own, by the delta method.

    Args:
        budgets: (steps relative to the experiment, log loss) of every run of the baseline.
        variant: log losses of the variant.

    Returns:
        None where the losses do not fall with more steps, or are too few for the fit.
    """
    x, y = (np.array(column, float) for column in zip(*budgets, strict=True))
    x = np.log(x)
    if len(set(x)) < 3 or len(x) < 5 or len(variant) < 2:
        return None
    coefficients, covariance = np.polyfit(x, y, 2, cov=True)
    target, ends = float(np.mean(variant)), (float(x.min()), float(x.max()))

    def log_steps(value: float) -> float:
        """Return log(relative steps) at which the baseline has a log loss."""
        grid = np.linspace(*ends, 2001)
        return float(grid[np.abs(np.polyval(coefficients, grid) - value).argmin()])

    slopes = np.polyval(np.polyder(coefficients), np.linspace(*ends, 5))
    if (slopes >= 0).any():
        return None
    solution = log_steps(target)
    powers = np.array([solution**2, solution, 1.0])
    variance = powers @ covariance @ powers + np.var(variant, ddof=1) / len(variant)
    error = math.sqrt(variance) / -float(np.polyval(np.polyder(coefficients), solution))
    error *= -float(stdtrit(min(len(x) - 3, len(variant) - 1), LEVEL / 2))
    low, high = max(solution - error, ends[0]), min(solution + error, ends[1])
    return math.exp(solution), math.exp(low), math.exp(high)
