"""What runs left behind, side by side: their curves, where they part, which are the same recipe, and its noise.

compare.py prints it. Nothing here needs torch.
"""

import json
import math
import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from checkpoint.identity import FACTS, compare_facts, lasting_starts
from cli.output import printable
from config.errors import ConfigError
from config.schema import flat_settings
from data.json_objects import typed
from data.sampler import BatchSizes
from plotting.style import step_to_x
from run.metrics_log import read_rows
from run.resume import FREE_SETTINGS, OF_SCHEDULES
from run.status import Status, read_status
from run.stored_settings import read_settings

SEEDS = ("seed", "data.seed")
# What two runs of one recipe may have different: where they lie, and what moves no loss by more than rounding.
NOT_OF_A_RECIPE = FREE_SETTINGS - OF_SCHEDULES - {"evaluation", "on_nonfinite", "max_skipped_in_a_row"}
WHEN_EVALUATED = (
    "every",
    "micro_batch_size",
    "num_scored_generations",
    "num_logged_generations",
    "temperature",
)  # not on what
NOT_OF_A_RECIPE |= {f"evaluation.{name}" for name in WHEN_EVALUATED}


@dataclass(frozen=True)
class Branch:
    """The checkpoint that a branch began from."""

    run: str
    """Where its run lay then."""
    step: int
    digest: str | None


@dataclass(frozen=True)
class StartRow:
    """What is read of a row of sessions.jsonl; older versions wrote less."""

    step: int
    config: dict[str, Any] | None = None
    mixed_precision: str | None = None
    code: str | None = None
    git_commit: str | None = None
    branched_from: Branch | None = None


@dataclass(frozen=True)
class Recipe:
    """What runs have in common that differ by their seeds alone, and so by nothing but noise."""

    settings: tuple[tuple[str, str], ...]
    """Names and JSON values of what makes another run: settings, and the facts of checkpoint/identity.py."""
    begin: "tuple[int, Recipe | str] | None" = None
    """Of a branch: the step at which it left, and the recipe of its parent, or the place where that lay."""

    @classmethod
    def of(cls, settings: dict[str, Any], begin: "tuple[int, Recipe | str] | None" = None) -> "Recipe":
        """The recipe of flat settings, with `mixed_precision` and `code` among them."""
        names = sorted(name for name in settings if is_of_recipe(name) and name not in SEEDS)
        return cls(tuple((name, json.dumps(settings[name], sort_keys=True)) for name in names), begin)


