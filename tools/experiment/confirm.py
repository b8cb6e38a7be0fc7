"""Confirm accepted ideas: together, alone, and all but one, against the baseline, on seeds that no screen has used."""

import json
import math
import statistics
import sys
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from scipy import stats

from config.errors import ConfigError, RunError
from tools.experiment import judge, log
from tools.experiment.arm import Arm, scale_parameters
from tools.experiment.change import Idea, Worktrees, head_commit, merge, parse_ideas
from tools.experiment.experiment import run_with_json
from tools.experiment.ideas import is_control
from tools.experiment.record import Record
from tools.experiment.report import analyze, confirmation_lines
from tools.experiment.settings import ConfirmConfig, parse_sizes
from tools.jobs.launch import Launch
from tools.jobs.runner import JobRunner

FIRST_SEED = 5000  # screens and comparisons count from 0
LEVEL = 0.05


@dataclass
class Row:
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
    """Corrected for the number of rows (Holm 1979)."""
    verdict: str = "unknown"


def main(config: ConfirmConfig) -> None:
    """Train the arms, append the table to the log and print it.

    Raises:
        ConfigError: no idea is accepted or given, or the ideas are refused or cannot be on together.
        RunError: a run failed.
        SystemExit: with code 75 after a signal; run the same command again to resume.
    """
    run_with_json(config, run_confirmation)


def run_confirmation(config: ConfirmConfig, lab: Path, jobs: JobRunner) -> None:
    """Train the arms, append the table to the log and print it."""
    with Worktrees() as trees:
        words = config.common + ([f"--data.seed={config.data_seed}"] if config.data_seed is not None else [])
        launch, head = Launch.parse(config.launch), head_commit()
        screened = Arm.resolve(trees.folder(head), launch, config.common, lab)
        file = lab / "screens" / screened.name / "screen.json"
        effects, accepted = read_effects(file, lab) if file.exists() else ({}, [])
        ideas = parse_ideas(config.ideas) or accepted
        if not ideas:
            raise ConfigError("ideas: the screen accepted none; name those to confirm")
        for one, other in combinations(ideas, 2):
            if both := one.setting_names & other.setting_names:
                raise ConfigError(f"idea: {other.text!r} and {one.text!r} set {min(both)}; confirm them one by one")

        def resolve(on: list[Idea]) -> Arm:
            code = trees.folder(merge(head, on))
            own = [*words, *(word for idea in on for word in idea.settings)]
            return Arm.resolve(code, launch, own, lab, is_judged=code != screened.code)

        arms = {"baseline": resolve([]), "all": resolve(ideas)}
        judge.check_targets(arms["baseline"], arms["all"].settings)
        if len(ideas) > 1:
            arms |= {idea.text: resolve([idea]) for idea in ideas}
        if len(ideas) > 2:
            arms |= {f"all without {idea.text}": resolve([one for one in ideas if one != idea]) for idea in ideas}
        pairs = [("all", "baseline", ideas)]
        pairs += [(idea.text, "baseline", [idea]) for idea in ideas if len(ideas) > 1]
        pairs += [("all", f"all without {idea.text}", [idea]) for idea in ideas if len(ideas) > 2]
        rows = []
        for size in parse_sizes(config.sizes):
            losses = train(
                jobs, arms["baseline"], {name: scale_parameters(arm, size) for name, arm in arms.items()}, config.seeds
            )
            for arm, against, changed in pairs:
                known = [effects.get(idea.key) for idea in changed]
                predicted = (
                    None if None in known else math.prod(1 + effect for effect in known if effect is not None) - 1
                )
                rows.append(compare(size, arm, against, predicted, losses[arm], losses[against]))
    correct(rows)
    result = {
        "key": f"confirm {screened.name} {config.data_seed} {[idea.key for idea in ideas]}",
        "seeds": config.seeds,
    }
    result |= {"ideas": [idea.text for idea in ideas], "data_seed": config.data_seed, "rows": [asdict(r) for r in rows]}
    log.append(lab, result)
    print(json.dumps(result) if config.print_json else "\n".join(confirmation_lines(result)))


def read_effects(file: Path, lab: Path) -> tuple[dict[str, float], list[Idea]]:
    """Return the effects of a screen by the key of the idea, and the ideas that are better, the best first.

    Of ideas that cannot be on together, the best is accepted.
    """
    record = Record.read(file)
    found = dict(zip(record.ideas, analyze(record, lab).ideas, strict=True))
    effects = {key: one.effect for key, one in found.items() if not math.isnan(one.effect)}
    better = [key for key, one in found.items() if one.verdict == "better" and not is_control(record.idea(key))]
    apart = [{*pair} for pair in record.pairs_apart()]
    accepted: list[str] = []
    for key in sorted(better, key=lambda key: effects[key]):
        if better_one := next((one for one in accepted if {key, one} in apart), None):
            texts = record.idea(key).text, record.idea(better_one).text
            print(f"left out: {texts[0]} cannot be on together with {texts[1]}, which is better", file=sys.stderr)
        else:
            accepted.append(key)
    return effects, [*map(record.idea, accepted)]


def train(jobs: JobRunner, baseline: Arm, arms: dict[str, Arm], seeds: int) -> dict[str, list[float]]:
    """Train all seeds of all arms, interleaved, and return the logs of their losses."""
    every = range(FIRST_SEED, FIRST_SEED + seeds)
    jobs.train([arm.job(seed) for seed in every for arm in arms.values()])
    losses = {}
    for name, arm in arms.items():
        scores = judge.score(baseline, [(arm, arm.job(seed).run) for seed in every])
        if problem := next((score.problem for score in scores if score.problem), ""):
            raise RunError(f"{name}: {problem}")
        losses[name] = [math.log(score.loss) for score in scores]
    return losses


def compare(
    size: float, arm: str, against: str, predicted: float | None, ours: list[float], theirs: list[float]
) -> Row:
    """Compare the logs of the losses of two arms by Welch's t-test."""
    test: Any = stats.ttest_ind(ours, theirs, equal_var=False)
    interval = test.confidence_interval(1 - LEVEL)
    changes = statistics.fmean(ours) - statistics.fmean(theirs), interval.low, interval.high
    return Row(size, arm, against, predicted, *(math.expm1(change) for change in changes), p=float(test.pvalue))


def correct(rows: list[Row]) -> None:
    """Correct the p-values of all rows by Holm's method, and set the verdicts."""
    largest = 0.0
    for rank, row in enumerate(sorted(rows, key=lambda row: row.p)):
        largest = row.p = min(1.0, max(largest, (len(rows) - rank) * row.p))
        if row.p <= LEVEL:
            row.verdict = "better" if row.effect < 0 else "worse"
