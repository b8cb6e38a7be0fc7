"""The result of an experiment: a row of the log, and from that row the report in words."""

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cli.output import aligned
from tools.experiment.compute_multiplier import BUDGETS, Estimate, geometric_mean
from tools.experiment.score import EXCESS_LOSS
from tools.experiment.sequential_test import MAX_MORE_SEEDS, MIN_SEEDS, TOTAL_ALPHA, Difference

CONFIDENCE = "95%"
FALSE_BETTER_RATE = TOTAL_ALPHA / 2  # fraction of candidates without effect that are called better


@dataclass
class Comparison:
    """Results at one model size."""

    verdict: str
    difference: Difference
    baseline: list[float]
    """Values of the metric by seed."""
    candidate: list[float]
    entropy: float | None
    """Entropy of the data, nats/token; None if unknown."""
    margin: float
    """Equivalence margin, as a fraction of the baseline's mean."""
    metric: str
    more_seeds: int = 0
    """Estimated further seeds of each arm for a verdict, at most MAX_MORE_SEEDS."""
    multiplier: Estimate | None = None
    """The compute multiplier."""


def make_row(
    facts: dict[str, Any],
    comparisons: dict[float, Comparison],
    cost: dict[str, Any] | None,
    message: str,
    verdict: str,
) -> dict[str, Any]:
    """Return the row for the log, as plain JSON.

    Differences are in percent of the baseline's mean. Results are those of the first size (factor on the parameters);
    with several, those of each are in `sizes`. Without a comparison, the row has `verdict` and the reason, `message`.
    """
    sizes = [{"size": size, **comparison_facts(comparison, cost)} for size, comparison in comparisons.items()]
    first = sizes[0] if sizes else {"seeds": 0, "more_seeds": None, "verdict": verdict}
    row = {**facts, **first, "time": time.strftime("%Y-%m-%d %H:%M:%S")}
    if message:
        row["message"] = message
    if cost:
        row["cost"] = cost
    if len(sizes) > 1:
        row |= {"sizes": sizes, "trend": trend(sizes)}
    return row


def comparison_facts(comparison: Comparison, cost: dict[str, Any] | None) -> dict[str, Any]:
    """Return a comparison as plain JSON."""
    mean, difference = statistics.fmean(comparison.baseline), comparison.difference
    percent = [100 * change / mean for change in (difference.mean, difference.low, difference.high)]
    facts: dict[str, Any] = {
        "verdict": comparison.verdict,
        "seeds": difference.seeds,
        "baseline_seeds": len(comparison.baseline),
        "more_seeds": comparison.more_seeds,
        "entropy": comparison.entropy,
        "margin": comparison.margin,
        "metric": comparison.metric,
        **dict(zip(("difference", "low", "high"), percent, strict=True)),
        "means": [mean, statistics.fmean(comparison.candidate)],
        "stds": [statistics.stdev(losses) for losses in (comparison.baseline, comparison.candidate)],
        "losses": [comparison.baseline, comparison.candidate],
    }
    if comparison.multiplier:
        facts["compute_multiplier"] = [*comparison.multiplier]
        if cost and cost["relative_throughput"]:
            facts["time_multiplier"] = multiply(comparison.multiplier, cost["relative_throughput"])
    return facts


def cost_facts(
    scores: list[dict[str, Any]],
    memory_bytes: list[float],
    speeds: tuple[list[float], list[float]],
    num_lines: int,
) -> dict[str, Any]:
    """Return the resources that both arms need as plain JSON, [baseline, candidate] each.

    `scores` are results of `score_arm`, with `tokens`; `speeds` are tokens per second in interleaved runs, if measured.
    """
    ratios = [speed / baseline_speed for baseline_speed, speed in zip(*speeds, strict=True)]
    cost: dict[str, Any] = {
        **{name: [score[name] for score in scores] for name in ("parameters", "flops_per_token", "tokens")},
        "peak_memory_bytes": memory_bytes,
        "diff_lines": num_lines,
        "relative_throughput": geometric_mean(ratios) if ratios else None,
        "tokens_per_second": [statistics.median(values) if values else None for values in speeds],
    }
    if None not in [score["num_bytes"] for score in scores]:  # estimated by the bytes per token of the validation text
        cost["bytes"] = [score["tokens"] * score["num_bytes"] / score["num_targets"] for score in scores]
    return cost


