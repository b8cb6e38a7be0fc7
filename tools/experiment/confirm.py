"""Confirm what a race found: all of it, each of its steps, and all of it without each idea, on reserved seeds.

The statistic is that of the race (verdicts.py), so more seeds may be added after a look at the result.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

from runtime.config.errors import ConfigError
from runtime.files import write_atomically
from tools.experiment import report, verdicts
from tools.experiment.baseline import (
    baseline_margin,
    experiment_folder,
    open_experiment,
    resolve_baseline,
    with_base,
)
from tools.experiment.change import Idea, idea_texts, parse_idea
from tools.experiment.race import run_with_json
from tools.experiment.record import Record
from tools.experiment.runs import SEEDS_OF_CONFIRMATIONS, Planned, Result, Runs, runs_of
from tools.experiment.settings import ConfirmConfig
from tools.experiment.variant import Recipe, Variant, check_targets, corpus_hashes, scale_parameters
from tools.jobs.runner import JobRunner


def main(config: ConfirmConfig) -> None:
    """Train the variants, save the table and print it.

    Raises:
        ConfigError: there is nothing to confirm, or the ideas are refused or conflict.
        RunError: the environment failed, for example by a full disk.
        SystemExit: with code 75 after a signal; run the same command again to resume.
    """
    run_with_json(config, confirm)


def confirm(config: ConfirmConfig, recipe: Recipe, jobs: JobRunner) -> list[str]:
    """Train the variants, save the table and return it as lines."""
    named = {text: parse_idea(text) for text in recipe.until_stopped(idea_texts(config.ideas))}
    baseline, recipe = resolve_baseline(with_base(recipe, config.ideas, named))
    folder = experiment_folder(config, recipe, baseline)
    ideas = [*{idea.key: idea for idea in named.values()}.values()] or newest_stack(folder)
    if config.data_seed is not None:
        recipe = replace(recipe, settings=(*recipe.settings, ("data.seed", config.data_seed)))
    check_settings(ideas)
    stacks, pairs = plan(ideas)
    resolved = dict(zip(stacks, recipe.variants(stacks.values()), strict=True))
    variants = {name: variant for name, variant in resolved.items() if isinstance(variant, Variant)}
    for name, problem in resolved.items():
        if isinstance(problem, Exception):
            raise ConfigError(f"ideas: {name}: {problem}")
        if config.data_seed is None:
            check_targets(baseline, variants[name])
        for size in config.factors:
            try:
                scale_parameters(variants[name], size, variants["baseline"])
            except ConfigError as error:
                raise ConfigError(f"sizes: {name}: {error}") from None
    test_seed = open_experiment(folder, recipe, baseline, "confirm")
    runs = Runs(folder, variants["baseline"], jobs, test_seed, config.metric)
    equal = {name: runs.equalize(variant, config.equal) for name, variant in variants.items()}
    sizes = {
        size: {name: scale_parameters(variant, size, equal["baseline"]) for name, variant in equal.items()}
        for size in config.factors
    }
    if missing := missing_runs(config, runs, sizes):
        train(config, runs, missing, baseline)

    digests = {size: {name: one.digest for name, one in scaled.items()} for size, scaled in sizes.items()}
    differences = []
    for size, some in digests.items():
        differences += compare(size, some, pairs, runs.results, baseline_margin(config, baseline))
    trained = {digest for some in digests.values() for digest in some.values()}
    results = [result for digest in trained for result in runs_of(runs.results, digest, SEEDS_OF_CONFIRMATIONS)]
    result = {
        "version": report.JSON_VERSION,
        "kind": "confirmation",
        "ideas": [idea.name for idea in ideas],
        "compared": config.metric or ("excess loss" if report.has_entropy(runs.results) else "loss"),
        "data": corpus_hashes(baseline.settings),
        "seeds": config.seeds,
        "data_seed": config.data_seed,
        "differences": differences,
        "trends": trends(differences, digests, runs.results),
        "failures": sorted({result.failure for result in results if result.failure}),
    }
    identity = repr([config.data_seed, [idea.key for idea in ideas]])
    file = folder / "confirmations" / f"{sha256(identity.encode()).hexdigest()[:8]}.json"
    file.parent.mkdir(exist_ok=True)
    write_atomically(file, json.dumps(result, indent=1) + "\n")
    return [json.dumps(result)] if config.print_json else report.confirmation_lines(result)


def newest_stack(folder: Path) -> list[Idea]:
    """Return the ideas that the newest race with a result has found."""
    for file in sorted(folder.glob("races/*.json"), key=report.modification_time, reverse=True):
        try:
            record = Record.read(file)
        except ConfigError as error:
            print(error, file=sys.stderr)
            continue
        if ideas := [record.ideas[key] for key in record.stack]:
            print(f"confirming {' + '.join(idea.name for idea in ideas)}, found by {file}", file=sys.stderr)
            return ideas
    raise ConfigError(
        f"ideas: no race of this code and these settings ({folder}) has found a better one; give the settings of a "
        "race and check out its commit, or name ideas"
    )


def check_settings(ideas: list[Idea]) -> None:
    """Raise ConfigError if two ideas set the same setting."""
    for number, idea in enumerate(ideas):
        for other in ideas[:number]:
            if both := idea.setting_names & other.setting_names:
                remedy = "confirm them one by one"
                raise ConfigError(f"ideas: {other.name!r} and {idea.name!r} set {min(both)}; {remedy}")


def plan(ideas: list[Idea]) -> tuple[dict[str, list[Idea]], list[tuple[str, str]]]:
    """Return the ideas of each variant by its name, and the pairs (variant, against) that are compared.

    They are each step A, A + B, A + B + C against the one before it, all ideas against the baseline, and all ideas
    against all without each.
    """
    stacks, pairs = {"baseline": []}, []
    previous = "baseline"
    for end in range(1, len(ideas) + 1):
        name = " + ".join(idea.name for idea in ideas[:end])
        stacks[name] = ideas[:end]
        pairs.append((name, previous))
        previous = name
    if len(ideas) > 1:
        pairs.insert(0, (previous, "baseline"))
        for idea in ideas[:-1]:  # without the last one it is the step before
            name = f"all without {idea.name}"
            stacks[name] = [other for other in ideas if other is not idea]
            pairs.append((previous, name))
    return stacks, pairs


def missing_runs(config: ConfirmConfig, runs: Runs, sizes: dict[float, dict[str, Variant]]) -> list[Planned]:
    """Return the variant and reserved seed of each run that has no result yet, one seed after another."""
    return runs.missing(
        (variant, seed)
        for variants in sizes.values()
        for seed in SEEDS_OF_CONFIRMATIONS[: config.seeds]
        for variant in variants.values()
    )


def describe_time(runs: Runs, missing: list[Planned], baseline: Variant) -> str:
    """Return how long runs will take, by the FLOPs of each and the time of those that have ended; "" if none has."""
    flops = {variant.digest: variant.flops for variant, _ in missing}
    flops[baseline.digest] = baseline.flops
    ended = [run for run in runs.results.values() if run.digest_of_variant in flops and not run.failure]
    speeds = [run.seconds / flops[run.digest_of_variant] for run in ended if run.seconds and not run.is_stopped]
    if not speeds:
        return ""
    minutes = fmean(speeds) * sum(variant.flops for variant, _ in missing) / 60
    return f"about {minutes:.1f} minutes of one core or GPU, {minutes / runs.jobs.max_running:.1f} minutes from now"


def train(config: ConfirmConfig, runs: Runs, missing: list[Planned], baseline: Variant) -> None:
    """Train the missing runs, in their order, and print their time as soon as it is known."""
    runs.jobs.limit_minutes(config.minutes)
    text = describe_time(runs, missing, baseline)
    print(f"confirm: {len(missing)} runs, {text or 'whose time is known after the first one'}", file=sys.stderr)

    def may_start(variant: Variant) -> bool:
        nonlocal text
        if not text and (text := describe_time(runs, missing, baseline)):
            print(f"confirm: {len(missing)} runs, {text}", file=sys.stderr)
        return not runs.is_time_spent(variant)

    runs.train_in_order(missing, may_start)


def compare(
    size: float,
    digests: Mapping[str, str],
    pairs: list[tuple[str, str]],
    results: Mapping[str, Result],
    margin: float,
) -> list[dict[str, Any]]:
    """Return the differences of the pairs at one size, at which `digests` are those of the variants by their names."""
    compared = [(digests[against], digests[name]) for name, against in pairs]
    rows = report.describe_comparisons(results, compared, margin)
    return [
        {"size": size, "variant": name, "against": against, **row}
        for (name, against), row in zip(pairs, rows, strict=True)
    ]


def trends(
    differences: list[dict[str, Any]], digests: dict[float, dict[str, str]], results: Mapping[str, Result]
) -> list[dict[str, Any]]:
    """Return how the effect of each pair differs at each larger size from its effect at the smallest one."""
    smallest, groups = min(digests), report.Groups(results)
    effects = {(one["size"], one["variant"], one["against"]): one for one in differences}
    compared = [pair for pair in effects if pair[0] > smallest]
    contrasts = []
    for size, name, against in compared:
        first, second = digests[smallest], digests[size]
        contrasts.append(groups.indices(first[name], first[against], second[against], second[name]))
    rows = []
    for (size, name, against), contrast in zip(compared, contrasts, strict=True):
        row = {"variant": name, "against": against, "from": smallest, "to": size, "trend": "unknown"}
        row |= dict.fromkeys(("change", "low", "high"))
        both = [effects[one, name, against] for one in (smallest, size)]
        if all(one["effect"] is not None and one["verdict"] not in ("identical", "failed") for one in both):
            found = verdicts.compare(groups.values, [tuple(contrast)])
            change, half_width = float(found.effects[0]), float(found.half_widths[0])
            ends = (change, change - half_width, change + half_width)
            row |= dict(zip(("change", "low", "high"), map(report.change, ends), strict=True))
            row["trend"] = trend(both, change if abs(change) > half_width else 0.0)
        rows.append(row)
    return rows


def trend(effects: list[dict[str, Any]], change: float) -> str:
    """Return what becomes of an effect at another size, where it certainly differs by `change`; 0 if it may not."""
    first, second = effects
    if {first["verdict"], second["verdict"]} == {"better", "worse"}:
        return "changes sign"
    if not change:
        return "unknown"
    # An effect that is not significant may have either sign, so the other one decides which direction is a growth.
    known = first if first["verdict"] in ("better", "worse") else second
    return "grows" if (change < 0) == (known["effect"] < 0) else "shrinks"
