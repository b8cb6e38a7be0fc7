"""Results that end an experiment before its sequential test does: equal runs, hopeless ones, impossible losses."""

import math
import statistics

from tools.experiment.arm import Arm, ArmFailed
from tools.experiment.sequential_test import MAX_DEVIATIONS


class Identical(Exception):
    """Both arms train the same weights; the message says after how many steps."""


class Futile(Exception):
    """The candidate is unlikely to be better; the message says why."""


def is_identical(baseline: Arm, candidate: Arm) -> bool:
    """Return whether the first runs of two arms, of the same seed, ended with the same digest."""
    ours, theirs = (arm.job(0).run.newest_metrics().get("state/digest") for arm in (baseline, candidate))
    return baseline.first_seed == candidate.first_seed and ours is not None and ours == theirs


def check_first_loss(baseline: list[float], candidate: float, metric: str) -> None:
    """Raise Futile if a first run is worse than the baseline by more than MAX_DEVIATIONS standard deviations."""
    mean, deviation = statistics.fmean(baseline), statistics.stdev(baseline)
    if candidate > mean + MAX_DEVIATIONS * deviation > mean:
        raise Futile(
            f"its {metric} is {candidate:.4f} after one run, {(candidate - mean) / deviation:.0f} standard deviations "
            f"over seeds above the mean of the baseline, {mean:.4f}"
        )


def check_losses(baseline: list[float], candidate: list[float], excess: list[float] | None) -> None:
    """Raise ArmFailed if seeds of the candidate have equal losses, or its mean is below the entropy beyond the noise.

    The candidate then ignores its seed, or was trained on the validation set. `excess` has its excess losses, of at
    least two seeds, if the entropy of the data is known.
    """
    if len(set(candidate)) < len(candidate) and len(set(baseline)) == len(baseline):
        raise ArmFailed("the losses of different seeds are equal: the candidate does not use its seed")
    if excess and statistics.fmean(excess) + 3 * statistics.stdev(excess) / math.sqrt(len(excess)) < 0:
        raise ArmFailed(
            f"its mean loss is {-statistics.fmean(excess):.4f} nats/token below the entropy of the data: it was "
            "trained on the validation set"
        )
