"""What an experiment found, and how it is told: a row of the notebook, and from that the answer in words."""

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from experiments.sequential_test import ALL_LOOKS, FIRST_LOOK, Difference, Worth

CONFIDENCE = "95%"
# Shares of the steps that the baseline is trained for too, to say what a gain is worth.
BUDGETS = (0.5, 0.5**0.5, 2**0.5, 2.0)
ONE_SIDED = ALL_LOOKS / 2  # of ideas that do nothing, the share that is called better


@dataclass
class Answer:
    """What is known of one size of the model."""

    verdict: str
    found: Difference
    baseline: list[float]
    candidate: list[float]
    """Losses, above the floor where that is known."""
    floor: float | None
    margin: float
    """The share of the baseline's loss that counts as nothing."""
    metric: str = "val/loss"
    more: int | None = None
    """Of an unknown one: about how many more runs of each side would tell."""
    worth: Worth | None = None


@dataclass
class Costs:
    """What baseline and candidate need."""

    measured: tuple[dict[str, Any], dict[str, Any]]
    """As experiments/scorer.py gives it."""
    memory: tuple[float, float]
    """The peak, in bytes."""
    tokens_per_second: tuple[list[float], list[float]]
    """Measured by turns."""
    speed: tuple[float, float, float] | None
    """How many times as fast the candidate is, with its interval."""
    diff_lines: int


def row(words: dict[str, Any], answers: dict[float, Answer], costs: Costs | None, message: str) -> dict[str, Any]:
    """For the notebook and for programs: plain JSON. Differences are in percent of the baseline's loss, above the floor
    where that is known; what concerns one size is of the first, and of all in `sizes`."""
    sizes = [{"size": size, **of_size(answer, costs)} for size, answer in answers.items()]
    first = sizes[0] if sizes else {"seeds": 0, "verdict": "unknown"}
    facts = {**words, **first, "time": time.strftime("%Y-%m-%d %H:%M:%S")}
    if message:
        facts |= {"message": message} | ({} if sizes else {"verdict": "failed"})
    if costs:
        ours, theirs = costs.measured
        facts["cost"] = {name: [ours[name], theirs[name]] for name in ("parameters", "flops_per_token", "tokens")}
        facts["cost"] |= {"peak_memory_bytes": list(costs.memory), "diff_lines": costs.diff_lines, "speed": costs.speed}
        if None not in (ours["num_bytes"], theirs["num_bytes"]):  # by the bytes of a token of the validation text
            facts["cost"]["bytes"] = [one["tokens"] * one["num_bytes"] / one["num_targets"] for one in costs.measured]
        facts["cost"]["tokens_per_second"] = [
            statistics.median(speeds) if speeds else None for speeds in costs.tokens_per_second
        ]
    if len(sizes) > 1:
        facts |= {"sizes": sizes, "trend": trend(sizes)}
    return facts


def of_size(answer: Answer, costs: Costs | None) -> dict[str, Any]:
    """An answer as plain JSON."""
    base, found = statistics.fmean(answer.baseline), answer.found
    percent = [100 * change / base for change in (found.mean, found.low, found.high)]
    facts: dict[str, Any] = {"verdict": answer.verdict, "seeds": found.runs, "more_seeds": answer.more}
    facts |= {"floor": answer.floor, "margin": answer.margin, "metric": answer.metric}
    facts |= dict(zip(("difference", "low", "high"), percent, strict=True))
    facts |= {"means": [base, statistics.fmean(answer.candidate)]}
    facts |= {"deviations": [statistics.stdev(side) for side in (answer.baseline, answer.candidate)]}
    if answer.worth:
        facts["worth"] = [answer.worth.ratio, answer.worth.low, answer.worth.high]
        if costs and costs.speed:
            facts["worth_in_time"] = product(facts["worth"], costs.speed)
    return facts


def product(one: list[float], other: tuple[float, float, float]) -> list[float]:
    """Of two positive numbers with their intervals, whose errors are independent: their logarithms add up, and at each
    end the squares of their reaches."""
    middle = one[0] * other[0]
    if not 0 < other[1] <= other[2] < math.inf:
        return [middle, 0.0, math.inf]
    down, up = (math.hypot(*(math.log(side[end] / side[0]) for side in (one, other))) for end in (1, 2))
    return [middle, middle * math.exp(-down), middle * math.exp(up)]