@dataclass(eq=False)
class Record:
    """A run, as it lies on the disk."""

    path: Path
    settings: dict[str, Any]
    """Flat, as `section.name`; and beside them `mixed_precision` and `code`, null where an older version did not write
    them down."""
    rows: dict[int, dict[str, Any]]
    """Of metrics.jsonl, by step; of a branch those after it left its parent."""
    status: Status | None
    branch: Branch | None
    parent: "Record | None" = None
    """Of a branch: the run that it left, where that is at hand."""
    label: str = ""
    starts: list[dict[str, Any]] = field(default_factory=list)
    """The rows of sessions.jsonl whose steps are still there."""

    def code(self, after: int = 0) -> str | None:
        """The hash of the code that trained the steps after `after`; of several codes, also from which step on. None
        where an older version did not write it down."""
        begun = [start for start, end in pairwise([*self.starts, None]) if end is None or end["step"] > after]
        codes = [(start["step"], start.get("code")) for start in begun]
        if not codes or any(code is None for _, code in codes):
            return None
        later = [f"{code} from step {step + 1}" for (_, before), (step, code) in pairwise(codes) if code != before]
        return ", ".join([codes[0][1], *later])

    def history(self) -> dict[int, dict[str, Any]]:
        """The rows of the whole trajectory: the parent's until the branch, then its own."""
        if self.parent is None:
            return self.rows
        shared = {s: row for s, row in self.parent.history().items() if s <= self.branch.step}
        return shared | self.rows

    def curve(self, metric: str, whole: bool = False) -> list[tuple[int, float]]:
        """Steps and finite values of a metric, of the run alone or of its whole trajectory."""
        rows = self.history() if whole else self.rows
        return [(step, row[metric]) for step, row in sorted(rows.items()) if is_finite(row.get(metric))]

    def last(self, metric: str) -> float | None:
        """The newest value of a metric, None without any."""
        return next((value for _, value in reversed(self.curve(metric, whole=True))), None)

    def best_loss(self) -> float | None:
        """The lowest validation loss, None without any."""
        return min((loss for _, loss in self.comparable_losses()), default=None)

    def comparable_losses(self) -> list[tuple[int, float]]:
        """Steps and validation losses of the whole trajectory, since it is evaluated on as many sequences as now."""
        since = self.evaluated_alike_since()
        return [(step, loss) for step, loss in self.curve("val/loss", whole=True) if step > since]

    def evaluated_alike_since(self) -> int:
        """The step after which all evaluations are of `evaluation.num_samples` sequences."""
        now, since = self.settings["evaluation.num_samples"], 0
        if self.parent:
            alike = self.parent.settings["evaluation.num_samples"] == now
            since = min(self.branch.step, self.parent.evaluated_alike_since()) if alike else self.branch.step
        for start, later in pairwise(self.starts):
            then = flat_settings(start.get("config") or {}).get("evaluation.num_samples", now)
            since = later["step"] if then != now else since
        return since

    def final(self, metric: str = "val/loss") -> float | None:
        """A metric after the last step; None while there is none."""
        value = self.history().get(self.settings["steps"], {}).get(metric)
        return value if is_finite(value) else None

    def tokens_to(self, loss: float) -> int | None:
        """Training tokens until an evaluation gave at most `loss`; None if none did."""
        reached = (step for step, value in self.comparable_losses() if value <= loss)
        return next((self.tokens(step) for step in reached), None)

    def tokens(self, step: int) -> int:
        """Training tokens until a step: of a branch those of its parent, whose batches may have been others, and its
        own."""
        if self.parent is None:
            return self.logged_tokens(step)
        begin = min(step, self.branch.step)
        return self.parent.tokens(begin) + self.logged_tokens(step) - self.logged_tokens(begin)

    def logged_tokens(self, step: int) -> int:
        """`train/tokens` until a step; between two that are logged, in proportion to the sequences."""
        logged = [(0, 0), *self.curve("train/tokens")]
        before, tokens = max(point for point in logged if point[0] <= step)
        names = ("global_batch_size", "schedule.batch_warmup_from", "schedule.batch_warmup_steps")
        sizes = BatchSizes(*(self.settings[name] for name in names))
        tokens_per_sequence = self.settings["seq_len"]
        if later := [point for point in logged if point[0] > step]:
            tokens_per_sequence = (later[0][1] - tokens) / (sizes.before(later[0][0]) - sizes.before(before))
        return tokens + round((sizes.before(step) - sizes.before(before)) * tokens_per_sequence)

    def places(self, x: str) -> Callable[[float], float]:
        """What a step of the whole trajectory is on an axis of plotting.style.X_AXES.

        Raises:
            ConfigError: its files do not tell.
            OSError: they cannot be read.
        """
        own = step_to_x(x, self.path)
        if self.parent is None or x == "steps":
            return own
        begin, before = self.branch.step, self.parent.places(x)
        return lambda step: before(min(step, begin)) + own(max(step, begin)) - own(begin)

    def tells(self, x: str) -> bool:
        """Whether its files tell what a step is on that axis."""
        with suppress(ConfigError, OSError):
            return self.places(x) is not None
        return False

    def spent(self, what: str) -> float | None:
        """Tokens, FLOPs or seconds of training, as plotting.style.X_AXES calls them; None where it wrote none down."""
        if what == "flops" and self.fact("flops_per_token") is None:
            return None  # what an older version had no need to write down is not worth importing torch
        with suppress(ConfigError, OSError):
            return self.places(what)(self.done())
        return None

    def fact(self, name: str) -> Any:
        """What its newest start wrote down, as `parameters`; None in a run of an older version."""
        return self.starts[-1].get(name) if self.starts else None

    def done(self) -> int:
        """The newest step that it has logged, or shares with its parent."""
        return max(self.history(), default=0)

    def above_floor(self) -> float | None:
        """The newest validation loss less the lowest possible one; None where that is not known."""
        loss, floor = self.curve("val/loss", whole=True), dict(self.curve("val/entropy", whole=True))
        return loss[-1][1] - floor[loss[-1][0]] if loss and loss[-1][0] in floor else None

    def peak_memory_bytes(self) -> float | None:
        """The most that its first process has held, as tensors on a GPU or else in memory."""
        return max((value for _, value in self.curve("perf/peak_memory_bytes")), default=None)

    def tokens_per_second(self) -> float | None:
        """The median over the logged intervals."""
        speeds = [speed for _, speed in self.curve("perf/tokens_per_second")]
        return statistics.median(speeds) if speeds else None

    def seeds(self) -> tuple[int, ...]:
        """Runs of one recipe are the same run where these are."""
        return tuple(self.settings[name] for name in SEEDS)

    def recipe(self) -> Recipe:
        """What it has in common with runs that differ by their seeds alone."""
        begin = None
        if self.branch:
            begin = self.branch.step, self.parent.recipe() if self.parent else self.branch.run
        return Recipe.of(self.settings, begin)


