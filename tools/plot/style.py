"""The style of all figures: colours and dashes that colour-blind readers can tell apart, axes with units."""

import math
import os
import sys
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.errors import ConfigError
from run.metrics_log import read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

X_AXES = {
    "steps": "optimizer steps",
    "tokens": "training tokens",
    "flops": "training FLOPs",
    "seconds": "training time (seconds, without evaluations and checkpoints)",
}
# The colours of Okabe and Ito (2008, "Color Universal Design") with a contrast of at least 3 against white and against
# a dark page, where black becomes white. Colours and dashes distinguish 20 runs, with markers 140.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000")
DASHES = ((), (5, 1.5), (1.5, 1), (6, 1.5, 1.5, 1.5))  # lengths of dashes and gaps, in line widths
MARKERS = "os^DvPX"  # a single point shows no dashes, so the numbers of markers and colours are coprime
THIN: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.6}
THICK: dict[str, Any] = {"linewidth": 1.8}
ENTROPY_LINE: dict[str, Any] = {"color": "#555555", "linestyle": ":"}
MAX_MARKERS = 12  # per curve
MAX_TICKS = 6
MAX_LABEL_LENGTH = 60  # characters, in a title or in a legend of one column

warnings.filterwarnings("ignore", "Glyph .* missing from font")  # run names in scripts that the font lacks


def new_figure(width: float, height: float) -> "Figure":
    """Create an empty figure of this size in inches, which can only be written to a file and needs no display."""
    # matplotlib fails to import if MPLBACKEND names a backend that is not installed, as in a shell started from a
    # notebook.
    backend = os.environ.pop("MPLBACKEND", None) if "matplotlib" not in sys.modules else None
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    if backend is not None:
        os.environ["MPLBACKEND"] = backend
        with suppress(ValueError):
            rcParams["backend"] = backend  # for other code in this process that plots, as in a notebook
    return Figure(figsize=(width, height), layout="constrained")


@contextmanager
def report_plot_errors(figure_name: str, say: Callable[[str], None] = print) -> Iterator[None]:
    """Print an error while plotting instead of raising it, so that a plot cannot end a chain of experiments."""
    try:
        yield
    except Exception as error:
        say(f"{figure_name} cannot be plotted: {error}")


def run_style(index: int) -> dict[str, Any]:
    """Return the colour and dashes of run number `index`; tools/compare/report.html uses the same."""
    return {"color": COLORS[index % len(COLORS)], "linestyle": (0, DASHES[index % len(DASHES)])}


def markers(index: int, num_points: int) -> dict[str, Any]:
    """Return the marker style of curve number `index`, thinned to MAX_MARKERS."""
    every = 1 + (num_points - 1) // MAX_MARKERS
    return {"marker": MARKERS[index % len(MARKERS)], "markersize": 4, "markevery": every}


def round_ticks(low: float, high: float) -> list[float]:
    """Return round numbers in [low, high] for a logarithmic axis.

    The first of these with at least three in the range: powers of ten; 1, 2 and 5 times powers of ten; equally spaced
    numbers.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator

    linear = MaxNLocator(MAX_TICKS, steps=[1, 2, 5, 10])
    ticks: list[float] = []
    for locator in (LogLocator(numticks=2 * MAX_TICKS), LogLocator(subs=(1, 2, 5), numticks=2 * MAX_TICKS), linear):
        ticks = [float(tick) for tick in locator.tick_values(low, high) if low <= tick <= high]
        if len(ticks) > 2:
            break
    return ticks


def format_number(number: float) -> str:
    """Format without an exponent from 0.001 to 10 million: 1,000 instead of 1e+03."""
    return f"{number:,.12g}" if number == 0 or 1e-3 <= abs(number) < 1e7 else f"{number:g}"


def style_loss_axes(axes: "Axes", losses: list[float], x: str = "steps") -> None:
    """Set scale, ticks, labels and grid of a plot of losses; `x` is a key of X_AXES."""
    from matplotlib.ticker import EngFormatter, FuncFormatter

    losses = [loss for loss in losses if math.isfinite(loss)]
    if losses and min(losses) > 0:
        axes.set_yscale("log")
        set_round_log_ticks(axes.yaxis, *axes.get_ylim())
    has_si_prefixes = x in ("tokens", "flops")
    formatter = EngFormatter(sep="") if has_si_prefixes else FuncFormatter(lambda number, _: format_number(number))
    axes.xaxis.set_major_formatter(formatter)
    axes.set(xlabel=X_AXES[x], ylabel="loss (nats/token)")
    axes.grid(alpha=0.3)


def set_round_log_ticks(axis: "Axis", low: float, high: float) -> None:
    """Label a logarithmic axis with round numbers, without minor ticks."""
    ticks = round_ticks(low, high)
    axis.set_ticks(ticks, [format_number(tick) for tick in ticks])
    axis.set_ticks([], minor=True)


def fit_label(name: str, max_length: int = MAX_LABEL_LENGTH) -> str:
    """Shorten a name and escape what matplotlib would interpret; keep its end, where runs of a sweep differ."""
    name = name.encode(errors="replace").decode()  # file names may hold bytes that are not UTF-8
    name = name if len(name) <= max_length else f"{name[: max_length // 3]}…{name[-max_length * 2 // 3 :]}"
    return name.replace("$", r"\$")  # an unescaped dollar sign begins a formula


def step_to_x(x: str, run_directory: Path) -> Callable[[float], float]:
    """Return the function that maps a step of a run to its position on the axis `x`, a key of X_AXES.

    Raise ConfigError if the run logged too little for it.
    """
    if x == "steps":
        return lambda step: step
    steps, tokens, seconds = [0], [0], [0.0]
    for row in read_rows(run_directory / "metrics.jsonl"):
        num_tokens, tokens_per_second = row.get("train/tokens"), row.get("perf/tokens_per_second")
        if isinstance(num_tokens, int) and isinstance(tokens_per_second, int | float) and tokens_per_second > 0:
            seconds.append(seconds[-1] + (num_tokens - tokens[-1]) / tokens_per_second)
            tokens.append(num_tokens)
            steps.append(row["step"])
    if len(steps) == 1:
        raise ConfigError(f"x: {x}: {run_directory / 'metrics.jsonl'} has no train/tokens or perf/tokens_per_second")
    logged = seconds if x == "seconds" else tokens
    factor = flops_per_token(run_directory) if x == "flops" else 1

    def interpolate(step: float) -> float:
        after = min(max(1, bisect_left(steps, step)), len(steps) - 1)
        fraction = (step - steps[after - 1]) / (steps[after] - steps[after - 1])
        return factor * (logged[after - 1] + fraction * (logged[after] - logged[after - 1]))

    return interpolate


def flops_per_token(run_directory: Path) -> int:
    """Return the training FLOPs/token in the sessions.jsonl of a run; raise ConfigError if it has none."""
    sessions = run_directory / "sessions.jsonl"
    rows = read_rows(sessions) if sessions.exists() else ()
    recorded = [row["flops_per_token"] for row in rows if "flops_per_token" in row]
    if not recorded:
        raise ConfigError(f"x: flops: {sessions} has no flops_per_token; use --x tokens")
    return recorded[-1]
