"""The tables of tools.compare: losses, costs, and which configurations differ significantly over their seeds."""

import json
import os.path
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from checkpoint.identity import describe_code
from cli.output import aligned, printable
from data.validation_bytes import cover_same_text
from tools.compare.records import (
    NEVER,
    SEEDS,
    Configuration,
    Record,
    belongs_to_configuration,
    differing_settings,
    final_values,
    first_divergence,
    prediction_task,
)

SIGNIFICANCE_LEVEL = 0.05
MAX_COLUMNS = 6  # settings shown as columns, or in a label
MAX_LISTED_RUNS = 4
LOSSES = ("train/loss", "val/loss")
# Settings that select the sequences on which the validation loss is measured.
VALIDATION_SETTINGS = ("evaluation.num_samples", "seq_len", "data.packing")
Configurations = dict[str, list[Record]]
"""Runs by the label of their configuration."""


@dataclass(frozen=True)
class Group:
    """Runs that predict the same data, so that their losses are comparable."""

    title: str
    records: list[Record]
    configurations: Configurations

    def configuration_index(self, record: Record) -> int:
        """Return the index of the run's configuration, which determines its colour."""
        return next(index for index, records in enumerate(self.configurations.values()) if record in records)


@dataclass
class Table:
    """Rows of cells, the first of them titles."""

    rows: list[list[str]]
    configurations: list[int | None] = field(default_factory=list)
    """For each row except the titles, the index of its configuration in the group, or None."""
    notes: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Format as text."""
        yield from aligned(self.rows)
        yield from self.notes


def group_by_data(records: list[Record]) -> list[Group]:
    """Group runs by what they predict, in the order of their first runs."""
    by_data: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        by_data.setdefault(prediction_task(record), []).append(record)
    return [Group(describe_data(members[0]), members, group_by_configuration(members)) for members in by_data.values()]


def describe_data(record: Record) -> str:
    """Describe what a run predicts."""
    setting = record.settings.get
    match record.settings["data.source"]:
        case "text":
            corpora = setting("data.mix") or {setting("data.path"): None}
            names = [f"{path}" + (f" x {weight:g}" if weight is not None else "") for path, weight in corpora.items()]
            return printable(f"text of {', '.join(names)} (hash {str(setting('data.hash'))[:8]})")
        case "random":
            return f"random tokens, vocabulary of {setting('model.vocab_size')}"
    facts = setting("data.facts")
    return f"stories of {facts} facts (zipf {setting('data.zipf')})" if facts else "stories"


def group_by_configuration(records: list[Record]) -> Configurations:
    """Group runs that differ by their seeds alone.

    A label names the settings in which configurations differ or, if these are too many, the runs.
    """
    groups: dict[Configuration, list[Record]] = {}
    for record in records:
        groups.setdefault(record.configuration(), []).append(record)
    differing = differing_settings([members[0] for members in groups.values()])
    names = [name for name in differing if belongs_to_configuration(name) and name not in SEEDS]
    labelled: Configurations = {}
    for members in groups.values():
        first = members[0]
        parts = [f"{name} {format_setting(first, name)}" for name in names]
        parts = parts if len(names) <= MAX_COLUMNS else [common_name(members)]
        parts += [f"from step {first.branch.step}"] if first.branch else []
        label = ", ".join(parts) or common_name(members)
        labelled[label if label not in labelled else f"{label}, {first.label}"] = members
    return labelled


def common_name(records: list[Record]) -> str:
    """Name a configuration by the common prefix of its runs' names or, without one, by its first run."""
    names = [record.label for record in records]
    prefix = re.sub(r"[-_.]*(seed)?[-_.]*$", "", os.path.commonprefix(names)) if len(names) > 1 else ""
    return prefix or names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def format_differing_settings(records: list[Record]) -> Iterator[str]:
    """Format the settings that differ, one a line: every value and the runs that have it."""
    names = differing_settings(records)
    if len(records) > 1:
        yield "settings that differ:" if names else "settings that differ: none"
    for name in names:
        runs_by_value: dict[str, list[str]] = {}
        for record in records:
            runs_by_value.setdefault(format_setting(record, name), []).append(record.label)
        yield f"  {name}: " + "; ".join(
            f"{value} in {', '.join(labels) if len(labels) <= MAX_LISTED_RUNS else f'{len(labels)} runs'}"
            for value, labels in runs_by_value.items()
        )
    if "code" in names:
        sessions = [vars(session) for record in records for session in record.sessions if session.code]
        codes = "; ".join(dict.fromkeys(map(describe_code, sessions)))
        yield f"  code is a hash of the sources that train: {codes}"


