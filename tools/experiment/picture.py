"""The picture of a screen: the effect of each idea with its interval, sorted, and its costs beside it."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from tools.experiment.analysis import Idea, Screen
from tools.plot import new_figure

STYLES = {
    "better": ("#0072B2", "o"),
    "worse": ("#D55E00", "X"),
    "unknown": ("#888888", "D"),
    "failed": ("#A0428A", "s"),
}
MAX_LABEL = 52  # characters
MIN_REACH, MAX_REACH = 0.1, 1.0  # of the axis on either side of zero, as fractions


def draw(screen: Screen, path: Path, metric: str = "excess loss") -> None:
    """Write the picture, in the format of the path's suffix."""
    ideas = sorted(screen.ideas, key=lambda idea: (math.isnan(idea.effect), idea.effect))
    reach = axis_reach(ideas)
    figure = new_figure(10, 1.4 + 0.25 * len(ideas))
    axes = figure.add_subplot()
    for height, idea in enumerate(ideas):
        draw_idea(axes, height, idea, reach)
    axes.axvline(0, color="black", linewidth=1)
    heights, bottom_and_top = range(len(ideas)), (len(ideas) - 0.4, -1.6)
    axes.set(xlim=(-reach, reach), ylim=bottom_and_top)
    axes.locator_params(axis="x", steps=[1, 2, 5, 10])
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:+.0f}%" if value else "0")
    axes.set_yticks(heights, [label(idea.idea) for idea in ideas], fontsize="small", parse_math=False)
    costs = axes.twinx()
    costs.set_ylim(bottom_and_top)
    header = "".join(f"{name:>8}" for name in ("effect", "failed", "seconds", "params", "FLOPs"))
    costs.set_yticks([-1, *heights], [header, *map(cells, ideas)], fontsize="small", family="monospace")
    for name, idea in zip(axes.get_yticklabels(), ideas, strict=True):
        name.set(style="italic" if is_sham(idea) else "normal")
        name.set_color("black" if idea.verdict == "unknown" else STYLES[idea.verdict][0])
    for side in (axes, costs):
        side.tick_params(axis="y", length=0)
        side.spines[["left", "right", "top"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(f"change of the {metric}, 95% interval (left is better; {describe(screen)})", fontsize="small")
    verdicts = [verdict for verdict in STYLES if any(idea.verdict == verdict for idea in ideas)]
    handles = [axes.plot([], [], color=STYLES[one][0], marker=STYLES[one][1], label=one)[0] for one in verdicts]
    axes.legend(
        handles=handles, ncols=4, loc="upper left", fontsize="small", borderpad=0.2, framealpha=1, edgecolor="white"
    )
    figure.savefig(path, dpi=150)


def draw_idea(axes: Any, height: int, idea: Idea, reach: float) -> None:
    """Draw the interval and the estimate of an idea; an arrow at the edge stands for an estimate beyond the axis."""
    color, marker = STYLES[idea.verdict]
    if height % 2 == 0:
        axes.axhspan(height - 0.5, height + 0.5, color="0.95", linewidth=0)
    if idea.verdict == "failed":
        axes.text(0, height, "  makes runs fail", color=color, fontsize="small", va="center")
        return
    if math.isnan(idea.effect):
        axes.text(0, height, "  no estimate", color=color, fontsize="small", va="center")
        return
    line, size = (1.4, 4) if idea.verdict == "unknown" else (2.6, 6)
    axes.plot([idea.low, idea.high], [height, height], color=color, linewidth=line, solid_capstyle="butt")
    if abs(idea.effect) > reach:
        marker = ">" if idea.effect > 0 else "<"
    axes.plot(np.clip(idea.effect, -reach, reach), height, color=color, marker=marker, markersize=size, clip_on=False)


def axis_reach(ideas: list[Idea]) -> float:
    """Return how far the axis reaches from zero: to all gains, the intervals of what is better, and most others."""
    ends = [max(abs(idea.low), abs(idea.high)) for idea in ideas if not math.isnan(idea.low)]
    gains = [abs(idea.low if idea.verdict == "better" else idea.effect) for idea in ideas if idea.effect < 0]
    return float(np.clip(1.1 * max([*gains, np.quantile(ends or [0], 0.8)]), MIN_REACH, MAX_REACH))


def is_sham(idea: Idea) -> bool:
    """Return whether an idea is a sham, which changes nothing and shows what chance does, by its name."""
    return "sham" in idea.idea.lower()


def label(name: str) -> str:
    """Return the label of an idea; a patch is shown by its file name."""
    words = [Path(word).name if word.endswith((".patch", ".diff")) else word for word in name.split(" ")]
    text = " ".join(words)
    return text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 1] + "…"


def cells(idea: Idea) -> str:
    """Return the numbers beside an idea, under those of the header."""
    effect = "" if math.isnan(idea.effect) else f"{100 * idea.effect:+.1f}%"
    ratios = ["" if math.isnan(value) else f"{value:.2f}" for value in (idea.seconds, idea.parameters, idea.flops)]
    return "".join(f"{text:>8}" for text in (effect, idea.failed or "", *ratios))


def describe(screen: Screen) -> str:
    """Return the number of runs."""
    return f"{screen.runs} runs" + (f", {screen.failed} failed" if screen.failed else "")
