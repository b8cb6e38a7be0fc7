"""lab/log.jsonl, the append-only log with a row for every experiment, and its report: a table and a figure."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from config.errors import ConfigError
from config.paths import expand_user_path
from data.files import lock, write_atomically
from data.json_objects import parse_object
from tools.experiment.settings import ReportConfig
from tools.plot import new_figure

MARKERS = {"better": "o", "worse": "X", "no difference": "s", "unknown": "D", "futile": "v"}
MAX_LABEL_CHARACTERS = 50
# Keys whose values differ whenever the same runs are analysed again.
VOLATILE = ("time", "cost", "time_multiplier", "seconds", "cpu_seconds")
REQUIRED = {"idea", "baseline", "candidate", "verdict", "seeds"}


def append(lab: Path, row: dict[str, Any]) -> None:
    """Append the row of an experiment unless it is there: several machines may run one experiment together."""
    lab.mkdir(parents=True, exist_ok=True)
    with open(lab / "log.jsonl", "a+") as file:
        lock(file, wait=True)
        file.seek(0)
        text = file.read()
        row = json.loads(json.dumps(row))
        if not any(without_volatile(before) == without_volatile(row) for before in parse_rows(text)):
            incomplete = bool(text) and not text.endswith("\n")  # a process died while it wrote
            file.write("\n" * incomplete + json.dumps(row) + "\n")


def without_volatile(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the values that differ when the same runs are analysed again."""
    sizes = [{key: size[key] for key in size if key not in VOLATILE} for size in row.get("sizes", [])]
    return {name: value for name, value in row.items() if name not in VOLATILE} | {"sizes": sizes}


def read_log(lab: Path) -> list[dict[str, Any]]:
    """Return one row for each pair of arms and margin, in order of appearance: the newest of those with most seeds."""
    path = lab / "log.jsonl"
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in parse_rows(path.read_text(errors="replace") if path.exists() else ""):
        key = row["baseline"], row["candidate"], row.get("margin")
        if key not in rows or row["seeds"] >= rows[key]["seeds"]:
            rows[key] = row
    return [*rows.values()]


def parse_rows(text: str) -> list[dict[str, Any]]:
    """Return the rows of a log, without lines that are incomplete or damaged."""
    rows = []
    for line in text.splitlines():
        try:
            row = parse_object(line)
        except ValueError:
            continue
        numbers = [row.get(name) for name in ("difference", "low", "high", "margin")] if "low" in row else []
        if row.keys() >= REQUIRED and type(row["seeds"]) is int and all(type(n) in (int, float) for n in numbers):
            rows.append(row)
    return rows


def count_candidates(lab: Path, baseline: str) -> int:
    """Return how many candidates were compared with a baseline, given by its name before any tuning."""
    return len(
        {
            row["candidate"]
            for row in read_log(lab)
            if row.get("untuned_baseline", row["baseline"]) == baseline
            and row["verdict"] != "identical"
            and (row["seeds"] or row["verdict"] != "unknown")
        }
    )


def format_percent(value: float | None) -> str:
    """Format a difference for the table."""
    return "-" if value is None else f"{value:+.1f}%"


def markdown_table(rows: list[dict[str, Any]]) -> str:
    """Return all experiments as a Markdown table, the best first."""
    lines = [
        "| idea | baseline | difference | 95% interval | compute multiplier | margin | seeds | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=sort_key):
        interval = "-" if row.get("low") is None else f"{format_percent(row['low'])} to {format_percent(row['high'])}"
        multiplier = row.get("compute_multiplier")
        idea = row["idea"].replace("|", r"\|")
        cells = (
            f"`{idea}`",
            row["baseline"],
            format_percent(row.get("difference")),
            interval,
            "{:.2f} ({:.2f} to {:.2f})".format(*multiplier) if multiplier else "-",
            f"{100 * row['margin']:g}%" if row.get("margin") else "-",
            row["seeds"],
            row["verdict"],
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def sort_key(row: dict[str, Any]) -> tuple[bool, float]:
    """Order rows by their difference; those without one are last."""
    return row.get("difference") is None, row.get("difference") or 0.0


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the interval of each experiment, the best at the top, over its equivalence margin; readable in grey."""
    drawn = sorted((row for row in rows if row.get("low") is not None), key=sort_key, reverse=True)
    figure = new_figure(8, 1.4 + 0.32 * len(drawn))
    axes = figure.add_subplot()
    if drawn:
        margins = [100 * row["margin"] for row in drawn]
        widths, left = [2 * margin for margin in margins], [-margin for margin in margins]
        axes.barh(range(len(drawn)), widths, height=1.0, left=left, color="0.85", label="equivalence margin")
    for verdict, marker in MARKERS.items():
        points = [(height, row) for height, row in enumerate(drawn) if row["verdict"] == verdict]
        if points:
            heights, of_verdict = zip(*points, strict=True)
            means, lows, highs = ([row[name] for row in of_verdict] for name in ("difference", "low", "high"))
            errors = [np.subtract(means, lows), np.subtract(highs, means)]
            fill = "black" if verdict in ("better", "worse") else "white"
            style = {"fmt": marker, "color": "black", "markerfacecolor": fill, "capsize": 3, "linewidth": 1.2}
            axes.errorbar(means, heights, xerr=errors, label=verdict, **style)
    axes.axvline(0, color="black", linewidth=0.8)
    if drawn:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    axes.set_yticks(range(len(drawn)), [*map(label, drawn)], fontsize="small", parse_math=False)
    axes.set(xlabel="change of the validation loss (% of the baseline, lower is better), 95% interval")
    axes.grid(axis="x", alpha=0.4)
    figure.savefig(path, dpi=150)


def label(row: dict[str, Any]) -> str:
    """Return the label of an experiment in the figure; a patch is shown by its file name."""
    code, *settings = row["idea"].split(" ", 1)
    idea = " ".join([Path(code).name if code.endswith((".patch", ".diff")) else code, *settings])
    return idea if len(idea) <= MAX_LABEL_CHARACTERS else idea[: MAX_LABEL_CHARACTERS - 1] + "…"


def main(config: ReportConfig) -> None:
    """Print the table of all experiments, and write it and the figure; raise ConfigError if the lab is not writable."""
    lab = expand_user_path("lab", config.lab)
    rows = read_log(lab)
    print(text := markdown_table(rows))
    try:
        lab.mkdir(parents=True, exist_ok=True)
        write_atomically(lab / "report.md", text + "\n")
        draw(rows, lab / "report.png")
    except OSError as error:
        raise ConfigError(f"lab: {lab} cannot be written: {error.strerror}") from None
