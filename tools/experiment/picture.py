"""The picture of a screen: the effect of each idea with its interval, sorted, and its costs beside it."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from tools.experiment.change import PATCH_SUFFIXES
from tools.plot import new_figure

STYLES = {
    "better": ("#0072B2", "o"),
    "worse": ("#D55E00", "X"),
    "unknown": ("#888888", "D"),
    "failed": ("#A0428A", "s"),
}
MAX_LABEL = 52  # characters
MIN_REACH, MAX_REACH = 0.1, 1.0  # of the axis on either side of zero, as fractions


def draw(screen: dict[str, Any], path: Path) -> None:
    """Write the picture of a screen, given as the object of `--json`, in the format of the path's suffix."""
    ideas = sorted_ideas(screen)
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
    axes.set_yticks(heights, [label(idea["idea"]) for idea in ideas], fontsize="small", parse_math=False)
    costs = axes.twinx()
    costs.set_ylim(bottom_and_top)
    header = "".join(f"{name:>8}" for name in ("effect", "failed", "seconds", "params", "FLOPs"))
    costs.set_yticks([-1, *heights], [header, *map(cells, ideas)], fontsize="small", family="monospace")
    for name, idea in zip(axes.get_yticklabels(), ideas, strict=True):
        # A sham changes nothing and shows what chance does.
        name.set(style="italic" if "sham" in idea["idea"].lower() else "normal")
        name.set_color("black" if idea["verdict"] == "unknown" else STYLES[idea["verdict"]][0])
    for side in (axes, costs):
        side.tick_params(axis="y", length=0)
        side.spines[["left", "right", "top"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    runs = f"{screen['runs']} runs" + (f", {screen['failed']} failed" if screen["failed"] else "")
    axes.set_xlabel(f"change of the excess loss, 95% interval (left is better; {runs})", fontsize="small")
    verdicts = [verdict for verdict in STYLES if any(idea["verdict"] == verdict for idea in ideas)]
    handles = [axes.plot([], [], color=STYLES[one][0], marker=STYLES[one][1], label=one)[0] for one in verdicts]
    axes.legend(
        handles=handles, ncols=4, loc="upper left", fontsize="small", borderpad=0.2, framealpha=1, edgecolor="white"
    )
    figure.savefig(path, dpi=150)


def sorted_ideas(screen: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the ideas of a screen, the best first, and those without an estimate last."""
    return sorted(screen["ideas"], key=lambda idea: math.inf if idea["effect"] is None else idea["effect"])


def draw_idea(axes: Any, height: int, idea: dict[str, Any], reach: float) -> None:
    """Draw the interval and the estimate of an idea; an arrow at the edge stands for an estimate beyond the axis."""
    color, marker = STYLES[idea["verdict"]]
    if height % 2 == 0:
        axes.axhspan(height - 0.5, height + 0.5, color="0.95", linewidth=0)
    if idea["verdict"] == "failed":
        axes.text(0, height, "  makes runs fail", color=color, fontsize="small", va="center")
        return
    if idea["effect"] is None:
        axes.text(0, height, "  no estimate", color=color, fontsize="small", va="center")
        return
    line, size = (1.4, 4) if idea["verdict"] == "unknown" else (2.6, 6)
    axes.plot([idea["low"], idea["high"]], [height, height], color=color, linewidth=line, solid_capstyle="butt")
    if abs(idea["effect"]) > reach:
        marker = ">" if idea["effect"] > 0 else "<"
    middle = np.clip(idea["effect"], -reach, reach)
    axes.plot(middle, height, color=color, marker=marker, markersize=size, clip_on=False)


def axis_reach(ideas: list[dict[str, Any]]) -> float:
    """Return how far the axis reaches from zero: to all gains, the intervals of what is better, and most others."""
    known = [idea for idea in ideas if idea["effect"] is not None]
    ends = [max(abs(idea["low"]), abs(idea["high"])) for idea in known]
    gains = [abs(idea["low" if idea["verdict"] == "better" else "effect"]) for idea in known if idea["effect"] < 0]
    return float(np.clip(1.1 * max([*gains, np.quantile(ends or [0], 0.8)]), MIN_REACH, MAX_REACH))


def label(name: str) -> str:
    """Return the label of an idea; a patch is shown by its file name."""
    text = " ".join(Path(word).name if word.endswith(PATCH_SUFFIXES) else word for word in name.split(" "))
    return text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 1] + "…"


def cells(idea: dict[str, Any]) -> str:
    """Return the numbers beside an idea, under those of the header."""
    effect = "" if idea["effect"] is None else f"{100 * idea['effect']:+.1f}%"
    costs = [idea[name] for name in ("seconds", "parameters", "flops")]
    ratios = ["" if value is None else f"{value:.2f}" for value in costs]
    return "".join(f"{text:>8}" for text in (effect, idea["failed"] or "", *ratios))
