"""What compare.py says of runs, as tables: which of them compare, how good each is and what it cost, and which recipes
differ beyond the noise of their seeds.
"""

import json
import os.path
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from checkpoint.identity import describe_code
from cli.output import aligned, printable
from comparison.records import SEEDS, Recipe, Record, differing, first_difference, is_of_recipe, predicted, samples

SIGNIFICANT = 0.05
NUM_COLUMNS, NUM_NAMED = 6, 4  # settings that have a column or are in a label; runs that are named one by one
LOSSES = ("train/loss", "val/loss")
# Settings that say on which sequences of its data a validation loss is measured.
MEASURE = ("evaluation.num_samples", "seq_len", "data.packing")
Recipes = dict[str, list[Record]]  # by their labels


@dataclass(frozen=True)
class Group:
    """Runs that predict the same data, whose losses compare."""

    title: str
    records: list[Record]
    recipes: Recipes
    """Runs that differ by their seeds alone, by what distinguishes them in this group."""

    def place(self, record: Record) -> int:
        """That of its recipe, which has one colour."""
        return next(place for place, records in enumerate(self.recipes.values()) if record in records)


@dataclass
class Table:
    """Rows of words, the first of them titles."""

    rows: list[list[str]]
    recipes: list[int | None] = field(default_factory=list)
    """Of each row but the titles: the place of its recipe in the group, None where it has none."""
    notes: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """As text."""
        yield from aligned(self.rows)
        yield from self.notes


def grouped(records: list[Record]) -> list[Group]:
    """By what they predict, in the order of their first runs."""
    by_data: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        by_data.setdefault(predicted(record), []).append(record)
    return [Group(data_name(members[0]), members, recipes_of(members)) for members in by_data.values()]


def data_name(record: Record) -> str:
    """What it predicts, in words."""
    setting = record.settings.get
    match record.settings["data.source"]:
        case "text":
            corpora = setting("data.mix") or {setting("data.path"): None}
            names = [f"{path}" + (f" x {share:g}" if share is not None else "") for path, share in corpora.items()]
            return printable(f"text of {', '.join(names)} (hash {str(setting('data.hash'))[:8]})")
        case "random":
            return f"random tokens, {setting('model.vocab_size')} of them"
    facts = setting("data.facts")
    return f"stories of {facts} facts (zipf {setting('data.zipf')})" if facts else "stories"


def recipes_of(records: list[Record]) -> Recipes:
    """Runs that differ by their seeds alone, by the settings in which they differ from the others; where these are too
    many, by the name of the runs."""
    found: dict[Recipe, list[Record]] = {}
    for record in records:
        found.setdefault(record.recipe(), []).append(record)
    all_differing = differing([members[0] for members in found.values()])
    names = [name for name in all_differing if is_of_recipe(name) and name not in SEEDS]
    labelled: Recipes = {}
    for members in found.values():
        one = members[0]
        own = [f"{name} {word(one, name)}" for name in names]
        own = own if len(names) <= NUM_COLUMNS else [common_name(members)]
        own += [f"from step {one.branch.step}"] if one.branch else []
        label = ", ".join(own) or common_name(members)
        labelled[label if label not in labelled else f"{label}, {one.label}"] = members
    return labelled


def common_name(records: list[Record]) -> str:
    """What the names of runs of several seeds begin with."""
    names = [record.label for record in records]
    begin = re.sub(r"[-_.]*(seed)?[-_.]*$", "", os.path.commonprefix(names)) if len(names) > 1 else ""
    return begin or names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def settings(records: list[Record]) -> Iterator[str]:
    """The settings that differ, a line each: every value, and which runs have it."""
    names = differing(records)
    if len(records) > 1:
        yield "settings that differ:" if names else "settings that differ: none"
    for name in names:
        having: dict[str, list[str]] = {}
        for record in records:
            having.setdefault(word(record, name), []).append(record.label)
        yield f"  {name}: " + "; ".join(
            f"{value} in {', '.join(labels) if len(labels) <= NUM_NAMED else f'{len(labels)} runs'}"
            for value, labels in having.items()
        )
    if "code" in names:
        starts = [start for record in records for start in record.starts if "code" in start]
        yield "  code is a hash of the sources that train; it was " + "; ".join(
            dict.fromkeys(map(describe_code, starts))
        )


def runs(group: Group, loss: float | None) -> Table:
    """A line a run: that with the lowest validation loss first, those without one last."""
    records = group.records
    if loss is None:
        finished = [record for record in records if record.final() is not None] or records
        loss = max((best for record in finished if (best := record.best_loss()) is not None), default=0.0)
    first, names = records[0], differing(records)
    names = names if len(names) <= NUM_COLUMNS else []
    floor = ["above floor"] if any(record.curve("val/entropy", whole=True) for record in records) else []
    titles = ["run", *names, "state", "step", "train/loss", "val/loss", *floor, "best", f"tokens to {loss:.4f}"]
    table = Table([titles + (["digest parts", "loss parts"] if len(records) > 1 else [])])
    for record in sorted(records, key=by_loss):
        row = [
            record.label,
            *(word(record, name) for name in names),
            record.status.state if record.status else "unknown",
            str(record.done()),
            shown(record.last("train/loss")),
            shown(record.last("val/loss")),
            *(shown(record.above_floor()) for _ in floor),
            shown(record.best_loss()),
            shown(record.tokens_to(loss), ",d"),
        ]
        if record is not first:
            parts = first_difference(first, record, "state/digest"), first_difference(first, record, *LOSSES)
            row += ["never" if step == 0 else shown(step, "d") for step in parts]
        table.rows.append(row)
        table.recipes.append(group.place(record))
    if len(records) > 1:
        table.notes.append(f"parts: the first step that both have logged where it is not that of {first.label}")
    return table


