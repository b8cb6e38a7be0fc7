"""What is kept of figures, and docs/performance.md's tables and pictures of them: python -m benchmarks.page

benchmarks/results/NAME.json holds {group: {case: {quantity: value}}}, and where they come from. A list has the value of
every round; anything else is a fact. A table replaces what stands between `<!-- NAME -->` and `<!-- end -->`.
"""

import json
import os
import platform
import re
import sys
from datetime import date
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import psutil
import torch

from benchmarks.measure import ROOT
from checkpoint.provenance import provenance

PAGE, RESULTS = ROOT / "docs" / "performance.md", ROOT / "benchmarks" / "results"
Figures = dict[str, dict[str, dict]]
SPEED, STEP, PEAK = {"tokens_per_second": "tokens/s"}, {"seconds_a_step": "seconds a step"}, {"peak_mib": "peak, MiB"}
TABLES = {  # which quantities of a result, and what heads them
    "throughput": SPEED,
    "time_to_loss": {"seconds": "seconds", "val/loss": "validation loss, nats a character", "tokens": "tokens"},
    "peers": {"seconds": "seconds", "val/bits_per_byte": "validation, bits a byte", "tokens": "tokens"},
    "overhead": SPEED,
    "scaling": SPEED | STEP | {"share_hidden": "share hidden"},
    "memory": PEAK | STEP,
    "sharding": PEAK | {"predicted_mib": "predicted for a GPU"} | STEP,
    "startup": {"seconds": "seconds", "processor_seconds": "processor seconds"},
    "generation": SPEED | {"processor_seconds": "processor seconds"},
    "gpu": SPEED | {"flops_per_second": "FLOP/s", "mfu": "MFU of the data sheet", "peak_gib": "peak, GiB"},
}
MANY = 6  # turns, of which the quarters at either end are left out of the parentheses
NO_RATIO = {"val/loss", "val/bits_per_byte", "tokens", "share_hidden", "mfu"}


def microseconds(case: dict, of: str) -> np.ndarray:
    """A token's in each round, by the clock or of all processors together."""
    return 1e6 / np.array(case["tokens_per_second"]) * np.divide(case[of], case["seconds"])


TIME, WORK = (partial(microseconds, of=of) for of in ("seconds", "processor_seconds"))
ORDER, WINDOWS = (itemgetter(f"{part}_nanoseconds_per_token") for part in ("order", "windows"))
# Curves of growth: what was measured and its legend; theory's legend, and what the cost is proportional to by it.
BY_FLOPS = [
    (TIME, "measured", "by FLOPs, at the speed of {start:,}", lambda n, case: case["flops_per_token"]),
    (None, "", "of that for attention's scores", lambda n, case: case["attention_flops_per_token"]),
]
BY_SIZE = [
    (ORDER, "order, measured", "order, constant", lambda n, case: 1),
    (WINDOWS, "windows, measured", "windows, constant", lambda n, case: 1),
]
BY_CORES = [
    (TIME, "by the clock, measured", "the clock, shared by {cores} cores", lambda n, case: 1 / min(n, case["cores"])),
    (WORK, "processor time, measured", "processor time, constant", lambda n, case: 1),
]
# The point whose speed theory takes over: where few FLOPs are done slowly, in small models, the largest; where FLOPs
# are of two kinds, with context, the shortest, so that theory shows how the other kind adds to it.
PICTURES = {
    "context": ("context, tokens", BY_FLOPS, 0),
    "width": ("d_model", BY_FLOPS, -1),
    "depth": ("layers", BY_FLOPS, -1),
    "vocabulary": ("tokens of the vocabulary", BY_FLOPS, -1),
    "corpus": ("tokens of the corpus", BY_SIZE, 0),
    "processes": ("processes", BY_CORES, 0),
}


def machine() -> dict[str, str | int | float]:
    """What the figures were measured on."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", cpuinfo, re.MULTILINE))
    facts = {"cpu": found.get("model name", platform.processor()), "cores": os.cpu_count()}
    if "cpu family" in found:  # a shared machine may hide its model's name
        facts["cpu"] += f" (family {found['cpu family']}, model {found['model']})"
    facts["memory_gib"] = round(psutil.virtual_memory().total / 2**30, 1)
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def write(name: str, figures: Figures, left_out: list[str]) -> None:
    """Write a result, with where it comes from, and the groups for which no time was left."""
    words = (Path(word).name if "/" in word else word for word in sys.orig_argv[1:])
    record = {"command": " ".join(["python", *words]), "date": str(date.today()), "machine": machine()}
    record |= {"versions": provenance(), **({"left_out": left_out} if left_out else {}), "figures": figures}
    (RESULTS / f"{name}.json").write_text(dump(record))


def dump(record: dict) -> str:
    """As JSON, a figure on one line."""
    lists = r"\[[^\[\]{}]*\]"
    return re.sub(lists, lambda found: json.dumps(json.loads(found[0])), json.dumps(record, indent=2)) + "\n"


def read(name: str) -> dict:
    """A result that was written; of one that was never measured, nothing."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {"figures": {}}


def number(value: float) -> str:
    """Thousands apart, and three digits of a fraction."""
    return f"{value:,.0f}" if 100 <= abs(value) < 1e9 or isinstance(value, int) else f"{value:.3g}"


