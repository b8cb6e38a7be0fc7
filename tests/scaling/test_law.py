"""The law of loss is found in made-up points whose law is known, and the theory is what counting says."""

import numpy as np
import pytest

from scaling import law
from scaling.law import Law, fit, fit_with_uncertainty, slope, unkept_mass, unread_mass

TRUE = Law(30.0, 0.5, 400.0, 0.4)
FLOOR = 0.45
SIZES, DATA = np.repeat([8e3, 2e4, 5e4, 1.2e5], 4), np.tile([3e5, 6e5, 1.2e6, 2.4e6], 4)
LARGER = 4e5, 4e6


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr(law, "RESAMPLES", 40)


def measured(noise: float, seed: int) -> np.ndarray:
    return TRUE(SIZES, DATA) * np.exp(np.random.default_rng(seed).normal(0, noise, len(SIZES)))


def test_exponents_of_points_without_noise_are_found():
    found = fit(SIZES, DATA, TRUE(SIZES, DATA))
    assert (found.alpha, found.beta) == pytest.approx((0.5, 0.4), rel=1e-3)
    assert found(*LARGER) == pytest.approx(TRUE(*LARGER), rel=1e-3)
    free = fit(SIZES, DATA, TRUE(SIZES, DATA), known_floor=FLOOR)
    assert (free.alpha, free.beta, free.floor) == pytest.approx((0.5, 0.4, 0), abs=0.02)


@pytest.mark.slow
def test_intervals_hold_the_truth_about_as_often_as_they_say():
    """Of 12 ladders with a noise of 2%: of 95 in 100, fewer than 9 would be inside once in 400 times."""
    inside = {"alpha": 0, "beta": 0, "prediction": 0}
    for trial in range(12):
        fitted = fit_with_uncertainty(SIZES, DATA, measured(0.02, trial), [0] * len(SIZES))
        for name in ("alpha", "beta"):
            low, high = fitted.interval(lambda found, name=name: getattr(found, name))
            inside[name] += low <= getattr(TRUE, name) <= high
        _, low, high = fitted.prediction(*LARGER)
        outcome = TRUE(*LARGER) * np.exp(np.random.default_rng(1000 + trial).normal(0, 0.02))
        inside["prediction"] += low <= outcome <= high
    assert min(inside.values()) >= 9, inside


def test_a_floor_that_is_not_known_costs_certainty():
    exact = fit_with_uncertainty(SIZES, DATA, measured(0.005, 1), [0] * len(SIZES))
    free = fit_with_uncertainty(SIZES, DATA, measured(0.005, 1), [0] * len(SIZES), FLOOR)
    widths = [np.diff(fitted.interval(lambda found: found.beta))[0] for fitted in (exact, free)]
    assert widths[1] > widths[0]


def test_the_best_split_is_the_least_excess_for_its_product():
    parameters, tokens = TRUE.best_split(1e12)
    assert parameters * tokens == pytest.approx(1e12)
    others = parameters * np.linspace(0.5, 2, 31)
    assert TRUE(parameters, tokens) <= TRUE(others, 1e12 / others).min()


def test_what_is_unread_is_what_counting_finds_and_its_exponent_that_of_theory():
    rng = np.random.default_rng(0)
    shares = np.arange(1, 201) ** -1.3
    shares /= shares.sum()
    left = [1 - shares[np.unique(rng.choice(200, 300, p=shares))].sum() for _ in range(500)]
    assert unread_mass(200, 1.3, [300])[0] == pytest.approx(np.mean(left), rel=0.03)
    told = [1e4, 1e5]
    assert slope(told, unread_mass(10**7, 1.5, told)) == pytest.approx(0.5 / 1.5, abs=0.02)
    kept = [1e3, 1e4]
    assert slope(kept, unkept_mass(10**7, 1.5, kept)) == pytest.approx(0.5, abs=0.02)