def costs(group: Group) -> Table:
    """A line a run, in the same order: what it needed until where it stands."""
    titles = ["run", "parameters", "tokens", "FLOPs", "seconds", "tokens/s", "peak memory"]
    table = Table([titles], notes=["seconds: of training, without evaluations and saves"])
    for record in sorted(group.records, key=by_loss):
        parameters, memory = record.fact("parameters"), record.peak_memory_bytes()
        row = [record.label, shown(parameters, ",d"), f"{record.tokens(record.done()):,d}"]
        row += [shown(record.spent("flops"), ".3g"), shown(record.spent("seconds"), ",.1f")]
        row += [shown(record.tokens_per_second(), ",.0f"), "-" if memory is None else f"{memory / 1e6:,.0f} MB"]
        table.rows.append(row)
        table.recipes.append(group.place(record))
    return table


def by_loss(record: Record) -> tuple[bool, float, str]:
    """The key that sorts runs by their last validation loss, those without one last."""
    loss = record.last("val/loss")
    return loss is None, loss or 0.0, record.label


def verdicts(group: Group) -> Table | None:
    """Runs that differ by their seeds alone, as one: mean and deviation, and whether the best differs from the rest.
    None where there is nothing to compare."""
    finished = [(records, losses) for records in group.recipes.values() if (losses := samples(records))]
    if len(group.records) == 1 or not finished:
        return None
    names, warnings = differing([records[0] for records, _ in finished]), []
    if "steps" in names:
        warnings += ["warning: these recipes train for different numbers of steps, which is a part of every difference"]
    if measured := [name for name in names if name in MEASURE]:
        warnings += [f"warning: these losses are not measured on the same sequences ({', '.join(measured)})"]
    if all(len(losses) == 1 for _, losses in finished):
        told = "No recipe has finished with two seeds: what differs beyond the noise cannot be told."
        return Table([], notes=[*warnings, told])
    table = ranked(group.recipes, "val/loss")
    table.notes = warnings + table.notes
    return table


def by_bytes(groups: list[Group]) -> list[Table]:
    """Of groups that predict the same text, cut into tokens by several tokenizers, which compare by bits per byte. The
    whole of it must have been evaluated: so many rows are another part of the text for another tokenizer."""
    by_text: dict[str, list[Group]] = {}
    for group in groups:
        if text := next(filter(None, (record.fact("validation_text") for record in group.records)), None):
            by_text.setdefault(text, []).append(group)
    tables = []
    for members in (members for members in by_text.values() if len(members) > 1):
        recipes = {
            group.title + (f": {label}" if len(group.recipes) > 1 else ""): records
            for group in members
            for label, records in group.recipes.items()
        }
        whole = {
            label: kept
            for label, records in recipes.items()
            if (kept := [one for one in records if one.settings["evaluation.num_samples"] is None])
        }
        table = ranked(whole, "val/bits_per_byte")
        if not table.recipes:  # none has come to its end
            continue
        table.recipes = [None for _ in table.recipes]  # no place in one group
        if len(whole) < len(recipes):
            table.notes.append("left out, with evaluation.num_samples: what they evaluate is not all of the text")
        tables.append(table)
    return tables


def ranked(recipes: Recipes, metric: str) -> Table:
    """Recipes by the mean of a metric over their seeds, and whether the best differs from each of the others."""
    from experiments.sequential_test import welch_p_value  # scipy takes a second to import

    found = [(label, values) for label, records in recipes.items() if (values := samples(records, metric))]
    found.sort(key=lambda item: statistics.fmean(item[1]))
    best, places = found[0][1] if found else [], [*recipes]
    # With one seed there is nothing to compare with.
    probabilities = {label: welch_p_value(best, values) for label, values in found[1:]}
    comparisons = sum(p is not None for p in probabilities.values())
    table = Table([["recipe", "seeds", metric, "deviation", "above the best", "p", "verdict"]])
    for label, values in found:
        mean, deviation = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
        row = [label, str(len(values)), shown(mean), shown(deviation)]
        if values is not best:
            p = probabilities[label]
            difference = shown(mean - statistics.fmean(best))
            row += [difference, *(verdict(p * comparisons) if p is not None else untold(best, values))]
        table.rows.append(row)
        table.recipes.append(places.index(label))
    if unfinished := [one.label for records in recipes.values() for one in records if one.final(metric) is None]:
        table.notes.append(f"left out, without a validation loss after the last step: {', '.join(unfinished)}")
    if comparisons:
        table.notes.append(
            f"p: Welch's t-test against the best, times {comparisons} for as many comparisons (Bonferroni)"
        )
    return table


def verdict(p: float) -> list[str]:
    """The corrected p, and what it says."""
    p = min(1.0, p)
    return [f"{p:.2g}", f"{'beyond' if p < SIGNIFICANT else 'within'} the noise"]


def untold(best: list[float], values: list[float]) -> list[str]:
    """Of which of the two there is only one."""
    whose = "this recipe" if len(best) > 1 else "the best" if len(values) > 1 else "each of the two"
    return ["-", f"cannot be told from one seed of {whose}"]


def word(record: Record, name: str) -> str:
    """The value of a setting."""
    return printable(json.dumps(record.settings.get(name), ensure_ascii=False)).strip('"')


def shown(value: float | None, form: str = ".4f") -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else format(value, form)
