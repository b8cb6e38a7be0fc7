"""The reach of a gain: what a race found, on other data, for twice the steps and with four times the parameters.

Each winner is compared with the baseline that it joined, on reserved seeds and by the same intervals as everything
else. So runs of `confirm --sizes 1,4` count here, too. The record of a race has what is compared, and report.py says
whether the gain holds.
"""

import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from runtime.config.errors import ConfigError, RunError
from tools.experiment import report, verdicts
from tools.experiment.baseline import baseline_margin, experiment_folder, open_experiment, resolve_baseline
from tools.experiment.change import Idea
from tools.experiment.corpus import LIBRARY
from tools.experiment.record import Record
from tools.experiment.runs import SEEDS_OF_CONFIRMATIONS, Planned, Runs
from tools.experiment.settings import ExperimentConfig
from tools.experiment.variant import Recipe, Variant, given_settings, scale_parameters, scale_steps

MIN_SEEDS, MAX_SEEDS = verdicts.MIN_BASELINE_RUNS, 8  # of each variant
STEPS, PARAMETERS = 2.0, 4.0  # factors
TWICE, LARGER = "at twice the steps", "at four times the size"
TEXT = {"data.source": "text", "data.path": str(LIBRARY)}  # for a race on stories, prepared at the first use
# The data of configs/lab.yaml, for a race on text.
STORIES = {"data.source": "stories", "data.facts": 1024, "data.zipf": 1.0}
NUM_STORIES = 500  # that are evaluated


@dataclass(frozen=True)
class Change:
    """Other conditions under which winners are compared."""

    name: str
    runs: Runs
    variants: list[Variant]
    """The baseline, then on top of it one winner after another."""
    margin: float

    @property
    def pairs(self) -> list[tuple[Variant, Variant]]:
        """The baseline that each winner joined, and the winner on top of it."""
        return list(zip(self.variants, self.variants[1:], strict=False))

    @property
    def findings(self) -> list[verdicts.Finding]:
        """What is known of each winner."""
        digests = [(one.digest, other.digest) for one, other in self.pairs]
        return report.compare_runs(report.Groups(self.runs.results), digests, self.margin)

    @property
    def missing(self) -> list[Planned]:
        """The runs that are next: the first seeds of all variants, then one more where nothing is settled yet."""
        pairs = zip(self.pairs, self.findings, strict=True)
        variants = [variant for pair, finding in pairs for variant in pair if finding.verdict == "unknown"]
        for num_seeds in range(MIN_SEEDS, MAX_SEEDS + 1):
            seeds = SEEDS_OF_CONFIRMATIONS[:num_seeds]
            if missing := self.runs.missing((variant, seed) for seed in seeds for variant in variants):
                return missing
        return []

    @property
    def width(self) -> float:
        """The widest interval of a winner that is not settled, relative to the margin; infinite without any run."""
        widths = [finding.half_width for finding in self.findings if finding.verdict == "unknown"]
        return max(widths, default=0.0) / self.margin


def plan(
    config: ExperimentConfig, recipe: Recipe, runs: Runs, ideas: list[Idea], earlier: Iterable[Change] = ()
) -> list[Change]:
    """Return the changes under which winners can be measured, the cheapest first; problems of others are printed.

    Args:
        config: of the race.
        recipe: its baseline.
        runs: its runs.
        ideas: the winners, in their order.
        earlier: changes for fewer winners, whose experiments are open.
    """
    margin = baseline_margin(config, runs.baseline)
    changes = []
    try:
        variants = resolve(config, recipe, runs, ideas)
        changes.append(Change(TWICE, runs, [scale_steps(one, STEPS) for one in variants], margin))
        larger = [scale_parameters(one, PARAMETERS, variants[0]) for one in variants]
        changes.append(Change(LARGER, runs, larger, margin))
    except (ConfigError, RunError) as error:
        print(f"reach: {error}", file=sys.stderr)
    try:
        name, recipe = other_data(config, recipe, runs.baseline)
        baseline, recipe = resolve_baseline(recipe)
        folder = experiment_folder(config, recipe, baseline)
        opened = [change.runs for change in earlier if change.runs.folder == folder]
        if not opened:
            seed = open_experiment(folder, recipe, baseline, "reach")
            opened.append(Runs(folder, baseline, runs.jobs, seed, config.metric))
        [runs] = opened
        variants = resolve(config, recipe, runs, ideas)
        changes.insert(0, Change(name, runs, variants, baseline_margin(config, baseline)))
    except (ConfigError, RunError) as error:
        print(f"reach: {error}", file=sys.stderr)
    return changes


def resolve(config: ExperimentConfig, recipe: Recipe, runs: Runs, ideas: list[Idea]) -> list[Variant]:
    """Return the baseline and, on top of it, one winner after another; raise ConfigError if one cannot be trained."""
    variants = []
    for number, variant in enumerate(recipe.variants([ideas[:end] for end in range(len(ideas) + 1)])):
        if isinstance(variant, Exception):
            raise ConfigError(f"{ideas[number - 1].name if number else 'the baseline'}: {variant}")
        variants.append(runs.equalize(variant, config.equal))
    return variants


def other_data(config: ExperimentConfig, recipe: Recipe, baseline: Variant) -> tuple[str, Recipe]:
    """Return the name of the change to other data, and the recipe with these."""
    if config.other_data is not None:
        data = given_settings(shlex.split(config.other_data), recipe.checkouts.folder(recipe.commit), {})
        name = "on stories" if data.get("data.source") == "stories" else "on text"
    elif baseline.settings["data.source"] == "text":
        # As many as a run reads, so that none is seen twice.
        name, data = "on stories", STORIES | {"data.num_samples": baseline.steps * baseline.global_batch_size}
    else:
        name, data = "on text", TEXT
    settings: dict[str, Any] = dict(recipe.settings)
    if data.get("data.source") == "stories":
        settings["evaluation.num_samples"] = NUM_STORIES
    if wrong := [option for option in data if not option.startswith("data.")]:
        raise ConfigError(f"other_data: {wrong[0]} is no setting of the data; give it to all runs")
    return name, replace(recipe, data=data, settings=tuple(settings.items()))


def note(record: Record, changes: list[Change]) -> None:
    """Write into a record what is compared under each change."""
    winners = [entry for entry in record.rounds if entry.winner]
    for change in changes:
        for entry, (baseline, variant) in zip(winners, change.pairs, strict=True):
            digests = {"baseline": baseline.digest, "variant": variant.digest}
            entry.reach[change.name] = {"folder": change.runs.folder.name, **digests, "margin": change.margin}


def train(changes: list[Change], may_start: Callable[[Variant], bool]) -> None:
    """Train each variant with a few seeds under each change, then more where the widest interval is."""

    def widest() -> tuple[Change, list[Planned]] | None:
        """Return the change that needs runs most, and these, if they may start."""
        for change in sorted(changes, key=lambda change: change.width, reverse=True):
            if (missing := change.missing) and may_start(max((one for one, _ in missing), key=lambda one: one.flops)):
                return change, missing
        return None

    while found := widest():
        change, todo = found
        print(f"reach: {len(todo)} runs {change.name}", file=sys.stderr)
        change.runs.train_in_order(todo, may_start)
