"""The baseline of a chain: runs of its head on seeds that no selection has seen."""

import math
import statistics
from collections.abc import Iterator

from scipy import stats

from chain.ledger import Row
from chain.settings import ChainConfig
from chain.state import Chain, locked_chain
from experiments import change
from experiments.change import Change, checked_out
from experiments.experiment import Experiment
from experiments.score import choose_metric
from experiments.sequential_test import nominal_alphas
from experiments.settings import ExperimentConfig
from jobs.runner import JobRunner

POWER, POWER_SEEDS = 0.8, 12


def measure_baseline(config: ChainConfig, chain: Chain) -> Row:
    """Return the row of the head's runs, which are trained if they are not there.

    Raises:
        ConfigError: the recipe is refused.
        RunError: it does not train.
    """
    if chain.baseline:
        return chain.baseline
    num_seeds = int(chain.start["seeds_baseline"])
    arguments = ["baseline", "--config", str(change.ROOT / chain.recipe)]
    experiment = Experiment(ExperimentConfig(arguments, first_seed=chain.first_seed), chain.lab, JobRunner(config.jobs))
    with checked_out(Change((), chain.head, chain.head)) as (code, _):
        arm = experiment.resolve_baseline(code)
        experiment.train([arm.run(seed) for seed in range(num_seeds)])
        losses = arm.losses(num_seeds, choose_metric(arm, arm))
    mean, deviation = statistics.fmean(losses), statistics.stdev(losses)
    before = [float(row["loss"]) for row in chain.rows if row["kind"] == "baseline"]
    with locked_chain(config.lab) as (ledger, now):
        return now.baseline or ledger.append(
            kind="baseline",
            commit=chain.head,
            candidate=arm.digest,
            status=f"standard deviation {100 * deviation / mean:.3g}%",
            loss=mean,
            difference=100 * (mean / before[-1] - 1) if before else None,
            seeds_baseline=num_seeds,
            message=f"detects {100 * detectable_effect(deviation / mean, chain.next_level):.3g}%",
            **experiment.spent(),
        )


def detectable_effect(deviation: float, level: float) -> float:
    """Return the effect that a test detects with a power of at least POWER by POWER_SEEDS runs of each arm.

    The last analysis alone has this power; those before add to it.

    Args:
        deviation: standard deviation over seeds.
        level: one-sided level of the test.
    """
    quantile = stats.t.isf(nominal_alphas(POWER_SEEDS, 2 * level)[-1] / 2, 2 * POWER_SEEDS - 2)
    return float(deviation * math.sqrt(2 / POWER_SEEDS) * (quantile + stats.norm.ppf(POWER)))


def describe_baseline(row: Row) -> Iterator[str]:
    """Yield the measurement of a baseline in words."""
    effect = f", {float(row['difference']):+.1f}% against the baseline before" if row["difference"] else ""
    yield f"baseline: loss {row['loss']} on {row['seeds_baseline']} fresh seeds{effect}"
    yield f"{row['status']} over seeds; an idea {row['message']} with 80% power by {POWER_SEEDS} seeds"
