"""Draws pictures of a run from its metrics.jsonl: python plot.py runs/stories [more runs]... writes loss.png there, and
layers.png if the run has `tracking.layers`. compare.py draws the curves of several runs over each other with it.
"""

import json
import math
import sys
import warnings
from itertools import pairwise
from pathlib import Path

from data.files import write_atomically
from run.metrics_file import read_rows

Curves = dict[str, dict[str, list[tuple[int, float]]]]  # by the labels of runs and by metrics: steps and values
PAGE = Path(__file__).parent / "analysis" / "curves.html"
NUM_POINTS_DRAWN = 1000  # of a curve, in a page
NUM_LETTERS = 60  # of a title, or of names beside each other in a legend
warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a run's name in letters that the font lacks


def save_loss_curve(run_directory: Path, picture: Path | None = None) -> Path:
    """Write `picture`, or else `<run_directory>/loss.png`: training and validation loss in nats a token, and the floor
    where it is known.

    Raises:
        OSError: there is no metrics.jsonl, or the picture cannot be written.
    """
    from matplotlib.figure import Figure  # without pyplot: no window system is asked for

    rows = list(read_rows(run_directory / "metrics.jsonl"))

    def curve(metric: str) -> tuple[list[int], list[float]]:
        points = [(row["step"], row[metric]) for row in rows if isinstance(row.get(metric), float)]
        return [step for step, _ in points], [value for _, value in points]

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    training = curve("train/loss")
    marker = "o" if len(training[0]) == 1 else None  # of one point there is no line
    axes.plot(*training, color="tab:blue", alpha=0.5, linewidth=1, label="training", marker=marker, markersize=3)
    if (validation := curve("val/loss"))[0]:
        axes.plot(*validation, color="tab:orange", marker="o", markersize=3, label="validation")
    floors = curve("val/floor")[1]
    if floors:
        axes.axhline(floors[-1], color="black", linestyle="--", linewidth=1, label=f"floor = {floors[-1]:.4f}")
    name = run_directory.resolve().name.encode(errors="replace").decode()  # a file system takes what nothing can draw
    axes.set_title(shortened(name), parse_math=False)  # a dollar sign would begin a formula
    finish_axes(axes, [*floors, *training[1], *validation[1]])
    picture = picture or run_directory / "loss.png"
    figure.savefig(picture, dpi=150)
    return picture


