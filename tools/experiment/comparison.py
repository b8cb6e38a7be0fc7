"""One idea against the baseline: seeds of both arms are trained until a sequential test decides.

The estimand is the mean over seeds of the log of the excess loss (of the loss, where the entropy of the data is
unknown). Differences of it are reported as changes of the geometric mean.
"""

import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from config.errors import ConfigError, RunError
from run.directory import Run
from tools.experiment import judge
from tools.experiment.arm import Arm, Recipe, scale_parameters, scale_steps
from tools.experiment.change import Idea
from tools.experiment.compute_multiplier import BUDGETS, Estimate, estimate_compute_multiplier
from tools.experiment.sequential_test import MIN_SEEDS, additional_seeds, decide, estimate_difference
from tools.experiment.settings import ExperimentConfig
from tools.jobs.runner import Job, JobRunner

BUDGET_SEEDS = 2  # runs of the baseline on each of BUDGETS
# First seeds of an arm that equals the baseline, where equal seeds would give equal runs, and of the runs that tune.
EQUAL_SEEDS, TUNING_SEEDS = 1000, 2000
NUM_TUNING_SEEDS, TUNING_FACTORS = 2, (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass
class Result:
    """A comparison at one model size. Changes are those of the geometric mean over seeds, as fractions."""

    size: float = 1.0
    """Factor on the parameters."""
    verdict: str = "unknown"
    """better, worse, no difference, unknown, failed or identical."""
    message: str = ""
    """Why the verdict is failed or identical."""
    seeds: int = 0
    effect: float | None = None
    low: float | None = None
    """Lower end of the 95% interval, which holds whenever the test stops."""
    high: float | None = None
    more_seeds: int | None = None
    """Estimated number of further seeds of each arm until there is a verdict."""
    losses: list[list[float]] = field(default_factory=list)
    """Losses, or values of the metric, of the baseline and the candidate by seed."""
    is_ratio: bool = True
    """False where a loss is not positive: changes are then differences of means."""
    compute_multiplier: Estimate | None = None
    cost: dict[str, list[Any]] = field(default_factory=dict)
    """Size, speed and memory of the first run of each arm."""


class Comparison:
    """A candidate arm and a baseline arm.

    Raises ConfigError if the idea is refused, changes nothing, or changes what the loss means.
    """

    def __init__(self, config: ExperimentConfig, idea: Idea, recipe: Recipe, jobs: JobRunner):
        self.config, self.idea, self.jobs = config, idea, jobs
        recipe = replace(recipe, commit=idea.base or recipe.commit)
        self.baseline, self.candidate = recipe.arm(), recipe.arm([idea])
        try:
            judge.check_settings(self.baseline, self.candidate)
        except ConfigError as error:
            raise ConfigError(f"idea: {idea.text!r}: {error}") from None

    def run(self) -> dict[str, Any]:
        """Return the result of the comparison as JSON, with that of the first size at its top."""
        names = {"idea": self.idea.text, "baseline": self.baseline.name, "candidate": self.candidate.name}
        first, *others = map(asdict, self.compare_sizes())
        return names | first | {"sizes": others}

    def compare_sizes(self) -> list[Result]:
        """Compare both arms at each size, until the candidate fails or trains the weights of the baseline."""
        if failed := judge.failed_checks(self.candidate):
            return [Result(verdict="failed", message=f"it breaks checks of verify.py: {failed}")]
        if self.config.minutes:
            self.jobs.deadline = time.monotonic() + 60 * self.config.minutes
        arms, results = [self.baseline, self.candidate], []
        if self.config.tune:
            arms = [tuned for arm in arms if (tuned := self.tune(arm))]
        for size in self.config.factors if len(arms) == 2 else []:
            baseline, candidate = (scale_parameters(arm, size) for arm in arms)
            results.append(result := self.compare(baseline, candidate))
            result.size = size
            if result.verdict in ("better", "worse") and self.config.speedup:
                result.compute_multiplier = self.compute_multiplier(baseline, result)
            if result.verdict in ("failed", "identical") or time.monotonic() >= self.jobs.deadline:
                break
        return results or [Result()]

    def compare(self, baseline: Arm, candidate: Arm) -> Result:
        """Train seeds of both arms until there is a verdict, or the seeds or the time are used up."""
        is_equal, result = baseline.digest == candidate.digest, Result()
        pairs = [
            (baseline.job(seed), candidate.job(seed + EQUAL_SEEDS * is_equal)) for seed in range(self.config.max_seeds)
        ]
        for n in range(1, len(pairs) + 1):
            failure = self.train(pairs, n)
            if failure is None:
                break
            if failure:
                return Result(verdict="failed", message=failure)
            first = [job.run.newest_metrics().get("state/digest") for job in pairs[0]]
            if first[0] == first[1] is not None:
                return Result(verdict="identical", message="both arms train the same weights, bit for bit")
            runs = [[pair[index].run for pair in pairs[:n]] for index in (0, 1)]
            ours, problem = judge.arm_losses(self.baseline, baseline, runs[0], self.config.metric)
            if problem:
                raise ConfigError(f"metric: the baseline cannot be compared: {problem}")
            theirs, problem = judge.arm_losses(self.baseline, candidate, runs[1], self.config.metric)
            if problem:
                return Result(verdict="failed", message=problem)
            result = self.analyse([ours, theirs])
            costs = [cost(own[0]) for own in runs]
            result.cost = {name: [one[name] for one in costs] for name in costs[0]}
            if result.verdict != "unknown":
                break
        return result

    def train(self, pairs: list[tuple[Job, Job]], n: int) -> str | None:
        """Train the first n pairs of runs, and later ones on cores that would be idle.

        Returns:
            Why the candidate does not train; "" if it does; None if the time was spent before n pairs were finished.

        Raises:
            RunError: the baseline does not train, or a run was killed.
        """
        needed = [job for pair in pairs[:n] for job in pair]
        unfinished = sum(not job.is_finished() for job in needed)
        if not unfinished:
            return ""
        ahead = [job for pair in pairs[n:] for job in pair if not job.is_finished()]
        ahead = ahead[: -unfinished % self.jobs.max_running]
        is_in_time = self.jobs.train([*needed, *ahead], until_failure=False)
        for job in needed:
            if failure := self.jobs.failures.get(job):
                if failure.killed or job in (pair[0] for pair in pairs):
                    raise RunError(f"{job.run.path}: {failure.message}; run the same command again to resume")
                return f"does not train: {failure.message}; log: {job.output}"
            if not job.is_finished() and not is_in_time:
                return None
            if not job.is_finished():
                raise RunError(f"{job.run.path}: stopped from elsewhere; run the same command again to resume")
        return ""

    def analyse(self, losses: list[list[float]]) -> Result:
        """Return the result after some seeds of the baseline and the candidate."""
        is_ratio = min(map(min, losses)) > 0  # a metric may be zero or negative, and has no logarithm then
        difference = estimate_difference(*([math.log(x) for x in own] if is_ratio else own for own in losses))
        margin = self.config.margin * (1 if is_ratio else abs(statistics.fmean(losses[0])))
        result = Result(seeds=difference.seeds, losses=losses, is_ratio=is_ratio)
        if difference.seeds < MIN_SEEDS:
            return result
        changes = difference.mean, difference.low, difference.high
        result.effect, result.low, result.high = [math.expm1(x) for x in changes] if is_ratio else changes
        result.verdict, result.more_seeds = decide(difference, margin), additional_seeds(difference, margin)
        return result

    def compute_multiplier(self, baseline: Arm, result: Result) -> Estimate | None:
        """Train the baseline on other budgets, and convert the difference into steps; None if there is no time."""
        points = [(1.0, loss) for loss in result.losses[0]]
        for factor in BUDGETS:
            arm = scale_steps(baseline, factor)
            jobs = [arm.job(seed) for seed in range(BUDGET_SEEDS)]
            if not self.jobs.train(jobs, until_failure=False):
                return None
            runs = [job.run for job in jobs if job.is_finished()]
            losses, _ = judge.arm_losses(self.baseline, arm, runs, self.config.metric)
            points += [(factor, loss) for loss in losses]
        return estimate_compute_multiplier(points, *result.losses)

    def tune(self, arm: Arm) -> Arm | None:
        """Return the arm with the best of several values of a setting, by the mean over separate seeds.

        Return None if the time was spent before.

        Raises:
            ConfigError: the setting is not a number, or 0, or training fails with all values.
        """
        setting = self.config.tune or ""
        value = arm.settings.get(setting)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value:
            raise ConfigError(f"tune: {setting!r} is {value!r}; name a setting with a number other than 0")
        values: list[float] = [value * factor for factor in TUNING_FACTORS]
        if isinstance(value, int):
            values = sorted({max(1, round(one)) for one in values})
        arms = [arm.changed({setting: one}) for one in values]
        jobs = {one.digest: [one.job(TUNING_SEEDS + seed) for seed in range(NUM_TUNING_SEEDS)] for one in arms}
        if not self.jobs.train([job for several in jobs.values() for job in several], until_failure=False):
            return None
        # A value with which a run fails, such as a learning rate at which it diverges, cannot be the best.
        losses = []
        for one, own in zip(arms, jobs.values(), strict=True):
            runs = [job.run for job in own if job.is_finished()]
            found, problem = judge.arm_losses(self.baseline, one, runs, self.config.metric)
            losses.append(math.inf if problem or len(runs) < len(own) else statistics.fmean(found))
        if min(losses) == math.inf:
            raise ConfigError(f"tune: training fails with all of {len(values)} values of {setting} around {value:g}")
        best = arms[losses.index(min(losses))]
        at_end = ", at an end of the range" * (best in (arms[0], arms[-1]))
        print(f"tune: {setting} {best.settings[setting]:g}{at_end}", file=sys.stderr)
        return best


def cost(run: Run) -> dict[str, Any]:
    """Return what a run took."""
    session, newest, speed = run.sessions()[-1], run.newest_metrics(), run.tokens_per_second()
    return {
        "parameters": session.parameters,
        "flops_per_token": session.flops_per_token,
        "tokens": newest.get("train/tokens"),
        "tokens_per_second": None if math.isnan(speed) else speed,
        "peak_memory_bytes": newest.get("perf/peak_memory_bytes"),
    }
