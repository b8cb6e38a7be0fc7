"""Figures of tools.scale: the scaling law and the learning-rate search."""

from itertools import cycle
from pathlib import Path

import numpy as np

from tools.plot import new_figure, set_round_log_ticks
from tools.scale.ladder import Measurement, base_config, facts_read
from tools.scale.law import unseen_fact_probability
from tools.scale.recipe import format_count, learning_rate
from tools.scale.report import KNOWN, Report

MARKERS = "osD^vPX*"
EXCESS_LABEL = "excess validation loss (nats/token)"


def shades(number: int, colormap: str = "viridis") -> list:
    """Return colours from dark to light, which differ in greyscale, too."""
    import matplotlib

    return list(matplotlib.colormaps[colormap](np.linspace(0, 0.85, number)))


def draw_law(report: Report, outcome: Measurement, path: Path) -> Path:
    """Draw excess loss against FLOPs, tokens and parameters, with the law, its frontier and its prediction."""
    law, target = report.fits[KNOWN].law, report.target
    figure = new_figure(10, 3.9)
    from matplotlib.ticker import LogLocator

    by_flops, by_tokens, by_size = figure.subplots(1, 3, sharey=True)
    draw_sizes(report, by_flops, by_tokens)
    draw_budgets(report, by_size)
    sizes, budgets = ([getattr(run, name) for run in report.measurements] for name in ("parameters", "tokens"))
    products = np.geomspace(min(sizes) * min(budgets), target.parameters * target.tokens, 50)
    flops_per_product = target.flops / target.parameters / target.tokens
    by_flops.plot(products * flops_per_product, law(*law.compute_optimal(products)), "k--", label="compute-optimal")
    tokens, data = np.geomspace(min(budgets), max(*budgets, target.tokens), 50), base_config().data
    theory = unseen_fact_probability(data.facts, data.zipf, facts_read(1) * tokens)
    theory *= 0.8 * law(max(sizes), tokens[0]) / theory[0]  # the theory gives the slope, not the height
    by_tokens.plot(tokens, theory, "k:", label="slope of unseen facts")
    for axes, x in ((by_flops, target.flops), (by_tokens, target.tokens), (by_size, target.parameters)):
        expected, low, high = report.predictions[KNOWN]
        interval = [[expected - low], [high - expected]]
        axes.errorbar([x], [expected], yerr=interval, color="black", marker="_", capsize=3, label="predicted")
        star = {"color": "tab:red", "marker": "*", "markersize": 10, "linestyle": "none"}
        axes.plot([x], [outcome.excess_loss(report.scope)], label="measured", **star)
        axes.set(xscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    by_flops.set(xlabel="training FLOPs", ylabel=f"{EXCESS_LABEL},\n{report.scope}", yscale="log")
    by_tokens.set_xlabel("training tokens")
    by_size.set_xlabel("non-embedding parameters")
    for axis in (by_flops.yaxis, by_tokens.xaxis, by_size.xaxis):
        axis.set_minor_locator(LogLocator(subs=(2, 5)))
        for set_formatter in (axis.set_major_formatter, axis.set_minor_formatter):
            set_formatter("{x:g}" if axis is by_flops.yaxis else lambda value, _: format_count(value))
    figure.savefig(path, dpi=150)
    return path


def draw_sizes(report: Report, by_flops, by_tokens) -> None:
    """Draw the runs of each model size, and the law for that size, over FLOPs and over tokens."""
    law, runs = report.fits[KNOWN].law, report.measurements
    sizes = sorted({run.parameters for run in runs})
    budgets = [run.tokens for run in runs]
    tokens = np.geomspace(min(budgets), max(*budgets, report.target.tokens), 50)
    for size, color, marker in zip(sizes, shades(len(sizes)), cycle(MARKERS), strict=False):
        of_size = [run for run in runs if run.parameters == size]
        excess = [run.excess_loss(report.scope) for run in of_size]
        dots, line = dot_style(color, marker), {"color": color, "linewidth": 1}
        flops_per_token = of_size[0].flops / of_size[0].tokens
        by_flops.plot([run.flops for run in of_size], excess, label=f"{format_count(size)} parameters", **dots)
        by_flops.plot(tokens * flops_per_token, law(size, tokens), **line)
        by_tokens.plot([run.tokens for run in of_size], excess, **dots)
        by_tokens.plot(tokens, law(size, tokens), **line)


def draw_budgets(report: Report, by_size) -> None:
    """Draw the runs of each budget of tokens, and the law for that budget, over model size.

    The colours are other ones than those of `draw_sizes`, which stand for sizes in the same figure.
    """
    law, runs = report.fits[KNOWN].law, report.measurements
    budgets = sorted({run.tokens for run in runs})
    sizes = np.geomspace(min(run.parameters for run in runs), report.target.parameters, 50)
    for budget, color, marker in zip(budgets, shades(len(budgets), "plasma"), cycle(MARKERS), strict=False):
        of_budget = [run for run in runs if run.tokens == budget]
        excess = [run.excess_loss(report.scope) for run in of_budget]
        label = f"{format_count(budget)} tokens"
        by_size.plot([run.parameters for run in of_budget], excess, label=label, **dot_style(color, marker))
        by_size.plot(sizes, law(sizes, budget), color=color, linewidth=1)


def dot_style(color, marker: str) -> dict:
    return {"color": color, "marker": marker, "markersize": 4.5, "linestyle": "none"}


def draw_learning_rates(curves: dict[int, list[tuple[float, float]]], path: Path) -> Path:
    """Draw excess loss against the learning rate of each width, absolute and relative to the rule's."""
    figure = new_figure(8, 3.6)
    absolute, relative = figure.subplots(1, 2, sharey=True)
    for (width, curve), color, marker in zip(curves.items(), shades(len(curves)), cycle(MARKERS), strict=False):
        rates, losses = (np.array(column) for column in zip(*curve, strict=True))
        style = {"color": color, "marker": marker, "markersize": 4}
        for axes, x in ((absolute, rates), (relative, rates / learning_rate(width))):
            axes.plot(x, losses, label=f"width {width}", **style)
            axes.plot(x[losses.argmin()], losses.min(), marker="o", markersize=10, fillstyle="none", color=color)
    absolute.set(xscale="log", yscale="log", xlabel="learning rate", ylabel=EXCESS_LABEL)
    relative.set(xscale="log", xlabel="learning rate / learning rate of the rule")
    absolute.legend(fontsize="small")
    set_round_log_ticks(absolute.yaxis)
    for axes in (absolute, relative):
        set_round_log_ticks(axes.xaxis)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    return path
