"""Results of the benchmarks, and what is made from them: python -m tools.benchmark.tables.

benchmarks/results/NAME.json holds {group: {case: {quantity: value}}} with the command, machine and versions. A list of
numbers has the value of each round; anything else is a constant. The command updates the tables of docs/performance.md,
each between `<!-- NAME -->` and `<!-- end -->`, and draws benchmarks/results/curve.png if there is a result of `curve`.
"""

import json
import os
import re
import resource
import sys
from datetime import date
from pathlib import Path
from statistics import median, quantiles

import psutil
import torch

from runtime.machine.cpu import processor_name
from tools import plot
from trainer.checkpoint.provenance import provenance

ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "docs" / "performance.md", ROOT / "benchmarks" / "results"
Figures = dict[str, dict[str, dict]]
SPEED, SECONDS, LOSS = {"tokens_per_second": "tokens/s"}, {"seconds": "seconds"}, "validation loss, nats/"
MEMORY = {"peak_mib": "peak, MiB"}
TABLES = {  # quantities of a result, and their column headers
    "throughput": SPEED,
    "time_to_loss": SECONDS | {"val/loss": f"{LOSS}character", "tokens": "tokens"},
    "bits_per_byte": SECONDS | {"val/bits_per_byte": "validation loss, bits per byte"},
    "overhead": SPEED,
    "memory": MEMORY | {"seconds_a_step": "seconds/step"},
    "exactness": {"seconds_a_step": "seconds/step"} | MEMORY,
    "checkpoint_stall": {"waits_seconds": "seconds"},
    "startup": SECONDS,
    "generation": SPEED,
    "gpu": SPEED | {"mfu": "MFU"} | MEMORY,
    "cuda_graph": SPEED | MEMORY,
    "curve": SPEED | {"val/loss": f"last {LOSS}token", "seconds": "seconds from the launch"},
}
NO_RATIO = {"val/loss", "val/bits_per_byte", "mfu"}
MANY = 6  # from this number of rounds on, ranges are interquartile


def machine() -> dict[str, str | int | float]:
    facts = {"cpu": processor_name(), "cores": os.cpu_count() or 1}
    facts["memory_gib"] = round(psutil.virtual_memory().total / 2**30, 1)
    return facts | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def cpu_seconds() -> float:
    """Return the CPU time of this process and its finished children."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def write_result(name: str, figures: Figures) -> None:
    others = TABLES.keys() - {name}  # cases that the same command measures
    words = (Path(word).name if "/" in word else word for word in sys.orig_argv[1:] if word not in others)
    record = {"command": " ".join(["python", *words]), "date": str(date.today()), "machine": machine()}
    (RESULTS / f"{name}.json").write_text(to_json(record | {"versions": provenance(), "figures": figures}))


def to_json(record: dict) -> str:
    """Return JSON with each list on one line."""
    lists = r"\[[^\[\]{}]*\]"
    return re.sub(lists, lambda match: json.dumps(json.loads(match[0])), json.dumps(record, indent=2)) + "\n"


def read_result(name: str) -> dict:
    """Return a result, without figures if it was never measured."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {"figures": {}}


def format_value(value: object, unit: str = "") -> str:
    """Format a constant, or the median and the range of rounds; from MANY rounds on, the interquartile range."""
    if not isinstance(value, list):
        if not isinstance(value, int | float):
            return str(value)
        return f"{value:,.0f}" if 100 <= abs(value) < 1e9 or isinstance(value, int) else f"{value:.3g}"
    if len(value) == 1:
        return f"{format_value(value[0])}{unit} (one round)"
    lowest, *_, highest = quantiles(value, n=4) if len(value) >= MANY else (min(value), max(value))
    if lowest == highest:
        return f"{format_value(lowest)}{unit}"
    spread = f"{format_value(lowest)} to {format_value(highest)}{', 2 rounds' * (len(value) == 2)}"
    return f"{format_value(median(value))}{unit} ({spread})"


def format_ratios(case: dict, cases: dict[str, dict], quantity: str) -> str:
    """Return a case's figure divided by that of each baseline, round by round because cases are interleaved."""
    ratios = []
    for name in case.get("against", []):
        ours, theirs = case.get(quantity), cases.get(name, {}).get(quantity)
        if isinstance(ours, list) and isinstance(theirs, list) and quantity not in NO_RATIO:
            ratios.append(
                format_value([figure / baseline for figure, baseline in zip(ours, theirs, strict=False)], f"x {name}")
            )
    return "; ".join(ratios)


def table_rows(groups: Figures, quantities: dict[str, str]) -> list[list[str]]:
    """Return a header and a row for each case, without empty columns."""
    rows = [["", "", *(word for title in quantities.values() for word in (title, "ratio"))]]
    for group, cases in groups.items():
        for name, case in cases.items():
            row = [group if name == next(iter(cases)) else "", f"{name}: {case['error']}" if "error" in case else name]
            for quantity in quantities:
                row += [format_value(case.get(quantity, "")), format_ratios(case, cases, quantity)]
            rows.append(row)
    used = [index for index, column in enumerate(zip(*rows[1:], strict=True)) if any(column)]
    return [[row[index] for index in used] for row in rows]


def section(name: str, record: dict) -> str:
    """Return the Markdown table of a result, and a line with the command, the machine and the other load on it."""
    machine, figures = record["machine"], record["figures"]
    cases = [case for group in figures.values() for case in group.values()]
    hardware = machine.get("gpu") or f"{machine['cores']} cores of {machine['cpu']}"
    caption = f"`{record['command']}`; {hardware}, torch {record['versions']['torch']}, {record['date']}"
    measured = [case[quantity] for case in cases for quantity in TABLES[name] if isinstance(case.get(quantity), list)]
    if (rounds := max(map(len, measured), default=0)) >= MANY:
        caption += f"; quartiles of {rounds} rounds"
    if others := [cores for case in cases for cores in case.get("others_cores", [])]:
        caption += f"; cores busy with other work: median {median(others):.2f}, at most {max(others):.2f}"
    header, *lines = ("| " + " | ".join(row) + " |" for row in table_rows(figures, TABLES[name]))
    return "\n".join([header, "|---" * (header.count(" | ") + 1) + "|", *lines, "", f"{caption}."])


def replace_table(text: str, name: str, table: str) -> str:
    """Return the text of a page with what is between `<!-- NAME -->` and `<!-- end -->` replaced."""
    between = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    return between.sub(lambda match: f"{match[1]}{table}\n{match[2]}", text)


def render_page() -> str:
    """Return docs/performance.md with every table made from the current results."""
    text = PAGE.read_text()
    for name in TABLES:
        if (record := read_result(name))["figures"]:
            text = replace_table(text, name, section(name, record))
    return text


def draw_curves() -> None:
    """Draw the losses of `curve` over the seconds of the steps, if it was measured."""
    figure = plot.new_figure(7, 4.2)
    axes = figure.add_subplot()
    for index, (name, cases) in enumerate(read_result("curve")["figures"].items()):
        for case in cases.values():
            shown = [(step * median(case["seconds_a_step"]), loss) for step, _, loss in case["curve"][1:]]
            axes.plot(*zip(*shown, strict=True), **plot.run_style(index), **plot.markers(index, len(shown)), label=name)
    if axes.lines:
        plot.style_loss_axes(axes, "seconds")
        axes.legend()
        plot.save(figure, RESULTS / "curve.png")


if __name__ == "__main__":
    PAGE.write_text(render_page())
    draw_curves()