def trend(sizes: list[dict[str, Any]]) -> str:
    """Whether what an idea gains grows, stays or fades from the smallest to the largest size: in worth, or in percent
    of the loss where that is not known of both."""
    first, last = sizes[0], sizes[-1]
    if first.get("worth") and last.get("worth"):
        gains = [[math.log(value) for value in size["worth"]] for size in (first, last)]
    else:
        gains = [[-size["difference"], -size["high"], -size["low"]] for size in (first, last)]
    (a, a_low, a_high), (b, b_low, b_high) = gains
    change = b - a
    if change - math.hypot(b - b_low, a_high - a) > 0:
        return "grows"
    return "fades" if change + math.hypot(b_high - b, a - a_low) < 0 else "stays, as far as these runs can tell"


def interval(values: list[float], form: str = ".2f") -> str:
    """A number with its interval."""
    middle, low, high = (format(value, form) for value in values)
    return f"{middle} ({CONFIDENCE}: {low} to {high})"


def worth_in_words(steps: list[float], time: list[float] | None = None) -> str:
    """As Worth has them, of the time if that is given: an end of the budgets that were trained is only a limit."""
    limits = ["over " * (value >= BUDGETS[-1]) + "under " * (value <= BUDGETS[0]) for value in steps]
    words = [f"{limit}{value:.2f}" for limit, value in zip(limits, time or steps, strict=True)]
    return f"{words[0]} ({CONFIDENCE}: {words[1]} to {words[2]})"


def sentence(found: dict[str, Any]) -> str:
    """The answer."""
    idea, verdict = found["idea"], found["verdict"]
    if verdict == "failed":
        return f"Failed: {idea} does not train: {found['message']}"
    if "difference" not in found:
        return f"Not known: the budget was spent before {idea} had {FIRST_LOOK} runs."
    by = interval([found[name] for name in ("difference", "low", "high")], "+.1f").replace(" (", "% (", 1)
    what = measured_by(found)
    told = {
        "better": f"Better: {idea} changes the {what} by {by}",
        "worse": f"Worse: {idea} changes the {what} by {by}",
        "no difference": f"No difference of more than {100 * found['margin']:g}%: {idea} changes the {what} by {by}",
        "unknown": f"Not known: {idea} changes the {what} by {by}",
    }[verdict]
    if found.get("worth"):
        told += f"; worth {worth_in_words(found['worth'])} times the steps"
    if found.get("worth_in_time"):
        told += f", {worth_in_words(found['worth'], found['worth_in_time'])} times the time"
    if verdict == "unknown":
        more = found["more_seeds"]
        told += f"; {f'about {more}' if more else 'more than 200'} more seeds of each side would tell"
    if unequal := unequal_costs(found):
        told += f"; unequal: {unequal}"
    if "trend" in found:
        told += f"; with size it {found['trend']}"
    if "message" in found:
        told += f"; of a larger one nothing is known: {found['message']}"
    return told + "."


def measured_by(found: dict[str, Any]) -> str:
    """What is compared."""
    return "val/loss above the floor" if found.get("floor") is not None else found.get("metric", "val/loss")


def unequal_costs(found: dict[str, Any]) -> str:
    """Of which the idea has more or less than the baseline."""
    cost = found.get("cost", {})
    pairs = {"parameters": cost.get("parameters"), "FLOPs a token": cost.get("flops_per_token")}
    pairs |= {"training tokens": cost.get("tokens"), "bytes of training text": cost.get("bytes")}
    return ", ".join(
        f"{100 * (theirs / ours - 1):+.1f}% {name}"
        for name, (ours, theirs) in ((name, pair) for name, pair in pairs.items() if pair)
        if abs(theirs / ours - 1) > 0.001
    )


def table(found: dict[str, Any]) -> Iterator[list[str]]:
    """What both sides come to, and what they cost."""

    def line(name: str, pair: list[float] | None, form: str = ",d", times: float = 1) -> list[str]:
        if not pair or None in pair:
            return [name, "-", "-", "-"]
        return [name, *(format(type(value)(value * times), form) for value in pair), f"{pair[1] / pair[0]:.3f}"]

    cost = found.get("cost", {})
    yield ["", "baseline", "idea", "ratio"]
    yield line(measured_by(found), found["means"], ".4f")
    yield ["deviation over seeds", *(f"{value:.4f}" for value in found["deviations"]), ""]
    if cost:
        yield line("parameters", cost["parameters"])
        yield line("FLOPs a token", cost["flops_per_token"])
        yield line("training tokens", cost["tokens"])
        yield line("tokens/s, by turns", cost["tokens_per_second"], ",.0f")
        yield line("peak memory (MB)", cost["peak_memory_bytes"], ",.0f", 1e-6)
        yield ["lines of the diff", "", str(cost["diff_lines"]), ""]
