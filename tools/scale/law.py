"""A scaling law L(N, D) = E + A N^-alpha + B D^-beta of parameters N and tokens D: its fit, intervals, predictions.

Form and fit are those of Hoffmann et al. 2022 ("Chinchilla", arXiv:2203.15556, section 3.3): a Huber loss of
differences of logarithms, minimised from many starting points. They fit the irreducible loss E, too; here the entropy
of the data may be known.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import least_squares

HUBER_DELTA = 0.02  # in the logarithm: points further than 2% from the law count less
NUM_RESAMPLES = 200
MAX_EXPONENT = 2.0
INITIAL_EXPONENTS = (0.1, 0.3, 0.6, 1.0)  # a fit starts from each pair


@dataclass(frozen=True)
class Law:
    """The excess loss over the entropy of the data, in nats/token, as a function of parameters N and tokens D."""

    size_factor: float
    alpha: float
    data_factor: float
    beta: float
    irreducible: float = 0.0
    """Fitted irreducible loss minus the entropy of the data; 0 where the entropy is known to the fit."""

    def __call__(self, parameters: ArrayLike, tokens: ArrayLike) -> np.ndarray:
        """Return the excess loss of models with so many parameters after so many tokens."""
        size_term = self.size_factor * np.asarray(parameters, dtype=float) ** -self.alpha
        return self.irreducible + size_term + self.data_factor * np.asarray(tokens, dtype=float) ** -self.beta

    def compute_optimal(self, products: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Return the parameters and tokens with the least loss for given products N D, to which FLOPs are proportional.

        Both are at least 1, even where badly determined exponents would put the whole product into one of them.
        """
        log_ratio = math.log(self.alpha * self.size_factor) - math.log(self.beta * self.data_factor)
        log_products = np.log(products)
        log_parameters = (log_ratio + self.beta * log_products) / (self.alpha + self.beta)
        parameters = np.exp(np.clip(log_parameters, 0, log_products))
        return parameters, np.asarray(products) / parameters


def fit(
    parameters: ArrayLike,
    tokens: ArrayLike,
    excess: ArrayLike,
    hidden_entropy: float | None = None,
    start: Law | None = None,
) -> Law:
    """Fit a law to the excess losses of runs over the entropy of the data, in nats/token and above 0.

    With `hidden_entropy`, the entropy of the data, in nats/token, it is added to the excess, and the irreducible loss
    is fitted as if the entropy were unknown; with None the law has two terms. `start` is the only starting point of the
    fit; None: a grid.
    """
    log_sizes, log_data = np.log(parameters), np.log(tokens)
    losses = np.asarray(excess) + (hidden_entropy or 0.0)
    size_middle, data_middle = log_sizes.mean(), log_data.mean()

    # x: the logarithms of the size term at the mean size, alpha, the data term at the mean data, beta and, if it is
    # fitted, the irreducible loss.
    def log_terms(x: np.ndarray) -> np.ndarray:
        powers = [x[0] - np.exp(x[1]) * (log_sizes - size_middle), x[2] - np.exp(x[3]) * (log_data - data_middle)]
        return np.array([*powers, np.full_like(log_sizes, x[4])] if len(x) == 5 else powers)

    def residuals(x: np.ndarray) -> np.ndarray:
        return np.logaddexp.reduce(log_terms(x)) - np.log(losses)

    def jacobian(x: np.ndarray) -> np.ndarray:
        fractions = np.exp(log_terms(x) - np.logaddexp.reduce(log_terms(x)))
        by_exponent = (-np.exp(x[1]) * (log_sizes - size_middle), -np.exp(x[3]) * (log_data - data_middle))
        columns = [fractions[0], fractions[0] * by_exponent[0], fractions[1], fractions[1] * by_exponent[1]]
        return np.stack([*columns, *fractions[2:]], axis=1)

    half = math.log(losses.mean() / 2)
    starts = [[half, math.log(a), half, math.log(b)] for a in INITIAL_EXPONENTS for b in INITIAL_EXPONENTS]
    if hidden_entropy is not None:
        starts = [[*x, math.log(fraction * losses.min())] for x in starts for fraction in (0.5, 0.9)]
    if start:
        x = [math.log(start.size_factor) - start.alpha * size_middle, math.log(start.alpha)]
        x += [math.log(start.data_factor) - start.beta * data_middle, math.log(start.beta)]
        starts = [x if hidden_entropy is None else [*x, math.log(start.irreducible + hidden_entropy)]]
    low, high = math.log(1e-3), math.log(MAX_EXPONENT)
    bounds = [-40, low, -40, low, -40][: len(starts[0])], [20, high, 20, high, 5][: len(starts[0])]
    options: dict[str, Any] = {"jac": jacobian, "loss": "huber", "f_scale": HUBER_DELTA, "x_scale": "jac"}
    options |= {"max_nfev": 300, "bounds": bounds}
    fits = [least_squares(residuals, np.clip(x, *bounds), **options) for x in starts]
    x = min(fits, key=lambda result: result.cost).x
    alpha, beta = math.exp(x[1]), math.exp(x[3])
    irreducible = math.exp(x[4]) - hidden_entropy if hidden_entropy is not None else 0.0
    return Law(math.exp(x[0] + alpha * size_middle), alpha, math.exp(x[2] + beta * data_middle), beta, irreducible)


