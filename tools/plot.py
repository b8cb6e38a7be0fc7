"""Plot runs from their metrics.jsonl: python -m tools.plot RUN... [--x tokens].

It writes loss.png into each run, excess.png if the run logged `val/excess_loss/KIND`, layers.png if it logged
`layers/NAME/BLOCK` (tracking.block_stats), and evaluation.png if evaluate.py evaluated it. tools.compare plots several
runs in one figure.

The functions from `new_figure` on are the style of all figures: colours and dashes that colour-blind readers can tell
apart, and axes with round numbers and units.
"""

from typing import Annotated, Literal

from model.settings import Settings
from runtime.config.help import POSITIONAL


class PlotConfig(Settings):
    """Plots runs: writes loss.png, excess.png, layers.png and evaluation.png into the directory of each."""

    runs: Annotated[list[str], POSITIONAL]
    """Run directories, or folders of evaluate.py."""

    x: Literal["steps", "tokens", "flops", "seconds"] = "steps"
    """The x axis of loss.png: optimizer steps, training tokens, training FLOPs, or seconds of training."""


if __name__ == "__main__":  # before anything slow is imported; it calls `main` below and never returns
    from runtime.cli.scripts import run_and_exit

    run_and_exit("tools.plot", PlotConfig, needs_torch=False)

import json
import math
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runtime.config.errors import ConfigError
from runtime.config.paths import expand_user_path
from trainer.run.directory import Run
from trainer.run.metrics_log import read_rows

if TYPE_CHECKING:  # importing matplotlib takes longer than the rest
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

X_AXES = {
    "steps": "optimizer steps",
    "tokens": "training tokens",
    "flops": "training FLOPs",
    "seconds": "training time (seconds, without evaluations and checkpoints)",
}
BLOCK_STAT_TITLES = {
    "weight_norm": "weight norm (L2)",
    "gradient_norm": "gradient norm (L2)",
    "activation_rms": "activation RMS",
    "update_ratio": "update norm / weight norm",
}
# The colours of Okabe and Ito (2008, "Color Universal Design") with a contrast of at least 3 against white. Colours and
# dashes distinguish 20 runs, with markers 140.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000")
KIND_COLORS = (*COLORS[:4], "#8C510A")  # of kinds of tokens: the fifth, black, is all of them
DASHES = ((), (5, 1.5), (1.5, 1), (6, 1.5, 1.5, 1.5))  # lengths of dashes and gaps, in line widths
MARKERS = "os^DvPX"  # a single point shows no dashes, so the numbers of markers and colours are coprime
THIN: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.6}
THICK: dict[str, Any] = {"linewidth": 1.8}
ENTROPY_LINE: dict[str, Any] = {"color": "#555555", "linestyle": ":"}
MAX_MARKERS = 12  # per curve
SMOOTHING = 1.5  # of the loss by context length: the curve is drawn over a logarithm
MAX_TICKS = 6
MAX_LABEL_LENGTH = 60  # characters, in a title or in a legend of one column

warnings.filterwarnings("ignore", "Glyph .* missing from font")  # run names in scripts that the font lacks


def main(config: PlotConfig) -> None:
    """Draw the figures of each run and print their paths; raise ConfigError if a run cannot be plotted."""
    for run in config.runs:
        directory = expand_user_path("runs", run)
        figures: list[Path | None] = []  # None: there is nothing to show
        try:
            if (evaluation := directory / "evaluation.json").exists():
                figures.append(save_loss_by_position(json.loads(evaluation.read_text()), directory / "evaluation.png"))
            if not figures or (directory / "metrics.jsonl").exists():
                figures.append(save_loss_curve(directory, config.x))
                figures += [save_excess_loss(directory), save_block_stats(directory)]
        except (OSError, ValueError, TypeError, KeyError) as error:  # of a file that is missing or damaged
            raise ConfigError(f"runs: {run!r} cannot be plotted: {error}") from None
        for figure in filter(None, figures):
            print(figure)


