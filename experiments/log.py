"""lab/notebook.jsonl: every experiment that was made, a line each; as a table and as a picture."""

import json
import time
from pathlib import Path
from typing import Any

from data.files import lock, write_atomically
from data.json_objects import parse_object
from plotting.style import new_figure

VERDICTS = {"better": "o", "worse": "X", "no difference": "s", "unknown": "D"}  # and their markers
IDEA_LETTERS = 50
MEASURED = ("time", "cost", "worth_in_time")
LOCK_SECONDS = 0.05  # between two attempts at the lock of another machine


def append(lab: Path, row: dict[str, Any]) -> None:
    """Add an experiment that has an answer, unless that stands there: several machines may come to it together."""
    if row["verdict"] == "unknown" and "difference" not in row:
        return
    lab.mkdir(parents=True, exist_ok=True)
    with open(lab / "notebook.jsonl", "a+") as file:
        while not lock(file):
            time.sleep(LOCK_SECONDS)
        file.seek(0)
        text = file.read()
        known = {key(before): before for before in parsed(text)}
        if told(known.get(key(row), {})) != told(json.loads(json.dumps(row))):
            half = text and not text.endswith("\n")  # a line of a machine that died
            file.write("\n" * bool(half) + json.dumps(row) + "\n")


def told(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what each look measures anew."""
    sizes = [{name: value for name, value in size.items() if name not in MEASURED} for size in row.get("sizes", [])]
    return {name: value for name, value in row.items() if name not in MEASURED} | {"sizes": sizes}


def read(lab: Path) -> list[dict[str, Any]]:
    """The newest row of each pair of sides, in the order of their first."""
    path = lab / "notebook.jsonl"
    return list({key(row): row for row in parsed(path.read_text() if path.exists() else "")}.values())


def parsed(text: str) -> list[dict[str, Any]]:
    """The rows; what is none, as half a line of a machine that died, is passed over."""
    rows = []
    for line in text.splitlines():
        try:
            row = parse_object(line)
        except ValueError:
            continue
        if {"idea", "baseline", "candidate", "verdict", "seeds"} <= row.keys():
            rows.append(row)
    return rows


def key(row: dict[str, Any]) -> tuple[str, str]:
    """Which sides it compares."""
    return row["baseline"], row["candidate"]


def tried(lab: Path, baseline: str) -> int:
    """How many ideas were tried against a baseline, whatever was tuned."""
    return sum(row.get("untuned", row["baseline"]) == baseline for row in read(lab))


def shown_percent(value: float | None) -> str:
    """As the table has it."""
    return "-" if value is None else f"{value:+.1f}%"


def table(rows: list[dict[str, Any]]) -> str:
    """All experiments in Markdown, the best first."""
    lines = [
        "| idea | against | difference | 95% | worth in steps | runs a side | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=rank):
        interval = "-" if row.get("low") is None else f"{shown_percent(row['low'])} to {shown_percent(row['high'])}"
        worth = "-" if not row.get("worth") else "{:.2f} ({:.2f} to {:.2f})".format(*row["worth"])
        idea = row["idea"].replace("|", r"\|")
        cells = (
            f"`{idea}`",
            row["baseline"],
            shown_percent(row.get("difference")),
            interval,
            worth,
            row["seeds"],
            row["verdict"],
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def rank(row: dict[str, Any]) -> tuple[bool, float]:
    """By the difference; what has none comes last."""
    return row.get("difference") is None, row.get("difference") or 0.0


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """An interval an idea, the best at the top; the marker says the verdict, so that it can be read in grey.

    Raises:
        OSError: the picture cannot be written.
    """
    drawn = sorted((row for row in rows if row.get("low") is not None), key=rank, reverse=True)
    figure = new_figure(8, 1.4 + 0.32 * len(drawn))
    axes = figure.add_subplot()
    for verdict, marker in VERDICTS.items():
        having = [(height, row) for height, row in enumerate(drawn) if row["verdict"] == verdict]
        if not having:
            continue
        heights, of_verdict = zip(*having, strict=True)
        middle = [row["difference"] for row in of_verdict]
        reach = [
            [m - r["low"] for m, r in zip(middle, of_verdict, strict=True)],
            [r["high"] - m for m, r in zip(middle, of_verdict, strict=True)],
        ]
        filled = "black" if verdict in ("better", "worse") else "white"
        axes.errorbar(
            middle,
            heights,
            xerr=reach,
            fmt=marker,
            color="black",
            markerfacecolor=filled,
            capsize=3,
            linewidth=1.2,
            label=verdict,
        )
    axes.axvline(0, color="black", linewidth=0.8)
    if drawn:
        margin = 100 * drawn[0]["margin"]
        axes.axvspan(-margin, margin, color="0.85", label=f"counts as nothing: {margin:g}%")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    axes.set_yticks(range(len(drawn)), [*map(drawable_idea, drawn)], fontsize="small", parse_math=False)
    axes.set(xlabel="validation loss against the baseline (%, lower is better), 95% interval")
    axes.grid(axis="x", alpha=0.4)
    figure.savefig(path, dpi=150)


def drawable_idea(row: dict[str, Any]) -> str:
    """What the picture calls it: a patch by its name, wherever it lies."""
    code, *settings = row["idea"].split(" ", 1)
    idea = " ".join([Path(code).name if code.endswith((".patch", ".diff")) else code, *settings])
    return idea if len(idea) <= IDEA_LETTERS else idea[: IDEA_LETTERS - 1] + "…"


def publish(lab: Path) -> str:
    """Write notebook.png and notebook.md; the table."""
    rows = read(lab)
    text = table(rows)
    write_atomically(lab / "notebook.md", text + "\n")
    draw(rows, lab / "notebook.png")
    return text
