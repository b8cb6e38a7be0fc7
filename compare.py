"""Compares runs: python compare.py RUN RUN..., for a sweep python compare.py runs/*.

Says which settings differ, at which step the runs part, how good and how fast each is, what it cost, and whether
recipes differ beyond the noise of their seeds. Draws the curves over each other. Runs that predict different data are
told apart. docs/comparing.md explains what it prints.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jsonargparse.typing import PositiveFloat

from cli.output import printable
from comparison import tables as comparison_tables
from comparison.branches import trees
from comparison.records import read_records
from comparison.report import of_group, save_page, save_picture
from comparison.tables import Group, Table, grouped
from config.errors import ConfigError
from config.paths import expanded


@dataclass
class CompareConfig:
    """Compares runs: settings, where they part, losses, costs, and whether recipes differ beyond the noise."""

    runs: list[str]
    """The directories of the runs. Where runs part is said against the first one that predicts the same data."""

    loss: PositiveFloat | None = None
    """The validation loss to which to count training tokens. null: the lowest that every finished run reached."""

    x: Literal["steps", "tokens", "flops", "seconds"] = "steps"
    """What the curves are drawn over: optimizer steps, training tokens, the FLOPs of these, or seconds of training."""

    out: str | None = "compare"
    """Where to draw the curves: OUT.png, of several kinds of data OUT-1.png, OUT-2.png, ...; and OUT.html, with the
    tables, to hover and zoom. null: nowhere."""


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
    groups = grouped(records)
    tables = [[*filter(None, tables_of(group, config.loss))] for group in groups]
    across = comparison_tables.by_bytes(groups)
    for line in (*report(groups, tables, across), *trees(records)):
        print(line)
    if config.out:
        out = expanded("out", config.out)
        draw(groups, tables, across, out / "compare" if out.is_dir() else out, config.x)


def tables_of(group: Group, loss: float | None) -> Iterator[Table | None]:
    """What is said of runs that predict the same."""
    yield comparison_tables.runs(group, loss)
    yield comparison_tables.costs(group)
    yield comparison_tables.verdicts(group)


def report(groups: list[Group], tables: list[list[Table]], across: list[Table]) -> Iterator[str]:
    """All that is printed but for branches."""
    if len(groups) > 1:
        yield f"These runs predict {len(groups)} kinds of data; a loss says nothing beside one on other data."
    for number, (group, of_one) in enumerate(zip(groups, tables, strict=True), start=1):
        if len(groups) > 1:
            yield from ["", f"{number}. {group.title}: {len(group.records)} run{'s'[: len(group.records) > 1]}"]
        yield from comparison_tables.settings(group.records)
        for table in of_one:
            yield from ["", *table.lines()]
    for table in across:
        yield from ["", "The same text in the tokens of several tokenizers:", *table.lines()]


def draw(groups: list[Group], tables: list[list[Table]], across: list[Table], out: Path, x: str) -> None:
    """Write a picture for each group, and the page.

    Raises:
        ConfigError: they cannot be written.
    """
    ends = [f"-{number}.png" for number in range(1, len(groups) + 1)] if len(groups) > 1 else [".png"]
    if lost := [record.label for group in groups for record in group.records if not record.tells(x)]:
        print(f"not drawn, for their files do not tell {x}: {', '.join(lost)}")
    try:
        curves = [of_group(group, x) for group in groups]
        out.parent.mkdir(parents=True, exist_ok=True)
        for group, of_one, end in zip(groups, curves, ends, strict=True):
            save_picture(group.title, of_one, out.with_name(out.name + end), x)
        titles = [group.title for group in groups]
        pages = [(title, *rest) for title, *rest in zip(titles, curves, tables, strict=True)]
        pages += [("the same text by several tokenizers", [], [table]) for table in across]
        save_page(pages, out.with_name(out.name + ".html"), x)
    except OSError as error:
        raise ConfigError(f"out: {str(out)!r}: the curves cannot be drawn there: {error}") from None
    print(f"curves: {', '.join(f'{out}{end}' for end in ends)}, and {out}.html with the tables, to hover and zoom")


if __name__ == "__main__":
    from cli.scripts import run_and_exit

    run_and_exit("compare", CompareConfig, needs_torch=False)
