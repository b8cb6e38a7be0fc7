"""How pictures of runs look: for whom colours look alike too, on axes with names, units and round numbers."""

import math
import os
import sys
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from config.errors import ConfigError
from config.schema import TrainConfig
from config.yaml_files import read_yaml
from model.config import GPTConfig
from run.metrics_log import read_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

X_AXES = {
    "steps": "optimizer steps",
    "tokens": "training tokens",
    "flops": "training FLOPs",
    "seconds": "seconds of training, without evaluations and saves",
}
# Of the palette of Okabe and Ito (2008, "Color Universal Design") those that stand out from white and from a dark page
# with a contrast of 3 or more; black is white there. With dashes it takes 20 runs until two look alike, with marks 140.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000")
DASHES = ((), (5, 1.5), (1.5, 1), (6, 1.5, 1.5, 1.5))  # lengths of lines and gaps, in widths of the line
MARKS = "os^DvPX"  # no fewer than colours, whose number has no common factor: a single point has no dashes
THIN, THICK, FLOOR = {"linewidth": 0.8, "alpha": 0.6}, {"linewidth": 1.8}, {"color": "#555555", "linestyle": ":"}
NUM_MARKS = 12  # at most, on a curve
NUM_TICKS = 6

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
    """Scale, ticks and grid of a picture of losses; `x` is one of X_AXES."""
    from matplotlib.ticker import EngFormatter, FuncFormatter

    losses = [loss for loss in losses if math.isfinite(loss)]
    if losses and min(losses) > 0:
        axes.set_yscale("log")
        label_round(axes.yaxis, *axes.get_ylim())
    in_thousands = x in ("tokens", "flops")
    axes.xaxis.set_major_formatter(EngFormatter(sep="") if in_thousands else FuncFormatter(lambda n, _: as_written(n)))
    axes.set(xlabel=X_AXES[x], ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)


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
        after = min(max(1, bisect_left(steps, step)), len(steps) - 1)
        share = (step - steps[after - 1]) / (steps[after] - steps[after - 1])
        return factor * (places[after - 1] + share * (places[after] - places[after - 1]))

    return place


def flops_per_token(run_directory: Path) -> int:
    """Of a training of the run's model on one token: as its starts wrote down or, of an older version, as its settings
    say."""
    starts = run_directory / "sessions.jsonl"
    known = [row["flops_per_token"] for row in read_rows(starts) if "flops_per_token" in row] if starts.exists() else []
    if known:
        return known[-1]
    from checkpoint.provenance import network_size  # slow to import, and for this axis alone

    try:
        settings = read_yaml((run_directory / "config.yaml").read_text())
        config = TrainConfig(model=GPTConfig(**settings["model"]), seq_len=settings["seq_len"])
        return network_size(config)["flops_per_token"]
    except (ConfigError, ValueError, LookupError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(f"x: flops: {run_directory / 'config.yaml'} does not tell the model: {error}") from None
