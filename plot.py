"""Draws runs from their metrics.jsonl: python plot.py RUN... [--x tokens] writes loss.png into each run, excess.png if
it tells its excess over the floor by kind, and layers.png if it has `tracking.block_stats`. comparison/report.py draws
several runs over each other.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from config.errors import ConfigError
from config.paths import expanded
from plotting.style import (
    COLORS,
    DASHES,
    FLOOR,
    THICK,
    THIN,
    X_AXES,
    as_written,
    drawable,
    finish_axes,
    label_round,
    marks,
    new_figure,
    places_on,
)
from run.metrics_log import read_rows

LAYER_TITLES = {
    "weight_norm": "norm of the weights (L2)",
    "gradient_norm": "norm of the gradients (L2)",
    "activation_rms": "root mean square of the activations",
    "update_ratio": "norm of the update / norm of the weights",
}


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
    training, validation, floors = curve("train/loss"), curve("val/loss"), curve("val/entropy")[1]
    marker = "o" if len(training[0]) == 1 else None  # of one point there is no line
    axes.plot(*training, color=COLORS[0], **THIN, label="training (thin)", marker=marker, markersize=3)
    if validation[0]:
        style = THICK | marks(0, len(validation[0]))
        axes.plot(*validation, color=COLORS[1], **style, label="validation (thick)")
    if floors:
        axes.axhline(floors[-1], **FLOOR, label=f"floor = {floors[-1]:.4f}")
    axes.set_title(drawable(run_directory.resolve().name))
    finish_axes(axes, [*floors, *training[1], *validation[1]], x)
    axes.legend(loc="best", fontsize="small")  # does not warn of its cost
    picture = picture or run_directory / "loss.png"
    figure.savefig(picture, dpi=150)
    return picture


def save_loss_by_position(losses: list[float], metrics: dict[str, Any], name: str, picture: Path) -> None:
    """Write a picture of the loss at each position of a sequence, in nats; `metrics` have the mean as val/loss and, if
    it is known, val/entropy.

    Raises:
        OSError: it cannot be written.
    """
    figure = new_figure(7, 4.2)
    axes = figure.add_subplot(xscale="log", xlabel="tokens before it in the sequence", ylabel="loss (nats per token)")
    axes.plot(range(1, len(losses) + 1), losses, color=COLORS[0], **THICK, label="at this position")
    axes.axhline(metrics["val/loss"], color="black", linestyle="--", label=f"mean = {metrics['val/loss']:.4f}")
    if (floor := metrics.get("val/entropy")) is not None:
        axes.axhline(floor, **FLOOR, label=f"floor = {floor:.4f}")
    axes.set_title(drawable(name))
    label_round(axes.xaxis, *axes.get_xlim())
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=150)


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
    by `val/excess_loss/KIND`; None without any, or without one above it.

    Raises:
        OSError: there is no metrics.jsonl, or the picture cannot be written.
    """
    rows = [row for row in read_rows(run_directory / "metrics.jsonl") if isinstance(row.get("val/entropy"), float)]
    names = [name for name in (rows[-1] if rows else ()) if name.startswith("val/excess_loss/")]
    curves = {"all": [row["val/loss"] - row["val/entropy"] if row["val/loss"] else math.nan for row in rows]}
    curves |= {name.rpartition("/")[2].replace("_", " "): [row.get(name) or math.nan for row in rows] for name in names}
    seen = [value for values in curves.values() for value in values if value > 0]
    if not (names and seen):
        return None
    figure = new_figure(7, 4.2)
    import matplotlib

    facts = sorted(label for label in curves if label.startswith("facts"))
    shades = matplotlib.colormaps["viridis"]([i / max(1, len(facts)) for i in range(len(facts))])
    axes = figure.add_subplot()
    # The legend's order is that of the lines where they end.
    for label, values in sorted(curves.items(), key=lambda curve: -curve[1][-1]):
        if label == "all":
            style = {"color": "black", "linewidth": 2.4}
        elif label in facts:  # the rarer, the lighter
            style = {"color": shades[facts.index(label)]} | marks(facts.index(label), len(values))
        else:
            place = [*curves].index(label)
            style = {"color": COLORS[1 + 2 * (place % 2)], "linestyle": (0, DASHES[1 + place % 3])}
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
    """Draws runs: python plot.py RUN... writes loss.png into each, and layers.png if it has tracking.block_stats."""

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