def save_loss_curve(run_directory: Path, x: str = "steps") -> Path:
    """Plot the training and validation loss, and the entropy of the data if it is known; return the file.

    `x` is a key of X_AXES. Raise OSError if there is no metrics.jsonl, and ConfigError if the run logged too little for
    the x axis.
    """
    rows, to_x = list(read_rows(run_directory / "metrics.jsonl")), step_to_x(x, run_directory)
    figure = new_figure(7, 4.2)
    axes = figure.add_subplot()
    for metric, style, label in (
        ("train/loss", {"color": COLORS[0]} | THIN, "training (thin)"),
        ("val/loss", {"color": COLORS[1]} | THICK, "validation (thick)"),
    ):
        curve = {row["step"]: row[metric] for row in rows if is_finite(row.get(metric))}
        if curve or metric == "train/loss":
            # A single point has no line.
            marker = markers(0, len(curve)) if metric == "val/loss" or len(curve) == 1 else {}
            axes.plot(to_x([*curve]), [*curve.values()], **style, **marker, label=label)
    if entropies := [row["val/entropy"] for row in rows if is_finite(row.get("val/entropy"))]:
        axes.axhline(entropies[-1], **ENTROPY_LINE, label=f"entropy of the data = {entropies[-1]:.4f}")
    axes.set_title(fit_label(run_directory.resolve().name))
    style_loss_axes(axes, x)
    axes.legend(loc="best", fontsize="small")  # an explicit "best" does not warn about its cost
    return save(figure, run_directory / "loss.png")


def save_loss_by_position(evaluation: dict[str, Any], picture: Path) -> Path:
    """Plot the loss (nats/token) of each target by its context length, which is one token for the first.

    `evaluation` is the content of evaluation.json. Neighbouring positions differ much where the texts begin alike, as
    stories do, so the mean of the positions around each is drawn over them.
    """
    losses = [math.nan if loss is None else loss for loss in evaluation["loss_by_position"]]
    figure = new_figure(7, 4.2)
    axes = figure.add_subplot(xscale="log", xlabel="context length (tokens)", ylabel="validation loss (nats/token)")
    lengths = range(1, len(losses) + 1)
    axes.plot(lengths, losses, color=COLORS[0], marker=".", linestyle="none", alpha=0.4, label="at this context length")
    around = f"mean over 1/{SMOOTHING} to {SMOOTHING} times this length"
    axes.plot(lengths, smooth_over_lengths(losses), color=COLORS[1], **THICK, label=around)
    axes.axhline(evaluation["val/loss"], color="black", linestyle="--", label=f"mean = {evaluation['val/loss']:.4f}")
    if (entropy := evaluation.get("val/entropy")) is not None:
        axes.axhline(entropy, **ENTROPY_LINE, label=f"entropy of the data = {entropy:.4f}")
    axes.set_title(fit_label(picture.resolve().parent.name))
    set_round_log_ticks(axes.xaxis)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")  # it would hide points
    return save(figure, picture)


def smooth_over_lengths(losses: Sequence[float]) -> NDArray[np.float64]:
    """Return for each context length L the mean of the losses from L / SMOOTHING to L * SMOOTHING, without NaN."""
    values, lengths = np.asarray(losses, float), np.arange(1, len(losses) + 1)
    is_known = np.isfinite(values)
    sums, counts = (np.concatenate([[0.0], np.cumsum(x)]) for x in (np.where(is_known, values, 0), is_known))
    first = np.ceil(lengths / SMOOTHING).astype(int) - 1
    end = np.minimum(np.floor(lengths * SMOOTHING).astype(int), len(losses))
    num_known = counts[end] - counts[first]
    return np.where(is_known & (num_known > 0), (sums[end] - sums[first]) / np.maximum(num_known, 1), math.nan)