@dataclass(frozen=True)
class LawFit:
    """A law and its parametric bootstrap."""

    law: Law
    resampled: list[Law]
    """Laws fitted to points with simulated noise."""
    noise: float
    """Standard deviation of the logarithm of one run's fitted loss around the law."""
    offset: float
    """The fitted loss is the excess loss plus this, in nats/token."""

    def interval(self, parameter: Callable[[Law], float]) -> tuple[float, float]:
        """Return the 95% bootstrap interval of a parameter of the law."""
        low, high = np.quantile([parameter(law) for law in self.resampled], (0.025, 0.975))
        return float(low), float(high)

    def predict(self, parameters: float, tokens: float) -> tuple[float, float, float]:
        """Predict the excess loss of one run, in nats/token, with its 95% prediction interval.

        The interval combines the uncertainty of the law and the run's noise.
        """
        rng = np.random.default_rng(0)
        draws = [
            (law(parameters, tokens) + self.offset) * math.exp(noise) - self.offset
            for law in self.resampled
            for noise in rng.normal(0, self.noise, 20)
        ]
        low, high = np.quantile(draws, (0.025, 0.975))
        return float(self.law(parameters, tokens)), float(low), float(high)


def fit_with_uncertainty(
    parameters: Sequence[float],
    tokens: Sequence[float],
    excess: Sequence[float],
    hidden_entropy: float | None = None,
) -> LawFit:
    """Fit the geometric means over seeds, then refit them with simulated noise (a parametric bootstrap).

    The noise has the standard deviation of the residuals or of the means over seeds, whichever is larger. The arguments
    are those of `fit`; runs that differ in their seed alone have the same parameters and tokens.
    """
    runs: dict[tuple[float, float], list[float]] = {}
    for n, d, value in zip(parameters, tokens, excess, strict=True):
        runs.setdefault((n, d), []).append(value)
    sizes, data = (np.array(column) for column in zip(*runs, strict=True))
    offset = hidden_entropy or 0.0
    means = np.array([math.exp(np.mean(np.log(values))) for values in runs.values()])
    law = fit(sizes, data, means, hidden_entropy)
    residuals = np.log(means + offset) - np.log(law(sizes, data) + offset)
    degrees_of_freedom = max(1, len(means) - (4 if hidden_entropy is None else 5))
    residual_std = math.sqrt(float(residuals @ residuals) / degrees_of_freedom)
    counts = [len(values) for values in runs.values()]
    variances = [np.log(np.add(values, offset)).var(ddof=1) for values in runs.values() if len(values) > 1]
    seed_std = math.sqrt(float(np.mean(variances))) if variances else 0.0
    rng = np.random.default_rng(0)
    std_of_means = max(residual_std, seed_std / math.sqrt(float(np.mean(counts))))
    resampled = []
    for _ in range(NUM_RESAMPLES):
        noisy = (law(sizes, data) + offset) * np.exp(rng.normal(0, std_of_means, len(sizes))) - offset
        resampled.append(fit(sizes, data, noisy, hidden_entropy, start=law))
    return LawFit(law, resampled, max(residual_std, seed_std), offset)


def unseen_fact_probability(num_facts: int, zipf: float, facts_read: ArrayLike) -> np.ndarray:
    """Return the probability that the next fact has not been read before (Hutter 2021, arXiv:2102.04074).

    This is the error rate of a learner that forgets nothing, after each number of `facts_read`, with repetitions. The
    fact of rank i has a probability proportional to i^-zipf.
    """
    weights = np.arange(1, num_facts + 1, dtype=np.float64) ** -zipf
    probabilities = weights / weights.sum()
    return np.array([float((probabilities * np.exp(-probabilities * count)).sum()) for count in np.ravel(facts_read)])


def power_law_exponent(inputs: Sequence[float], values: np.ndarray) -> float:
    """Return the exponent a of values proportional to inputs^-a, from the first and the last point."""
    return -math.log(values[-1] / values[0]) / math.log(inputs[-1] / inputs[0])
