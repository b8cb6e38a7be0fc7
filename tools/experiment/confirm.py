"""Confirm accepted ideas: together, alone, and all but one, against the baseline, on seeds that no screen has used."""

import json
import math
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from scipy import stats

from config.errors import ConfigError, RunError
from tools.experiment import judge
from tools.experiment.arm import Arm, Recipe, scale_parameters
from tools.experiment.change import Idea, idea_texts, parse_idea
from tools.experiment.experiment import run_with_json
from tools.experiment.ideas import CONTROL
from tools.experiment.record import Record
from tools.experiment.report import analyze, confirmation_lines, save_result
from tools.experiment.settings import ConfirmConfig
from tools.jobs.runner import JobRunner

FIRST_SEED = 5000  # screens and comparisons count from 0
LEVEL = 0.05


@dataclass
class ArmDifference:
    """A difference between two arms; changes are those of the geometric mean over seeds, as fractions."""

    size: float
    arm: str
    against: str
    predicted: float | None
    """By the screen, as the product of its effects."""
    effect: float
    low: float
    """Lower end of the 95% interval (Welch)."""
    high: float
    p: float
    """Corrected for the number of differences (Holm 1979)."""
    verdict: str = "unknown"


def main(config: ConfirmConfig) -> None:
    """Train the arms, save the table and print it.

    Raises:
        ConfigError: no idea is accepted or given, or the ideas are refused or cannot be on together.
        RunError: a run failed.
        SystemExit: with code 75 after a signal; run the same command again to resume.
    """
    run_with_json(config, confirm)


def confirm(config: ConfirmConfig, recipe: Recipe, jobs: JobRunner) -> list[str]:
    """Train the arms, save the table and return it as lines."""
    screen = recipe.arm().name
    file = recipe.lab / "screens" / screen / "screen.json"
    if not (file.exists() or config.ideas):
        raise ConfigError(f"lab: {recipe.lab} has no screen of these settings; give those of the screen, or name ideas")
    effects, ideas = read_effects(file, recipe.lab) if file.exists() else ({}, [])
    if config.ideas:
        ideas = [*{idea.key: idea for idea in map(parse_idea, idea_texts(config.ideas))}.values()]
    if not ideas:
        raise ConfigError("ideas: the screen accepted none; name those to confirm")
    for one, other in combinations(ideas, 2):
        if both := one.setting_names & other.setting_names:
            raise ConfigError(f"idea: {other.text!r} and {one.text!r} set {min(both)}; confirm them one by one")
    if config.data_seed is not None:
        recipe = replace(recipe, words=[*recipe.words, f"--data.seed={config.data_seed}"])

    on, pairs = plan_arms(ideas)
    arms = {name: recipe.arm(own) for name, own in on.items()}
    judge.check_settings(arms["baseline"], arms["all"])
    if failed := judge.failed_checks(arms["all"]):
        raise ConfigError(f"ideas: together they break checks of verify.py: {failed}")
    differences = []
    for size in config.factors:
        losses = train(jobs, {name: scale_parameters(arm, size) for name, arm in arms.items()}, config.seeds)
        for arm, against, changed in pairs:
            known = [1 + effects[idea.key] for idea in changed if idea.key in effects]
            predicted = math.prod(known) - 1 if len(known) == len(changed) else None
            differences.append(compare(size, arm, against, predicted, losses[arm], losses[against]))
    correct(differences)
    names = [idea.text for idea in ideas]
    result = {"ideas": names, "seeds": config.seeds, "data_seed": config.data_seed}
    result["differences"] = [asdict(one) for one in differences]
    save_result(recipe.lab, result, screen, config.data_seed, [idea.key for idea in ideas])
    return [json.dumps(result)] if config.print_json else confirmation_lines(result)


def plan_arms(ideas: list[Idea]) -> tuple[dict[str, list[Idea]], list[tuple[str, str, list[Idea]]]]:
    """Return the ideas of each arm, and the pairs of arms that are compared, with the ideas in which they differ."""
    arms, pairs = {"baseline": [], "all": ideas}, [("all", "baseline", ideas)]
    if len(ideas) > 1:
        arms |= {idea.text: [idea] for idea in ideas}
        pairs += [(idea.text, "baseline", [idea]) for idea in ideas]
        for idea in ideas:
            others = [one for one in ideas if one != idea]
            name = f"all without {idea.text}" if len(others) > 1 else others[0].text
            arms[name] = others
            pairs.append(("all", name, [idea]))
    return arms, pairs


def read_effects(file: Path, lab: Path) -> tuple[dict[str, float], list[Idea]]:
    """Return the effects of a screen by the key of the idea, and the ideas that are better, the best first.

    An idea is left out if it cannot be on together with a better one.
    """
    record = Record.read(file)
    found = dict(zip(record.ideas, analyze(record, lab).ideas, strict=True))
    effects = {key: one.effect for key, one in found.items() if not math.isnan(one.effect)}
    better = [key for key, one in found.items() if one.verdict == "better" and one.idea != CONTROL]
    apart = [{*pair} for pair in record.pairs_apart()]
    accepted: list[str] = []
    for key in sorted(better, key=lambda key: effects[key]):
        if better_one := next((one for one in accepted if {key, one} in apart), None):
            texts = record.ideas[key].text, record.ideas[better_one].text
            print(f"left out: {texts[0]} cannot be on together with {texts[1]}, which is better", file=sys.stderr)
        else:
            accepted.append(key)
    return effects, [record.ideas[key] for key in accepted]


def train(jobs: JobRunner, arms: dict[str, Arm], num_seeds: int) -> dict[str, list[float]]:
    """Train all seeds of all arms, interleaved, and return the logs of their losses; the baseline judges the others."""
    seeds = range(FIRST_SEED, FIRST_SEED + num_seeds)
    jobs.train([arm.job(seed) for seed in seeds for arm in arms.values()])
    losses = {}
    for name, arm in arms.items():
        found, problem = judge.arm_losses(arms["baseline"], arm, [arm.job(seed).run for seed in seeds])
        if problem:
            raise RunError(f"{name}: {problem}")
        losses[name] = [*map(math.log, found)]
    return losses


def compare(
    size: float, arm: str, against: str, predicted: float | None, ours: list[float], theirs: list[float]
) -> ArmDifference:
    """Compare the logs of the losses of two arms by Welch's t-test."""
    test: Any = stats.ttest_ind(ours, theirs, equal_var=False)
    interval = test.confidence_interval(1 - LEVEL)
    changes = statistics.fmean(ours) - statistics.fmean(theirs), interval.low, interval.high
    return ArmDifference(size, arm, against, predicted, *map(math.expm1, changes), p=float(test.pvalue))


def correct(differences: list[ArmDifference]) -> None:
    """Correct the p-values of all differences by Holm's method, and set the verdicts."""
    largest = 0.0
    for rank, one in enumerate(sorted(differences, key=lambda one: one.p)):
        largest = one.p = min(1.0, max(largest, (len(differences) - rank) * one.p))
        if one.p <= LEVEL:
            one.verdict = "better" if one.effect < 0 else "worse"
