"""Compares runs: python compare.py RUN RUN..., for a sweep python compare.py runs/*.

Says which settings differ, at which step the runs part, how good and how fast each is, and whether recipes differ
beyond the noise of their seeds. Draws the curves over each other. docs/comparing.md explains what it prints.
"""

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from jsonargparse.typing import PositiveFloat

from analysis.records import (
    SEEDS,
    Recipe,
    Record,
    changes,
    differing,
    effect,
    first_difference,
    is_of_recipe,
    read_records,
    samples,
    welch,
)
from cli.screen import printable
from config import ConfigError, expanded
from plot import save_curves, save_page
from run.identity import code_name

SIGNIFICANT = 0.05
NUM_COLUMNS, NUM_NAMED = 6, 4  # settings that have a column in the table; runs that are named one by one
LOSSES = ("train/loss", "val/loss")
# Settings that say on what a validation loss is measured.
MEASURE = ("evaluation.num_samples", "seq_len", "data.source", "data.hash", "data.mix", "data.documents")
MEASURE += ("data.facts", "data.zipf")


@dataclass
class CompareConfig:
    """Compares runs: settings, where they part, losses, speed, and whether recipes differ beyond the noise."""

    runs: list[str]
    """The directories of the runs. Where runs part is said against the first."""

    loss: PositiveFloat | None = None
    """The validation loss to which to count training tokens. null: the lowest that every finished run reached."""

    out: str | None = "compare"
    """Where to draw the curves: OUT.png, and OUT.html to hover and zoom. null: nowhere."""


def main(config: CompareConfig) -> None:
    """Print and draw.

    Raises:
        ConfigError: none of them is a run, one does not exist, or the curves cannot be drawn there.
    """
    paths = [expanded("runs", run) for run in config.runs]
    if absent := [path for path in paths if not path.exists()]:
        raise ConfigError(f"runs: {str(absent[0])!r} does not exist")
    records, skipped = read_records(paths)
    for reason in skipped:
        print(f"skipped: {printable(reason)}")
    if not records:
        raise ConfigError("runs: none of these is the directory of a run")
    for part in (settings(records), table(records, config.loss), recipes(records), trees(records)):
        for line in part:
            print(line)
    if config.out:
        out = expanded("out", config.out)
        curves = {record.label: curves_of(record) for record in records}
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            save_curves(curves, out.with_name(out.name + ".png"))
            save_page(curves, out.with_name(out.name + ".html"))
        except OSError as error:
            raise ConfigError(f"out: {config.out!r}: the curves cannot be drawn there: {error}") from None
        print(f"curves: {out}.png, and {out}.html to hover and zoom")


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
        yield "  code is a hash of the sources that train; it was " + "; ".join(dict.fromkeys(map(code_name, starts)))


def table(records: list[Record], loss: float | None) -> Iterator[str]:
    """A line a run: that with the lowest validation loss first, those without one last."""
    if loss is None:
        finished = [record for record in records if record.final_loss() is not None] or records
        loss = max((best for record in finished if (best := record.best_loss()) is not None), default=0.0)
    first, names = records[0], differing(records)
    names = names if len(names) <= NUM_COLUMNS else []
    titles = ["run", *names, "state", "step", "train/loss", "val/loss", "best", f"tokens to {loss:.4f}", "tokens/s"]
    titles += ["digest parts", "loss parts"] if len(records) > 1 else []
    rows = [titles]
    for record in sorted(records, key=by_loss):
        rows.append(
            [
                record.label,
                *(word(record, name) for name in names),
                record.status.state if record.status else "unknown",
                str(max(record.rows, default=0)),
                shown(record.last("train/loss")),
                shown(record.last("val/loss")),
                shown(record.best_loss()),
                shown(record.tokens_to(loss), ",d"),
                shown(record.tokens_per_second(), ",.0f"),
            ]
        )
        if record is not first:
            parts = first_difference(first, record, "state/digest"), first_difference(first, record, *LOSSES)
            rows[-1] += ["never" if step == 0 else shown(step, "d") for step in parts]
    yield from ["", *aligned(rows)]
    if len(records) > 1:
        yield f"parts: the first step that both have logged where it is not that of {first.label}"


def by_loss(record: Record) -> tuple[bool, float, str]:
    """The key that sorts runs by their last validation loss, those without one last."""
    loss = record.last("val/loss")
    return loss is None, loss or 0.0, record.label


