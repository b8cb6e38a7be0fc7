"""The pictures of scale.py: of the law, of what an unknown floor costs, and of the learning rates."""

from itertools import cycle
from pathlib import Path

import numpy as np

from plotting.style import new_figure, set_round_log_ticks
from scaling.ladder import FACTS, FACTS_A_STORY, SEQ_LEN, ZIPF, Point
from scaling.law import unread_mass
from scaling.recipe import learning_rate, short
from scaling.report import EXACT, FREE, Report

MARKERS = "osD^vPX*"


def shades(number: int) -> list:
    """From dark to light: so many colours that differ in grey too."""
    import matplotlib  # after `new_figure`, for whose sake see there

    return list(matplotlib.colormaps["viridis"](np.linspace(0, 0.85, number)))


def draw_law(report: Report, outcome: Point | None, path: Path) -> Path:
    """Excess over the floor against FLOPs, tokens and parameters, with the law, its frontier and its prediction."""
    law, beyond = report.fits[EXACT].law, report.beyond
    expected, low, high = report.predictions[EXACT]
    sizes = sorted({point.parameters for point in report.points})
    budgets = sorted({point.tokens for point in report.points})
    figure = new_figure(10, 3.9)
    from matplotlib.ticker import LogLocator

    by_flops, by_tokens, by_size = figure.subplots(1, 3, sharey=True)
    flops_of = {point.parameters: point.flops / point.tokens for point in report.points}
    flops_of[beyond.parameters] = beyond.flops / beyond.tokens
    stretch = np.geomspace(min(budgets), max(*budgets, beyond.tokens), 50)
    for size, color, marker in zip(sizes, shades(len(sizes)), cycle(MARKERS), strict=False):
        points = [point for point in report.points if point.parameters == size]
        dots = {"color": color, "marker": marker, "markersize": 4.5, "linestyle": "none"}
        line = {"color": color, "linewidth": 1}
        excess = [point.excess(report.kind) for point in points]
        by_flops.plot([point.flops for point in points], excess, label=f"{short(size)} parameters", **dots)
        by_flops.plot(stretch * flops_of[size], law(size, stretch), **line)
        by_tokens.plot([point.tokens for point in points], excess, **dots)
        by_tokens.plot(stretch, law(size, stretch), **line)
    grown = np.geomspace(min(sizes), beyond.parameters, 50)
    for budget, color, marker in zip(budgets, shades(len(budgets)), cycle(MARKERS), strict=False):
        points = [point for point in report.points if point.tokens == budget]
        label = f"{short(budget)} tokens"
        dots = {"color": color, "marker": marker, "markersize": 4.5, "linestyle": "none", "label": label}
        by_size.plot([point.parameters for point in points], [point.excess(report.kind) for point in points], **dots)
        by_size.plot(grown, law(grown, budget), color=color, linewidth=1)
    products = np.geomspace(min(sizes) * min(budgets), beyond.parameters * beyond.tokens, 50)
    best = law.best_split(products)
    by_flops.plot(products * beyond.flops / beyond.parameters / beyond.tokens, law(*best), "k--", label="frontier")
    theory = unread_mass(FACTS, ZIPF, stretch / SEQ_LEN * FACTS_A_STORY)
    # Of the theory the slope is known, not the height.
    height = 0.8 * law(sizes[-1], stretch[0]) / theory[0]
    by_tokens.plot(stretch, theory * height, "k:", label="slope of facts not yet read")
    for axes, place in ((by_flops, beyond.flops), (by_tokens, beyond.tokens), (by_size, beyond.parameters)):
        interval = [[expected - low], [high - expected]]
        axes.errorbar([place], [expected], yerr=interval, color="black", marker="_", capsize=3, label="predicted")
        if outcome:
            axes.plot(
                [place],
                [outcome.excess(report.kind)],
                color="tab:red",
                marker="*",
                markersize=10,
                linestyle="none",
                label="outcome",
            )
        axes.set(xscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    by_flops.set(xlabel="FLOP", ylabel=f"loss above the exact floor, of {report.kind}\n(nats a token)", yscale="log")
    by_tokens.set_xlabel("tokens")
    by_size.set_xlabel("parameters that are multiplied")
    for axis in (by_flops.yaxis, by_tokens.xaxis, by_size.xaxis):
        axis.set_minor_locator(LogLocator(subs=(2, 5)))
        for format_with in (axis.set_major_formatter, axis.set_minor_formatter):
            format_with("{x:g}" if axis is by_flops.yaxis else lambda value, _: short(value))
    figure.savefig(path, dpi=150)
    return path


def draw_floors(report: Report, outcome: Point, path: Path) -> Path:
    """Exponents, floor and prediction, by the exact floor and by one that is fitted, with their intervals."""
    figure = new_figure(8, 2.6)
    panels = [
        ("exponent of size", lambda law: law.alpha, report.theory["alpha"], "theory, in the limit"),
        ("exponent of data", lambda law: law.beta, report.theory_here, "theory, for so many facts"),
        ("floor (nats a token)", lambda law: report.floor + law.floor, report.floor, "exact"),
        ("predicted, above the floor", None, outcome.excess(report.kind), "outcome"),
    ]
    for axes, (title, of, truth, said) in zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True):
        for place, (name, color) in enumerate(((FREE, "0.55"), (EXACT, "black"))):
            fitted = report.fits[name]
            if of is None:
                value, low, high = report.predictions[name]
            else:
                value, (low, high) = of(fitted.law), fitted.interval(of)
            error = [[max(0, value - low)], [max(0, high - value)]]
            axes.errorbar([value], [place], xerr=error, color=color, marker="os"[place], capsize=4)
        axes.axvline(truth, color="tab:red", linestyle="--", linewidth=1.2)
        axes.set_title(f"{title}\n- - {said}", fontsize="small")
        axes.set(yticks=(0, 1), yticklabels=(FREE, EXACT), ylim=(-0.6, 1.6))
        axes.tick_params(axis="x", labelsize="x-small")
        axes.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=150)
    return path


def draw_learning_rates(curves: dict[int, list[tuple[float, float]]], path: Path) -> Path:
    """Loss against the learning rate of each width, and against its share of the rule's."""
    figure = new_figure(8, 3.6)
    plain, ruled = figure.subplots(1, 2, sharey=True)
    for (width, curve), color, marker in zip(curves.items(), shades(len(curves)), cycle(MARKERS), strict=False):
        rates, losses = (np.array(column) for column in zip(*curve, strict=True))
        style = {"color": color, "marker": marker, "markersize": 4}
        plain.plot(rates, losses, label=f"width {width}", **style)
        ruled.plot(rates / learning_rate(width), losses, **style)
        for axes, x in ((plain, rates), (ruled, rates / learning_rate(width))):
            axes.plot(x[losses.argmin()], losses.min(), marker="o", markersize=10, fillstyle="none", color=color)
    plain.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="loss above the floor (nats a token)")
    ruled.set(xscale="log", xlabel="learning rate, as a share of the rule's")
    plain.legend(fontsize="small")
    set_round_log_ticks(plain.yaxis, *plain.get_ylim())
    for axes in (plain, ruled):
        set_round_log_ticks(axes.xaxis, *axes.get_xlim())
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    return path
