"""Rows of a screen: which ideas are on in each run.

The design is sparse: an idea is on in about a fifth of the rows, so that its effect is measured near the baseline,
where few other ideas are on. With these numbers of ideas in each row, it is D-optimal: it maximizes det(X'X), where X
has a column of ones and a column for each idea, by exchanging ideas within rows (coordinate exchange: Meyer and
Nachtsheim, "The coordinate-exchange algorithm for constructing exact optimal experimental designs", 1995). Standard
errors are then within a few percent of those of uncorrelated columns. The order of the rows is such that each beginning
is nearly balanced too, so a screen may stop early.

Why a fifth: root mean square error, in percent, of an effect against that of the idea alone, if runs scatter by 8% and
each pair of ideas has an interaction with a standard deviation of 0, 1, 2 or 4%:

ideas, rows   fraction 0.1         0.2                  0.3                  0.5
8, 48         3.9 3.9 4.0 4.2      2.9 3.0 3.2 3.8      2.6 2.7 3.1 4.2      2.3 2.7 3.5 5.8
23, 48        4.4 4.5 4.8 5.8      3.1 3.3 4.0 6.1      2.6 3.2 4.4 7.5      2.4 3.5 5.7 10.5
40, 96        2.9 3.1 3.6 5.3      2.1 2.7 4.0 7.1      1.8 2.9 4.9 9.3      1.7 3.8 7.0 13.7
40, 200       1.9 2.1 2.6 4.0      1.4 2.1 3.3 6.1      1.2 2.4 4.3 8.4      1.1 3.5 6.6 13.1
"""

import math
from collections.abc import Iterable

import numpy as np
from scipy import stats

FRACTION = 0.2  # of the rows, in which an idea is on
MAX_FRACTION = 0.5  # of the rows added at once, in which an idea that joined late may be on
# Information about each idea before the first row, in rows. It makes X'X invertible before all ideas are estimable
# (DuMouchel and Jones, "A simple Bayesian modification of D-optimal designs", 1994).
RIDGE = 0.1
ROUNDS, STARTS = 5, 4  # rounds of exchanges over all rows, and local searches for a row in each
GOLDEN_RATIO = (1 + math.sqrt(5)) / 2


def extend_design(rows: np.ndarray, num_rows: int, exclusive: Iterable[tuple[int, int]] = ()) -> np.ndarray:
    """Return further rows of a design, in the order in which to run them.

    They are a function of the arguments. The first row of a design is the baseline, with all ideas off.

    Args:
        rows: Rows so far, boolean [rows, ideas]; [0, ideas] for a new design. Ideas that join a design are columns of
            False at the end; the new rows favour them.
        num_rows: Number of new rows. One large extension is closer to the optimum than several small ones.
        exclusive: Pairs of columns that are never on in the same row.

    Returns:
        Boolean [num_rows, ideas].
    """
    before, num_ideas = np.asarray(rows, bool), rows.shape[1]
    excluded = np.zeros((num_ideas, num_ideas), bool)
    for first, second in exclusive:
        excluded[first, second] = excluded[second, first] = True
    generator = np.random.default_rng((0, *before.shape))
    sizes = [row_size(len(before) + index, num_ideas) for index in range(num_rows)]
    new = np.zeros((num_rows, num_ideas), bool)
    for _ in range(ROUNDS):
        for index in range(num_rows):
            others = np.delete(new, index, axis=0)
            covariance = unscaled_covariance(np.r_[before, others])
            available = others.sum(0) < MAX_FRACTION * num_rows
            best = new[index] if new[index].any() else None
            for _ in range(STARTS):
                order = generator.permutation(num_ideas)
                row = search_row(covariance, order, available, excluded, sizes[index])
                if best is None or gain(covariance, row) > gain(covariance, best):
                    best = row
            new[index] = best
    return ordered(before, new)


def unscaled_covariance(rows: np.ndarray) -> np.ndarray:
    """Return the inverse of X'X with a ridge, [1 + ideas, 1 + ideas].

    It is rounded, so that the choices that follow from it do not depend on the order in which BLAS sums.
    """
    features = np.c_[np.ones(len(rows)), rows]
    return np.round(np.linalg.inv(features.T @ features + RIDGE * np.eye(features.shape[1])), 9)


def gain(covariance: np.ndarray, row: np.ndarray) -> float:
    """Return x' covariance x, where x is a one and the row: the factor on det(X'X) if the row is added, minus 1."""
    x = np.r_[1, row]
    return round(float(x @ covariance @ x), 8)


def ordered(before: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return the new rows, each time the one that increases the determinant the most; their sizes keep their order."""
    left = [*new]
    for size in new.sum(1):
        covariance = unscaled_covariance(before)
        gains = [gain(covariance, row) if row.sum() == size else -math.inf for row in left]
        before = np.r_[before, [left.pop(int(np.argmax(gains)))]]
    return before[len(before) - len(new) :]


def row_size(index: int, num_ideas: int) -> int:
    """Return how many ideas are on in row number `index`, unless exclusions allow only fewer.

    The sizes are quantiles of a binomial distribution, as if each idea were on independently: if they were equal, the
    columns would add up to a constant, and no effect would be estimable. The quantiles are at multiples of the golden
    ratio modulo 1, each beginning of which is nearly uniform. With few ideas, the fraction is that at which each idea
    and the baseline have equal numbers of rows.
    """
    fraction = max(FRACTION, 1 / (num_ideas + 1))
    return max(0, int(stats.binom.ppf(index * GOLDEN_RATIO % 1, num_ideas, fraction)))


def search_row(
    covariance: np.ndarray, order: np.ndarray, available: np.ndarray, excluded: np.ndarray, size: int
) -> np.ndarray:
    """Return a row, boolean [ideas], of up to `size` ideas with a large gain.

    Ideas are added in this order, then one at a time is exchanged for another while the gain increases.
    """
    row = np.zeros(len(order), bool)
    for idea in order:
        row[idea] = row.sum() < size and available[idea] and not (row & excluded[idea]).any()
    ideas = covariance[1:, 1:]
    while row.any():
        out = np.flatnonzero(row)
        slope = 2 * (covariance[1:, 0] + ideas @ row)
        gains = slope - slope[out, None] - 2 * ideas[out] + np.diag(ideas) + np.diag(ideas)[out, None]
        conflicts = excluded @ row.astype(int) - excluded[out]
        gains = np.where(~row & available & (conflicts == 0), gains, 0)
        if gains.max() < 1e-8:
            break
        one, other = np.unravel_index(gains.argmax(), gains.shape)
        row[[out[one], other]] = False, True
    return row
