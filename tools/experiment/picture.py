"""The picture of a race: the effect of each idea with its interval, round after round, and its costs beside it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tools.plot import new_figure

STYLES = {
    "better": ("#0072B2", "o"),
    "worse": ("#D55E00", "X"),
    "no gain": ("#009E73", "v"),
    "unknown": ("#888888", "D"),
    "failed": ("#A0428A", "s"),
    "identical": ("#000000", "s"),
    "refused": ("#A0428A", "X"),
    "withdrawn": ("#888888", "X"),
}
WITHOUT_ESTIMATE = {"failed": "its runs fail", "refused": "refused", "withdrawn": "withdrawn"}
MAX_LABEL = 60  # characters
BASELINE = "baseline"  # stands for the idea of which the arms of the first round with --tune are
MAX_LATER_IDEAS = 10  # that are drawn of each round but the first
MIN_REACH, MAX_REACH = 0.1, 1.0  # of the axis on either side of zero, as fractions
COLUMNS = {"effect": "", "runs": "", "steps": "steps", "FLOPs": "flops", "seconds": "seconds", "params": "parameters"}


def draw(race: dict[str, Any], path: Path) -> None:
    """Write the picture of a race, given as the object of `--json`, in the format of the path's suffix."""
    # A row is an idea, or the heading of a round.
    rows: list[dict[str, Any] | str] = []
    has_raced = False
    for entry in race["rounds"]:
        ideas = [idea for idea in best_arms(entry["ideas"]) if idea["verdict"] is not None]
        measured = [idea for idea in ideas if idea["effect"] is not None]
        if has_raced and not measured:
            continue
        loss = "" if entry["baseline_loss"] is None else f" ({entry['baseline_loss']:.4f}{unit_of(race)})"
        rows.append(f"round {entry['round']}, on {'the baseline' if not entry['stack'] else 'the best so far'}{loss}")
        rows += measured[:MAX_LATER_IDEAS] if has_raced else ideas
        has_raced |= any(idea["arm_of"] != BASELINE for idea in ideas)
    ideas = [row for row in rows if isinstance(row, dict)]
    reach = axis_reach(ideas)
    figure = new_figure(11, 1.4 + 0.25 * len(rows))
    axes = figure.add_subplot()
    for height, row in enumerate(rows):
        if isinstance(row, dict):
            draw_idea(axes, height, row, reach)
    axes.axvline(0, color="black", linewidth=1)
    bottom_and_top = (len(rows) - 0.4, -1.6)
    axes.set(xlim=(-reach, reach), ylim=bottom_and_top)
    axes.locator_params(axis="x", steps=[1, 2, 5, 10])
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:+.0f}%" if value else "0")
    labels = [row if isinstance(row, str) else label(row["idea"]) for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize="small", parse_math=False)
    costs = axes.twinx()
    costs.set_ylim(bottom_and_top)
    header = "".join(f"{name:>8}" for name in COLUMNS)
    costs.set_yticks([-1, *range(len(rows))], [header, *map(cells, rows)], fontsize="small", family="monospace")
    for name, row in zip(axes.get_yticklabels(), rows, strict=True):
        if isinstance(row, str):
            name.set(weight="bold")
        else:
            name.set_color("black" if row["verdict"] == "unknown" else STYLES[row["verdict"]][0])
            name.set(weight="bold" if row["joined"] else "normal")
    for side in (axes, costs):
        side.tick_params(axis="y", length=0)
        side.spines[["left", "right", "top"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    runs = f"{race['runs']} runs" + (f", {race['failed']} failed" if race["failed"] else "")
    what = f"change of the {race['compared']}, with intervals that hold at every look"
    axes.set_xlabel(f"{what} (left is better; {runs}; bold: joined the baseline)", fontsize="small")
    verdicts = [verdict for verdict in STYLES if any(idea["verdict"] == verdict for idea in ideas)]
    handles = [axes.plot([], [], color=STYLES[name][0], marker=STYLES[name][1], label=name)[0] for name in verdicts]
    axes.legend(
        handles=handles, ncols=6, loc="upper left", fontsize="small", borderpad=0.2, framealpha=1, edgecolor="white"
    )
    figure.savefig(path, dpi=150)


def best_arms(ideas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the best arm of each idea, which is its first one, and all arms of the baseline that is tuned."""
    best = {idea["arm_of"]: idea for idea in reversed(ideas)}
    return [idea for idea in ideas if idea["arm_of"] == BASELINE or best[idea["arm_of"]] is idea]


def draw_idea(axes: Any, height: int, idea: dict[str, Any], reach: float) -> None:
    """Draw the interval and the estimate of an idea; an arrow at the edge stands for an estimate beyond the axis."""
    color, marker = STYLES[idea["verdict"]]
    if height % 2 == 0:
        axes.axhspan(height - 0.5, height + 0.5, color="0.95", linewidth=0)
    if idea["effect"] is None:
        text = WITHOUT_ESTIMATE.get(idea["verdict"], "no estimate yet")
        axes.text(0, height, f"  {text}", color=color, fontsize="small", va="center")
        return
    line, size = (2.6, 6) if idea["verdict"] in ("better", "worse") else (1.4, 4)
    ends = [idea["low"], min(idea["high"], 2 * reach)]
    axes.plot(ends, [height, height], color=color, linewidth=line, solid_capstyle="butt")
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


def unit_of(race: Mapping[str, Any]) -> str:
    """Return the unit of the losses of a race, with a space; "" for another metric."""
    return " nats/token" if race["compared"] in ("excess loss", "loss") else ""


def label(text: str) -> str:
    """Return the label of an idea: a patch by its file name; the factor of an arm, such as [lr x0.5], at the end."""
    found = re.search(r" \[[^][]* x[^][]*\]$", text)
    factor = found[0] if found else ""
    name = text.removesuffix(factor)
    factor = re.sub(r"\w+\.(?=\w+ x)", "", factor)  # without the section of the setting
    short = " ".join(Path(word).name if word.endswith((".patch", ".diff")) else word for word in name.split(" "))
    room = MAX_LABEL - len(factor)
    return (short if len(short) <= room else short[: room - 1] + "…") + factor


def cells(row: dict[str, Any] | str) -> str:
    """Return the numbers beside an idea, under those of the header."""
    if isinstance(row, str):
        return ""
    effect = "" if row["effect"] is None else f"{100 * row['effect']:+.1f}%"
    runs = f"{row['runs']}" + (f"-{row['failed']}" if row["failed"] else "")
    costs = ["" if row[name] is None else f"{row[name]:.2f}" for name in COLUMNS.values() if name]
    return "".join(f"{text:>8}" for text in (effect, runs, *costs))
