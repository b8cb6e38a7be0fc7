"""Draws runs from their metrics.jsonl: python plot.py RUN... [--x tokens] writes loss.png into each run, excess.png if
it tells its excess over the floor by kind, and layers.png if it has `tracking.layers`. compare.py draws the curves of
several runs over each other with it.
"""

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from config import ConfigError, expanded
from data.files import write_atomically
from run.metrics_file import read_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curves = dict[str, dict[str, list[tuple[float, float]]]]  # by the labels of runs and by metrics: places on x and values
X_AXES = {
    "steps": "optimizer steps",
    "tokens": "training tokens",
    "flops": "training FLOPs",
    "seconds": "seconds of training, without evaluations and saves",
}
# Of the palette of Okabe and Ito (2008, "Color Universal Design") those that stand out from white and from a dark page
# with a contrast of 3 or more; black is white there. With dashes and marks it takes 20 runs until two look alike.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000")
DASHES = ((), (5, 1.5), (1.5, 1), (6, 1.5, 1.5, 1.5))  # lengths of lines and gaps, in widths of the line
MARKS = "os^Dv"
THIN, THICK, FLOOR = {"linewidth": 0.8, "alpha": 0.6}, {"linewidth": 1.8}, {"color": "#555555", "linestyle": ":"}
NUM_MARKS = 12  # at most, on a curve
NUM_TICKS = 6

LAYER_TITLES = {
    "weight_norm": "norm of the weights (L2)",
    "gradient_norm": "norm of the gradients (L2)",
    "activation_rms": "root mean square of the activations",
    "update_ratio": "norm of the update / norm of the weights",
}

PAGE = Path(__file__).parent / "analysis" / "curves.html"
NUM_POINTS_DRAWN = 1000  # of a curve, in a page
NUM_LETTERS = 60  # of a title, or of names beside each other in a legend
warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a run's name in letters that the font lacks


def new_figure(width: float, height: float) -> "Figure":
    """An empty picture, in inches, that is only ever written to a file: no window system and no notebook is asked."""
    # A backend shows pictures on a screen. One that MPLBACKEND names and that is not there, as that of a notebook in a
    # shell which the notebook started, would end the import with an error.
    backend = os.environ.pop("MPLBACKEND", None) if "matplotlib" not in sys.modules else None
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    if backend is not None:
        os.environ["MPLBACKEND"] = backend
        with suppress(ValueError):
            rcParams["backend"] = backend  # for what draws besides, as in a notebook
    return Figure(figsize=(width, height), layout="constrained")


@contextmanager
def drawing(picture: str, say: Callable[[str], None] = print) -> Iterator[None]:
    """Around what draws a picture beside a result: whatever fails in it, the result is no less there."""
    try:
        yield
    except Exception as error:
        say(f"{picture} cannot be drawn: {error}")


def run_style(index: int) -> dict[str, Any]:
    """How the curve of a run is drawn, by its place among the runs; the page says the same by COLORS and DASHES."""
    return {"color": COLORS[index % len(COLORS)], "linestyle": (0, DASHES[index % len(DASHES)])}


def marks(index: int, num_points: int) -> dict[str, Any]:
    """Those on a curve of evaluations."""
    every = 1 + (num_points - 1) // NUM_MARKS
    return {"marker": MARKS[index % len(MARKS)], "markersize": 4, "markevery": every}


