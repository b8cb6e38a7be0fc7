"""What the runs of a race say about each idea, and which variant to train next.

All values are logarithms of losses, so differences are relative changes. Three parts, which hold for one idea or many:

- Variances. The seeds of a variant are few, so its variance is shrunk toward the common one of all variants (moderated
  t-statistics: Smyth, "Linear models and empirical Bayes methods for assessing differential expression", 2004; as in
  the R package limma).
- Intervals and p-values that hold at every look: a normal mixture over the possible effects (Robbins, "Statistical
  methods related to the law of the iterated logarithm", 1970; Johari, Koomen, Pekelis and Walsh, "Always valid
  inference", 2022). So one may look after every run, stop at any time and go on later.
- Verdicts. Over the ideas of a race the false discovery rate is controlled (Benjamini and Hochberg 1995); with p-values
  that hold at every look this also holds where later runs depend on earlier results (Jamieson and Jain, "A bandit
  approach to multiple testing with false discovery control", 2018).

tests/tools/experiment/test_verdicts.py simulates the rates: heavy tails, skew, unequal variances, failures, late ideas.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

# The distribution functions of the normal and of Student's t distribution, and their inverses. scipy.stats has them
# with better names, but takes a second to import.
from scipy.special import ndtr, ndtri, stdtr, stdtrit

LEVEL = 0.05  # false discovery rate of a race, and one minus the coverage of each interval
MIN_BASELINE_RUNS = 4  # before anything is computed
MIN_RUNS_OF_DISCOVERY = 4  # of an idea: fewer do not show whether it scatters more than others
# The standard deviation of the mixture over effects, in standard deviations of a run. It tunes for which effects the
# intervals are shortest, and the rates hold for any value.
MIXTURE_SCALE = 1.0
OPTIMISM = 2.0  # standard errors that are added to an idea's gain when the next run is chosen
# Degrees of freedom of the common variance in that of an idea. With fewer, intervals after one run say nothing; with
# more, those of ideas that scatter much more than the others are too short (simulated in the tests).
PRIOR_FREEDOM = 6.0
MAX_OF_MEDIAN = 10.0

Verdict = Literal["better", "worse", "no gain", "unknown", "failed", "identical"]


@dataclass
class Group:
    """The runs of one variant."""

    values: list[float] = field(default_factory=list)
    """Log of the loss of each run that is scored."""
    failed: int = 0
    """Runs that crashed or diverged, or whose loss is not valid."""
    pending: int = 0
    """Runs that are planned, in training or not scored yet."""

    @property
    def num_ended(self) -> int:
        """Runs with a result."""
        return len(self.values) + self.failed


@dataclass(frozen=True)
class Finding:
    """What is known of an idea."""

    verdict: Verdict = "unknown"
    effect: float = math.nan
    """Difference of the mean log loss from the baseline's; negative is better. NaN before the first run."""
    half_width: float = math.inf
    """The 95% interval, which holds at every look, is effect - half_width to effect + half_width."""
    p: float = 1.0
    q: float = 1.0
    """p-value corrected for the number of ideas (Benjamini and Hochberg)."""
    standard_error: float = math.inf

    @property
    def is_settled(self) -> bool:
        """Whether more runs are of no use; the effect of a `better` idea may still be too imprecise."""
        return self.verdict not in ("unknown", "better")


# Variances and intervals


def moderate_variances(groups: Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray, float]:
    """Shrink the sample variance of each group toward the common one, which has PRIOR_FREEDOM degrees of freedom.

    Smyth (2004, section 6.2) estimates that number from the scatter of the variances. With a degree of freedom or two
    each, these scatter so much that the estimate, and with it the width of all intervals, is mostly chance.

    Returns:
        The shrunk variances [groups], their degrees of freedom [groups], and the degrees of freedom of all groups
        together, which no estimate exceeds. All variances are 0 if the values of each group are equal.
    """
    freedom = np.array([max(len(group) - 1, 0) for group in groups], float)
    # Relative to the first value, so that the variance of equal values is exactly 0.
    variances = np.array([np.var(np.subtract(group, group[0]), ddof=1) if len(group) > 1 else 0.0 for group in groups])
    total = float(freedom.sum())
    if not variances.any():
        return variances, freedom, total
    # One group with a run that diverged must not widen all intervals, so a variance counts up to a multiple of the
    # median of those that are not 0.
    highest = MAX_OF_MEDIAN * float(np.median(variances[variances > 0]))
    common = float(np.average(variances.clip(max=highest), weights=freedom))
    shrunk = (PRIOR_FREEDOM * common + freedom * variances) / (PRIOR_FREEDOM + freedom)
    return shrunk, np.minimum(PRIOR_FREEDOM + freedom, total), total