def predicted(record: Record) -> tuple[Any, ...]:
    """What a run predicts: losses of runs that predict something else do not compare."""
    source, setting = record.settings["data.source"], record.settings.get
    if source == "random":
        return source, setting("model.vocab_size")
    if source == "text":  # the hash is of the tokens; of a mixture the shares count too
        return source, setting("data.hash") or setting("data.path"), *(setting("data.mix") or {}).values()
    return source, setting("data.facts"), setting("data.zipf") if setting("data.facts") else None


def is_of_recipe(name: str) -> bool:
    """Whether a setting says what is trained, and not where or how fast."""
    return not NOT_OF_A_RECIPE & {name, name.split(".")[0]}


def is_finite(value: Any) -> bool:
    """Whether it is a number that can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_record(path: Path) -> Record:
    """The run in the directory `path`.

    Raises:
        ConfigError: it is none, or it is damaged.
    """
    settings = read_settings(path / "config.yaml", remedy="")
    if settings is None:
        raise ConfigError(f"{path} is no run: it has no config.yaml")
    try:
        metrics, starts = path / "metrics.jsonl", path / "sessions.jsonl"
        rows = {row["step"]: row for row in read_rows(metrics)} if metrics.exists() else {}
        all_starts = list(read_rows(starts)) if starts.exists() else []
        begins = [typed(row, StartRow, f"{starts}: a start").branched_from for row in all_starts]
        branch = next(filter(None, begins), None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if branch:
        rows = {step: row for step, row in rows.items() if step > branch.step}
    status = read_status(path / "status.json")
    done = max([*rows, status.step if status else 0])
    record = Record(path, settings, rows, status, branch, starts=lasting_starts(all_starts, done))
    precision = record.starts[-1].get("mixed_precision") if record.starts else None
    record.settings |= {"mixed_precision": precision, "code": record.code()}
    return record


def read_records(paths: list[Path]) -> tuple[list[Record], list[str]]:
    """The runs among these directories, parents found and labels given; and of what is no run, why."""
    records, skipped = [], []
    for path in dict.fromkeys(paths):
        try:
            records.append(read_record(path))
        except ConfigError as error:
            skipped.append(str(error))
    names = [record.path.resolve().name for record in records]
    for record, name in zip(records, names, strict=True):
        record.label = printable(name if names.count(name) == 1 else str(record.path))
        record.parent = find_parent(record, records)
    return records, skipped


def find_parent(record: Record, records: list[Record]) -> Record | None:
    """The run that a branch left: the one at the place that it wrote down, or, where that was moved, the one that had
    the same state after the same step."""
    if record.branch is None:
        return None
    step, digest = record.branch.step, record.branch.digest
    older = [other for other in records if other is not record and other.rows and min(other.rows) <= step]
    at_its_place = [other for other in older if str(other.path.resolve()) == record.branch.run]
    if digest is None:
        return next(iter(at_its_place), None)
    same_state = [other for other in older if other.rows.get(step, {}).get("state/digest") == digest]
    return next((other for other in [*at_its_place, *same_state] if other in same_state), None)


def first_difference(one: Record, other: Record, *metrics: str) -> int | None:
    """The first step that both logged where one of these metrics differs: 0 if none does, None if none is of both."""
    ours, theirs = one.history(), other.history()
    compared = 0
    for step in sorted(ours.keys() & theirs.keys()):
        both = [name for name in metrics if name in ours[step] and name in theirs[step]]
        if any(ours[step][name] != theirs[step][name] for name in both):
            return step
        compared += len(both)
    return 0 if compared else None


def differing(records: list[Record]) -> list[str]:
    """The settings that are not the same in all of these runs, but for those that say where a run lies."""
    names = dict.fromkeys(name for record in records for name in record.settings)
    return [
        name
        for name in names
        if name not in ("name", "out_dir", "resume", "branch_from")
        and len({json.dumps(record.settings.get(name)) for record in records}) > 1
    ]


def changes(branch: Record) -> list[str]:
    """The settings by which a branch is another run than its parent; its code against that of the same steps."""
    step, parent = branch.branch.step, branch.parent
    names = [name for name in differing([parent, branch]) if is_of_recipe(name) and name not in FACTS]
    then, now = (record.settings | {"code": record.code(after=step)} for record in (parent, branch))
    return names + compare_facts(then, now)


def effect(branch: Record, records: list[Record]) -> tuple[int, float, list[float]] | None:
    """What the change made by a branch gives: its validation loss less its parent's, after the last step that evaluated
    both.

    Returns:
        The step; the effect; and the losses after it of runs that differ by their seeds alone, the parent and the
        branches that left it at the same step: what such effects are without a cause. None without such a step, or
        where the two predict different data.
    """
    ours, theirs = dict(branch.curve("val/loss")), dict(branch.parent.curve("val/loss", whole=True))
    evaluated_both = ours.keys() & theirs.keys()
    if not evaluated_both or predicted(branch) != predicted(branch.parent):
        return None
    step = max(evaluated_both)
    repeats = [(branch.parent.seeds(), theirs[step])]
    for other in records:
        left_there = other.parent is branch.parent and other.branch.step == branch.branch.step
        if left_there and set(changes(other)) <= {*SEEDS}:
            loss = dict(other.curve("val/loss")).get(step)
            repeats += [(other.seeds(), loss)] if loss is not None else []
    return step, ours[step] - theirs[step], one_of_each(repeats)


def samples(records: list[Record], metric: str = "val/loss") -> list[float]:
    """A metric after the last step of runs of one recipe, one for each of the seeds."""
    losses = [(record.seeds(), record.final(metric)) for record in records]
    return one_of_each([(seeds, loss) for seeds, loss in losses if loss is not None])


def one_of_each(losses: list[tuple[tuple[int, ...], float]]) -> list[float]:
    """A loss for each of the seeds. A run is a function of them: one that was repeated gives no second sample, but what
    its repetitions, which may differ by rounding, have in the mean."""
    by_seeds: dict[tuple[int, ...], list[float]] = {}
    for seeds, loss in losses:
        by_seeds.setdefault(seeds, []).append(loss)
    return [statistics.fmean(same) for same in by_seeds.values()]