def loss_table(group: Group, target_loss: float | None) -> Table:
    """Create a row for each run, lowest validation loss first.

    `target_loss` is the validation loss to count training tokens to; None: the lowest that all finished runs reached.
    """
    records = group.records
    if target_loss is None:
        finished = [record for record in records if record.final() is not None] or records
        target_loss = max((best for record in finished if (best := record.best_loss()) is not None), default=0.0)
    reference, names = records[0], differing_settings(records)
    names = names if len(names) <= MAX_COLUMNS else []
    excess = ["excess loss"] if any(record.curve("val/excess_loss", from_start=True) for record in records) else []
    titles = ["run", *names, "state", "step", "train/loss", "val/loss", *excess, "best", f"tokens to {target_loss:.4f}"]
    table = Table([titles + (["digest diverges", "loss diverges"] if len(records) > 1 else [])])
    for record in sorted(records, key=sort_key):
        row = [
            record.label,
            *(format_setting(record, name) for name in names),
            record.status.state if record.status else "unknown",
            str(record.completed_steps()),
            format_value(record.last_value("train/loss")),
            format_value(record.last_value("val/loss")),
            *(format_value(record.last_value("val/excess_loss")) for _ in excess),
            format_value(record.best_loss()),
            format_value(record.tokens_to_loss(target_loss), ",d"),
        ]
        if record is not reference:
            steps = (first_divergence(reference, record, *metrics) for metrics in (["state/digest"], LOSSES))
            row += ["never" if step == NEVER else format_value(step, "d") for step in steps]
        table.rows.append(row)
        table.configurations.append(group.configuration_index(record))
    if len(records) > 1:
        table.notes.append(f"diverges: the first step logged by both where it differs from {reference.label}")
    return table


def cost_table(group: Group) -> Table:
    """Create a row for each run, in the order of `loss_table`, with its cost so far."""
    titles = ["run", "parameters", "tokens", "FLOPs", "seconds", "tokens/s", "peak memory"]
    table = Table([titles], notes=["seconds: of training, without evaluations and checkpoints"])
    for record in sorted(group.records, key=sort_key):
        memory = max((value for _, value in record.curve("perf/peak_memory_bytes")), default=None)
        speeds = [speed for _, speed in record.curve("perf/tokens_per_second")]
        row = [
            record.label,
            format_value(record.session_fact("parameters"), ",d"),
            f"{record.tokens(record.completed_steps()):,d}",
            format_value(record.cost("flops"), ".3g"),
            format_value(record.cost("seconds"), ",.1f"),
            format_value(statistics.median(speeds) if speeds else None, ",.0f"),
            "-" if memory is None else f"{memory / 1e6:,.0f} MB",
        ]
        table.rows.append(row)
        table.configurations.append(group.configuration_index(record))
    return table


def sort_key(record: Record) -> tuple[bool, float, str]:
    """Return the key that sorts runs by their last validation loss, runs without one last."""
    loss = record.last_value("val/loss")
    return loss is None, loss or 0.0, record.label


def significance_table(group: Group) -> Table | None:
    """Create a row for each configuration with its statistics over seeds; None if there is nothing to compare."""
    finished = [(records, values) for records in group.configurations.values() if (values := final_values(records))]
    if len(group.records) == 1 or not finished:
        return None
    names, warnings = differing_settings([records[0] for records, _ in finished]), []
    if "steps" in names:
        warnings.append(
            "warning: these configurations train for different numbers of steps, which adds to every difference"
        )
    if measured := [name for name in names if name in VALIDATION_SETTINGS]:
        warnings.append(f"warning: these losses are not measured on the same sequences ({', '.join(measured)})")
    if all(len(values) == 1 for _, values in finished):
        return Table(
            [], notes=[*warnings, "No configuration has finished with two seeds: significance needs at least two."]
        )
    table = rank_configurations(group.configurations, "val/loss")
    table.notes = warnings + table.notes
    return table