def multiply(first: Estimate, second: Estimate) -> list[float]:
    """Return the product of two positive estimates with independent errors, each (value, low, high).

    Logarithms add; half-widths combine as the root of the sum of squares.
    """
    value = first[0] * second[0]
    if not 0 < second[1] <= second[2] < math.inf:
        return [value, 0.0, math.inf]
    down, up = (math.hypot(*(math.log(one[end] / one[0]) for one in (first, second))) for end in (1, 2))
    return [value, value * math.exp(-down), value * math.exp(up)]


def trend(sizes: list[dict[str, Any]]) -> str:
    """Return whether the gain grows or shrinks from the smallest to the largest size.

    The gain is the compute multiplier, or the difference in percent where that is not known for both.
    """
    first, last = sizes[0], sizes[-1]
    if first.get("compute_multiplier") and last.get("compute_multiplier"):
        gains = [[math.log(value) for value in size["compute_multiplier"]] for size in (first, last)]
    else:
        gains = [[-size["difference"], -size["high"], -size["low"]] for size in (first, last)]
    (a, a_low, a_high), (b, b_low, b_high) = gains
    change = b - a
    if change - math.hypot(b - b_low, a_high - a) > 0:
        return "grows"
    return "shrinks" if change + math.hypot(b_high - b, a - a_low) < 0 else "does not change significantly"


def format_difference(row: dict[str, Any], unit: str = "") -> str:
    """Format the difference of a comparison, in percent, with its interval."""
    middle, low, high = (f"{row[name]:+.1f}" for name in ("difference", "low", "high"))
    return f"{middle}{unit} ({CONFIDENCE}: {low} to {high})"


def format_multiplier(compute: list[float], time: list[float] | None = None) -> str:
    """Format the time multiplier, by default the compute multiplier, whose values at the ends of BUDGETS are bounds."""
    bounds = ["over " * (value >= BUDGETS[-1]) + "under " * (value <= BUDGETS[0]) for value in compute]
    words = [f"{bound}{value:.2f}" for bound, value in zip(bounds, time or compute, strict=True)]
    return f"{words[0]} ({CONFIDENCE}: {words[1]} to {words[2]})"


def summarize(row: dict[str, Any]) -> str:
    """Return the result in one sentence."""
    if "difference" in row:
        return "; ".join(parts_of_comparison(row)) + "."
    idea, verdict, message = row["idea"], row["verdict"], row["message"]
    if verdict == "identical":
        return (
            f"Identical: {idea} trains the same weights as the baseline, bit for bit, {message}; is the setting in "
            "effect? --stop_early false trains whole runs."
        )
    if verdict == "unknown":
        ours, theirs = row.get("finished_runs", (0, 0))
        message += f"; {ours} runs of the baseline and {theirs} of the candidate are finished, {MIN_SEEDS} are needed"
    return f"{verdict.capitalize()}: {idea}: {message}"


def parts_of_comparison(row: dict[str, Any]) -> list[str]:
    """Return the parts of the summary: the verdict with the difference, then multipliers and caveats."""
    idea, verdict = row["idea"], row["verdict"]
    beyond = f" beyond the equivalence margin of {100 * row['margin']:g}%" if verdict == "no difference" else ""
    change = format_difference(row, "%")
    parts = [f"{verdict.capitalize()}{beyond}: {idea} changes {row['metric']} by {change}"]
    if row.get("compute_multiplier"):
        parts.append(f"compute multiplier {format_multiplier(row['compute_multiplier'])}")
    if row.get("time_multiplier"):
        parts.append(f"time multiplier {format_multiplier(row['compute_multiplier'], row['time_multiplier'])}")
    if verdict == "unknown":
        more = row["more_seeds"]
        parts.append(f"{'about' if more < MAX_MORE_SEEDS else 'at least'} {more} more seeds of each arm would decide")
    if verdict == "futile":
        parts.append("it is unlikely to be called better with all seeds; --stop_early false trains them")
    if unequal := unequal_costs(row):
        parts.append(f"unequal: {unequal}")
    if "trend" in row:
        parts.append(f"the gain {row['trend']} with size")
    if row.get("verify") not in (None, "passed"):
        parts.append(f"checks of verify.py that fail: {row['verify']}")
    if row.get("data_changes"):
        parts.append(f"its losses may mean something else, as it changes {', '.join(row['data_changes'])}")
    if "message" in row:
        parts.append(f"no result for a larger model: {row['message']}")
    return parts


