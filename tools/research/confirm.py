"""The command `confirm`: measure the effect of the accepted ideas on seeds that no selection has used."""

import math
import shlex
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scipy import stats

from cli.output import aligned
from config.errors import ConfigError
from tools.experiment.arm import ArmFailed
from tools.experiment.change import Change, checked_out, diff_of
from tools.experiment.experiment import Experiment
from tools.experiment.score import choose_metric
from tools.experiment.settings import ExperimentConfig, parse_sizes
from tools.jobs.runner import Failed, JobRunner
from tools.research.code import apply_ideas
from tools.research.ledger import Row, format_cell, typed_row
from tools.research.output import Result, format_effect
from tools.research.settings import ConfirmConfig
from tools.research.state import HEAD_AGAINST_START, RESERVED_SEEDS, SEEDS_PER_HEAD, Chain, locked_chain

LEVEL = 0.05  # significance level of each interval, a single test with a number of seeds fixed in advance


@dataclass(frozen=True)
class Contrast:
    """Two commits to compare, with the same additional settings."""

    name: str
    base: str
    commit: str
    settings: str = ""
    size: float = 1.0
    claimed: float = math.nan
    """Difference at selection (%)."""
    problem: str = ""
    """Why the commits cannot be compared."""


def confirm(config: ConfirmConfig) -> Result:
    """Compare head and start, and leave out each accepted idea; after a stop, rerun to resume.

    Raises:
        ConfigError: no idea is accepted, or this head was confirmed on another number of seeds.
        Failed, Stopped: a run of head or start fails, or a signal stops the runs.
    """
    if config.seeds < 2:
        raise ConfigError(f"seeds: {config.seeds} must be at least 2, for an interval")
    with locked_chain(config.lab) as (_, chain):
        if not chain.kept:
            raise ConfigError("confirm: no idea is accepted yet; accept one with `tools.research keep`")
        rows = [row for row in chain.rows if row["kind"] == "confirm"]
        if others := {row["seeds_candidate"] for row in rows if row["commit"] == chain.head} - {str(config.seeds)}:
            number = others.pop()
            raise ConfigError(
                f"seeds: {config.seeds} must be {number}, as when this head was first confirmed; its reserved seeds "
                "can be used only once"
            )
        heads = [*dict.fromkeys([*(row["commit"] for row in rows), chain.head])]
    first_seed = RESERVED_SEEDS + SEEDS_PER_HEAD * heads.index(chain.head)
    jobs = JobRunner(config.jobs)
    table = [(contrast, measure(config, chain, contrast, first_seed, jobs)) for contrast in contrasts(config, chain)]
    facts = {"rows": [typed_row(row) for _, row in table], "claimed": claimed(chain)}
    return Result(chain.summary() | facts, [*describe(table, config.seeds)])


def contrasts(config: ConfirmConfig, chain: Chain) -> Iterator[Contrast]:
    """Yield the comparisons to make; raise ConfigError if a setting is wrong."""
    start, head = chain.start["commit"], chain.head
    yield Contrast(HEAD_AGAINST_START, start, head, claimed=claimed(chain))
    for size in parse_sizes(config.sizes):
        if size != 1:
            yield Contrast(f"{HEAD_AGAINST_START}, {size:g} times the parameters", start, head, size=size)
    if config.data_seed is not None:
        settings = f"--data.seed {config.data_seed}"
        yield Contrast(f"{HEAD_AGAINST_START}, {settings}", start, head, settings)
    if config.corpus:
        yield Contrast(f"{HEAD_AGAINST_START}, {config.corpus}", start, head, config.corpus)
    if config.leave_one_out and len(chain.kept) > 1:
        for left_out in chain.kept:
            others = [chain.load(row) for row in chain.kept if row is not left_out]
            name = f"head against head without #{left_out['id']} {left_out['idea']}"
            try:
                without, _ = apply_ideas(others, start, chain.recipe)
                yield Contrast(name, without.commit or start, head, claimed=float(left_out["difference"] or "nan"))
            except ConfigError as error:  # a later idea builds on it
                yield Contrast(name, head, head, problem=str(error))


