"""The command `log`: a table of the ideas in chronological order, and a figure of the chain."""

import math
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten

from cli.output import aligned
from tools.plot import COLORS, fit_label, new_figure
from tools.research.ledger import typed_row
from tools.research.output import Result, describe_idea, format_effect
from tools.research.settings import LogConfig
from tools.research.state import HEAD_AGAINST_START, TEST_KINDS, Chain, locked_chain

# Marker, colour and label of the ideas, by their outcome. Filled markers are accepted ideas.
OUTCOMES = {
    "kept": {"marker": "o", "color": COLORS[0], "label": "accepted"},
    "kept unproven": {"marker": "D", "color": COLORS[0], "label": "accepted, unproven"},
    "better": {"marker": "^", "edgecolors": COLORS[2], "facecolors": "none", "label": "better, not accepted"},
    "other": {"marker": "s", "edgecolors": "0.5", "facecolors": "none", "label": "not better"},
    "identical": {"marker": "|", "color": "0.3", "label": "identical", "clip_on": False},
    "failed": {"marker": "x", "color": COLORS[1], "label": "failed", "clip_on": False},
}
MAX_LABEL = 40  # characters of an idea in the figure
MAX_CELL = 60  # characters of an idea in the table
MAX_RELATIVE_LOSS = 1.3  # top of the figure, relative to the first baseline; worse ideas are drawn at it
SECONDS_PER_HOUR = 3600

Points = list[tuple[float, float]]


def log(config: LogConfig) -> Result:
    """Return the chain as a table, and draw it in LAB/chain.png."""
    with locked_chain(config.lab) as (_, chain):
        pass
    problems: list[str] = []
    try:
        draw(chain, chain.lab / "chain.png")
    except Exception as error:  # a plot cannot end a chain of experiments
        problems.append(f"chain.png cannot be plotted: {error}")
    return Result(chain.summary() | {"rows": [*map(typed_row, chain.rows)]}, [*lines(chain), *problems])


def lines(chain: Chain) -> Iterator[str]:
    """Yield the table and the state of the chain."""
    numbers = {chain.start["commit"]: "start"} | {row["commit"]: f"#{row['id']}" for row in chain.kept}
    table = [["idea", "time", "against", "status", "decision", "difference", "seeds", "p", "CPU s"]]
    confirmed = {(row["commit"], row["idea"]): row for row in chain.rows if row["kind"] == "confirm"}
    for row in [*chain.ideas.values(), *confirmed.values()]:
        number = f"#{row['id']}" if row["id"] else "confirm"
        cpu_seconds = f"{float(row['cpu_seconds']):.0f}" if row["cpu_seconds"] else ""
        cells = [f"{number} {shorten(describe_idea(row), MAX_CELL)}", row["time"], numbers.get(row["parent"], "")]
        cells += [row["status"], row["decision"], format_effect(row), row["seeds_candidate"], row["p"], cpu_seconds]
        table.append(cells)
    yield from aligned(table)
    yield ""
    counts = f"{len(chain.ideas)} ideas, {len(chain.discoveries)} better, {len(chain.kept)} accepted"
    yield f"{chain.branch} at {chain.head[:12]}: {counts}; wealth {chain.wealth:.3g}, next level {chain.next_level:.3g}"
    yield f"figure: {chain.lab / 'chain.png'}; ledger: {chain.lab / 'ledger.tsv'}"


def draw(chain: Chain, path: Path) -> None:
    """Draw the loss of each idea at its test, of each head on fresh seeds, and what was claimed and confirmed."""
    spent, heads, claims, ideas = collect(chain)
    figure = new_figure(9, 5)
    axes = figure.add_subplot()
    for points, line, label in (
        (heads, "-", "head, on fresh seeds"),
        (heads[:1] + claims, ":", "claimed at selection"),
    ):
        if points:
            x, y = zip(*points, (spent, points[-1][1]), strict=True)
            axes.step(x, y, where="post", color=COLORS[4], linestyle=line, label=label)
    for (hours, loss), row in zip(claims, chain.kept, strict=True):
        axes.annotate(f"#{row['id']}", (hours, loss), (-4, -10), textcoords="offset points", fontsize=6, ha="right")
    for name, style in OUTCOMES.items():
        if name in ideas:
            hours, losses = zip(*ideas[name], strict=True)
            if name in ("identical", "failed"):  # they have no loss
                axes.scatter(hours, [1] * len(hours), s=24, transform=axes.get_xaxis_transform(), **style)
            else:
                highest = MAX_RELATIVE_LOSS * heads[0][1]
                axes.scatter(hours, [min(loss, highest) for loss in losses], s=24, zorder=3, **style)
    if heads and (confirmed := confirmed_percent(chain)):
        mean, low, high = (heads[0][1] * (1 + percent / 100) for percent in confirmed)
        errors = [[mean - low], [high - mean]]
        axes.errorbar(
            [spent], [mean], yerr=errors, fmt="*", color=COLORS[3], markersize=10, capsize=3, label="confirmed"
        )
    axes.set(xlabel="CPU hours", ylabel="validation loss, excess where the entropy is known (nats/token)")
    axes.grid(alpha=0.3)
    for row in chain.kept:  # the numbers in the figure
        axes.plot([], [], " ", label=f"#{row['id']} {fit_label(describe_idea(row), MAX_LABEL)}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=150)


def collect(chain: Chain) -> tuple[float, Points, Points, dict[str, Points]]:
    """Return what to draw, as (CPU hours, loss).

    Returns:
        The CPU hours in all; the heads; the accepted ideas as they were measured at selection; all ideas by outcome.
    """
    spent, heads = 0.0, []
    tested: dict[str, tuple[float, float]] = {}
    for row in chain.rows:
        if row["kind"] in (*TEST_KINDS, "baseline", "confirm"):  # the other rows repeat the time of the test
            spent += float(row["cpu_seconds"] or 0) / SECONDS_PER_HOUR
        if row["kind"] == "baseline":
            heads.append((spent, float(row["loss"])))
        elif row["kind"] in TEST_KINDS:
            # An idea that is futile after one run has no mean loss; it was much worse.
            tested[row["id"]] = spent, float(row["loss"] or math.inf)
    ideas: dict[str, Points] = {}
    for row in chain.ideas.values():
        if row["decision"].startswith("kept"):
            outcome = row["decision"]
        elif row["status"] in ("better", "identical"):
            outcome = row["status"]
        else:
            outcome = "other" if row["loss"] or row["status"] == "futile" else "failed"
        ideas.setdefault(outcome, []).append(tested[row["id"]])
    return spent, heads, [tested[row["id"]] for row in chain.kept], ideas


def confirmed_percent(chain: Chain) -> list[float] | None:
    """Return the difference between head and start by the newest confirmation, with its interval; None without one."""
    rows = [row for row in chain.rows if row["kind"] == "confirm" and row["idea"] == HEAD_AGAINST_START and row["loss"]]
    return [float(rows[-1][name]) for name in ("difference", "low", "high")] if rows else None
