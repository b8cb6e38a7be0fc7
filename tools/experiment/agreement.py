"""Compare a testbed with effects that the field knows: python -m tools.experiment agreement [options] [settings].

A testbed is what all runs have in common: data, steps, model, learning rates. benchmarks/known_effects.yaml has ideas
with the sign of their effect in larger runs; a testbed is good if its estimates have these signs. Testbeds are chosen
by one half of the list and reported on the other.

With --tune, the baseline and each idea are trained once with each factor. The best arm of each is then trained with
other seeds, which alone are compared, so that the choice of an arm by its loss makes no effect look better.
"""

import json
import math
import sys
from typing import Any

from runtime.cli.output import aligned
from runtime.config.errors import ConfigError, RunError
from runtime.config.yaml_files import read_yaml
from runtime.files import write_atomically
from tools.experiment import change, report
from tools.experiment.baseline import baseline_margin, experiment_folder, open_experiment, resolve_baseline
from tools.experiment.change import ROOT, Idea, parse_idea
from tools.experiment.race import run_with_json
from tools.experiment.runs import EVERY_SEED, SEEDS_OF_CONFIRMATIONS, Runs, runs_of
from tools.experiment.settings import AgreementConfig
from tools.experiment.variant import Recipe, Variant, corpus_hashes
from tools.jobs.runner import JobRunner

EFFECTS = ROOT / "benchmarks" / "known_effects.yaml"
BASELINE = "baseline"
TUNING_SEED = 0
BASELINE_SEEDS = 2  # times those of an idea, because all ideas are compared with it


def main(config: AgreementConfig) -> None:
    """Train the ideas of a half of the list, and print their effects beside the known ones.

    Raises:
        ConfigError: a setting is refused.
        RunError: the environment failed, for example by a full disk.
        SystemExit: with code 75 after a signal; run the same command again to resume.
    """
    run_with_json(config, agreement)


def agreement(config: AgreementConfig, recipe: Recipe, jobs: JobRunner) -> list[str]:
    """Train the ideas, save the table and return it as lines."""
    effects = {entry["name"]: entry for entry in read_yaml(EFFECTS.read_text()) if entry.get("half") == config.half}
    ideas = {BASELINE: Idea("")} | {name: parse_idea(entry["change"]) for name, entry in effects.items()}
    baseline, recipe = resolve_baseline(recipe)
    folder = experiment_folder(config, recipe, baseline)
    grid = [(name, arm) for name, idea in ideas.items() for arm in change.arms(idea, config.grid)]
    resolved = recipe.variants([[arm] for _, arm in grid])
    for (name, _), variant in zip(grid, resolved, strict=True):
        if name == BASELINE and isinstance(variant, Exception):
            raise variant
    test_seed = open_experiment(folder, recipe, baseline, "agreement")
    runs = Runs(folder, baseline, jobs, test_seed, config.metric)
    arms: dict[str, list[Variant]] = {name: [] for name in ideas}
    factors: dict[str, dict[str, float]] = {}
    for (name, arm), variant in zip(grid, resolved, strict=True):
        try:
            if isinstance(variant, Exception):
                raise variant
            arms[name].append(runs.equalize(variant, config.equal))
            factors[arms[name][-1].digest] = arm.factors
        except (ConfigError, RunError) as error:
            if name == BASELINE:
                raise
            print(f"{name}: {error}", file=sys.stderr)

    # The best arm of each, by one run of each arm; then its runs with other seeds, one seed of all after another.
    jobs.limit_minutes(config.minutes)

    def may_start(variant: Variant) -> bool:
        for one in arms[BASELINE]:
            runs.check_baseline(one, SEEDS_OF_CONFIRMATIONS)
        return not runs.is_time_spent(variant)

    if config.grid:
        runs.train_in_order(((variant, TUNING_SEED) for some in arms.values() for variant in some), may_start)
    best = {name: min(some, key=lambda variant: tuning_loss(runs, variant)) for name, some in arms.items() if some}
    seeds = {name: config.seeds * (BASELINE_SEEDS if name == BASELINE else 1) for name in best}
    planned = [(number, best[name], seed) for name in best for number, seed in spread(seeds[name], config.seeds)]
    planned.sort(key=lambda one: one[0])
    runs.train_in_order(((variant, seed) for _, variant, seed in planned), may_start)
    runs.check_baseline(best[BASELINE], SEEDS_OF_CONFIRMATIONS)

    names = [name for name in best if name != BASELINE]
    pairs = [(best[BASELINE].digest, best[name].digest) for name in names]
    found = report.describe_comparisons(runs.results, pairs, baseline_margin(config, baseline))
    rows = [
        {"name": name, "known": effects[name]["effect"], **row, "factors": factors[best[name].digest]}
        for name, row in zip(names, found, strict=True)
        if row["effect"] is not None  # the minutes may be over before, or its runs fail
    ]
    measured = {row["name"] for row in rows}
    result = {
        "version": report.JSON_VERSION,
        "half": config.half,
        "tune": config.tune,
        "equal": config.equal,
        "settings": recipe.words,
        "data": corpus_hashes(baseline.settings),
        "baseline_factors": factors[best[BASELINE].digest],
        "baseline_loss": report.mean(
            run.loss for run in runs_of(runs.results, best[BASELINE].digest, SEEDS_OF_CONFIRMATIONS)
        ),
        "seconds": sum(run.seconds or 0.0 for one in factors for run in runs_of(runs.results, one, EVERY_SEED)),
        "right": sum(has_sign(row) for row in rows),
        "clearly_wrong": sum(row["verdict"] in ("better", "worse") and not has_sign(row) for row in rows),
        "not_measured": [name for name in effects if name not in measured],
        "effects": rows,
    }
    file = folder / "agreement" / f"{config.half}{'-tuned' if config.grid else ''}.json"
    file.parent.mkdir(exist_ok=True)
    write_atomically(file, json.dumps(result, indent=1) + "\n")
    return [json.dumps(result)] if config.print_json else lines(result)


def spread(count: int, rounds: int) -> list[tuple[float, int]]:
    """Return reserved seeds, each with the round in which it is trained, evenly spread over the rounds."""
    return [(number * rounds / count, seed) for number, seed in enumerate(SEEDS_OF_CONFIRMATIONS[:count])]


def tuning_loss(runs: Runs, variant: Variant) -> float:
    """Return the log loss of the run that tunes; infinity if it failed or does not exist."""
    return min(runs.group(variant, range(TUNING_SEED, TUNING_SEED + 1)).values, default=math.inf)


def has_sign(row: dict[str, Any]) -> bool:
    """Return whether an estimate has the sign that is known."""
    return (row["effect"] < 0) == (row["known"] == "better")


def lines(result: dict[str, Any]) -> list[str]:
    """Return the table as text."""
    table = [["idea", "known", "effect", "95% interval", "verdict", "runs", "factor"]]
    for row in sorted(result["effects"], key=lambda row: row["effect"]):
        mark = "" if has_sign(row) else (" WRONG" if row["verdict"] in ("better", "worse") else " (wrong sign)")
        cells = [report.percent(row["effect"]), report.interval(row), f"{row['verdict']}{mark}", str(row["runs"])]
        table.append([row["name"], row["known"], *cells, ", ".join(f"x{one:g}" for one in row["factors"].values())])
    counts = f"{result['right']} of {len(result['effects'])} signs right, {result['clearly_wrong']} clearly wrong"
    missing = [f"not measured: {', '.join(result['not_measured'])}"] if result["not_measured"] else []
    return [*aligned(table), *missing, f"{counts}; {result['seconds'] / 3600:.2f} CPU hours"]