def unequal_costs(row: dict[str, Any]) -> str:
    """Return the costs in which the candidate differs from the baseline by more than 0.1%, as text; "" if none do."""
    cost = row.get("cost", {})
    pairs = {"parameters": cost.get("parameters"), "FLOPs/token": cost.get("flops_per_token")}
    pairs |= {"training tokens": cost.get("tokens"), "bytes of training text": cost.get("bytes")}
    return ", ".join(
        f"{100 * (pair[1] / pair[0] - 1):+.1f}% {name}"
        for name, pair in pairs.items()
        if pair and abs(pair[1] / pair[0] - 1) > 0.001
    )


def cost_table(row: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the lines of the table of results and costs of both arms."""

    def line(name: str, pair: list[float] | None, form: str = ",d", factor: float = 1) -> list[str]:
        if not pair or None in pair:
            return [name, "-", "-", "-"]
        return [name, *(format(type(value)(value * factor), form) for value in pair), f"{pair[1] / pair[0]:.3f}"]

    unit = " (nats/token)" if row["metric"] in ("val/loss", EXCESS_LOSS) else ""
    yield ["", "baseline", "candidate", "ratio"]
    yield line(f"{row['metric']}{unit}", row["means"], ".4f")
    yield ["std over seeds", *(f"{value:.4f}" for value in row["stds"]), ""]
    if cost := row.get("cost"):
        yield line("parameters", cost["parameters"])
        yield line("FLOPs/token", cost["flops_per_token"])
        yield line("training tokens", cost["tokens"])
        yield line("tokens/s, interleaved", cost["tokens_per_second"], ",.0f")
        yield line("peak memory (MB)", cost["peak_memory_bytes"], ",.0f", 1e-6)
        yield ["lines of the diff", "", str(cost["diff_lines"]), ""]


def format_report(row: dict[str, Any]) -> Iterator[str]:
    """Yield the report: the result in one sentence, the table, and how it was obtained."""
    yield summarize(row)
    if "difference" in row:
        yield from ["", *aligned(list(cost_table(row)))]
    yield ""
    for arm, commit in (("baseline", row["base"]), ("candidate", row["commit"])):
        yield f"{arm}: {row[arm]}" + (f", commit {commit[:12]}" if commit else "")
    if row.get("commits_behind"):
        yield f"the baseline is {row['commits_behind']} commit(s) behind HEAD; --onto HEAD applies the change to HEAD"
    if row.get("uncommitted"):
        yield "uncommitted changes of code or config files are in neither arm"
    if "tuned" in row:
        yield f"tuned: {row['tuned'][0]:g} for the baseline, {row['tuned'][1]:g} for the candidate"
    elif row["verdict"] in ("better", "worse"):
        yield "neither arm is tuned: --tune optimizer.lr shows whether the learning rate only suits one of them better"
    if row["diff"]:
        yield f"diff: {row['diff']}"
    for size in row.get("sizes", []):
        multiplier = size.get("compute_multiplier")
        words = f", compute multiplier {format_multiplier(multiplier)}" if multiplier else ""
        begin = f"{size['size']:g} times the parameters, {size['seeds']} seeds"
        yield f"{begin}: {size['verdict']}, {format_difference(size)} percent{words}"
    if "difference" in row:
        yield (
            f"{row['seeds']} seeds of the candidate and {row['baseline_seeds']} of the baseline, analysed after every "
            f"seed from number {MIN_SEEDS} on: repeated confidence intervals with Welch's t, valid under any stopping "
            "rule (docs/experiments.md)"
        )
    tried = row["candidates_tried"]
    yield (
        f"{tried} candidate(s) were compared with this baseline; if none had an effect, about "
        f"{FALSE_BETTER_RATE * tried:.2g} would be called better by chance"
    )
