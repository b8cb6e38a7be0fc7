"""How loss falls with size and data: L(N, D) = floor + A N^-alpha + B D^-beta, fitted to runs and used to predict.

The form and the fit are those of Hoffmann et al. 2022 ("Chinchilla", arXiv:2203.15556, section 3.3), a Huber loss of
the differences of logarithms from many starts. There the floor is one more guess; here it may be known.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

HUBER = 0.02  # of a logarithm: beyond 2% a point counts less
RESAMPLES = 200
LARGEST_EXPONENT = 2.0
EXPONENTS = (0.1, 0.3, 0.6, 1.0)  # from each pair of these a fit starts


@dataclass(frozen=True)
class Law:
    """The excess over `floor` of a model of N parameters after D tokens."""

    size_factor: float
    alpha: float
    data_factor: float
    beta: float
    floor: float = 0.0
    """What was fitted as the floor, above the one that is known."""

    def __call__(self, parameters: float | np.ndarray, tokens: float | np.ndarray) -> float | np.ndarray:
        """The excess, in nats a token."""
        return self.floor + self.size_factor * parameters**-self.alpha + self.data_factor * tokens**-self.beta

    def best_split(self, products: float | np.ndarray) -> tuple[float | np.ndarray, float | np.ndarray]:
        """Parameters and tokens of the least excess with a given product of both, to which FLOPs are proportional."""
        ratio = self.alpha * self.size_factor / (self.beta * self.data_factor)
        parameters = (ratio * products**self.beta) ** (1 / (self.alpha + self.beta))
        return parameters, products / parameters


def fit(
    parameters: Sequence[float],
    tokens: Sequence[float],
    excess: Sequence[float],
    known_floor: float | None = None,
    near: Law | None = None,
) -> Law:
    """The law nearest to measured points, each an `excess` over the floor in nats a token.

    Without a `known_floor` the floor is exact, and the excess is a sum of two powers. With one the fit is told nothing
    of it, as of text from the wild: it sees losses, `known_floor` above the excess, and finds its own floor. It starts
    at the law that it must be `near`, if there is one.
    """
    sizes, data = np.log(parameters), np.log(tokens)
    seen = np.asarray(excess) + (known_floor or 0.0)
    size_middle, data_middle = sizes.mean(), data.mean()

    def terms(x: np.ndarray) -> np.ndarray:
        powers = [x[0] - np.exp(x[1]) * (sizes - size_middle), x[2] - np.exp(x[3]) * (data - data_middle)]
        return np.array([*powers, np.full_like(sizes, x[4])] if len(x) == 5 else powers)

    def differences(x: np.ndarray) -> np.ndarray:
        return np.logaddexp.reduce(terms(x)) - np.log(seen)

    def slopes(x: np.ndarray) -> np.ndarray:
        shares = np.exp(terms(x) - np.logaddexp.reduce(terms(x)))
        by_exponents = (-np.exp(x[1]) * (sizes - size_middle), -np.exp(x[3]) * (data - data_middle))
        columns = [shares[0], shares[0] * by_exponents[0], shares[1], shares[1] * by_exponents[1], *shares[2:]]
        return np.stack(columns, axis=1)

    half = math.log(seen.mean() / 2)
    starts = [[half, math.log(a), half, math.log(b)] for a in EXPONENTS for b in EXPONENTS]
    if known_floor is not None:
        starts = [[*start, math.log(share * seen.min())] for start in starts for share in (0.5, 0.9)]
    if near:
        factors = [math.log(near.size_factor) - near.alpha * size_middle, math.log(near.alpha)]
        factors += [math.log(near.data_factor) - near.beta * data_middle, math.log(near.beta)]
        starts = [factors if known_floor is None else [*factors, math.log(near.floor + known_floor)]]
    least, most = math.log(1e-3), math.log(LARGEST_EXPONENT)
    bounds = ([-40, least, -40, least, -40][: len(starts[0])], [20, most, 20, most, 5][: len(starts[0])])
    options = {"loss": "huber", "f_scale": HUBER, "x_scale": "jac", "max_nfev": 300, "bounds": bounds}
    fits = [least_squares(differences, np.clip(start, *bounds), slopes, **options) for start in starts]
    x = min(fits, key=lambda found: found.cost).x
    alpha, beta = math.exp(x[1]), math.exp(x[3])
    floor = math.exp(x[4]) - known_floor if known_floor is not None else 0.0
    return Law(math.exp(x[0] + alpha * size_middle), alpha, math.exp(x[2] + beta * data_middle), beta, floor)


@dataclass(frozen=True)
class Fitted:
    """A law, and those of resampled points."""

    law: Law
    resampled: list[Law]
    noise: float
    """Standard deviation of a point around the law, of the logarithm of what was fitted."""
    offset: float
    """What was fitted is the excess and this."""

    def interval(self, of) -> tuple[float, float]:
        """Of 95 in 100 resampled laws, for a number of a law."""
        low, high = np.quantile([of(law) for law in self.resampled], (0.025, 0.975))
        return float(low), float(high)

    def prediction(self, parameters: float, tokens: float) -> tuple[float, float, float]:
        """The excess of a run that was not trained, and the interval for 95 in 100: of the law and of the run."""
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
    seeds: Sequence[int],
    known_floor: float | None = None,
) -> Fitted:
    """Fit the means over seeds, and again with noise of the size of what is left added to each point.

    The noise is that around the law, or that between seeds where it is larger.
    """
    points: dict[tuple[float, float], list[float]] = {}
    for n, d, value, _ in zip(parameters, tokens, excess, seeds, strict=True):
        points.setdefault((n, d), []).append(value)
    sizes, data = (np.array(column) for column in zip(*points, strict=True))
    offset = known_floor or 0.0
    means = np.array([math.exp(np.mean(np.log(values))) for values in points.values()])
    law = fit(sizes, data, means, known_floor)
    left = np.log(means + offset) - np.log(law(sizes, data) + offset)
    free = max(1, len(means) - (4 if known_floor is None else 5))
    around = math.sqrt(float(left @ left) / free)
    counts = [len(values) for values in points.values()]
    spread = [np.log(np.add(values, offset)).var(ddof=1) for values in points.values() if len(values) > 1]
    between = math.sqrt(float(np.mean(spread))) if spread else 0.0
    rng = np.random.default_rng(0)
    of_means = max(around, between / math.sqrt(float(np.mean(counts))))
    resampled = []
    for _ in range(RESAMPLES):
        noisy = (law(sizes, data) + offset) * np.exp(rng.normal(0, of_means, len(sizes))) - offset
        resampled.append(fit(sizes, data, noisy, known_floor, near=law))
    return Fitted(law, resampled, max(around, between), offset)


def unread_mass(facts: int, zipf: float, told: Sequence[float]) -> np.ndarray:
    """The probability that the next fact is one that was not among so many told before (Hutter 2021, arXiv:2102.04074):
    what a reader who forgets nothing has still to learn."""
    weights = np.arange(1, facts + 1, dtype=np.float64) ** -zipf
    shares = weights / weights.sum()
    return np.array([float((shares * np.exp(-shares * number)).sum()) for number in told])


def unkept_mass(facts: int, zipf: float, kept: Sequence[float]) -> np.ndarray:
    """The probability of a fact beyond the most frequent ones that a model has room for (Michaud et al. 2023,
    arXiv:2303.13506)."""
    shares = np.arange(1, facts + 1, dtype=np.float64) ** -zipf
    beyond = 1 - np.cumsum(shares) / shares.sum()
    return np.interp(kept, np.arange(1, facts + 1), beyond)


def slope(inputs: Sequence[float], values: np.ndarray) -> float:
    """The exponent of a power law through the ends."""
    return -math.log(values[-1] / values[0]) / math.log(inputs[-1] / inputs[0])
