"""The commands `try` and `combine`: test an idea against the head of the chain."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scipy import optimize

from config.errors import ConfigError
from data.sampler import BatchSizes
from tools.experiment import log
from tools.experiment.arm import Arm, changed_settings
from tools.experiment.change import Change
from tools.experiment.experiment import Experiment
from tools.experiment.sequential_test import estimate_difference
from tools.experiment.settings import ExperimentConfig
from tools.jobs.runner import JobRunner
from tools.research.code import Idea, apply_ideas, parse_idea
from tools.research.ledger import Row, make_row, typed_row
from tools.research.output import Result, cut_middle, describe_idea, format_effect
from tools.research.settings import CombineConfig, TryConfig
from tools.research.state import Chain, locked_chain

# Settings that define the task. Weights to start from were trained on further tokens.
TASK_SETTINGS = ("data.", "evaluation.", "init_from", "branch_from")
SMALLEST_P = 1e-9  # lower bound of the search for a p-value
# Exit codes by status; 0 for all others.
EXIT_CODES = {"unknown": 10, "futile": 10, "failed": 11, "identical": 11}


def try_idea(config: TryConfig) -> Result:
    """Test an idea.

    Raises:
        ConfigError: the idea or a setting is wrong, or the head has moved meanwhile.
        RunError, Failed, Stopped: the baseline or the environment fails, or a signal stops the runs.
    """
    if len(config.idea) > 1:
        raise ConfigError(f"idea: {' '.join(config.idea)!r} has several words; quote it as one argument")
    with locked_chain(config.lab) as (_, chain):
        idea = parse_idea(config.idea[0])
    return run_attempt(config, chain, "try", idea.text, [idea])


def combine(config: CombineConfig) -> Result:
    """Test several ideas together; raise the errors of `try_idea`."""
    with locked_chain(config.lab) as (_, chain):
        rows = [chain.idea(word.removeprefix("#")) for word in config.idea]
    text = " + ".join(f"#{row['id']}" for row in rows)
    return run_attempt(config, chain, "combine", text, [*map(chain.load, rows)])


def run_attempt(config: TryConfig, chain: Chain, kind: str, text: str, ideas: list[Idea]) -> Result:
    """Test ideas together and return the result; if this candidate was tested before, return the earlier result."""
    changed, code = apply_ideas(ideas, chain.head, chain.recipe)
    cells = {"kind": kind, "parent": chain.head, "commit": changed.commit, "idea": text, "note": config.note}
    cells["diff"] = code.save_diff(chain.lab / "diffs")
    cells["settings"] = " ".join(idea.settings for idea in ideas if idea.settings)
    heading = []
    try:
        row = Attempt(config, chain, cells).test(changed)
    except TriedBefore as tried:
        row = tried.row
        heading = [f"tried as #{row['id']}:"]
    return Result(
        typed_row(row) | {"tried_before": bool(heading)}, [*heading, *describe(row)], EXIT_CODES.get(row["status"], 0)
    )


class Attempt(Experiment):
    """The test of an idea, at the level and on the seeds that the chain assigns."""

    def __init__(self, config: TryConfig, chain: Chain, cells: dict[str, Any]):
        self.cells = cells
        experiment = ExperimentConfig(
            arguments=chain.arguments(cells["idea"]),
            max_seeds=config.max_seeds,
            budget_minutes=config.budget_minutes,
            allow_data_changes=config.allow_data_changes,
            speedup=False,
            first_seed=chain.first_seed,
            note=config.note,
        )
        super().__init__(experiment, chain.lab, JobRunner(config.jobs))
        self.arms: list[Arm] = []

    def test(self, changed: Change) -> Row:
        """Test the idea, and return its row; raise TriedBefore if the same candidate was tested before."""
        try:
            result = self.run(changed)
        except ConfigError as error:
            self.finish(status="refused", message=str(error))
            raise
        log.append(self.lab, result)
        return self.finish(status=result["verdict"], **self.result_cells(result))

    def resolve_candidate(self, baseline: Arm, code: Path, changed: Change) -> Arm:
        """Return the candidate, after entering it into the ledger with its number and level.

        Raises:
            TriedBefore: the same candidate was tested before.
            ConfigError: as in Experiment and `check_task`, or another idea was kept meanwhile.
        """
        candidate = super().resolve_candidate(baseline, code, changed)
        check_task(baseline, candidate, self.config.allow_data_changes)
        self.arms = [baseline, candidate]
        with locked_chain(self.lab) as (ledger, chain):
            if chain.head != self.cells["parent"]:
                raise ConfigError(f"idea: the head of the chain moved to {chain.head[:12]}; rerun the same command")
            same = chain.find(candidate.digest)
            if same and not self.can_resume(same):
                raise TriedBefore(same)
            self.cells["candidate"] = candidate.digest
            self.cells["id"] = same["id"] if same else 1 + len(chain.ideas)
            self.cells["level"] = float(same["level"]) if same else chain.next_level
            if not same:
                ledger.append(**self.cells, status="running")
        self.total_alpha = 2 * self.cells["level"]  # the level is one-sided: of a false "better" alone
        return candidate

    def can_resume(self, row: Row) -> bool:
        """Return whether the test of a row was stopped or refused, or is undecided after fewer than max_seeds seeds."""
        if row["status"] in ("running", "refused"):
            return True
        return row["status"] == "unknown" and int(row["seeds_candidate"] or 0) < self.config.max_seeds

    def result_cells(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return the cells of a result, given as a row of the experiment log."""
        copied = ("difference", "low", "high", "verify", "seconds", "cpu_seconds", "message")
        cells: dict[str, Any] = {name: result.get(name) for name in copied}
        cells["message"] = cells["message"] and cut_middle(cells["message"])
        cells["log"] = next((job.output for job in self.jobs.failures), None)
        if "losses" not in result:
            return cells
        baseline, candidate = result["losses"]
        speeds = [arm.job(0).run.tokens_per_second() for arm in self.arms]
        ratios = {"parameters": "parameters", "flops": "flops_per_token"}
        cells |= {name: result["cost"][key][1] / result["cost"][key][0] for name, key in ratios.items()}
        return cells | {
            "loss": result["means"][1],
            "seeds_baseline": len(baseline),
            "seeds_candidate": len(candidate),
            "p": p_value(baseline, candidate),
            "speed": speeds[1] / speeds[0],
        }

    def finish(self, **results: Any) -> Row:
        """Append the row with the result, unless another process that shared the test has done so; return the row.

        Return {} if the idea was refused before it had a number.
        """
        with locked_chain(self.lab) as (ledger, chain):
            if "id" not in self.cells:  # it was refused (no row), or its code crashes at the start
                if results["status"] != "failed":
                    return {}
                self.cells["id"] = 1 + len(chain.ideas)
            earlier = chain.ideas.get(str(self.cells["id"]))
            if earlier and not self.can_resume(earlier):
                return earlier
            row = make_row(**self.cells, **results)
            return ledger.append(**row | {"wealth": Chain(self.lab, [*ledger.rows, row]).wealth})


