"""The curves of runs over each other: a picture of the losses, and a page of every metric with the tables beside it.

Runs of one recipe, which differ by their seeds alone, are one curve in one colour: the mean, in a band from the lowest
to the highest of them. A run that has not come to its last step, as one that diverged, is a curve of its own in that
colour: at no step does the mean change for a run that ends there.
"""

import json
import statistics
import textwrap
from dataclasses import dataclass
from pathlib import Path

from comparison.records import Record
from comparison.tables import Group, Table
from data.files import write_atomically
from plotting.style import (
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

PAGE = Path(__file__).with_name("report.html")
NUM_POINTS_DRAWN = 1000  # of a line, in a page
NUM_ROWS, NUM_KEYS = 24, 4  # of a legend in a column, and what it explains besides the names
LEGEND_LETTERS = 70  # of a line, beside one panel
SHOWN = ("train/", "val/", "perf/", "generation/")
ABOVE_FLOOR = "val/loss above the floor"

Line = list[tuple[float, ...]]
"""Points (x, value) of one run, or (x, mean, lowest, highest) of several."""


@dataclass(frozen=True)
class Curves:
    """A recipe, as it is drawn."""

    label: str
    metrics: dict[str, list[Line]]

    def values(self, metric: str) -> list[float]:
        """All that is drawn of it."""
        return [value for line in self.metrics.get(metric, []) for point in line for value in point[1:]]


def of_group(group: Group, x: str) -> list[Curves]:
    """Of each of its recipes, over an axis of X_AXES; but for the runs that do not tell what a step is on it."""
    seeds = {label: len({record.seeds() for record in records}) for label, records in group.recipes.items()}
    if all(number == 1 for number in seeds.values()):
        names = {label: records[0].label for label, records in group.recipes.items()}
    else:
        names = {label: f"{label} ({number} seeds)" if number > 1 else label for label, number in seeds.items()}
    return [
        Curves(names[label], lines([record for record in records if record.tells(x)], x))
        for label, records in group.recipes.items()
    ]


def lines(records: list[Record], x: str) -> dict[str, list[Line]]:
    """By metrics: the mean of those that are finished, and each of the others by itself."""
    finished = {record.seeds(): record for record in records if record.final() is not None}  # a repetition is no seed
    together = [[*finished.values()], *([record] for record in records if record.final() is None)]
    found: dict[str, list[Line]] = {}
    for members in filter(None, together):
        curves, places = [curves_of(record) for record in members], [record.places(x) for record in members]
        for metric in dict.fromkeys(metric for each in curves for metric in each):
            of_metric = [each.get(metric, {}) for each in curves]
            line = []
            for step in sorted(set.intersection(*map(set, of_metric))):
                values = [each[step] for each in of_metric]
                band = (min(values), max(values)) if len(values) > 1 else ()
                mean = statistics.fmean(values) if band else values[0]
                line.append((statistics.fmean(place(step) for place in places) if x != "steps" else step, mean, *band))
            if line:
                found.setdefault(metric, []).append(line)
    return found


def curves_of(record: Record) -> dict[str, dict[int, float]]:
    """By metrics the value at every step. What a branch shares with its parent is drawn there, but for the point where
    it leaves."""
    curves = {}
    names = dict.fromkeys(key for row in record.rows.values() for key in row)
    for metric in names:
        if metric.startswith(SHOWN) and (own := record.curve(metric)):
            curves[metric] = dict(record.curve(metric, whole=True)[-len(own) - 1 :])
    floors = curves.get("val/entropy", {})
    above = {step: loss - floors[step] for step, loss in curves.get("val/loss", {}).items() if step in floors}
    return curves | ({ABOVE_FLOOR: above} if above else {})


def save_picture(title: str, curves: list[Curves], path: Path, x: str = "steps") -> None:
    """Write the training losses, thin, and the validation losses, thick, as a picture, with every floor that is known;
    then beside them what is above it, on a logarithmic axis: there the last hundredth can be seen.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    has_floor = any(value > 0 for each in curves for value in each.values(ABOVE_FLOOR))
    figure = new_figure(11 if has_floor else 8, 4.4)
    panels = figure.subplots(1, 1 + has_floor, sharex=True, squeeze=False)[0]
    room, key = LEGEND_LETTERS // (1 + len(curves) // NUM_ROWS) // (1 + has_floor), []
    num_lines = max(1, (NUM_ROWS - NUM_KEYS) // len(curves)) if curves else 1
    for index, each in enumerate(curves):
        draw_lines(panels[0], each.metrics.get("train/loss", []), run_style(index) | THIN, shade=False)
        thick = run_style(index) | THICK
        for axes, metric in zip(panels, ("val/loss", ABOVE_FLOOR), strict=False):
            draw_lines(axes, each.metrics.get(metric, []), thick, index)
        marked = markers(index, 1) if "val/loss" in each.metrics else {}
        key.append(Line2D([], [], **thick, **marked, label=wrapped(each.label, room, num_lines)))
    floors = sorted({float(f"{floor:.5g}") for each in curves for floor in each.values("val/entropy")[-1:]})
    for floor in floors:
        key.append(panels[0].axhline(floor, **ENTROPY_LINE, label=f"floor = {floor:.4f}"))
    for kind, style, words in (
        ("train/loss", THIN, "thin: training"),
        ("val/loss", THICK, "thick: validation"),
    ):
        if any(kind in each.metrics for each in curves):
            key.append(Line2D([], [], color=ENTROPY_LINE["color"], **style, label=words))
    if any(len(point) > 2 for each in curves for line in each.metrics.get("val/loss", []) for point in line):
        key.append(Patch(color=ENTROPY_LINE["color"], alpha=0.25, linewidth=0, label="band: lowest to highest seed"))
    for axes, metrics in zip(panels, (("train/loss", "val/loss"), (ABOVE_FLOOR,)), strict=False):
        drawn = [value for each in curves for metric in metrics for value in each.values(metric)]
        style_loss_axes(axes, [*drawn, *(floors if axes is panels[0] else ())], x)
    if has_floor:
        panels[1].set_ylabel("validation loss above the floor (nats per token)")
    figure.suptitle(fit_label(title), fontsize="medium")
    figure.legend(
        handles=key, loc="outside right upper", fontsize="small", handlelength=4, ncols=1 + len(key) // NUM_ROWS
    )
    figure.savefig(path, dpi=150)


def wrapped(name: str, room: int, num_lines: int) -> str:
    """A name in at most so many lines of `room` letters. Recipes differ anywhere in their names, sweeps at the end."""
    lines = textwrap.wrap(name, room)
    if num_lines == 1 or not lines:
        return fit_label(name, room)
    if len(lines) > num_lines:
        begin = num_lines // 2
        lines = [*lines[: begin - 1], f"{lines[begin - 1][: room - 1]}…", *lines[begin - num_lines :]]
    return "\n".join(fit_label(line, room) for line in lines)


def draw_lines(axes, lines: list[Line], style: dict, index: int | None = None, shade: bool = True) -> None:
    """A recipe's lines of one metric: evaluations, at place `index`, with markers."""
    for line in lines:
        places, values, *band = zip(*line, strict=True)
        own = markers(index, len(line)) if index is not None else {"marker": "o"} if len(line) == 1 else {}
        axes.plot(places, values, **({"markersize": 3} | style | own))
        if band and shade:
            axes.fill_between(places, *band, color=style["color"], alpha=0.2, linewidth=0)


def save_page(groups: list[tuple[str, list[Curves], list[Table]]], path: Path, x: str = "steps") -> None:
    """Write a page that shows every metric of groups of runs, to hover and to zoom, and their tables; it needs nothing
    but a browser. A recipe has the colour and the dashes that it has in the picture.

    Raises:
        OSError: it cannot be written.
    """
    data = [
        {
            "title": title,
            "curves": [
                (each.label, {metric: [*map(few_points, lines)] for metric, lines in each.metrics.items()})
                for each in curves
            ],
            "tables": [vars(table) for table in tables],
        }
        for title, curves, tables in groups
    ]
    # Inside a script of a page, a name must not be able to end it.
    written = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = PAGE.read_text().replace("COLORS_OF_RUNS", json.dumps(COLORS)).replace("DASHES_OF_RUNS", json.dumps(DASHES))
    write_atomically(path, page.replace("X_OF_RUNS", json.dumps([x, X_AXES[x]])).replace("GROUPS_OF_RUNS", written))


def few_points(line: Line) -> Line:
    """Of many points a few: of those beside each other the least and the greatest, so that no spike is passed over."""
    size = 1 + 2 * len(line) // NUM_POINTS_DRAWN
    few = {line[0], line[-1]}
    for i in range(0, len(line), size):
        few |= {choice(line[i : i + size], key=lambda point: point[1]) for choice in (min, max)}
    return [(point[0], *(v if isinstance(v, int) else float(f"{v:.6g}") for v in point[1:])) for point in sorted(few)]
