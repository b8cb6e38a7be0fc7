"""The design of a screen: sparse, balanced at each beginning, and extensible."""

from functools import cache
from itertools import combinations

import numpy as np
import pytest

from tools.experiment import design
from tools.experiment.design import FRACTION, extend_design


def new_design(num_ideas, num_rows, **options):
    return extend_design(np.zeros((0, num_ideas), bool), num_rows, **options)


cached_design = cache(new_design)


def standard_errors(rows):
    """Standard errors for a deviation of 1, relative to those of uncorrelated columns with a fifth of the rows on."""
    features = np.c_[np.ones(len(rows)), rows]
    errors = np.sqrt(np.diag(np.linalg.inv(features.T @ features))[1:])
    return errors * np.sqrt(len(rows) * FRACTION * (1 - FRACTION))


@pytest.mark.parametrize(("num_ideas", "num_rows", "worst"), [(8, 48, 1.1), (23, 48, 1.25), (40, 200, 1.06)])
def test_columns_are_nearly_uncorrelated(num_ideas, num_rows, worst):
    rows = cached_design(num_ideas, num_rows)
    assert rows.shape == (num_rows, num_ideas) and not rows[0].any()
    assert rows.mean() == pytest.approx(FRACTION, abs=0.02)
    assert np.ptp(rows.sum(0)) <= 5
    assert standard_errors(rows).max() < worst


@pytest.mark.parametrize(("num_ideas", "num_rows", "worst"), [(8, 48, 1.45), (23, 48, 1.35), (40, 200, 1.6)])
def test_each_beginning_is_nearly_balanced(num_ideas, num_rows, worst):
    rows = cached_design(num_ideas, num_rows)
    for length in range(2 * num_ideas, num_rows, 4):
        assert rows[:length].mean() == pytest.approx(FRACTION, abs=0.04)
        assert standard_errors(rows[:length]).max() < (worst if length < 3 * num_ideas else 1.25)


@pytest.mark.parametrize("num_ideas", [1, 2, 3, 4])
def test_few_ideas(num_ideas):
    rows = new_design(num_ideas, 24)
    assert rows.sum(0) == pytest.approx(24 * max(FRACTION, 1 / (num_ideas + 1)), abs=2)
    assert np.linalg.matrix_rank(np.c_[np.ones(24), rows]) == num_ideas + 1


def test_rows_depend_on_arguments_alone():
    rows = new_design(8, 24)
    assert (rows == new_design(8, 24)).all()
    assert (extend_design(rows, 12) == extend_design(rows, 12)).all()


def test_extension_is_nearly_optimal():
    rows = new_design(23, 48)
    rows = np.r_[rows, extend_design(rows, 48)]
    assert standard_errors(rows).max() < 1.12


def test_rows_can_be_added_one_by_one():
    rows = new_design(8, 0)
    for _ in range(40):
        rows = np.r_[rows, extend_design(rows, 1)]
    assert standard_errors(rows).max() < 1.35


def test_ideas_that_join_catch_up():
    early = np.pad(new_design(8, 48), ((0, 0), (0, 2)))
    new = extend_design(early, 24)
    assert new[:, 8:].sum(0).min() > 1.5 * new[:, :8].sum(0).max()
    assert new[:, 8:].mean(0).max() <= 0.5
    assert 0 < (new[:, 8] & new[:, 9]).sum() < 8
    rows = np.r_[early, new]
    assert standard_errors(rows).max() < 1.3
    assert standard_errors(rows)[:8].max() < standard_errors(early[:, :8]).max() * np.sqrt(72 / 48)


def test_joining_idea_is_compared_within_new_rows():
    early = np.pad(new_design(8, 48), ((0, 0), (0, 1)))
    assert extend_design(early, 12)[:, 8].sum() == 6


def test_exclusive_ideas_stay_apart():
    pairs = [*combinations(range(4), 2), (3, 7)]
    rows = new_design(12, 48, exclusive=pairs)
    rows = np.r_[rows, extend_design(rows, 24, exclusive=pairs)]
    assert not any((rows[:, first] & rows[:, second]).any() for first, second in pairs)
    assert standard_errors(rows).max() < 1.3


def test_ideas_of_one_setting_alternate():
    rows = new_design(5, 30, exclusive=combinations(range(5), 2))
    assert rows.sum(1).max() == 1 and set(rows.sum(0)) <= {3, 4}
    assert np.linalg.matrix_rank(np.c_[np.ones(30), rows]) == 6


def error_with_interactions(num_ideas, num_rows, interaction, deviation=0.08):
    """Root mean square error of an effect against that of the idea alone, if each pair of ideas interacts."""
    rows = new_design(num_ideas, num_rows).astype(float)
    weights = np.linalg.pinv(np.c_[np.ones(num_rows), rows])[1:]
    products = np.array([rows[:, first] * rows[:, second] for first, second in combinations(range(num_ideas), 2)]).T
    variances = deviation**2 * (weights**2).sum(1) + interaction**2 * ((weights @ products) ** 2).sum(1)
    return np.sqrt(variances.mean())


def test_fraction_keeps_errors_small(monkeypatch):
    """A tenth is worse without interactions, a half with them."""
    errors = {}
    for fraction in (0.1, FRACTION, 0.5):
        monkeypatch.setattr(design, "FRACTION", fraction)
        errors[fraction] = [error_with_interactions(23, 48, size) for size in (0, 0.01, 0.02)]
    few, fifth, half = errors.values()
    assert fifth[0] < 0.8 * few[0] and fifth[1] < few[1] and fifth[2] < 1.15 * few[2]
    assert fifth[1] < half[1] and fifth[2] < 0.75 * half[2]