def finish_axes(axes, losses: list[float]) -> None:
    """Scale, grid and legend of a picture of losses."""
    losses = [loss for loss in losses if math.isfinite(loss)] or [1.0]
    if (least := min(losses)) > 0:
        ratio = max(losses) / least
        axes.set_yscale("log", subs=(2, 5) if ratio > 10 else None)  # labels have room
        digits = 3 - math.floor(math.log10(ratio - 1)) if 1 < ratio < 2 else 3  # labels differ from each other
        axes.yaxis.set_major_formatter(f"{{x:.{digits}g}}")
        axes.yaxis.set_minor_formatter(f"{{x:.{digits}g}}")
    axes.set(xlabel="optimizer step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3, which="both")
    if labels := axes.get_legend_handles_labels()[1]:
        axes.legend(loc="best", fontsize="small", ncols=1 + len(labels) // 20)  # does not warn of its cost


def shortened(name: str, room: int = NUM_LETTERS) -> str:
    """A name that has room in a picture. Those of a sweep differ at their ends."""
    return name if len(name) <= room else f"{name[: room // 3]}…{name[-room * 2 // 3 :]}"


def save_curves(curves: Curves, path: Path) -> None:
    """Write the training losses, thin, and the validation losses of runs over each other as a picture.

    Raises:
        OSError: it cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.4), layout="constrained")
    axes = figure.add_subplot()
    palette = matplotlib.colormaps["tab10" if len(curves) <= 10 else "turbo"]
    losses, room = [], NUM_LETTERS // (1 + len(curves) // 20)
    for index, (label, metrics) in enumerate(curves.items()):
        color = palette(index if len(curves) <= 10 else index / len(curves))
        # No label of matplotlib may begin with an underscore, and a dollar sign would begin a formula.
        label = shortened(label.lstrip("_"), room).replace("$", r"\$")
        thin, dotted = {"alpha": 0.35, "linewidth": 0.8}, {"marker": "o", "markersize": 2.5}
        if len(metrics.get("train/loss", [])) == 1:
            thin |= dotted
        for metric, style in (("train/loss", thin), ("val/loss", dotted)):
            if points := metrics.get(metric):
                axes.plot(*zip(*points, strict=True), color=color, label=label, **style)
                losses += [value for _, value in points]
                label = None
    finish_axes(axes, losses)
    if legend := axes.get_legend():
        for line in legend.get_lines():  # in the colour of the curve, not that of the thin one
            line.set(alpha=1, linewidth=1.5)
    figure.savefig(path, dpi=150)


def save_page(curves: Curves, path: Path) -> None:
    """Write a page that shows every metric of the runs, to hover and to zoom; it needs nothing but a browser.

    Raises:
        OSError: it cannot be written.
    """

    def rounded(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
        size = 1 + 2 * len(points) // NUM_POINTS_DRAWN
        few = {points[0], points[-1]}
        for i in range(0, len(points), size):  # of each few the least and the greatest: a spike is not passed over
            few |= {choice(points[i : i + size], key=lambda point: point[1]) for choice in (min, max)}
        return [(step, v if isinstance(v, int) else float(f"{v:.6g}")) for step, v in sorted(few)]

    data = [
        (label, {metric: rounded(points) for metric, points in metrics.items()}) for label, metrics in curves.items()
    ]
    # Inside a script of a page, a name must not be able to end it.
    written = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    write_atomically(path, PAGE.read_text().replace("CURVES_OF_RUNS", written))


def save_layers(run_directory: Path) -> Path | None:
    """Write `<run_directory>/layers.png`, a heat map over steps and depth of each `layers/NAME`; None without any.

    Raises:
        OSError: there is no metrics.jsonl, or the picture cannot be written.
    """
    rows = [row for row in read_rows(run_directory / "metrics.jsonl") if any(key.startswith("layers/") for key in row)]
    if not rows:
        return None
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(key.split("/")[1] for key in rows[0] if key.startswith("layers/")))
    steps = [row["step"] for row in rows]
    inner = [(one + other) / 2 for one, other in pairwise(steps)]  # a cell is as wide as its neighbour; one alone is 1
    first, last = (inner[0], inner[-1]) if inner else (steps[0] + 0.5, steps[0] - 0.5)
    edges = [2 * steps[0] - first, *inner, 2 * steps[-1] - last]
    figure = Figure(figsize=(7, 1.8 * len(names)), layout="constrained")
    for axes, name in zip(figure.subplots(len(names), sharex=True, squeeze=False)[:, 0], names, strict=True):
        depth = sum(key.startswith(f"layers/{name}/") for key in rows[0])
        values = [[row.get(f"layers/{name}/{block}") or float("nan") for row in rows] for block in range(depth)]
        finite = [value for of_block in values for value in of_block if 0 < value < float("inf")] or [1.0]
        scale = LogNorm(min(finite), max(*finite, 1.001 * min(finite)))
        mesh = axes.pcolormesh(edges, [block - 0.5 for block in range(depth + 1)], values, norm=scale)
        axes.set(ylabel="block", yticks=range(0, depth, 1 + depth // 8), title=name.replace("_", " "))
        figure.colorbar(mesh, ax=axes)
    axes.set_xlabel("optimizer step")
    figure.savefig(run_directory / "layers.png", dpi=150)
    return run_directory / "layers.png"


if __name__ == "__main__":
    helped = {"-h", "--help"} & {*sys.argv}
    if helped or not sys.argv[1:]:
        print(__doc__, file=sys.stdout if helped else sys.stderr)
        sys.exit(0 if helped else 2)
    for argument in sys.argv[1:]:
        try:
            print(save_loss_curve(Path(argument)))
            if path := save_layers(Path(argument)):
                print(path)
        except OSError as error:
            print(f"plot.py: error: {error}", file=sys.stderr)
            sys.exit(2)