@dataclass(frozen=True)
class Differences:
    """Contrasts of groups, each array [contrasts]."""

    effects: np.ndarray
    half_widths: np.ndarray
    p: np.ndarray
    standard_errors: np.ndarray


def compare(groups: Sequence[Sequence[float]], contrasts: Sequence[tuple[int, ...]]) -> Differences:
    """Compare the means of groups by intervals and p-values that hold at every look.

    If the values of each group are equal, as those of a coarse metric may be, nothing tells how much runs scatter: the
    intervals are infinite and the p-values 1.

    Args:
        groups: log losses, at least one in each group of a contrast.
        contrasts: indices of groups whose means are subtracted and added in turn: (baseline, variant) is an effect, and
            (variant, baseline, other_baseline, other_variant) is the other effect minus the first one.
    """
    variances, freedom, total = moderate_variances(groups)
    means = np.array([np.mean(group) if len(group) else 0.0 for group in groups])
    weights = np.zeros((len(contrasts), len(groups)))
    for row, contrast in zip(weights, contrasts, strict=True):
        np.add.at(row, list(contrast), np.resize([-1.0, 1.0], len(contrast)))
    effects = weights @ means
    if not variances.any():
        unknown = np.full(len(effects), math.inf)
        return Differences(effects, half_widths=unknown, p=np.ones(len(effects)), standard_errors=unknown)
    counts = np.array([max(len(group), 1) for group in groups])
    squared_errors = variances / counts  # of the means

    # Welch and Satterthwaite's degrees of freedom of a difference.
    sums = weights**2 @ squared_errors
    difference_freedom = np.minimum(sums**2 / (weights**4 @ (squared_errors**2 / freedom)), total)
    errors = np.sqrt(sums)

    # The t-statistic becomes the normal quantile of the same tail, and the mixture over effects ~ N(0, scale^2) turns
    # that into a martingale: its inverse is the p-value, and the effects that it does not reject are the interval.
    # The scale follows the scatter of single runs, so the intervals suit losses that vary by 0.1% and by 10% alike, and
    # their width in standard errors depends on little but the numbers of runs.
    z = -ndtri(stdtr(difference_freedom, -np.abs(effects) / errors).clip(1e-300))
    run_deviation = np.sqrt(weights**2 @ variances / (weights**2).sum(1))
    ratio = (MIXTURE_SCALE * run_deviation / errors) ** 2
    p = np.exp(np.minimum(0.0, (np.log1p(ratio) - z**2 * ratio / (1 + ratio)) / 2))
    boundary = np.sqrt((1 + 1 / ratio) * (2 * math.log(1 / LEVEL) + np.log1p(ratio)))
    half_widths = -errors * stdtrit(difference_freedom, ndtr(-boundary))
    return Differences(effects, half_widths, p, errors)


def q_values(p: np.ndarray) -> np.ndarray:
    """Return the smallest false discovery rate at which each p-value is a discovery (Benjamini and Hochberg 1995)."""
    order = np.argsort(p)
    stepped = p[order] * len(p) / np.arange(1, len(p) + 1)
    q = np.empty(len(p))
    q[order] = np.minimum.accumulate(stepped[::-1])[::-1].clip(max=1)
    return q


# Verdicts


def assess(baseline: Group, ideas: Sequence[Group], margin: float, num_withdrawn: int = 0) -> list[Finding]:
    """Return what is known of each idea; withdrawn ones count among the comparisons.

    - failed: its runs fail more often than the baseline's.
    - better, worse: a discovery at LEVEL, in that direction.
    - no gain: the interval excludes a gain of `margin` (a log ratio).
    - unknown: none of these yet.
    """
    findings = [Finding("failed") if fails_more_often(idea, baseline) else Finding() for idea in ideas]
    measured = [index for index, idea in enumerate(ideas) if findings[index].verdict != "failed" and idea.values]
    if len(baseline.values) >= MIN_BASELINE_RUNS:
        groups = [baseline, *(ideas[index] for index in measured)]
        pairs = [(0, number) for number in range(1, len(groups))]
        for index, finding in zip(measured, find(groups, pairs, margin, len(ideas) + num_withdrawn), strict=True):
            findings[index] = finding
    return findings


