"""Figures and an HTML page that compare runs: losses as PNG; every metric, with the tables, as HTML.

The runs of one configuration differ only in their seeds and are one curve: the mean over seeds, in a band from lowest
to highest. An unfinished run, without a finite validation loss after its last step, is a separate curve in the same
colour, so that the mean does not jump where a run ends.
"""

import json
import statistics
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.files import write_atomically
from tools.compare.records import Record
from tools.compare.tables import Group, Table
from tools.plot.style import (
    COLORS,
    DASHES,
    ENTROPY_LINE,
    THICK,
    THIN,
    X_AXES,
    fit_label,
    markers,
    new_figure,
    run_style,
    style_loss_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = Path(__file__).with_name("report.html")
MAX_POINTS = 1000  # approximate limit for the points of a line in the page
MAX_LEGEND_ROWS = 24
NUM_STYLE_ENTRIES = 4  # legend entries that explain line styles
LEGEND_WIDTH = 70  # characters of a legend beside one panel
PAGE_METRICS = ("train/", "val/", "perf/", "generation/")
EXCESS_LOSS = "val/excess_loss"

Line = list[tuple[float, ...]]
"""Points (x, value) of one run, or (x, mean, lowest, highest) over seeds."""


@dataclass(frozen=True)
class Curves:
    """The curves of a configuration."""

    label: str
    metrics: dict[str, list[Line]]
    """Lines by metric: the mean of the finished runs, and each unfinished run."""

    def values(self, metric: str) -> list[float]:
        """Return all values of a metric, including the band."""
        return [value for line in self.metrics.get(metric, []) for point in line for value in point[1:]]


def make_curves(group: Group, x: str) -> list[Curves]:
    """Make the curves of each configuration over an axis of X_AXES, without runs that logged too little for it."""
    configurations = group.configurations
    num_seeds = {label: len({record.seeds() for record in records}) for label, records in configurations.items()}
    have_one_seed = max(num_seeds.values()) == 1
    curves = []
    for label, records in configurations.items():
        seeds = f" ({num_seeds[label]} seeds)" if num_seeds[label] > 1 else ""
        curves.append(Curves(records[0].label if have_one_seed else label + seeds, make_lines(records, x)))
    return curves


def make_lines(records: list[Record], x: str) -> dict[str, list[Line]]:
    """Make the lines of one configuration by metric: the mean of its finished runs, then its unfinished runs."""
    to_x = {record: convert for record in records if (convert := record.to_axis(x))}
    finished = {record.seeds(): record for record in to_x if record.final() is not None}  # ignores repetitions
    unfinished = [record for record in to_x if record.final() is None]
    lines: dict[str, list[Line]] = {}
    for members in filter(None, [[*finished.values()], *([record] for record in unfinished)]):
        curves = [read_curves(each) for each in members]
        for metric in dict.fromkeys(metric for run_curves in curves for metric in run_curves):
            values = [run_curves.get(metric, {}) for run_curves in curves]
            if line := average_curves(values, [to_x[each] for each in members]):
                lines.setdefault(metric, []).append(line)
    return lines


def average_curves(curves: list[dict[int, float]], to_x: list[Callable[[float], float]]) -> Line:
    """Average one metric over runs at the steps that all of them logged."""
    line: Line = []
    for step in sorted(set.intersection(*map(set, curves))):
        values = [curve[step] for curve in curves]
        means = [values[0]] if len(values) == 1 else [statistics.fmean(values), min(values), max(values)]
        line.append((statistics.fmean(convert(step) for convert in to_x), *means))
    return line


def read_curves(record: Record) -> dict[str, dict[int, float]]:
    """Return the values of each metric by step; for a branch, from the last point that it shares with its parent."""
    curves = {}
    for metric in dict.fromkeys(key for row in record.rows.values() for key in row):
        if metric.startswith(PAGE_METRICS) and (own := record.curve(metric)):
            curves[metric] = dict(record.curve(metric, from_start=True)[-len(own) - 1 :])
    return curves


def save_figure(title: str, curves: list[Curves], path: Path, x: str = "steps") -> None:
    """Plot training losses (thin) and validation losses (thick) with the entropy of the data where it is known.

    A second panel shows the excess validation loss on a logarithmic axis, where small differences near the entropy are
    visible.

    Raises:
        OSError: The figure cannot be written.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    has_excess = any(value > 0 for each in curves for value in each.values(EXCESS_LOSS))
    figure = new_figure(11 if has_excess else 8, 4.4)
    panels = figure.subplots(1, 1 + has_excess, sharex=True, squeeze=False)[0]
    width = LEGEND_WIDTH // (1 + len(curves) // MAX_LEGEND_ROWS) // (1 + has_excess)
    max_lines = max(1, (MAX_LEGEND_ROWS - NUM_STYLE_ENTRIES) // len(curves))
    legend: list[Any] = []
    for index, each in enumerate(curves):
        plot_lines(panels[0], each.metrics.get("train/loss", []), run_style(index) | THIN)
        thick = run_style(index) | THICK
        for axes, metric in zip(panels, ("val/loss", EXCESS_LOSS), strict=False):
            plot_evaluations(axes, each.metrics.get(metric, []), thick, index)
        marker = markers(index, 1) if "val/loss" in each.metrics else {}
        legend.append(Line2D([], [], **thick, **marker, label=wrap_label(each.label, width, max_lines)))
    entropies = sorted({float(f"{value:.5g}") for each in curves for value in each.values("val/entropy")[-1:]})
    for entropy in entropies:
        legend.append(panels[0].axhline(entropy, **ENTROPY_LINE, label=f"entropy of the data = {entropy:.4f}"))
    for metric, style, label in (("train/loss", THIN, "thin: training"), ("val/loss", THICK, "thick: validation")):
        if any(metric in each.metrics for each in curves):
            legend.append(Line2D([], [], color=ENTROPY_LINE["color"], **style, label=label))
    if any(len(point) > 2 for each in curves for line in each.metrics.get("val/loss", []) for point in line):
        legend.append(Patch(color=ENTROPY_LINE["color"], alpha=0.25, linewidth=0, label="band: min to max over seeds"))
    losses = [value for each in curves for metric in ("train/loss", "val/loss") for value in each.values(metric)]
    style_loss_axes(panels[0], [*losses, *entropies], x)
    if has_excess:
        style_loss_axes(panels[1], [value for each in curves for value in each.values(EXCESS_LOSS)], x)
        panels[1].set_ylabel("excess validation loss (nats/token)")
    figure.suptitle(fit_label(title), fontsize="medium")
    num_columns = 1 + len(legend) // MAX_LEGEND_ROWS
    figure.legend(handles=legend, loc="outside right upper", fontsize="small", handlelength=4, ncols=num_columns)
    figure.savefig(path, dpi=150)


def wrap_label(label: str, width: int, max_lines: int) -> str:
    """Wrap a label into lines of at most `width` characters; leave out the middle if there are too many."""
    lines = textwrap.wrap(label, width)
    if max_lines == 1 or not lines:
        return fit_label(label, width)
    if len(lines) > max_lines:
        begin = max_lines // 2
        lines = [*lines[: begin - 1], f"{lines[begin - 1][: width - 1]}…", *lines[begin - max_lines :]]
    return "\n".join(fit_label(line, width) for line in lines)


def plot_lines(axes: "Axes", lines: list[Line], style: dict[str, Any]) -> None:
    """Plot lines without their bands; a single point gets a marker."""
    for line in lines:
        marker = {"marker": "o", "markersize": 3} if len(line) == 1 else {}
        axes.plot([point[0] for point in line], [point[1] for point in line], **style, **marker)


def plot_evaluations(axes: "Axes", lines: list[Line], style: dict[str, Any], index: int) -> None:
    """Plot lines with the markers of configuration number `index` and with their bands."""
    for line in lines:
        xs, values, *band = (list(column) for column in zip(*line, strict=True))
        axes.plot(xs, values, **style, **markers(index, len(line)))
        if band:
            axes.fill_between(xs, band[0], band[1], color=style["color"], alpha=0.2, linewidth=0)


def save_page(groups: list[tuple[str, list[Curves], list[Table]]], path: Path, x: str = "steps") -> None:
    """Write a self-contained HTML page with every metric of groups of runs, to hover and zoom, and their tables.

    Configurations have the colours and dashes of the figure.
    """
    data = []
    for title, curves, tables in groups:
        thinned = [
            (each.label, {name: [*map(thin_out, lines)] for name, lines in each.metrics.items()}) for each in curves
        ]
        data.append({"title": title, "curves": thinned, "tables": [vars(table) for table in tables]})
    # Without the replacement, a run's name could close the script element.
    encoded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = PAGE.read_text().replace("COLORS_OF_RUNS", json.dumps(COLORS)).replace("DASHES_OF_RUNS", json.dumps(DASHES))
    write_atomically(path, page.replace("X_OF_RUNS", json.dumps([x, X_AXES[x]])).replace("GROUPS_OF_RUNS", encoded))


def thin_out(line: Line) -> Line:
    """Reduce a line to about MAX_POINTS points, keeping the minimum and the maximum of every interval."""
    size = 1 + 2 * len(line) // MAX_POINTS
    kept = {line[0], line[-1]}
    for begin in range(0, len(line), size):
        interval = line[begin : begin + size]
        kept |= {min(interval, key=lambda point: point[1]), max(interval, key=lambda point: point[1])}
    return [(point[0], *(v if isinstance(v, int) else float(f"{v:.6g}") for v in point[1:])) for point in sorted(kept)]