def round_ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high` for a logarithmic axis: 1, 2, 5 of each power of ten or, if those are few,
    steps of one size."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    few = MaxNLocator(NUM_TICKS, steps=[1, 2, 5, 10])
    for places in (LogLocator(numticks=2 * NUM_TICKS), LogLocator(subs=(1, 2, 5), numticks=2 * NUM_TICKS), few):
        ticks = [tick for tick in places.tick_values(low, high) if low <= tick <= high]
        if len(ticks) > 2:
            break
    return ticks


def as_written(number: float) -> str:
    """1, 10, 100 and 0.001 as one writes them; powers of ten beyond a million and a thousandth."""
    return f"{number:,.12g}" if number == 0 or 1e-3 <= abs(number) < 1e7 else f"{number:g}"


def finish_axes(axes, losses: list[float], x: str = "steps") -> None:
    """Scale, ticks, grid and legend of a picture of losses; `x` is one of X_AXES."""
    from matplotlib.ticker import EngFormatter, FuncFormatter

    losses = [loss for loss in losses if math.isfinite(loss)]
    if losses and min(losses) > 0:
        axes.set_yscale("log")
        label_round(axes.yaxis, *axes.get_ylim())
    in_thousands = x in ("tokens", "flops")
    axes.xaxis.set_major_formatter(EngFormatter(sep="") if in_thousands else FuncFormatter(lambda n, _: as_written(n)))
    axes.set(xlabel=X_AXES[x], ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    if labels := axes.get_legend_handles_labels()[1]:
        axes.legend(loc="best", fontsize="small", ncols=1 + len(labels) // 20)  # does not warn of its cost


def label_round(axis, low: float, high: float) -> None:
    """Round numbers at a logarithmic axis."""
    ticks = round_ticks(low, high)
    axis.set_ticks(ticks, [as_written(tick) for tick in ticks])
    axis.set_ticks([], minor=True)


def drawable(name: str, room: int = NUM_LETTERS) -> str:
    """A name as matplotlib can draw it, in so many letters. Those of a sweep differ at their ends."""
    name = name.encode(errors="replace").decode()  # a file system takes what nothing can draw
    name = name if len(name) <= room else f"{name[: room // 3]}…{name[-room * 2 // 3 :]}"
    return name.replace("$", r"\$")  # which would begin a formula


def places_on(x: str, run_directory: Path) -> Callable[[float], float]:
    """What a step of the run is on an axis of X_AXES.

    Raises:
        ConfigError: the files of the run do not tell.
        OSError: they cannot be read.
    """
    if x == "steps":
        return lambda step: step
    steps, tokens, seconds = [0], [0], [0.0]
    for row in read_rows(run_directory / "metrics.jsonl"):
        if "train/tokens" in row and (speed := row.get("perf/tokens_per_second")):
            seconds.append(seconds[-1] + (row["train/tokens"] - tokens[-1]) / speed)
            tokens.append(row["train/tokens"])
            steps.append(row["step"])
    if len(steps) == 1:
        raise ConfigError(f"x: {x}: {run_directory / 'metrics.jsonl'} has no tokens and no speed, only steps")
    places = seconds if x == "seconds" else tokens
    factor = flops_per_token(run_directory) if x == "flops" else 1

    def place(step: float) -> float:
        after = next((i for i in range(1, len(steps)) if steps[i] >= step), len(steps) - 1)
        share = (step - steps[after - 1]) / (steps[after] - steps[after - 1])
        return factor * (places[after - 1] + share * (places[after] - places[after - 1]))

    return place


def flops_per_token(run_directory: Path) -> int:
    """Of a training of the run's model on one token."""
    import torch  # slow to import, and for this axis alone

    from model.config import GPTConfig
    from model.gpt import GPTModel

    try:
        settings = yaml.safe_load((run_directory / "config.yaml").read_text())
        with torch.device("meta"):
            return GPTModel(GPTConfig(**settings["model"])).flops_per_token(settings["seq_len"])
    except (ValueError, LookupError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(f"x: flops: {run_directory / 'config.yaml'} does not tell the model: {error}") from None


def save_loss_curve(run_directory: Path, picture: Path | None = None, x: str = "steps") -> Path:
    """Write `picture`, or else `<run_directory>/loss.png`: training and validation loss over an axis of X_AXES, and the
    floor where it is known.

    Raises:
        OSError: there is no metrics.jsonl, or the picture cannot be written.
        ConfigError: as `places_on`.
    """
    rows, place = list(read_rows(run_directory / "metrics.jsonl")), places_on(x, run_directory)

    def curve(metric: str) -> tuple[list[float], list[float]]:
        points = [(row["step"], row[metric]) for row in rows if isinstance(row.get(metric), float)]
        return [place(step) for step, _ in points], [value for _, value in points]

    figure = new_figure(7, 4.2)
    axes = figure.add_subplot()
    training, validation, floors = curve("train/loss"), curve("val/loss"), curve("val/floor")[1]
    marker = "o" if len(training[0]) == 1 else None  # of one point there is no line
    axes.plot(*training, color=COLORS[0], **THIN, label="training (thin)", marker=marker, markersize=3)
    if validation[0]:
        style = THICK | marks(0, len(validation[0]))
        axes.plot(*validation, color=COLORS[1], **style, label="validation (thick)")
    if floors:
        axes.axhline(floors[-1], **FLOOR, label=f"floor = {floors[-1]:.4f}")
    axes.set_title(drawable(run_directory.resolve().name))
    finish_axes(axes, [*floors, *training[1], *validation[1]], x)
    picture = picture or run_directory / "loss.png"
    figure.savefig(picture, dpi=150)
    return picture


def save_curves(curves: Curves, path: Path, x: str = "steps") -> None:
    """Write the training losses, thin, and the validation losses, thick, of runs over each other as a picture, and
    every floor that is known. `x` is what of X_AXES the places in `curves` are.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib.lines import Line2D

    figure = new_figure(9, 5.4)
    axes = figure.add_subplot()
    losses, room, floors = [], NUM_LETTERS // (1 + len(curves) // 20), set()
    for index, (label, metrics) in enumerate(curves.items()):
        training, validation = metrics.get("train/loss", []), metrics.get("val/loss", [])
        style = run_style(index)
        if training:
            single = {"marker": "o", "markersize": 3} if len(training) == 1 else {}
            thin = THIN | ({"linestyle": "-"} if validation else {})
            axes.plot(*zip(*training, strict=True), **style | thin | single)
        if validation:
            axes.plot(*zip(*validation, strict=True), **style | THICK | marks(index, len(validation)))
        # No label of matplotlib may begin with an underscore.
        axes.plot(
            [], [], **style | THICK | (marks(index, 1) if validation else {}), label=drawable(label.lstrip("_"), room)
        )
        losses += [value for _, value in (*training, *validation)]
        floors |= {float(f"{floor:.5g}") for _, floor in metrics.get("val/floor", [])[-1:]}
    for floor in sorted(floors):
        axes.axhline(floor, **FLOOR, label=f"floor = {floor:.4f}")
    for kind, style in (("train/loss", THIN), ("val/loss", THICK)):
        if any(kind in metrics for metrics in curves.values()):
            word = {"train/loss": "thin: training", "val/loss": "thick: validation"}[kind]
            axes.add_line(Line2D([], [], color="#555555", **style, label=word))
    finish_axes(axes, [*losses, *floors], x)
    figure.savefig(path, dpi=150)


def save_loss_by_position(losses: list[float], metrics: dict[str, Any], name: str, picture: Path) -> None:
    """Write a picture of the loss at each position of a sequence, in nats; `metrics` have the mean as val/loss and, if
    it is known, val/floor.

    Raises:
        OSError: it cannot be written.
    """
    figure = new_figure(7, 4.2)
    axes = figure.add_subplot(xscale="log", xlabel="tokens before it in the sequence", ylabel="loss (nats per token)")
    axes.plot(range(1, len(losses) + 1), losses, color=COLORS[0], **THICK, label="at this position")
    axes.axhline(metrics["val/loss"], color="black", linestyle="--", label=f"mean = {metrics['val/loss']:.4f}")
    if (floor := metrics.get("val/floor")) is not None:
        axes.axhline(floor, **FLOOR, label=f"floor = {floor:.4f}")
    axes.set_title(drawable(name))
    label_round(axes.xaxis, *axes.get_xlim())
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=150)


def save_page(curves: Curves, path: Path, x: str = "steps") -> None:
    """Write a page that shows every metric of the runs, to hover and to zoom; it needs nothing but a browser. A run has
    the colour and the dashes that it has in the picture of `save_curves`.

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
    page = PAGE.read_text().replace("COLORS_OF_RUNS", json.dumps(COLORS)).replace("DASHES_OF_RUNS", json.dumps(DASHES))
    write_atomically(path, page.replace("X_OF_RUNS", json.dumps([x, X_AXES[x]])).replace("CURVES_OF_RUNS", written))


def save_layers(run_directory: Path) -> Path | None:
    """Write `<run_directory>/layers.png`, a heat map over steps and depth of each `layers/NAME`; None without any.

    Raises:
        OSError: there is no metrics.jsonl, or the picture cannot be written.
    """
    rows = [row for row in read_rows(run_directory / "metrics.jsonl") if any(key.startswith("layers/") for key in row)]
    if not rows:
        return None
    names = list(dict.fromkeys(key.split("/")[1] for key in rows[0] if key.startswith("layers/")))
    steps = [row["step"] for row in rows]
    inner = [(one + other) / 2 for one, other in pairwise(steps)]  # a cell is as wide as its neighbour; one alone is 1
    first, last = (inner[0], inner[-1]) if inner else (steps[0] + 0.5, steps[0] - 0.5)
    edges = [2 * steps[0] - first, *inner, 2 * steps[-1] - last]
    figure = new_figure(7, 0.4 + 1.8 * len(names))
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FuncFormatter

    figure.suptitle(drawable(run_directory.resolve().name))
    for axes, name in zip(figure.subplots(len(names), sharex=True, squeeze=False)[:, 0], names, strict=True):
        depth = sum(key.startswith(f"layers/{name}/") for key in rows[0])
        values = [[row.get(f"layers/{name}/{block}") or float("nan") for row in rows] for block in range(depth)]
        finite = [value for of_block in values for value in of_block if 0 < value < float("inf")] or [1.0]
        low, high = min(finite), max(*finite, 1.001 * min(finite))
        mesh = axes.pcolormesh(edges, [block - 0.5 for block in range(depth + 1)], values, norm=LogNorm(low, high))
        axes.set(ylabel="block", yticks=range(0, depth, 1 + depth // 8))
        axes.set_title(LAYER_TITLES.get(name, name.replace("_", " ")), fontsize="medium")
        label_round(figure.colorbar(mesh, ax=axes).ax.yaxis, low, high)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: as_written(step)))
    axes.set_xlabel(X_AXES["steps"])
    figure.savefig(run_directory / "layers.png", dpi=150)
    return run_directory / "layers.png"


def save_excess(run_directory: Path) -> Path | None:
    """Write `<run_directory>/excess.png`: how far above the floor each kind of token is, so when it is learnt, as told
    by `val/excess/KIND`; None without any, or without one above it.

    Raises:
        OSError: there is no metrics.jsonl, or the picture cannot be written.
    """
    rows = [row for row in read_rows(run_directory / "metrics.jsonl") if isinstance(row.get("val/floor"), float)]
    names = [name for name in (rows[-1] if rows else ()) if name.startswith("val/excess/")]
    curves = {"all": [row["val/loss"] - row["val/floor"] if row["val/loss"] else math.nan for row in rows]}
    curves |= {name.rpartition("/")[2].replace("_", " "): [row.get(name) or math.nan for row in rows] for name in names}
    seen = [value for values in curves.values() for value in values if value > 0]
    if not (names and seen):
        return None
    figure = new_figure(7, 4.2)
    axes = figure.add_subplot()
    # The legend's order is that of the lines where they end.
    for index, (label, values) in enumerate(sorted(curves.items(), key=lambda curve: -curve[1][-1])):
        style = {"color": "black", "linewidth": 2.4} if label == "all" else run_style(index) | marks(index, len(values))
        axes.plot([row["step"] for row in rows], values, label=label, **style)
    axes.set(title=drawable(run_directory.resolve().name), xlabel=X_AXES["steps"], yscale="log")
    axes.set_ylabel("loss above the floor (nats per token)")
    axes.set_ylim(bottom=max(min(seen), 1e-4 * max(seen)) / 2)
    label_round(axes.yaxis, *axes.get_ylim())
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(run_directory / "excess.png", dpi=150)
    return run_directory / "excess.png"


@dataclass
class PlotConfig:
    """Draws runs: python plot.py RUN... writes loss.png into each, and layers.png if it has tracking.layers."""

    runs: list[str]
    """The directories of the runs."""

    x: Literal["steps", "tokens", "flops", "seconds"] = "steps"
    """What the losses are drawn over: optimizer steps, training tokens, the FLOPs of these, or seconds of training."""


def main(config: PlotConfig) -> None:
    """Draw each run.

    Raises:
        ConfigError: one is no run, or cannot be drawn.
    """
    for run in config.runs:
        directory = expanded("runs", run)
        try:
            print(save_loss_curve(directory, x=config.x))
            for path in filter(None, (save_excess(directory), save_layers(directory))):
                print(path)
        except OSError as error:
            raise ConfigError(f"runs: {run!r} cannot be drawn: {error}") from None


if __name__ == "__main__":
    from cli.scripts import run_and_exit

    run_and_exit("plot", PlotConfig, needs_torch=False)