def find(
    groups: Sequence[Group], pairs: Sequence[tuple[int, int]], margin: float, num_comparisons: int
) -> list[Finding]:
    """Return what is known of each pair (baseline, variant) of groups; each group of a pair has values.

    The pairs are some of `num_comparisons`; the others, which are not measured yet or fail, have a p-value of 1.
    """
    found = compare([group.values for group in groups], pairs)
    q = q_values(np.append(found.p, np.ones(num_comparisons - len(pairs))))
    findings = []
    for number, (first, second) in enumerate(pairs):
        effect, half_width = float(found.effects[number]), float(found.half_widths[number])
        verdict = decide(effect, half_width, float(q[number]), margin, groups[first], groups[second])
        error = float(found.standard_errors[number])
        findings.append(Finding(verdict, effect, half_width, float(found.p[number]), float(q[number]), error))
    return findings


def decide(effect: float, half_width: float, q: float, margin: float, baseline: Group, idea: Group) -> Verdict:
    """Return what an effect with an interval says; q is its p-value, corrected for the number of comparisons."""
    if q <= LEVEL and len(idea.values) >= MIN_RUNS_OF_DISCOVERY:
        if effect > 0:
            return "worse"
        return "better" if failure_rate(idea) <= failure_rate(baseline) else "unknown"
    return "no gain" if effect - half_width > -margin else "unknown"


def failure_rate(group: Group) -> float:
    """Return the fraction of failed runs."""
    return group.failed / max(1, group.num_ended)


def fails_more_often(idea: Group, baseline: Group) -> bool:
    """Return whether runs of an idea fail more often than those of the baseline.

    Where no run of the baseline fails, one failure is enough; where some do, Fisher's exact test decides.
    """
    if failure_rate(idea) <= failure_rate(baseline):
        return False
    if not baseline.failed:
        return True
    table = [[idea.failed, len(idea.values)], [baseline.failed, len(baseline.values)]]
    from scipy.stats import fisher_exact

    test: Any = fisher_exact(table, alternative="greater")
    return test.pvalue <= LEVEL


# Allocation

BASELINE = -1


def choose_next(baseline: Group, ideas: Sequence[Group], findings: Sequence[Finding], margin: float) -> int | None:
    """Return the idea whose next run helps most to find the best one, BASELINE, or None if the round is over.

    First the baseline is trained a few times, and every idea once. Then a run goes to the idea that may be the best:
    the one with the lowest effect minus OPTIMISM standard errors (upper confidence bound: Lai and Robbins 1985; Auer
    2002), so an idea whose first run is far behind gets no second one. The baseline, which all ideas share, is trained
    about as often as the square root of the number of open ideas times one of them, which makes the differences as
    precise as possible for the number of runs (Dunnett 1955).

    Runs that are pending count as if they had confirmed what is known.
    """

    def runs(group: Group) -> int:
        return len(group.values) + group.pending

    if runs(baseline) < MIN_BASELINE_RUNS:
        return BASELINE
    open_ideas = [index for index, finding in enumerate(findings) if not finding.is_settled]
    if first_runs := [index for index in open_ideas if not runs(ideas[index])]:
        return first_runs[0]
    open_ideas = [index for index in open_ideas if math.isfinite(findings[index].effect)]
    if not open_ideas or is_decided(findings, margin):
        return None

    def optimistic(index: int) -> tuple[float, int]:
        idea, finding = ideas[index], findings[index]
        deviation = finding.standard_error * math.sqrt(len(idea.values) / runs(idea))
        return finding.effect - OPTIMISM * deviation, runs(idea)  # of equal ones, that with the fewest runs

    best = min(open_ideas, key=optimistic)
    is_short = runs(baseline) < math.sqrt(len(open_ideas)) * np.mean([runs(ideas[index]) for index in open_ideas])
    return BASELINE if is_short or runs(baseline) < runs(ideas[best]) else best


def is_decided(findings: Sequence[Finding], margin: float) -> bool:
    """Return whether the best idea is better, and no open one may gain more than it by `margin` (a log ratio).

    Two ideas with about the same gain would otherwise use up the runs; the other one races again in the next round.
    """
    better = [finding for finding in findings if finding.verdict == "better"]
    if not better:
        return False
    best = min(better, key=lambda finding: finding.effect)
    rivals = (finding for finding in findings if finding is not best and not finding.is_settled)
    return all(rival.effect - OPTIMISM * rival.standard_error > best.effect - margin for rival in rivals)


def best_idea(findings: Sequence[Finding]) -> int | None:
    """Return the idea that joins the baseline: the better one with the largest gain; None if there is none."""
    better = [index for index, finding in enumerate(findings) if finding.verdict == "better"]
    return min(better, key=lambda index: findings[index].effect) if better else None