def shown(figures: list[float], unit: str = "") -> str:
    """The median and `unit`, and between what all rounds lie, or half of many turns; or how many there were, if few."""
    lowest, *_, highest = quantiles(figures, n=4) if len(figures) >= MANY else (min(figures), max(figures))
    spread = f"{number(lowest)} to {number(highest)}" + ", 2 rounds" * (len(figures) == 2)
    return f"{number(median(figures))}{unit} ({spread if len(figures) > 1 else 'one round'})"


def cell(value: object) -> str:
    return shown(value) if isinstance(value, list) else number(value) if isinstance(value, int | float) else str(value)


def ratios(case: dict, cases: dict[str, dict], quantity: str) -> str:
    """A case's figure over that of each one that it is set against, round by round, because cases take turns."""
    written = []
    for name in case.get("against", []):
        rounds = case.get(quantity), cases.get(name, {}).get(quantity)
        if all(isinstance(figures, list) for figures in rounds):
            written.append(shown([one / two for one, two in zip(*rounds, strict=False)], f"x {name}"))
    return "; ".join(written)


def table(groups: Figures, quantities: dict[str, str]) -> list[list[str]]:
    """A header, and a row for each case; columns in which nothing stands are left out."""
    rows = [["", "", *(word for title in quantities.values() for word in (title, "over"))]]
    for group, cases in groups.items():
        for name, case in cases.items():
            row = [group if name == next(iter(cases)) else "", f"{name}: {case['error']}" if "error" in case else name]
            for quantity in quantities:
                row += [cell(case.get(quantity, "")), "" if quantity in NO_RATIO else ratios(case, cases, quantity)]
            rows.append(row)
    used = [index for index, column in enumerate(zip(*rows[1:], strict=True)) if any(column)]
    return [[row[index] for index in used] for row in rows]


def markdown(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def section(name: str) -> str:
    """The table of one result, what it was measured on, and what else was running."""
    record = read(name)
    machine, cases = record["machine"], [case for cases in record["figures"].values() for case in cases.values()]
    hardware = machine.get("gpu") or f"{machine['cores']} cores of {machine['cpu']}"
    where = f"`{record['command']}`: {hardware}, torch {record['versions']['torch']}, {record['date']}."
    if others := [cores for case in cases for cores in case.get("others_cores", [])]:
        most = f"{median(others):.2f} in the median and {max(others):.2f} at most"
        where += f" Cores that other work kept busy meanwhile: {most}."
    measured = [case[quantity] for case in cases for quantity in TABLES[name] if isinstance(case.get(quantity), list)]
    if (turns := max(map(len, measured), default=0)) >= MANY:
        where += f" Half of {turns} turns lie in the parentheses."
    return f"{markdown(table(record['figures'], TABLES[name]))}\n\n{where}"


def renewed(page: str, name: str, content: str) -> str:
    """`page` with what stands between `<!-- NAME -->` and the next `<!-- end -->` replaced."""
    between = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    return between.sub(lambda found: f"{found[1]}{content}\n{found[2]}", page)


def page() -> str:
    """The page with every table made anew."""
    text = PAGE.read_text()
    for name in TABLES:
        text = renewed(text, name, section(name)) if read(name)["figures"] else text
    return text


def draw(axis: str, record: dict, path: Path) -> None:
    """Cost per token over the points of an axis of growth, a bar from the lowest to the highest round; dashed is what
    theory says."""
    from matplotlib.ticker import EngFormatter  # here, for where figures are only kept it is not installed

    from plotting.style import COLORS, MARKERS, format_number, new_figure, set_round_log_ticks

    (label, curves, start), cases = PICTURES[axis], record["figures"][axis]
    points, each = list(map(int, cases)), [case | record["machine"] for case in cases.values()]
    figure = new_figure(6, 3.75)
    unit = "nanoseconds" if axis == "corpus" else "microseconds"
    axes = figure.add_subplot(xscale="log", xlabel=label, ylabel=f"{unit} per token")
    for index, (rounds, measured, theory, cost) in enumerate(curves):
        if rounds:
            least, medians, most = np.array([np.quantile(rounds(case), (0, 0.5, 1)) for case in each]).T
            reach = [medians - least, most - medians]
            mark = {"marker": MARKERS[index], "markersize": 5}
            axes.errorbar(points, medians, reach, color=COLORS[index], capsize=3, label=measured, **mark)
            scale = medians[start] / cost(points[start], each[start])
        by_theory = [scale * cost(*at) for at in zip(points, each, strict=True)]
        axes.plot(points, by_theory, "--", color=COLORS[index], label=theory.format(start=points[start], **each[0]))
    if curves is BY_FLOPS:
        axes.set_yscale("log")
        set_round_log_ticks(axes.yaxis, *axes.get_ylim())
    else:
        axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # with room for the legend
        axes.yaxis.set_major_formatter("{x:,g}")
    in_short = EngFormatter(sep="") if points[-1] > 10**6 else format_number
    axes.set_xticks(points, list(map(in_short, points)), fontsize=7)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    figure.savefig(path, dpi=100)


def renew(name: str) -> None:
    """Write all tables, and the pictures of that result."""
    PAGE.write_text(page())
    record = read(name)
    for axis in record["figures"] if name == "growth" else ():
        draw(axis, record, PAGE.parent / "growth" / f"{axis}.png")


if __name__ == "__main__":
    from docs.scaling import Machines, tables  # which needs this module

    renew("growth")
    scaling, marker = PAGE.with_name("scaling.md"), "python -m docs.scaling"
    scaling.write_text(renewed(scaling.read_text(), marker, f"\n{tables(Machines())}\n"))