def check_task(baseline: Arm, candidate: Arm, allow_data_changes: bool) -> None:
    """Raise ConfigError unless the initial weights, training tokens, data and evaluation are those of the baseline."""
    names = changed_settings(baseline, candidate)
    fixed = [name for name in names if name.startswith(TASK_SETTINGS) and name != "evaluation.ema_decay"]
    if fixed and not allow_data_changes:
        what = "the data, the evaluation and the initial weights"
        raise ConfigError(f"{', '.join(fixed)}: the recipe fixes {what}; leave them as they are")
    expected, tokens = training_tokens(baseline), training_tokens(candidate)
    if tokens != expected:
        product = "steps x global_batch_size x seq_len"
        raise ConfigError(f"{product}: {tokens:,} training tokens instead of {expected:,}; train on as many")


def training_tokens(arm: Arm) -> int:
    """Return the tokens that a run of one process reads, with a batch-size warm-up."""
    settings = arm.settings
    batch_size = settings["global_batch_size"] or settings["micro_batch_size"]
    sizes = BatchSizes.from_settings(settings | {"global_batch_size": batch_size})
    return sizes.tokens(settings["steps"], settings["seq_len"])


class TriedBefore(Exception):
    """The same candidate was tested against the same head.

    Attributes:
        row: Its row.
    """

    def __init__(self, row: Row):
        super().__init__()
        self.row = row


def p_value(baseline: list[float], candidate: list[float]) -> float:
    """Return the smallest one-sided level at which the sequential test would call the candidate better now."""

    def high(log_alpha: float) -> float:
        return estimate_difference(baseline, candidate, math.exp(log_alpha)).high

    smallest = math.log(2 * SMALLEST_P)
    if high(0.0) >= 0:
        return 1.0
    if high(smallest) < 0:
        return SMALLEST_P
    return math.exp(optimize.root_scalar(high, bracket=(smallest, 0.0), xtol=0.01).root) / 2


def describe(row: Row) -> Iterator[str]:
    """Yield the result of a test in a few lines."""
    number, status = row["id"], row["status"]
    if not row["difference"]:
        yield f"#{number} {status}: {describe_idea(row)}" + (f": {row['message']}" if row["message"] else "")
    else:
        seeds = f"{row['seeds_candidate']} seeds against {row['seeds_baseline']}"
        yield f"#{number} {status}: {describe_idea(row)} changes the loss by {format_effect(row)}, {seeds}"
        costs = ", ".join(f"{name} x{float(row[name]):.3g}" for name in ("parameters", "flops", "speed") if row[name])
        yield f"level {row['level']}, p {row['p']}, wealth {row['wealth']}; {costs}"
    if row["verify"] not in ("", "passed"):
        yield f"checks of verify.py that fail: {row['verify']}"
    if row["decision"]:
        yield f"decision: {row['decision']}"
    elif status == "better":
        yield f"accept it with `python -m tools.research keep {number}`; only `confirm` gives a result to quote"
    elif status == "unknown":
        yield "more seeds may decide: repeat the command with a larger --max_seeds or --budget_minutes, or drop it"
