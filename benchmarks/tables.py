"""The tables of docs/performance.md from benchmarks/results/*.json: python -m benchmarks.tables [--check]

Each replaces what stands between `<!-- NAME -->` and `<!-- end -->`. --check changes nothing and exits 1 if the page is
not what the files give.
"""

import json
import re
import sys
from collections.abc import Callable

from benchmarks.measure import ROOT
from benchmarks.record import RESULTS

PAGE = ROOT / "docs" / "performance.md"
Rows = list[list[str]]


def number(value: float | int | str | None) -> str:
    """As a table shows it: thousands apart, and three digits of a fraction."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def markdown(rows: Rows) -> str:
    lines = ["| " + " | ".join(map(number, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def throughput(figures: dict) -> Rows:
    shapes = [name for name, value in figures.items() if isinstance(value, dict)]
    speeds = [figures[shape]["tokens_per_second"] for shape in shapes]
    rows = [["tokens per second", *shapes], *([case, *(s[case] for s in speeds)] for case in sorted(speeds[0]))]
    ratios = [figures[shape].get("ratio", {}) for shape in shapes]
    return rows + [[f"ours in {case} of nanoGPT", *(f"{r[case]:.2f}x" for r in ratios)] for case in ratios[0]]


def time_to_loss(figures: dict) -> Rows:
    header = ["", "seconds from launch", "validation loss, nats a character", "tokens"]
    return [header] + [
        [side, each["seconds"], each["val/loss"], each["tokens"]]
        for side in ("ours", "nanoGPT")
        for each in figures[side]
    ]


def overhead(figures: dict) -> Rows:
    cases = {name: value for name, value in figures.items() if isinstance(value, dict)}
    rows = [["tokens per second", "train.py", "bare loop", "ratio"]]
    return rows + [[name, *value["tokens_per_second"].values(), value["ratio"]] for name, value in cases.items()]


def memory(figures: dict) -> Rows:
    columns = ["peak_mib", "seconds_a_step", "share_of_nanogpts_peak", "share_of_nanogpts_time"]
    header = ["", "peak, MiB", "seconds a step", "share of nanoGPT's peak", "share of its time"]
    return [header] + [[case, *(value.get(column, "") for column in columns)] for case, value in figures.items()]


def scaling(figures: dict) -> Rows:
    header = ["model", "1 process x 2 threads, tokens/s", "2 x 1, tokens/s", "2 x 1 over 1 x 2"]
    ways = list(next(iter(figures["ddp"].values())))
    rows = [[*header, *(f"{way}: seconds a step (share hidden)" for way in ways)]]
    for size, speeds in figures["processes"].items():
        steps = figures["ddp"][size].values()
        cells = [f"{way['seconds_a_step']:.3g} ({100 * way['share_hidden']:.0f}%)" for way in steps]
        rows.append([size, *speeds.values(), *cells])
    return rows


def startup(figures: dict) -> Rows:
    return [["from launch to", "seconds"]] + [[name, value] for name, value in figures.items()]


TABLES: dict[str, Callable[[dict], Rows]] = {
    function.__name__: function for function in (throughput, time_to_loss, overhead, scaling, memory, startup)
}


def section(name: str) -> str:
    """The table of one result, and what it was measured on."""
    record = json.loads((RESULTS / f"{name}.json").read_text())
    machine, versions = record["machine"], record["versions"]
    where = f"{machine['cores']} cores of {machine['cpu']}, torch {versions['torch']}, {record['date']}"
    return f"{markdown(TABLES[name](record['figures']))}\n\n`{record['command']}`: {where}."


def page() -> str:
    """The page with every table made anew."""
    text = PAGE.read_text()
    for name in TABLES:
        if (RESULTS / f"{name}.json").exists():
            between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
            text = between.sub(lambda match, name=name: f"{match[1]}{section(name)}\n{match[2]}", text)
    return text


def write() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(page() != PAGE.read_text())
    write()
