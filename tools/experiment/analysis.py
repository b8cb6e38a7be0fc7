"""Effects of the ideas of a screen.

The effect of an idea is the change of the mean over seeds of the log of the loss when the idea is on, averaged over
the runs of the design; it is reported as the change of the geometric mean. It is estimated by least squares from all
runs that finished.

Intervals and p-values are the widest of three, because each fails somewhere:

- the usual ones are too narrow if the runs with an idea scatter more than the others;
- HC2 (MacKinnon and White, "Some heteroskedasticity-consistent covariance matrix estimators with improved finite sample
  properties", 1985) is too narrow if no run with the idea happens to be an outlier, and with few runs it is biased
  towards equal variances;
- the estimator of Cattaneo, Jansson and Newey ("Inference in linear regression models with many covariates and
  heteroscedasticity", 2018) has no such bias, but varies more.

Both robust ones use the degrees of freedom of Bell and McCaffrey ("Bias reduction in standard errors for linear
regression with multi-stage samples", 2002).

A verdict keeps the false discovery rate over the ideas of the screen below 5% (Benjamini and Hochberg, "Controlling the
false discovery rate", 1995), at whatever number of runs one looks: the q-values include the factor LOOKS. The error
rates are simulated in tests/tools/experiment/test_analysis.py.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

ALPHA = 0.05
# Factor on all p-values, because a screen may be looked at after each run, stopped at the first discovery, and
# extended. In simulations of this, up to four times the runs of the first plan, a factor of 5 suffices.
LOOKS = 6
MIN_RUNS_ON, MIN_FREEDOM = 2, 2  # finished runs with the idea on, and residual degrees of freedom, for an interval
MIN_RUNS_BOTH = 3  # finished runs with both ideas of a pair on, for an interaction
MAX_LOG = 20.0  # larger changes of the log are reported as this one: exp(20) is 5e8


@dataclass(frozen=True)
class Effect:
    """A change of the geometric mean, as a fraction: -0.13 is 13% lower. NaN where the runs do not determine it."""

    effect: float
    low: float
    """Lower end of the 95% interval, which holds at a single look."""
    high: float
    p: float
    """Two-sided p-value of no change, which holds at a single look."""
    q: float
    """Smallest false discovery rate at which this is a discovery, at any look."""
    verdict: str
    """better, worse or unknown; for an idea, also failed."""


@dataclass(frozen=True)
class IdeaEffect(Effect):
    """The effect of an idea on the loss, and what the idea costs."""

    idea: str
    failed: int
    """Number of failed runs with the idea on; unless it is failed itself, without runs that have a failed idea on."""
    equal_compute: Effect | None
    """The effect if the runs without the idea had the compute of those with it; None if it is unknown what compute is
    worth."""
    seconds: float = math.nan
    """Seconds a step with the idea on, divided by those with it off."""
    parameters: float = math.nan
    """Ratio of the parameters, likewise."""
    flops: float = math.nan
    """Ratio of the FLOPs, likewise."""


@dataclass(frozen=True)
class Interaction(Effect):
    """The change of the geometric mean when both ideas are on, beyond the product of their effects."""

    ideas: tuple[str, str]
    runs: int
    """Finished runs with both on."""


@dataclass(frozen=True)
class Analysis:
    """The result of a screen."""

    runs: int
    """Runs so far, failed ones included."""
    failed: int
    ideas: list[IdeaEffect]
    interactions: list[Interaction]
    """Pairs of ideas that are better, the largest interaction first."""

    def to_json(self) -> dict[str, Any]:
        """Return the object of `--json`, with four significant digits, and None for NaN."""
        return json.loads(
            json.dumps(asdict(self)),
            parse_float=lambda text: float(f"{float(text):.4g}"),
            parse_constant=lambda _: None,
        )


class Fit(NamedTuple):
    """Least-squares estimates of the changes of a value when each idea is on, [ideas]; NaN where undetermined."""

    estimate: np.ndarray
    half_width: np.ndarray
    p: np.ndarray


def analyze(
    ideas: Sequence[str],
    on: np.ndarray,
    log_losses: np.ndarray,
    costs: Mapping[str, np.ndarray] | None = None,
    compute: np.ndarray | None = None,
    control: tuple[int, float] | None = None,
) -> Analysis:
    """Analyze the runs of a screen so far.

    Args:
        ideas: Names.
        on: Which ideas were on in each run, boolean [runs, ideas].
        log_losses: Log of the excess loss, or of the loss, of each run; NaN or infinite for runs that failed.
        costs: `seconds` a step, `parameters` and `flops` a token of each run, positive; NaN for failed runs.
        compute: What is to be equal in `equal_compute`: seconds or FLOPs of each run.
        control: The index of an idea that only changes the compute, and the factor by which it does. Since it has an
            effect by design, it is not among those of which 5% may be false.
    """
    on, log_losses = np.asarray(on, bool), np.asarray(log_losses, float)
    finished = np.isfinite(log_losses)
    fit, index = least_squares(on, log_losses), None if control is None else control[0]
    effects = to_effects(fit, index)
    num_failed, is_failed = attribute_failures(on, ~finished)
    at_equal_compute: list[Effect | None] = [None] * len(ideas)
    if control and compute is not None and np.abs(fit.estimate[index]) > fit.half_width[index]:
        slope = fit.estimate[index] / math.log(control[1])  # change of the log loss by that of the log compute
        at_equal_compute = [*to_effects(least_squares(on, log_losses - slope * np.log(compute)), index)]
    ratios: dict[str, Any] = {
        name: np.exp(least_squares(on, np.log(values)).estimate).tolist() for name, values in (costs or {}).items()
    }
    results = [
        IdeaEffect(
            **vars(replace(effect, verdict="failed") if is_failed[index] else effect),
            idea=ideas[index],
            failed=int(num_failed[index]),
            equal_compute=at_equal_compute[index],
            **{name: values[index] for name, values in ratios.items()},
        )
        for index, effect in enumerate(effects)
    ]
    accepted = [index for index, result in enumerate(results) if result.verdict == "better"]
    return Analysis(len(on), int((~finished).sum()), results, find_interactions(ideas, on, log_losses, accepted))


def least_squares(on: np.ndarray, values: np.ndarray) -> Fit:
    """Fit an intercept and a change for each idea to the finite values; `on` is boolean [runs, ideas]."""
    finite = np.isfinite(values)
    on, values = on[finite], values[finite]
    n, num_ideas = on.shape
    features = np.c_[np.ones(n), on]
    inverse = np.linalg.pinv(features)
    freedom = n - np.linalg.matrix_rank(features) if n else 0
    if freedom < MIN_FREEDOM:
        return Fit(*np.full((3, num_ideas), np.nan))
    weights = inverse[1:]  # [ideas, runs]: the estimates are weights @ values
    estimable = np.isclose(inverse @ features, np.eye(num_ideas + 1), atol=1e-8)[1:].all(1)
    estimable &= on.sum(0) >= MIN_RUNS_ON
    residual_maker = np.eye(n) - features @ inverse
    squares = (residual_maker @ values) ** 2
    mixing = residual_maker**2  # expected squares = mixing @ variances
    own = np.diag(residual_maker).clip(1e-9)
    hc2 = weights**2 / own
    unbiased = np.linalg.solve(mixing + 1e-3 * np.eye(n), weights.T**2).T  # `mixing` may be singular
    # HC2 is a quadratic form in the residuals: twice its squared mean, divided by its variance at equal variances.
    robust_freedom = (hc2 @ own) ** 2 / np.einsum("ki,ij,kj->k", hc2, mixing, hc2).clip(1e-300)
    usual = np.sqrt(squares.sum() / freedom * (weights**2).sum(1))
    robust = np.sqrt(np.maximum(hc2 @ squares, unbiased @ squares))
    estimate = np.where(estimable, weights @ values, np.nan)
    half_widths, p_values = [], []
    for error, degrees in ((usual, freedom), (robust, robust_freedom.clip(1, freedom))):
        half_widths.append(error * stats.t.isf(ALPHA / 2, degrees))
        p_values.append(2 * stats.t.sf(np.abs(estimate) / error.clip(1e-12), degrees))
    return Fit(estimate, np.max(half_widths, 0), np.max(p_values, 0))


def to_effects(fit: Fit, control: int | None = None) -> list[Effect]:
    """Return the effects of changes of the log, with q-values and verdicts over all of them but the control."""
    estimate, half_width, p = fit
    if not len(p):
        return []
    q = np.nan_to_num(LOOKS * p, nan=1).clip(max=1)
    is_tested = np.arange(len(p)) != (-1 if control is None else control)
    q[is_tested] = stats.false_discovery_control(q[is_tested])
    low, middle, high = np.expm1((estimate + np.outer([-1, 0, 1], half_width)).clip(max=MAX_LOG))
    verdicts = np.where(q > ALPHA, "unknown", np.where(estimate < 0, "better", "worse"))
    columns = (column.tolist() for column in (middle, low, high, p, np.where(np.isnan(p), p, q), verdicts))
    return [Effect(*row) for row in zip(*columns, strict=True)]


def attribute_failures(on: np.ndarray, failed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of failed runs, and which ideas make runs fail, each [ideas].

    The idea with the smallest p-value of Fisher's exact test is blamed if that is significant among all ideas, at any
    look. The runs with it are then left out, so that the other ideas in them are not blamed too.
    """
    num_ideas = on.shape[1]
    counts, blamed = np.zeros(num_ideas, int), np.zeros(num_ideas, bool)
    while not blamed.all():
        left = ~on[:, blamed].any(1)
        both = (on & failed[:, None])[left].sum(0)
        counts = np.where(blamed, counts, both)
        p = np.where(both, stats.hypergeom.sf(both - 1, left.sum(), failed[left].sum(), on[left].sum(0)), 1)
        if LOOKS * num_ideas * p.min() > ALPHA:
            break
        blamed[p.argmin()] = True
    return counts, blamed


def find_interactions(
    ideas: Sequence[str], on: np.ndarray, log_losses: np.ndarray, accepted: list[int]
) -> list[Interaction]:
    """Return the interactions of all pairs of accepted ideas, the largest first, each estimated by itself."""
    pairs, estimates = [], []
    for first, second in combinations(accepted, 2):
        both = on[:, first] & on[:, second]
        runs = int((both & np.isfinite(log_losses)).sum())
        if runs >= MIN_RUNS_BOTH:
            fit = least_squares(np.c_[on, both], log_losses)
            pairs.append({"ideas": (ideas[first], ideas[second]), "runs": runs})
            estimates.append([column[-1] for column in fit])
    effects = to_effects(Fit(*np.reshape(estimates, (-1, 3)).T))
    found = [Interaction(**vars(effect), **pair) for effect, pair in zip(effects, pairs, strict=True)]
    return sorted(found, key=lambda one: -abs(np.nan_to_num(np.log1p(one.effect))))
