"""Figures of one run, drawn from its metrics.jsonl: loss, excess loss by token kind, block statistics."""

from itertools import pairwise
from pathlib import Path
from typing import Any

from run.metrics_log import read_rows
from tools.plot.style import (
    COLORS,
    DASHES,
    ENTROPY_LINE,
    THICK,
    THIN,
    X_AXES,
    fit_label,
    format_number,
    markers,
    new_figure,
    set_round_log_ticks,
    step_to_x,
    style_loss_axes,
)

BLOCK_STAT_TITLES = {
    "weight_norm": "weight norm (L2)",
    "gradient_norm": "gradient norm (L2)",
    "activation_rms": "activation RMS",
    "update_ratio": "update norm / weight norm",
}


def save_loss_curve(run_directory: Path, picture: Path | None = None, x: str = "steps") -> Path:
    """Plot the training and validation loss, and the entropy of the data if it is known; return the file.

    The file is `picture`, by default `<run_directory>/loss.png`; `x` is a key of X_AXES. Raise OSError if there is no
    metrics.jsonl, and ConfigError if the run logged too little for the x axis.
    """
    rows, to_x = list(read_rows(run_directory / "metrics.jsonl")), step_to_x(x, run_directory)

    def curve(metric: str) -> tuple[list[float], list[float]]:
        points = [(row["step"], row[metric]) for row in rows if isinstance(row.get(metric), float)]
        return [to_x(step) for step, _ in points], [value for _, value in points]

    figure = new_figure(7, 4.2)
    axes = figure.add_subplot()
    training, validation, entropies = curve("train/loss"), curve("val/loss"), curve("val/entropy")[1]
    marker = "o" if len(training[0]) == 1 else None  # a single point has no line
    axes.plot(*training, color=COLORS[0], **THIN, label="training (thin)", marker=marker, markersize=3)
    if validation[0]:
        style = THICK | markers(0, len(validation[0]))
        axes.plot(*validation, color=COLORS[1], **style, label="validation (thick)")
    if entropies:
        axes.axhline(entropies[-1], **ENTROPY_LINE, label=f"entropy of the data = {entropies[-1]:.4f}")
    axes.set_title(fit_label(run_directory.resolve().name))
    style_loss_axes(axes, [*entropies, *training[1], *validation[1]], x)
    axes.legend(loc="best", fontsize="small")  # an explicit "best" does not warn about its cost
    picture = picture or run_directory / "loss.png"
    figure.savefig(picture, dpi=150)
    return picture


def save_loss_by_position(evaluation: dict[str, Any], picture: Path) -> Path:
    """Plot the loss (nats/token) of each target by its context length, which is one token for the first.

    `evaluation` is the content of evaluation.json.
    """
    losses = [float("nan") if loss is None else loss for loss in evaluation["loss_by_position"]]
    figure = new_figure(7, 4.2)
    axes = figure.add_subplot(xscale="log", xlabel="context length (tokens)", ylabel="validation loss (nats/token)")
    axes.plot(range(1, len(losses) + 1), losses, color=COLORS[0], **THICK, label="at this context length")
    axes.axhline(evaluation["val/loss"], color="black", linestyle="--", label=f"mean = {evaluation['val/loss']:.4f}")
    if (entropy := evaluation.get("val/entropy")) is not None:
        axes.axhline(entropy, **ENTROPY_LINE, label=f"entropy of the data = {entropy:.4f}")
    axes.set_title(fit_label(picture.resolve().parent.name))
    set_round_log_ticks(axes.xaxis, *axes.get_xlim())
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=150)
    return picture


def save_block_stats(run_directory: Path) -> Path | None:
    """Plot a heat map over steps and blocks for each `layers/NAME` metric; return the file, or None without metrics."""
    rows = [row for row in read_rows(run_directory / "metrics.jsonl") if any(key.startswith("layers/") for key in row)]
    if not rows:
        return None
    names = list(dict.fromkeys(key.split("/")[1] for key in rows[0] if key.startswith("layers/")))
    steps = [row["step"] for row in rows]
    midpoints = [(one + other) / 2 for one, other in pairwise(steps)]
    # The first and last cells are symmetric about their steps; the cell of a single step is one step wide.
    first, last = (midpoints[0], midpoints[-1]) if midpoints else (steps[0] + 0.5, steps[0] - 0.5)
    edges = [2 * steps[0] - first, *midpoints, 2 * steps[-1] - last]
    figure = new_figure(7, 0.4 + 1.8 * len(names))
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FuncFormatter

    figure.suptitle(fit_label(run_directory.resolve().name))
    panels = figure.subplots(len(names), sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        depth = sum(key.startswith(f"layers/{name}/") for key in rows[0])
        values = [[row.get(f"layers/{name}/{block}") or float("nan") for row in rows] for block in range(depth)]
        positive = [value for block in values for value in block if 0 < value < float("inf")] or [1.0]
        low, high = min(positive), max(*positive, 1.001 * min(positive))
        mesh = axes.pcolormesh(edges, [block - 0.5 for block in range(depth + 1)], values, norm=LogNorm(low, high))
        axes.set(ylabel="block", yticks=range(0, depth, 1 + depth // 8))
        axes.set_title(BLOCK_STAT_TITLES.get(name, name.replace("_", " ")), fontsize="medium")
        set_round_log_ticks(figure.colorbar(mesh, ax=axes).ax.yaxis, low, high)
    panels[-1].xaxis.set_major_formatter(FuncFormatter(lambda step, _: format_number(step)))
    panels[-1].set_xlabel(X_AXES["steps"])
    figure.savefig(run_directory / "layers.png", dpi=150)
    return run_directory / "layers.png"


def save_excess_loss(run_directory: Path) -> Path | None:
    """Plot the excess validation loss by kind of token; return the file, or None without a positive value to plot."""
    rows = [row for row in read_rows(run_directory / "metrics.jsonl") if "val/excess_loss" in row]
    names = [name for name in (rows[-1] if rows else ()) if name.startswith("val/excess_loss/")]
    labels = {"all": "val/excess_loss"} | {name.rpartition("/")[2].replace("_", " "): name for name in names}
    curves = {label: [row.get(name) or float("nan") for row in rows] for label, name in labels.items()}
    positive = [value for values in curves.values() for value in values if value > 0]
    if not (names and positive):
        return None
    figure = new_figure(7, 4.2)
    import matplotlib

    facts = sorted(label for label in curves if label.startswith("facts"))
    shades = matplotlib.colormaps["viridis"]([i / max(1, len(facts)) for i in range(len(facts))])
    axes = figure.add_subplot()
    # The legend lists the curves from top to bottom, in the order of their last values.
    for label, values in sorted(curves.items(), key=lambda curve: -curve[1][-1]):
        if label == "all":
            style = {"color": "black", "linewidth": 2.4}
        elif label in facts:  # rarer facts are lighter
            style = {"color": shades[facts.index(label)]} | markers(facts.index(label), len(values))
        else:
            index = [*curves].index(label)
            style = {"color": COLORS[1 + 2 * (index % 2)], "linestyle": (0, DASHES[1 + index % 3])}
        axes.plot([row["step"] for row in rows], values, label=label, **style)
    axes.set(title=fit_label(run_directory.resolve().name), xlabel=X_AXES["steps"], yscale="log")
    axes.set_ylabel("excess validation loss (nats/token)")
    axes.set_ylim(bottom=max(min(positive), 1e-4 * max(positive)) / 2)
    set_round_log_ticks(axes.yaxis, *axes.get_ylim())
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(run_directory / "excess.png", dpi=150)
    return run_directory / "excess.png"
