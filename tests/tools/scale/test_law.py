"""A scaling law is recovered from simulated runs, and its theory from counting."""

import numpy as np
import pytest

from tools.scale import law
from tools.scale.law import Law, LawFit, fit, fit_with_uncertainty, power_law_exponent, unseen_fact_probability

TRUE = Law(30.0, 0.5, 400.0, 0.4)
ENTROPY = 0.45
SIZES, DATA = np.repeat([8e3, 2e4, 5e4, 1.2e5], 4), np.tile([3e5, 6e5, 1.2e6, 2.4e6], 4)
LARGER = 4e5, 4e6


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr(law, "NUM_RESAMPLES", 40)


def measured(noise: float, seed: int) -> np.ndarray:
    return TRUE(SIZES, DATA) * np.exp(np.random.default_rng(seed).normal(0, noise, len(SIZES)))


def test_fit_recovers_law_without_noise():
    found = fit(SIZES, DATA, TRUE(SIZES, DATA))
    assert (found.alpha, found.beta) == pytest.approx((0.5, 0.4), rel=1e-3)
    assert found(*LARGER) == pytest.approx(TRUE(*LARGER), rel=1e-3)
    free = fit(SIZES, DATA, TRUE(SIZES, DATA), hidden_entropy=ENTROPY)
    assert (free.alpha, free.beta, free.irreducible) == pytest.approx((0.5, 0.4, 0), abs=0.02)


@pytest.mark.slow
def test_intervals_cover_at_their_rate():
    """With 95% intervals for 12 ladders with 2% noise, fewer than 9 cover the truth with probability 1/400."""
    inside = {"alpha": 0, "beta": 0, "prediction": 0}
    for trial in range(12):
        fitted = fit_with_uncertainty(SIZES, DATA, measured(0.02, trial))
        for name in ("alpha", "beta"):
            low, high = fitted.interval(lambda found, name=name: getattr(found, name))
            inside[name] += low <= getattr(TRUE, name) <= high
        _, low, high = fitted.predict(*LARGER)
        outcome = TRUE(*LARGER) * np.exp(np.random.default_rng(1000 + trial).normal(0, 0.02))
        inside["prediction"] += low <= outcome <= high
    assert min(inside.values()) >= 9, inside


def test_fitted_irreducible_loss_widens_intervals():
    exact = fit_with_uncertainty(SIZES, DATA, measured(0.005, 1))
    free = fit_with_uncertainty(SIZES, DATA, measured(0.005, 1), ENTROPY)
    widths = [np.diff(fitted.interval(lambda found: found.beta))[0] for fitted in (exact, free)]
    assert widths[1] > widths[0]


def test_compute_optimal_minimises_loss():
    parameters, tokens = TRUE.compute_optimal(1e12)
    assert parameters * tokens == pytest.approx(1e12)
    others = parameters * np.linspace(0.5, 2, 31)
    assert TRUE(parameters, tokens) <= TRUE(others, 1e12 / others).min()


@pytest.mark.slow
def test_unseen_fact_probability_matches_simulation():
    rng = np.random.default_rng(0)
    shares = np.arange(1, 201) ** -1.3
    shares /= shares.sum()
    left = [1 - shares[np.unique(rng.choice(200, 300, p=shares))].sum() for _ in range(500)]
    assert unseen_fact_probability(200, 1.3, [0, 300]) == pytest.approx([1, np.mean(left)], rel=0.03)
    counts = [1e4, 1e5]
    exponent = power_law_exponent(counts, unseen_fact_probability(10**7, 1.5, counts))
    assert exponent == pytest.approx(0.5 / 1.5, abs=0.02)


@pytest.mark.parametrize(("alpha", "beta"), [(1e-3, 1e-3), (1e-3, 2.0), (2.0, 1e-3)])
def test_compute_optimal_of_badly_determined_law_is_finite(alpha, beta):
    parameters, tokens = Law(1e-3, alpha, 1e3, beta).compute_optimal(np.array([1e6, 1e12]))
    assert np.isfinite(parameters).all() and np.isfinite(tokens).all()
    assert parameters.min() >= 1
    assert tokens.min() >= 1


@pytest.mark.parametrize("offset", [0.0, 2.0])
def test_prediction_interval_includes_noise_of_the_run(offset):
    """The law is certain, a single run is not; its noise is relative to the whole loss."""
    expected, low, high = LawFit(TRUE, [TRUE] * 500, 0.1, offset).predict(*LARGER)
    assert expected == TRUE(*LARGER) and low < expected < high
    assert np.log((high + offset) / (low + offset)) == pytest.approx(2 * 1.96 * 0.1, rel=0.04)


def test_interval_has_quantiles_of_resampled_laws():
    resampled = [Law(1.0, alpha, 1.0, 1.0) for alpha in np.linspace(0, 1, 41)]
    assert LawFit(TRUE, resampled, 0.0, 0.0).interval(lambda law: law.alpha) == pytest.approx((0.025, 0.975))


def test_noise_includes_that_between_seeds():
    """The law fits the means, and the seeds of each point differ."""
    repeated = np.tile(SIZES, 40), np.tile(DATA, 40)
    excess = TRUE(*repeated) * np.exp(np.random.default_rng(0).normal(0, 0.1, len(repeated[0])))
    assert fit_with_uncertainty(*repeated, excess).noise == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(("hidden_entropy", "degrees_of_freedom"), [(None, 16 - 4), (ENTROPY, 16 - 5)])
def test_noise_uses_degrees_of_freedom(hidden_entropy, degrees_of_freedom):
    losses, offset = measured(0.02, 1), hidden_entropy or 0
    fitted = fit_with_uncertainty(SIZES, DATA, losses, hidden_entropy)
    residuals = np.log(losses + offset) - np.log(fitted.law(SIZES, DATA) + offset)
    assert fitted.noise == pytest.approx(np.sqrt((residuals**2).sum() / degrees_of_freedom))


def test_interval_shrinks_with_number_of_seeds():
    widths = []
    for seeds in (2, 32):
        repeated = np.tile(SIZES, seeds), np.tile(DATA, seeds)
        excess = TRUE(*repeated) * np.exp(np.random.default_rng(0).normal(0, 0.1, len(repeated[0])))
        low, high = fit_with_uncertainty(*repeated, excess).interval(lambda found: found.beta)
        widths.append(high - low)
    assert widths[1] < widths[0] / 2


def test_prediction_with_hidden_entropy_is_of_the_excess():
    """The noise is of the fitted loss, entropy included."""
    known = fit_with_uncertainty(SIZES, DATA, measured(0.01, 3))
    hidden = fit_with_uncertainty(SIZES, DATA, measured(0.01, 3), ENTROPY)
    assert hidden.offset == ENTROPY
    assert hidden.predict(*LARGER)[0] == pytest.approx(known.predict(*LARGER)[0], rel=0.2)
    _, low, high = hidden.predict(*LARGER)
    assert low < TRUE(*LARGER) < high


def test_resampled_noise_is_of_the_whole_loss():
    """Over the points the fitted law varies by the noise times sqrt(fitted numbers / points), as in any regression."""
    entropy, noise = 5.0, 0.003
    factors = np.exp(np.random.default_rng(4).normal(0, noise, len(SIZES)))
    fitted = fit_with_uncertainty(SIZES, DATA, (TRUE(SIZES, DATA) + entropy) * factors - entropy, entropy)
    curves = np.log([found(SIZES, DATA) + entropy for found in fitted.resampled])
    assert np.sqrt(curves.var(axis=0).mean()) == pytest.approx(fitted.noise * np.sqrt(5 / 16), rel=0.3)