def save_block_stats(run_directory: Path) -> Path | None:
    """Plot a heat map over steps and blocks for each `layers/NAME` metric; return the file, or None without metrics."""
    rows = [row for row in read_rows(run_directory / "metrics.jsonl") if any(key.startswith("layers/") for key in row)]
    if not rows:
        return None
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FuncFormatter

    names = list(dict.fromkeys(key.split("/")[1] for key in rows[0] if key.startswith("layers/")))
    steps = [row["step"] for row in rows]
    midpoints = [(step + next_step) / 2 for step, next_step in pairwise(steps)]
    # The first and last cells are symmetric about their steps; the cell of a single step is one step wide.
    first, last = (midpoints[0], midpoints[-1]) if midpoints else (steps[0] + 0.5, steps[0] - 0.5)
    edges = [2 * steps[0] - first, *midpoints, 2 * steps[-1] - last]
    figure = new_figure(7, 0.4 + 1.8 * len(names))
    figure.suptitle(fit_label(run_directory.resolve().name))
    panels = figure.subplots(len(names), sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        depth = sum(key.startswith(f"layers/{name}/") for key in rows[0])
        values = [[row.get(f"layers/{name}/{block}") or math.nan for row in rows] for block in range(depth)]
        positive = [value for block in values for value in block if 0 < value < math.inf] or [1.0]
        low, high = min(positive), max(*positive, 1.001 * min(positive))
        mesh = axes.pcolormesh(edges, [block - 0.5 for block in range(depth + 1)], values, norm=LogNorm(low, high))
        axes.set(ylabel="block", yticks=range(0, depth, 1 + depth // 8))
        axes.set_title(BLOCK_STAT_TITLES.get(name, name.replace("_", " ")), fontsize="medium")
        set_round_log_ticks(figure.colorbar(mesh, ax=axes).ax.yaxis)
    panels[-1].xaxis.set_major_formatter(FuncFormatter(format_number))
    panels[-1].set_xlabel(X_AXES["steps"])
    return save(figure, run_directory / "layers.png")


def save_excess_loss(run_directory: Path) -> Path | None:
    """Plot the excess validation loss by kind of token; return the file, or None without a positive value to plot."""
    rows = [row for row in read_rows(run_directory / "metrics.jsonl") if "val/excess_loss" in row]
    names = [name for name in (rows[-1] if rows else ()) if name.startswith("val/excess_loss/")]
    labels = {"all": "val/excess_loss"} | {name.rpartition("/")[2].replace("_", " "): name for name in names}
    curves = {label: [row.get(name) or math.nan for row in rows] for label, name in labels.items()}
    positive = [value for values in curves.values() for value in values if value > 0]
    if not (names and positive):
        return None
    # The legend has the order of the metrics: facts after the other kinds, from frequent ones to rare ones.
    facts = [label for label in curves if label.startswith("facts")]
    others = [label for label in curves if label not in ("all", *facts)]
    figure = new_figure(7, 4.2)
    axes = figure.add_subplot()
    for label, values in curves.items():
        if label == "all":
            style: dict[str, Any] = {"color": "black", "linewidth": 2.4}
        elif label in facts:  # greys, of which no other kind is one; rarer facts are lighter
            index = facts.index(label)
            style = {"color": f"{0.2 + 0.5 * index / len(facts):.2f}"} | markers(index, len(values))
        else:
            index = others.index(label)
            style = {"color": KIND_COLORS[index % len(KIND_COLORS)], "linestyle": (0, DASHES[index % len(DASHES)])}
        axes.plot([row["step"] for row in rows], values, label=label, **style)
    axes.set(title=fit_label(run_directory.resolve().name), xlabel=X_AXES["steps"], yscale="log")
    axes.set_ylabel("excess validation loss (nats/token)")
    axes.set_ylim(bottom=max(min(positive), 1e-4 * max(positive)) / 2)
    set_round_log_ticks(axes.yaxis)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return save(figure, run_directory / "excess.png")


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def step_to_x(x: str, run_directory: Path) -> Callable[[float | Sequence[float]], NDArray[np.float64]]:
    """Return the function that maps steps of a run to their positions on the axis `x`, a key of X_AXES.

    The seconds of a branch are counted from the step where it left its parent. Raise ConfigError if the run logged too
    little for the axis.
    """
    if x == "steps":
        return lambda steps: np.asarray(steps, float)
    run = Run(run_directory)
    speed = "perf/tokens_per_second"
    rows = [row for row in run.metrics() if is_finite(row.get("train/tokens")) and is_finite(row.get(speed))]
    rows = [row for row in rows if row[speed] > 0]
    if not rows:
        raise ConfigError(f"x: {x}: {run_directory / 'metrics.jsonl'} has no train/tokens or {speed}")
    sessions = run.sessions()
    branch = run.branch()
    begin, before = (branch.step, branch.tokens) if branch else (0, 0)
    rows = [row for row in rows if row["step"] > begin]
    logged_steps = np.array([begin, *(row["step"] for row in rows)], float)
    tokens = np.array([before, *(row["train/tokens"] for row in rows)], float)
    seconds = np.cumsum([0.0, *np.diff(tokens) / [row[speed] for row in rows]])
    if x == "seconds":
        return lambda steps: np.asarray(np.interp(steps, logged_steps, seconds))
    flops_per_token = next((s.flops_per_token for s in reversed(sessions) if s.flops_per_token), None)
    if x == "flops" and flops_per_token is None:
        raise ConfigError(f"x: flops: {run_directory / 'sessions.jsonl'} has no flops_per_token; use --x tokens")
    scale = flops_per_token if x == "flops" else 1
    return lambda steps: np.asarray(np.interp(steps, logged_steps, scale * tokens))


def new_figure(width: float, height: float) -> "Figure":
    """Create an empty figure of this size in inches, which can only be written to a file and needs no display."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", path: Path) -> Path:
    """Write a figure as PNG, and return the path; raise OSError if it cannot be written."""
    figure.savefig(path, dpi=150, format="png")
    return path


def run_style(index: int) -> dict[str, Any]:
    return {"color": COLORS[index % len(COLORS)], "linestyle": (0, DASHES[index % len(DASHES)])}


def markers(index: int, num_points: int = 1) -> dict[str, Any]:
    """Return the marker style of curve number `index`, thinned to MAX_MARKERS."""
    every = 1 + (num_points - 1) // MAX_MARKERS
    return {"marker": MARKERS[index % len(MARKERS)], "markersize": 4, "markevery": every}


def style_loss_axes(axes: "Axes", x: str = "steps") -> None:
    """Set scale, ticks, labels and grid of a plot of losses; `x` is a key of X_AXES."""
    from matplotlib.ticker import EngFormatter, FuncFormatter

    if 0 < axes.dataLim.y0 < math.inf:
        axes.set_yscale("log")
        set_round_log_ticks(axes.yaxis)
    has_si_prefixes = x in ("tokens", "flops")
    axes.xaxis.set_major_formatter(EngFormatter(sep="") if has_si_prefixes else FuncFormatter(format_number))
    axes.set(xlabel=X_AXES[x], ylabel="loss (nats/token)")
    axes.grid(alpha=0.3)


def set_round_log_ticks(axis: "Axis") -> None:
    """Label a logarithmic axis with round numbers, without minor ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    if high < 10 * low:  # too few powers of ten
        axis.set_major_locator(MaxNLocator(MAX_TICKS, steps=[1, 2, 5, 10]))
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(format_number))
    axis.set_minor_locator(NullLocator())


def format_number(number: float, position: int | None = None) -> str:
    """Format without an exponent from 0.001 to 10 million: 1,000 instead of 1e+03. `position`: of a tick, unused."""
    return f"{number:,.12g}" if number == 0 or 1e-3 <= abs(number) < 1e7 else f"{number:g}"


def fit_label(name: str, max_length: int = MAX_LABEL_LENGTH) -> str:
    """Shorten a name and escape what matplotlib would interpret; keep its end, where runs of a sweep differ."""
    name = name.encode(errors="replace").decode()  # file names may hold bytes that are not UTF-8
    name = name if len(name) <= max_length else f"{name[: max_length // 3]}…{name[-max_length * 2 // 3 :]}"
    return name.replace("$", r"\$")  # an unescaped dollar sign begins a formula