def tokenizer_tables(groups: list[Group]) -> list[Table]:
    """Create a table for each text that several tokenizers encode, by bits per byte.

    Runs are comparable if all of the text was evaluated, that is, the same number of bytes within the tolerance of
    data/validation_bytes.py.
    """
    by_text: dict[str, list[Group]] = {}
    for group in groups:
        texts = (record.session_fact("validation_text") for record in group.records)
        if text := next(filter(None, texts), None):
            by_text.setdefault(text, []).append(group)
    tables = []
    for members in by_text.values():
        if len(members) == 1:
            continue
        configurations = {
            group.title + (f": {label}" if len(group.configurations) > 1 else ""): records
            for group in members
            for label, records in group.configurations.items()
        }
        all_records = [record for records in configurations.values() for record in records]
        num_bytes = max(record.final("val/bytes") or 0 for record in all_records)
        kept = [record for record in all_records if measures_whole_text(record, num_bytes)]
        comparable = {label: [r for r in records if r in kept] for label, records in configurations.items()}
        table = rank_configurations(comparable, "val/bits_per_byte")
        if len(table.rows) < 3:  # fewer than two configurations have finished
            continue
        table.configurations = [None for _ in table.configurations]  # their indices differ between groups
        finished = [record for record in all_records if record.final("val/bits_per_byte") is not None]
        if left_out := [record.label for record in finished if record not in kept]:
            table.notes.append(f"left out, evaluated on another part of the text: {', '.join(left_out)}")
        tables.append(table)
    return tables


def measures_whole_text(record: Record, num_bytes: float) -> bool:
    """Return whether a run was evaluated on all of a validation text of `num_bytes` bytes."""
    if record.settings["evaluation.num_samples"] is not None:
        return False
    evaluated = record.final("val/bytes")
    return evaluated is not None and cover_same_text(evaluated, num_bytes)


def rank_configurations(configurations: Configurations, metric: str) -> Table:
    """Rank configurations by the mean of a metric over seeds and test the best against each of the others."""
    from tools.experiment.sequential_test import welch_p_value  # imports scipy, which takes a second

    samples = [
        (label, values) for label, records in configurations.items() if (values := final_values(records, metric))
    ]
    samples.sort(key=lambda sample: statistics.fmean(sample[1]))
    best, labels = samples[0][1] if samples else [], [*configurations]
    p_values = {label: welch_p_value(best, values) for label, values in samples[1:]}  # None if a second seed is missing
    num_comparisons = sum(p is not None for p in p_values.values())
    table = Table([["configuration", "seeds", metric, "std", "above best", "p", "verdict"]])
    for label, values in samples:
        mean, deviation = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
        row = [label, str(len(values)), format_value(mean), format_value(deviation)]
        if values is not best:
            row.append(format_value(mean - statistics.fmean(best)))
            if (p := p_values[label]) is None:
                missing = "this configuration" if len(best) > 1 else "the best" if len(values) > 1 else "both"
                row += ["-", f"needs a second seed of {missing}"]
            else:
                p = min(1.0, p * num_comparisons)
                row += [f"{p:.2g}", "significant" if p < SIGNIFICANCE_LEVEL else "not significant"]
        table.rows.append(row)
        table.configurations.append(labels.index(label))
    if unfinished := [one.label for records in configurations.values() for one in records if one.final(metric) is None]:
        table.notes.append(f"left out, without a validation loss after the last step: {', '.join(unfinished)}")
    if num_comparisons:
        test = "Welch's t-test against the best, Bonferroni-corrected for"
        table.notes.append(f"p: {test} {num_comparisons} comparison(s)")
    return table


def format_setting(record: Record, name: str) -> str:
    """Format the value of a setting."""
    return printable(json.dumps(record.settings.get(name), ensure_ascii=False)).strip('"')


def format_value(value: float | None, form: str = ".4f") -> str:
    """Format a number, or a dash for None."""
    return "-" if value is None else format(value, form)
