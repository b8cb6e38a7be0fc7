"""Runs read from disk for comparison: curves, costs, where two diverge, and which differ only in their seeds.

Nothing here needs torch.
"""

import glob
import json
import math
import statistics
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from checkpoint.identity import FACTS, compare_facts
from cli.output import printable
from config.errors import ConfigError
from config.schema import flat_settings
from data.sampler import BatchSizes
from run.reader import Branch, RunReader, Session, surviving_sessions
from run.resume import FREE_SETTINGS, SCHEDULE_SETTINGS
from run.status import Status
from tools.plot.style import step_to_x

SEEDS = ("seed", "data.seed")
NEVER = -1  # first_divergence returns this if no common value differs
# Runs of one configuration may differ in these settings, as a resumed run may in FREE_SETTINGS.
IGNORED_SETTINGS = FREE_SETTINGS - SCHEDULE_SETTINGS - {"evaluation", "on_nonfinite", "max_skipped_in_a_row"}
IGNORED_SETTINGS |= {
    f"evaluation.{name}"
    for name in ("every", "micro_batch_size", "num_scored_generations", "num_logged_generations", "temperature")
}
Configuration = tuple[Any, ...]
"""Key that is equal for runs that differ only in their seeds: settings and facts; for a branch also the step where it
left its parent, and the parent's key or, if the parent is gone, the digest of the state at that step."""


@dataclass(eq=False)
class Record:
    """A run as it is on disk."""

    path: Path
    settings: dict[str, Any]
    """Flat, as `section.name`, with the facts `mixed_precision` and `code` of its sessions."""
    rows: dict[int, dict[str, Any]]
    """Rows of metrics.jsonl by step; for a branch, only those after `branch.step`."""
    status: Status | None
    branch: Branch | None
    sessions: list[Session]
    """The sessions that trained its steps, oldest first."""
    parent: "Record | None" = None
    """For a branch, its parent if it is compared too."""
    parent_on_disk: "Record | None" = None
    """For a branch, its parent if it is compared or still on disk."""
    label: str = ""

    @property
    def fork_step(self) -> int:
        """Last step that the run shares with `parent`; 0 without a parent."""
        return self.branch.step if self.parent and self.branch else 0

    @cached_property
    def history(self) -> dict[int, dict[str, Any]]:
        """Rows by step from the start; for a branch, the parent's up to `fork_step`, then its own."""
        shared = self.parent.history if self.parent else {}
        return {step: row for step, row in shared.items() if step <= self.fork_step} | self.rows

    def curve(self, metric: str, from_start: bool = False) -> list[tuple[int, float]]:
        """Return steps and finite values of a metric; `from_start` includes the parent's of a branch."""
        rows = self.history if from_start else self.rows
        return [(step, row[metric]) for step, row in sorted(rows.items()) if is_finite(row.get(metric))]

    def last_value(self, metric: str) -> float | None:
        """Return the newest finite value of a metric, or None."""
        return next((value for _, value in reversed(self.curve(metric, from_start=True))), None)

    def final(self, metric: str = "val/loss") -> float | None:
        """Return a metric after the last step; None if the run is not there yet or the value is not finite."""
        value = self.history.get(self.settings["steps"], {}).get(metric)
        return value if is_finite(value) else None

    def completed_steps(self) -> int:
        """Return the newest logged step."""
        return max(self.history, default=0)

    def comparable_losses(self) -> list[tuple[int, float]]:
        """Return steps and validation losses since the number of validation samples last changed."""
        since = self.validation_unchanged_since()
        return [(step, loss) for step, loss in self.curve("val/loss", from_start=True) if step > since]

    def validation_unchanged_since(self) -> int:
        """Return the step after which `evaluation.num_samples` has had its current value."""
        name = "evaluation.num_samples"
        current = self.settings[name]
        for session, later in reversed([*pairwise(self.sessions)]):
            if flat_settings(session.config or {}).get(name, current) != current:
                return later.step
        if self.parent and self.parent.settings[name] == current:
            # A change in the parent after the fork does not concern the branch.
            return min(self.fork_step, self.parent.validation_unchanged_since())
        return self.fork_step

    def best_loss(self) -> float | None:
        """Return the lowest comparable validation loss, or None."""
        return min((loss for _, loss in self.comparable_losses()), default=None)

    def tokens_to_loss(self, loss: float) -> int | None:
        """Return the training tokens until the first comparable validation loss of at most `loss`, or None."""
        steps = (step for step, value in self.comparable_losses() if value <= loss)
        return next((self.tokens(step) for step in steps), None)

    def tokens(self, step: int) -> int:
        """Return the training tokens until a step; for a branch, the parent's up to `fork_step` plus its own."""
        sizes, begin = BatchSizes.from_settings(self.settings), min(step, self.fork_step)
        own = (sizes.sequences_before(step) - sizes.sequences_before(begin)) * self.settings["seq_len"]
        return own + (self.parent.tokens(begin) if self.parent else 0)

    def to_axis(self, x: str) -> Callable[[float], float] | None:
        """Return the function from a step to its position on an axis of X_AXES; None if the run logged too little."""
        with suppress(ConfigError, OSError):
            own = step_to_x(x, self.path)
            if self.parent is None or x == "steps":
                return own
            begin = self.fork_step
            if before := self.parent.to_axis(x):
                return lambda step: before(min(step, begin)) + own(max(step, begin)) - own(begin)
        return None

    def cost(self, x: str) -> float | None:
        """Return the cost of training so far on an axis of X_AXES, such as FLOPs; None if the run logged too little."""
        to_x = self.to_axis(x)
        return to_x and to_x(self.completed_steps())

    def session_fact(self, name: str) -> Any:
        """Return a fact of the newest session, such as `parameters`; None without sessions."""
        return getattr(self.sessions[-1], name) if self.sessions else None

    def code(self, after: int = 0) -> str | None:
        """Return the hash of the code that trained the steps after `after`; if it changed, each with its first step."""
        pairs = pairwise([*self.sessions, None])
        sessions = [session for session, later in pairs if session and (later is None or later.step > after)]
        codes = [(session.step, session.code) for session in sessions]
        if not codes or any(code is None for _, code in codes):
            return None
        changes = [f"{code} from step {step + 1}" for (_, before), (step, code) in pairwise(codes) if code != before]
        return ", ".join([str(codes[0][1]), *changes])

    def seeds(self) -> tuple[Any, ...]:
        """Return the sequence of seeds from step 1; runs of one configuration with equal sequences are the same run.

        A branch adds its seeds to its parent's unless they are equal; if the parent is gone, the digest of the state
        that the branch started from stands for the parent's seeds.
        """
        own = tuple(self.settings[name] for name in SEEDS)
        if self.branch is None:
            return (own,)
        before = self.parent_on_disk.seeds() if self.parent_on_disk else (self.branch.digest or self.branch.run,)
        return before if before[-1] == own else (*before, own)

    def configuration(self) -> Configuration:
        """Return the key that is equal for runs that differ in their seeds alone."""
        names = sorted(name for name in self.settings if belongs_to_configuration(name) and name not in SEEDS)
        settings = tuple((name, json.dumps(self.settings[name], sort_keys=True)) for name in names)
        if self.branch is None:
            return (settings,)
        if self.parent_on_disk:
            return settings, self.branch.step, self.parent_on_disk.configuration()
        return settings, self.branch.step, self.branch.digest or self.branch.run


