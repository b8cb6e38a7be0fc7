"""Runs that left others at a checkpoint, as a tree: what each changed, and the effect beside the noise."""

import statistics
from collections.abc import Iterator

from cli.output import printable
from comparison.records import Record, changes, effect
from comparison.tables import shown, word


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
