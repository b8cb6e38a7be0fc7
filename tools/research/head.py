"""The head of a chain: the commands `start`, `keep` and `drop`, and the runs of its baseline."""

import math
import os
import statistics
from collections.abc import Iterator
from pathlib import Path

from scipy import stats

from config.errors import ConfigError
from config.paths import expand_user_path
from tools.experiment import change
from tools.experiment.change import Change, checked_out, git
from tools.experiment.experiment import Experiment
from tools.experiment.score import choose_metric
from tools.experiment.sequential_test import MIN_SEEDS, nominal_alphas
from tools.experiment.settings import ExperimentConfig
from tools.jobs.runner import JobRunner
from tools.research.code import (
    current_branch,
    move_branch,
    refuse_edits,
    require_clean_tree,
    switch_to,
    tip,
    undo_idea,
    write_commit,
)
from tools.research.ledger import Row, locked_ledger, typed_row
from tools.research.output import Result, describe_idea, format_effect
from tools.research.settings import ChainConfig, DropConfig, KeepConfig, StartConfig
from tools.research.state import Chain, locked_chain

NEVER_ACCEPTED = ("running", "refused", "failed", "identical")
POWER, POWER_SEEDS = 0.8, 12


def start(config: StartConfig) -> Result:
    """Begin a chain: its branch, its ledger and its baseline; after a stop, rerun to resume.

    Raises:
        ConfigError: the lab has another chain, the branch exists, or the working tree has changes.
        Failed, Stopped: a run of the baseline fails, or a signal stops the runs.
    """
    if config.seeds < MIN_SEEDS:
        raise ConfigError(f"seeds: {config.seeds} must be at least {MIN_SEEDS}, to estimate the noise")
    recipe, lab = tracked_recipe(config.config), expand_user_path("lab", config.lab)
    branch = config.branch or f"research/{Path(recipe).stem}"
    with locked_ledger(lab) as ledger:
        if not ledger.rows:
            require_clean_tree()
            if tip(branch):
                raise ConfigError(f"branch: {branch} exists; choose another --branch, or delete it")
            git("branch", branch)  # before the ledger names it, because git refuses some names
            cells = {"idea": branch, "settings": recipe, "note": config.note, "seeds_baseline": config.seeds}
            mode = "strict" if config.strict else "online FDR"
            ledger.append(kind="start", commit=git("rev-parse", "HEAD"), status=mode, **cells)
        chain = Chain(lab, ledger.rows)
        if (chain.recipe, chain.branch) != (recipe, branch) or chain.ideas:
            raise ConfigError(f"lab: {config.lab} has a chain on {chain.branch} already; choose another --lab")
        if current_branch() != branch:
            switch_to(branch, chain.head)
    row = measure_baseline(config, chain)
    return Result(chain.summary() | {"baseline": typed_row(row)}, [f"branch: {branch}", *describe_baseline(row)])


def tracked_recipe(name: str) -> str:
    """Return the path of a config file in the repository; raise ConfigError if git does not track it."""
    path = Path(os.path.abspath(expand_user_path("config", name)))
    if not path.is_relative_to(change.ROOT) or not git("ls-files", "--", str(path)):
        raise ConfigError(f"config: {name!r} must be tracked by git, as accepted settings are committed to it")
    return path.relative_to(change.ROOT).as_posix()


def keep(config: KeepConfig) -> Result:
    """Accept an idea: commit it to the branch and train the new baseline; after a stop, rerun to resume.

    The ledger is written first. If the process is killed before it has moved the branch, the next command moves it.

    Raises:
        ConfigError: the idea is not better, was tried on another head, or files that it changes have other edits.
        Failed, Stopped: a run of the baseline fails, or a signal stops the runs.
    """
    with locked_chain(config.lab) as (ledger, chain):
        row = chain.idea(str(config.id))
        if not row["decision"].startswith("kept"):
            check_acceptable(row, chain, config.unproven)
            commit = write_commit(row["commit"], chain.head, commit_message(row))
            decision = "kept" if row["status"] == "better" else "kept unproven"
            row = ledger.append(**row | {"kind": "keep", "time": None, "commit": commit, "decision": decision})
            move_branch(chain.branch, row["parent"], commit)
    facts, lines = chain.summary(), [f"#{row['id']} {row['decision']}: {chain.branch} is at {chain.head[:12]}"]
    if row["commit"] == chain.head:
        baseline = measure_baseline(config, chain)
        facts["baseline"] = typed_row(baseline)
        lines += describe_baseline(baseline)
    return Result(facts, lines)