def prediction_task(record: Record) -> tuple[Any, ...]:
    """Return a key of the data that a run predicts; only losses with equal keys are comparable."""
    source, setting = record.settings["data.source"], record.settings.get
    if source == "random":
        return source, setting("model.vocab_size")
    if source == "text":  # the hash covers the tokens, but not the weights of a mixture
        return source, setting("data.hash") or setting("data.path"), *(setting("data.mix") or {}).values()
    return source, setting("data.facts"), setting("data.zipf") if setting("data.facts") else None


def belongs_to_configuration(name: str) -> bool:
    """Return whether a setting affects the training, not only where or how fast it happens."""
    return not IGNORED_SETTINGS & {name, name.split(".")[0]}


def is_finite(value: Any) -> bool:
    """Return whether a value of a row is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_record(path: Path) -> Record:
    """Read the run in a directory; raise ConfigError if it is not a run directory, or damaged."""
    reader = RunReader(path)
    settings, all_sessions = reader.settings, reader.sessions()
    rows, status = {row["step"]: row for row in reader.metrics()}, reader.status()
    branch = next(filter(None, (session.branched_from for session in all_sessions)), None)
    if branch:
        rows = {step: row for step, row in rows.items() if step > branch.step}
    completed = max([*rows, status.step if status else 0])
    record = Record(path, dict(settings), rows, status, branch, surviving_sessions(all_sessions, completed))
    record.settings |= {"mixed_precision": record.session_fact("mixed_precision"), "code": record.code()}
    return record


def read_records(paths: list[Path]) -> tuple[list[Record], list[str]]:
    """Read the runs among directories, with labels and parents; return them, and why others are not runs."""
    records, skipped = [], []
    for path in dict.fromkeys(paths):
        try:
            records.append(read_record(path))
        except ConfigError as error:
            skipped.append(str(error).removeprefix("run: "))
    names = [record.path.resolve().name for record in records]
    for record, name in zip(records, names, strict=True):
        record.label = printable(name if names.count(name) == 1 else str(record.path))
    on_disk = read_ancestors(records)
    for record in on_disk:
        record.parent, record.parent_on_disk = find_parent(record, records), find_parent(record, on_disk)
    return records, skipped


def read_ancestors(records: list[Record]) -> list[Record]:
    """Return the runs and, for branches, the runs on disk that may be their parents, and the parents of those.

    The configuration of a branch includes its parent's, so parents are read even if they are not compared.
    """
    known = {record.path.resolve(): record for record in records}
    queue = [*records]
    while queue:
        if (branch := queue.pop().branch) is None:
            continue
        parent = Path(branch.run)
        moved_aside = sorted(parent.parent.glob(f"{glob.escape(parent.name)}.old-*"))  # by --resume never
        for path in (parent, *moved_aside):
            if path.resolve() not in known:
                with suppress(ConfigError):
                    known[path.resolve()] = record = read_record(path)
                    queue.append(record)
    return [*known.values()]


def find_parent(record: Record, candidates: Iterable[Record]) -> Record | None:
    """Return the run that a branch left: it had the same state digest after the same step.

    Among several such runs it is the one at the recorded path, else the first by path.
    """
    if (branch := record.branch) is None:
        return None
    older = [other for other in candidates if other is not record and other.rows and min(other.rows) <= branch.step]
    older.sort(key=lambda other: (str(other.path.resolve()) != branch.run, str(other.path.resolve())))
    if branch.digest is None:
        return next((other for other in older if str(other.path.resolve()) == branch.run), None)
    return next((o for o in older if o.rows.get(branch.step, {}).get("state/digest") == branch.digest), None)


def first_divergence(one: Record, other: Record, *metrics: str) -> int | None:
    """Return the first step where one of these metrics differs; NEVER if none does, None if no step has both values."""
    ours, theirs = one.history, other.history
    num_compared = 0
    for step in sorted(ours.keys() & theirs.keys()):
        both = [name for name in metrics if name in ours[step] and name in theirs[step]]
        if any(ours[step][name] != theirs[step][name] for name in both):
            return step
        num_compared += len(both)
    return NEVER if num_compared else None


def differing_settings(records: list[Record]) -> list[str]:
    """Return the settings that differ between runs, except their location."""
    names = dict.fromkeys(name for record in records for name in record.settings)
    return [
        name
        for name in names
        if name not in ("name", "out_dir", "resume", "branch_from")
        and len({json.dumps(record.settings.get(name)) for record in records}) > 1
    ]


def changed_by_branch(branch: Record) -> list[str]:
    """Return the settings and facts in which a branch differs from the same steps of its parent."""
    assert branch.parent is not None
    names = [name for name in differing_settings([branch.parent, branch]) if belongs_to_configuration(name)]
    runs = (branch.parent, branch)
    parent_facts, branch_facts = (run.settings | {"code": run.code(after=branch.fork_step)} for run in runs)
    return [name for name in names if name not in FACTS] + compare_facts(parent_facts, branch_facts)


def measure_effect(branch: Record, records: list[Record]) -> tuple[int, float, list[float]] | None:
    """Compare the validation loss of a branch with its parent's, at the last step where both were evaluated.

    Returns:
        The step; the difference branch - parent; and the losses at that step of the parent and of the branches from the
        same checkpoint that changed only a seed, one for each seed. None if there is no such step, or if the two
        predict different data.
    """
    assert branch.parent is not None
    ours, theirs = dict(branch.curve("val/loss")), dict(branch.parent.curve("val/loss", from_start=True))
    both = ours.keys() & theirs.keys()
    if not both or prediction_task(branch) != prediction_task(branch.parent):
        return None
    step = max(both)
    repeats = [(branch.parent.seeds(), theirs[step])]
    for other in records:
        if other.parent is branch.parent and other.fork_step == branch.fork_step:
            loss = dict(other.curve("val/loss")).get(step)
            if loss is not None and set(changed_by_branch(other)) <= {*SEEDS}:
                repeats.append((other.seeds(), loss))
    return step, ours[step] - theirs[step], average_by_seed(repeats)


def final_values(records: list[Record], metric: str = "val/loss") -> list[float]:
    """Return a metric after the last step of runs of one configuration, one value for each seed."""
    values = [(record.seeds(), record.final(metric)) for record in records]
    return average_by_seed([(seeds, value) for seeds, value in values if value is not None])


def average_by_seed(values: list[tuple[tuple[Any, ...], float]]) -> list[float]:
    """Average the values with equal seeds: repeating a run adds no sample, though it may differ by rounding."""
    by_seeds: dict[tuple[Any, ...], list[float]] = {}
    for seeds, value in values:
        by_seeds.setdefault(seeds, []).append(value)
    return [statistics.fmean(repetitions) for repetitions in by_seeds.values()]