def measure(config: ConfirmConfig, chain: Chain, contrast: Contrast, first_seed: int, jobs: JobRunner) -> Row:
    """Return the row of a comparison, which is trained unless it is in the ledger.

    Raises:
        ConfigError: its settings are refused.
        Failed: a run of head or start fails.
    """
    seeds = dict.fromkeys(("seeds_baseline", "seeds_candidate"), str(config.seeds))
    key = {"kind": "confirm", "commit": contrast.commit, "idea": format_cell(contrast.name), **seeds}
    same = [row for row in chain.rows if row.items() >= key.items()]
    if same and same[-1]["status"] != "running":
        return same[-1]
    with locked_chain(config.lab) as (ledger, _):
        if not same:  # assigns reserved seeds to the head
            ledger.append(**key, parent=contrast.base, status="running")
    results = compare(config, chain, contrast, first_seed, jobs)
    with locked_chain(config.lab) as (ledger, _):
        return ledger.append(**key, parent=contrast.base, **results)


def compare(
    config: ConfirmConfig, chain: Chain, contrast: Contrast, first_seed: int, jobs: JobRunner
) -> dict[str, Any]:
    """Train all seeds of both commits, and return the cells of the result; raise the errors of `measure`."""
    if contrast.problem:
        return {"status": "not separable", "message": contrast.problem}
    arguments = chain.arguments(contrast.name, *shlex.split(contrast.settings))
    experiment = Experiment(ExperimentConfig(arguments=arguments, first_seed=first_seed), chain.lab, jobs)
    changed = Change((), contrast.base, contrast.commit, diff_of(contrast.base, contrast.commit))
    with checked_out(changed) as (base, head):
        try:
            baseline = experiment.resolve_baseline(base)
            candidate = experiment.resolve_candidate(baseline, head, changed)
            arms = experiment.scale_both(baseline, candidate, contrast.size)
            experiment.train([arm.job(seed) for seed in range(config.seeds) for arm in arms])
            metric = choose_metric(*arms)
        except (ConfigError, ArmFailed, Failed) as error:
            if contrast.base == chain.start["commit"]:
                raise
            # Without the idea, the head does not train, or is the same because a later idea overrides it.
            return {"status": "not separable", "message": str(error)} | experiment.spent()
        losses = [arm.losses(config.seeds, metric) for arm in arms]
    ours, theirs = map(statistics.fmean, losses)
    test: Any = stats.ttest_ind(losses[1], losses[0], equal_var=False)
    interval = test.confidence_interval(1 - LEVEL)
    status = "better" if interval.high < 0 else "worse" if interval.low > 0 else "unknown"
    percent = {"difference": theirs - ours, "low": interval.low, "high": interval.high}
    cells = {name: 100 * float(value) / ours for name, value in percent.items()}
    cells |= {"status": status, "loss": theirs, "p": float(test.pvalue), "level": LEVEL}
    return cells | experiment.spent()


def claimed(chain: Chain) -> float:
    """Return the difference of the whole chain at selection (%)."""
    return 100 * (math.prod(1 + float(row["difference"] or 0) / 100 for row in chain.kept) - 1)


def describe(table: list[tuple[Contrast, Row]], num_seeds: int) -> Iterator[str]:
    """Yield the comparisons as a table."""
    lines = [["", "confirmed, 95% interval", "status", "claimed at selection"]]
    for contrast, row in table:
        selection = "" if math.isnan(contrast.claimed) else f"{contrast.claimed:+.1f}%"
        lines.append([contrast.name, format_effect(row), row["status"], selection])
    yield from aligned(lines)
    yield f"{num_seeds} seeds of each arm, reserved for `confirm`; quote only these differences"