def commit_message(row: Row) -> str:
    """Return the message of the commit of an idea."""
    selection = f" at selection: {format_effect(row)}" if row["low"] else ""
    subject = f"research: {describe_idea(row)}"[:72]
    return f"{subject}\n\n{row['note']}\nidea {row['id']}, {row['status']}{selection}"


def check_acceptable(row: Row, chain: Chain, unproven: bool) -> None:
    """Raise ConfigError if an idea may not become the head."""
    status, number = row["status"], row["id"]
    if status != "better" and not (unproven and status not in NEVER_ACCEPTED):
        hint = "" if status in NEVER_ACCEPTED else "; --unproven accepts it, and the ledger records this"
        raise ConfigError(f"id: {number} is {status}, not better{hint}")
    if row["parent"] != chain.head:
        heads = f"{row['parent'][:12]}, and the head is {chain.head[:12]}"
        raise ConfigError(f"id: {number} was compared with {heads}; try it again")
    refuse_edits(chain.branch, chain.head, row["commit"])


def drop(config: DropConfig) -> Result:
    """Reject an idea, and remove it from the working tree; raise ConfigError if there is none, or it was accepted."""
    with locked_chain(config.lab) as (ledger, chain):
        row = chain.idea(str(config.id))
        if row["decision"].startswith("kept"):
            raise ConfigError(f"id: {row['id']} was {row['decision']}; try its reverse as a new idea")
        if not row["decision"]:
            row = ledger.append(**row | {"kind": "drop", "time": None, "decision": "dropped"})
        is_undone = (
            bool(row["commit"]) and row["parent"] == chain.head and undo_idea(chain.branch, chain.head, row["commit"])
        )
    tree = "removed from the working tree" if is_undone else "nothing was removed from the working tree"
    return Result(typed_row(row), [f"#{row['id']} dropped; {tree}" + f"; diff: {row['diff']}" * bool(row["diff"])])


def measure_baseline(config: ChainConfig, chain: Chain) -> Row:
    """Return the ledger's row of the head as baseline; if there is none, train the runs first.

    Raises:
        ConfigError, RunError: the recipe is refused, or does not start.
        Failed, Stopped: a run fails, or a signal stops the runs.
    """
    if chain.baseline:
        return chain.baseline
    num_seeds = int(chain.start["seeds_baseline"])
    settings = ExperimentConfig(arguments=chain.arguments("baseline"), first_seed=chain.first_seed)
    experiment = Experiment(settings, chain.lab, JobRunner(config.jobs))
    with checked_out(Change((), chain.head, chain.head)) as (code, _):
        arm = experiment.resolve_baseline(code)
        experiment.train([arm.job(seed) for seed in range(num_seeds)])
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

    The last analysis alone has this power; the analyses before it add to it. `deviation` is the standard deviation over
    seeds, and `level` the one-sided level of the test.
    """
    quantile = stats.t.isf(nominal_alphas(POWER_SEEDS, 2 * level)[-1] / 2, 2 * POWER_SEEDS - 2)
    return float(deviation * math.sqrt(2 / POWER_SEEDS) * (quantile + stats.norm.ppf(POWER)))


def describe_baseline(row: Row) -> Iterator[str]:
    """Yield the measurement of a baseline in words."""
    effect = f", {float(row['difference']):+.1f}% relative to the previous baseline" if row["difference"] else ""
    yield f"baseline: loss {row['loss']} on {row['seeds_baseline']} fresh seeds{effect}"
    freedom = int(row["seeds_baseline"]) - 1
    low, high = (math.sqrt(freedom / stats.chi2.isf(tail, freedom)) for tail in (0.025, 0.975))
    yield f"{row['status']} over seeds, with a 95% interval of {low:.2g} to {high:.2g} times this"
    yield f"a test {row['message']} with {POWER:.0%} power by {POWER_SEEDS} seeds"