def recipes(records: list[Record]) -> Iterator[str]:
    """Runs that differ by their seeds alone, as one: mean and deviation, and whether the best differs from the rest."""
    groups: dict[Recipe, list[Record]] = {}
    for record in records:
        groups.setdefault(record.recipe(), []).append(record)
    found = [(group, losses) for group in groups.values() if (losses := samples(group))]
    if len(records) == 1 or not found:
        return
    yield ""
    if all(len(losses) == 1 for _, losses in found):
        yield "No recipe has finished with two seeds: what differs beyond the noise cannot be told."
        return
    found.sort(key=lambda item: statistics.fmean(item[1]))
    all_differing = differing([group[0] for group, _ in found])
    names = [name for name in all_differing if is_of_recipe(name) and name not in SEEDS]
    best = found[0][1]
    comparisons = sum(welch(best, losses) is not None for _, losses in found[1:])  # one seed is compared with nothing
    rows = [["recipe", "seeds", "val/loss", "deviation", "above the best", "p", "verdict"]]
    for group, losses in found:
        one = group[0]
        own = [f"{name} {word(one, name)}" for name in names]
        own += [f"from step {one.branch.step}"] if one.branch else []
        mean, deviation = statistics.fmean(losses), statistics.stdev(losses) if len(losses) > 1 else None
        row = [", ".join(own) or one.label, str(len(losses)), shown(mean), shown(deviation)]
        if losses is not best:
            row += [shown(mean - statistics.fmean(best)), *verdict(welch(best, losses), comparisons)]
        rows.append(row)
    yield from aligned(rows)
    if "steps" in names:
        yield "warning: these recipes train for different numbers of steps, which is a part of every difference"
    if measured := [name for name in names if name in MEASURE]:
        yield f"warning: these losses are not measured on the same sequences ({', '.join(measured)})"
    if unfinished := [record.label for record in records if record.final_loss() is None]:
        yield f"left out, without a validation loss after the last step: {', '.join(unfinished)}"
    if comparisons:
        yield f"p: Welch's t-test against the best, times {comparisons} for as many comparisons (Bonferroni)"


def verdict(p: float | None, comparisons: int) -> list[str]:
    """The corrected p, and what it says."""
    if p is None:
        return ["-", "cannot be told from one seed"]
    p = min(1.0, p * comparisons)
    return [f"{p:.2g}", f"{'beyond' if p < SIGNIFICANT else 'within'} the noise"]


def trees(records: list[Record]) -> Iterator[str]:
    """Every run that others branched from, and those below it."""
    if any(record.branch for record in records):
        yield from ["", "branches:"]
    for record in records:
        if record.parent is None and record.branch:
            parent = printable(record.branch.run)
            yield f"{record.label}, from step {record.branch.step} of {parent}, which is not among these"
        elif record.parent is None and any(other.parent is record for other in records):
            yield f"{record.label}: val/loss {shown(record.last('val/loss'))}"
        if record.parent is None:
            yield from branches_of(record, records, "")


def branches_of(parent: Record, records: list[Record], indent: str) -> Iterator[str]:
    """The branches of a run, and theirs: what each changed, the effect, and the noise of changing a seed alone."""
    children = sorted((r for r in records if r.parent is parent), key=lambda r: (r.branch.step, r.label))
    for child in children:
        is_last = child is children[-1]
        changed = [f"{name} {word(parent, name)} -> {word(child, name)}" for name in changes(child)]
        line = f"{indent}{'└' if is_last else '├'}─ step {child.branch.step}: {child.label}"
        line += f" ({', '.join(changed) or 'nothing changed'})"
        if measured := effect(child, records):
            step, difference, repeats = measured
            line += f": {difference:+.4g} at step {step}"
            if len(repeats) > 1:
                line += f", noise {statistics.stdev(repeats):.4g} by {len(repeats)} seeds"
        yield line
        yield from branches_of(child, records, indent + ("   " if is_last else "│  "))


def curves_of(record: Record) -> dict[str, list[tuple[int, float]]]:
    """Every metric of a run. What a branch shares with its parent is drawn there, but for the point where it leaves."""
    curves = {}
    names = dict.fromkeys(key for row in record.rows.values() for key in row)
    for metric in names:
        if (own := record.curve(metric)) and metric.startswith(("train/", "val/", "perf/", "sample/")):
            curves[metric] = record.curve(metric, whole=True)[-len(own) - 1 :]
    return curves


def aligned(rows: list[list[str]]) -> list[str]:
    """Columns side by side: the first to the left, the others to the right."""
    num_columns = max(map(len, rows))
    rows = [row + [""] * (num_columns - len(row)) for row in rows]
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]  # the widths
    lines = []
    for row in rows:
        cells = [row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:], others, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def word(record: Record, name: str) -> str:
    """The value of a setting."""
    return printable(json.dumps(record.settings.get(name), ensure_ascii=False)).strip('"')


def shown(value: float | None, form: str = ".4f") -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else format(value, form)


if __name__ == "__main__":
    from cli.scripts import run_and_exit

    run_and_exit("compare", CompareConfig, needs_torch=False)
