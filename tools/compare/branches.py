"""Branches as a tree: what each changed, its effect on the validation loss, and the standard deviation over seeds."""

import statistics
from collections.abc import Iterator

from cli.output import printable
from tools.compare.records import Record, changed_by_branch, measure_effect
from tools.compare.tables import format_setting, format_value


def format_trees(records: list[Record]) -> Iterator[str]:
    """Format every run that others branched from, with its branches below it."""
    if any(record.branch for record in records):
        yield from ["", "branches:"]
    for record in records:
        if record.parent is not None:
            continue
        if record.branch:
            parent = printable(record.branch.run)
            yield f"{record.label}, from step {record.branch.step} of {parent}, which is not compared"
        elif any(other.parent is record for other in records):
            yield f"{record.label}: val/loss {format_value(record.last_value('val/loss'))}"
        yield from format_branches(record, records, "")


def format_branches(parent: Record, records: list[Record], indent: str) -> Iterator[str]:
    """Format the branches of a run, and their branches below them."""
    children = sorted((child for child in records if child.parent is parent), key=lambda c: (c.fork_step, c.label))
    for number, child in enumerate(children, start=1):
        is_last = number == len(children)
        changed = [
            f"{name} {format_setting(parent, name)} -> {format_setting(child, name)}"
            for name in changed_by_branch(child)
        ]
        line = f"{indent}{'└' if is_last else '├'}─ step {child.fork_step}: {child.label}"
        line += f" ({', '.join(changed) or 'nothing changed'})"
        if effect := measure_effect(child, records):
            step, difference, repeats = effect
            line += f": {difference:+.4g} at step {step}"
            if len(repeats) > 1:
                line += f", std over {len(repeats)} seeds {statistics.stdev(repeats):.4g}"
        yield line
        yield from format_branches(child, records, indent + ("   " if is_last else "│  "))
