"""The pictures of docs/performance.md from benchmarks/results/*.json: python -m benchmarks.pictures"""

import json
from pathlib import Path

from benchmarks.measure import ROOT
from benchmarks.record import RESULTS
from benchmarks.tables import Measured

MICRO, CPU = "microseconds_per_token", "cpu_microseconds_per_token"
LABELS = {"context": "context, tokens", "width": "d_model", "depth": "layers", "processes": "processes"}
LABELS |= {"vocabulary": "tokens of the vocabulary", "corpus": "tokens of the corpus"}
# The point whose speed theory takes over. Where few FLOPs are done slowly, in small models, it is the largest; where
# FLOPs are of two kinds, with context, the shortest, so that theory shows how the other kind adds to it.
STARTS = {"context": 0, "width": -1, "depth": -1, "vocabulary": -1}


def lines(axis: str, cases: list[dict], points: list[int]) -> list[tuple[str, str | list[float], str]]:
    """What is drawn over an axis: a name, a measured quantity or theory's values, and matplotlib's format."""

    def first(quantity: str, index: int = 0) -> float:
        return Measured.of(cases[index][quantity]).median

    if axis in STARTS:
        start = STARTS[axis]
        a_flop = first(MICRO, start) / cases[start]["flops_per_token"]
        by_flops, attention = (
            [a_flop * case[f"{kind}flops_per_token"] for case in cases] for kind in ("", "attention_")
        )
        by = f"by FLOPs, at the speed of {points[start]:,}"
        return [
            ("measured", MICRO, "o-C0"),
            (by, by_flops, "--C1"),
            ("of that for attention's scores", attention, ":C1"),
        ]
    if axis == "corpus":
        found = []
        for kind, color in (("order", "C0"), ("windows", "C1")):
            quantity = f"{kind}_nanoseconds_per_token"
            found += [(f"{kind}, measured", quantity, f"o-{color}")]
            found += [(f"{kind}, constant", [first(quantity)] * len(points), f"--{color}")]
        return found
    cores = cases[0]["cores"]
    return [
        ("by the clock, measured", MICRO, "o-C0"),
        (f"by the clock, shared by {cores} cores", [first(MICRO) / min(n, cores) for n in points], "--C0"),
        ("processor time, measured", CPU, "o-C1"),
        ("processor time, constant", [first(CPU)] * len(points), "--C1"),
    ]


def draw_growth(file: Path, axis: str, cases: dict[str, dict]) -> None:
    """Cost per token over the points of an axis; a bar is from the lowest to the highest round."""
    from matplotlib.figure import Figure  # without pyplot: no window system is asked for

    points = list(map(int, cases))
    unit = "nanoseconds" if axis == "corpus" else "microseconds"
    figure = Figure(figsize=(6, 3.75), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel=LABELS[axis], ylabel=f"{unit} per token")
    for name, values, style in lines(axis, list(cases.values()), points):
        if isinstance(values, str):
            measured = [Measured.of(case[values]) for case in cases.values()]
            values = [each.median for each in measured]
            for point, each in zip(points, measured, strict=True):
                axes.plot([point, point], [min(each.values), max(each.values)], f"_-{style[-2:]}")
        axes.plot(points, values, style, label=name)
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
