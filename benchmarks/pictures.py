"""The pictures of docs/performance.md from benchmarks/results/*.json: python -m benchmarks.pictures"""

import json
from pathlib import Path

from benchmarks.measure import ROOT
from benchmarks.record import RESULTS
from benchmarks.tables import Measured

LABELS = {"context": "context, tokens", "width": "d_model", "depth": "layers", "processes": "processes"}
LABELS |= {"vocabulary": "tokens of the vocabulary", "corpus": "tokens of the corpus"}
# The point whose speed theory takes over. Where few FLOPs are done slowly, in small models, it is the largest; where
# FLOPs are of two kinds, with context, the shortest, so that theory shows how the other kind adds to it.
STARTS = {"context": 0, "width": -1, "depth": -1, "vocabulary": -1}


def lines(axis: str, cases: list[dict], points: list[int]) -> tuple[dict[str, list[Measured]], dict[str, list[float]]]:
    """What was measured and what theory says, by legend, at each point of an axis."""

    def measured(quantity: str) -> list[Measured]:
        return [Measured.of(case[quantity]) for case in cases]

    def constant(values: list[Measured]) -> list[float]:
        return [values[0].median] * len(values)

    if axis == "corpus":
        order, windows = (measured(f"{kind}_nanoseconds_per_token") for kind in ("order", "windows"))
        theory = {"order, constant": constant(order), "windows, constant": constant(windows)}
        return {"order, measured": order, "windows, measured": windows}, theory
    clock = measured("microseconds_per_token")
    if axis == "processes":
        processors, cores = measured("cpu_microseconds_per_token"), cases[0]["cores"]
        shared = [clock[0].median / min(number, cores) for number in points]
        theory = {f"by the clock, shared by {cores} cores": shared, "processor time, constant": constant(processors)}
        return {"by the clock, measured": clock, "processor time, measured": processors}, theory
    start = STARTS[axis]
    of_a_flop = clock[start].median / cases[start]["flops_per_token"]
    legends = {f"by FLOPs, at the speed of {points[start]:,}": "", "of that for attention's scores": "attention_"}
    theory = {name: [of_a_flop * case[f"{kind}flops_per_token"] for case in cases] for name, kind in legends.items()}
    return {"measured": clock}, theory


def draw_growth(file: Path, axis: str, cases: dict[str, dict]) -> None:
    """Cost per token over the points of an axis; a bar is from the lowest to the highest round."""
    from matplotlib.figure import Figure  # without pyplot: no window system is asked for

    points = list(map(int, cases))
    unit = "nanoseconds" if axis == "corpus" else "microseconds"
    figure = Figure(figsize=(6, 3.75), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel=LABELS[axis], ylabel=f"{unit} per token")
    measurements, theory = lines(axis, list(cases.values()), points)
    for index, (name, values) in enumerate(measurements.items()):
        medians = [each.median for each in values]
        below = [each.median - min(each.values) for each in values]
        above = [max(each.values) - each.median for each in values]
        axes.errorbar(points, medians, [below, above], fmt=f"o-C{index}", capsize=3, label=name)
    for index, (name, values) in enumerate(theory.items()):
        axes.plot(points, values, f"--C{index}", label=name)
    if axis in STARTS:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # with room for the legend
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_xticks(points, [f"{point:,}" if point < 10**6 else f"{point:.0e}" for point in points], fontsize=7)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    figure.savefig(file, dpi=100)


def draw_overlap(file: Path, cases: dict[str, dict]) -> None:
    """When rank 0 computed and when it communicated in a step, in each way of examples/overlap.py."""
    from examples.overlap import draw

    timelines = {}
    for name, case in cases.items():  # begin, end, begin, end, ...
        if lanes := case.get("timeline_ms"):
            timelines[name.partition(", ")[2]] = tuple(list(zip(x[::2], x[1::2], strict=True)) for x in lanes)
    if timelines:
        draw(timelines, file)


def draw(name: str, docs: Path = ROOT / "docs") -> None:
    """Draw what the page shows of a result."""
    path = RESULTS / f"{name}.json"
    figures = json.loads(path.read_text())["figures"] if path.exists() else {}
    if name == "scaling" and figures:
        draw_overlap(docs / "overlap_ddp.png", list(figures.values())[-1])
    for axis, cases in figures.items() if name == "growth" else ():
        draw_growth(docs / "growth" / f"{axis}.png", axis, cases)


if __name__ == "__main__":
    draw("growth")
    draw("scaling")
