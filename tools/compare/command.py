"""Print tables of runs and draw their curves."""

from collections.abc import Iterator
from pathlib import Path

from cli.output import printable
from config.errors import ConfigError
from config.paths import expand_user_path
from tools.compare.branches import format_trees
from tools.compare.records import read_records
from tools.compare.report import make_curves, save_figure, save_page
from tools.compare.settings import CompareConfig
from tools.compare.tables import (
    Group,
    Table,
    cost_table,
    format_differing_settings,
    group_by_data,
    loss_table,
    significance_table,
    tokenizer_tables,
)


def main(config: CompareConfig) -> None:
    """Print the comparison and write the figures.

    Raises:
        ConfigError: A path does not exist, none is a run, or the figures cannot be written.
    """
    paths = [expand_user_path("runs", run) for run in config.runs]
    if missing := [path for path in paths if not path.exists()]:
        raise ConfigError(f"runs: {str(missing[0])!r} does not exist")
    records, skipped = read_records(paths)
    for reason in skipped:
        print(f"skipped: {printable(reason)}")
    if not records:
        raise ConfigError("runs: none of these is the directory of a run")
    groups = group_by_data(records)
    tables = [make_tables(group, config.loss) for group in groups]
    by_tokenizer = tokenizer_tables(groups)
    for line in (*format_report(groups, tables, by_tokenizer), *format_trees(records)):
        print(line)
    if config.out:
        out = expand_user_path("out", config.out)
        save_figures(groups, tables, by_tokenizer, out / "compare" if out.is_dir() else out, config.x)


def make_tables(group: Group, target_loss: float | None) -> list[Table]:
    """Make the tables of a group of runs."""
    tables = [loss_table(group, target_loss), cost_table(group), significance_table(group)]
    return [table for table in tables if table is not None]


def format_report(groups: list[Group], tables: list[list[Table]], by_tokenizer: list[Table]) -> Iterator[str]:
    """Format everything except branches, a line at a time."""
    if len(groups) > 1:
        yield f"These runs predict {len(groups)} kinds of data, whose losses are not comparable."
    for number, (group, group_tables) in enumerate(zip(groups, tables, strict=True), start=1):
        if len(groups) > 1:
            runs = "1 run" if len(group.records) == 1 else f"{len(group.records)} runs"
            yield from ["", f"{number}. {group.title}: {runs}"]
        yield from format_differing_settings(group.records)
        for table in group_tables:
            yield from ["", *table.lines()]
    for table in by_tokenizer:
        yield from ["", "The same text encoded by several tokenizers:", *table.lines()]


def save_figures(groups: list[Group], tables: list[list[Table]], by_tokenizer: list[Table], out: Path, x: str) -> None:
    """Write a figure for each group, and the HTML page; raise ConfigError if they cannot be written."""
    suffixes = [f"-{number}.png" for number in range(1, len(groups) + 1)] if len(groups) > 1 else [".png"]
    if left_out := [record.label for group in groups for record in group.records if not record.to_axis(x)]:
        print(f"not plotted, because they did not log {x}: {', '.join(left_out)}")
    try:
        curves = [make_curves(group, x) for group in groups]
        out.parent.mkdir(parents=True, exist_ok=True)
        for group, group_curves, suffix in zip(groups, curves, suffixes, strict=True):
            save_figure(group.title, group_curves, out.with_name(out.name + suffix), x)
        pages = [(groups[i].title, curves[i], tables[i]) for i in range(len(groups))]
        pages += [("the same text encoded by several tokenizers", [], [table]) for table in by_tokenizer]
        save_page(pages, out.with_name(out.name + ".html"), x)
    except OSError as error:
        raise ConfigError(f"out: {str(out)!r}: the figures cannot be written: {error}") from None
    print(f"curves: {', '.join(f'{out}{suffix}' for suffix in suffixes)}; interactive, with the tables: {out}.html")
