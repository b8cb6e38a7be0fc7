"""The results of a lab as text, JSON and pictures."""

import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from cli.output import aligned
from config.errors import ConfigError
from config.paths import expand_user_path
from run.directory import Run
from tools.experiment import analysis, log
from tools.experiment.ideas import CONTROL_STEPS, is_control
from tools.experiment.picture import draw
from tools.experiment.record import Record, Row
from tools.experiment.settings import ReportConfig

KIND = "val/excess_loss/"  # prefix of the metrics of kinds of tokens


def analyze(record: Record, lab: Path) -> analysis.Screen:
    """Analyze the runs of a screen that are finished and scored, or have failed."""
    left_out = rows_failing_by_pairs(record)
    keys, rows = [*record.ideas], [row for row in record.rows if row.is_done and row not in left_out]
    on = np.array([[key in row.ideas for key in keys] for row in rows], bool).reshape(len(rows), len(keys))
    losses = np.array([np.nan if row.loss is None else math.log(row.loss) if row.loss > 0 else np.nan for row in rows])
    costs = np.array([run_costs(row, lab) for row in rows]).reshape(len(rows), 4)
    names = [record.ideas[key]["text"] for key in keys]
    seconds, parameters, flops, whole = costs.T
    # What compute is worth in this very recipe: the control trains a known fraction of the steps.
    changes = zip(keys, analysis.least_squares(on, losses).estimate.tolist(), strict=True)
    control = next((change for key, change in changes if is_control(record.idea(key))), math.nan)
    slope = {} if math.isnan(control) else {"compute_slope": control / math.log(CONTROL_STEPS)}
    return analysis.analyze(names, on, losses, seconds, parameters, flops, whole, **slope)


def rows_failing_by_pairs(record: Record) -> list[Row]:
    """Return the runs that have two ideas on that fail together, which says nothing about either."""
    pairs = record.failing_pairs()
    return [row for row in record.rows if any({*pair} <= {*row.ideas} for pair in pairs)]


def run_costs(row: Row, lab: Path) -> list[float]:
    """Return seconds a step, parameters, FLOPs per token, and seconds of all steps of a run; NaN if it failed."""
    if row.loss is None:
        return [math.nan] * 4
    run = Run(lab / "runs" / row.run)
    newest, session = run.newest_metrics(), run.sessions()[-1]
    whole = newest["train/tokens"] / run.tokens_per_second()
    parameters, flops = session.parameters or math.nan, session.flops_per_token or math.nan
    return [whole / newest["step"], parameters, flops, whole]


def excess_by_kind(record: Record, lab: Path) -> dict[str, float]:
    """Return the mean excess loss of each kind of token over all runs, the largest first."""
    kinds = defaultdict(list)
    for row in record.rows:
        if row.loss is not None:
            for name, value in Run(lab / "runs" / row.run).newest_metrics().items():
                if name.startswith(KIND):
                    kinds[name.removeprefix(KIND)].append(value)
    return dict(sorted(((name, fmean(values)) for name, values in kinds.items()), key=lambda pair: -pair[1]))


def percent(change: float | None) -> str:
    """Format a change."""
    return "-" if change is None or math.isnan(change) else f"{100 * change:+.1f}%"


def number(value: float, form: str = ".2f") -> str:
    """Format a number that may be unknown."""
    return "-" if math.isnan(value) else format(value, form)


def interval(effect: analysis.Effect) -> str:
    """Format the interval of an effect."""
    return "-" if math.isnan(effect.low) else f"{percent(effect.low)} to {percent(effect.high)}"


def screen_lines(name: str, screen: analysis.Screen, record: Record, lab: Path) -> list[str]:
    """Return the report of a screen as text."""
    rows = [["idea", "effect", "95% interval", "p", "q", "verdict", "failed", "s/step", "params", "FLOPs", "equal s"]]
    for one in sorted(screen.ideas, key=lambda one: math.inf if math.isnan(one.effect) else one.effect):
        p, q = number(one.p, ".2g"), number(one.q, ".2g")
        equal = one.equal_compute.effect if one.equal_compute else None
        cost = [number(value) for value in (one.seconds, one.parameters, one.flops)]
        failed = str(one.failed or "")
        rows.append([one.idea, percent(one.effect), interval(one), p, q, one.verdict, failed, *cost, percent(equal)])
    failures = {row.failure for row in record.rows if row.failure}
    num_left_out = len(rows_failing_by_pairs(record))
    left_out = f", and {num_left_out} more of ideas that fail together" if num_left_out else ""
    lines = [
        f"{name}: {screen.runs} runs, {screen.failed} of them failed{left_out}",
        "",
        *aligned(rows),
        "",
        "effect: change of the geometric mean over seeds of the excess loss (the loss, if the entropy is unknown), "
        "averaged over runs with a few other ideas on",
        "equal s: the effect if the runs without the idea trained for as many seconds as those with it",
    ]
    lines += [f"failed: {text}" for text in sorted(failures)]
    lines += [f"cannot be on: {one['text']}: {one['failure']}" for one in record.ideas.values() if one["failure"]]
    for pair in record.failing_pairs():
        lines.append(f"fail together, and are kept apart: {' and '.join(record.ideas[key]['text'] for key in pair)}")
    for one in screen.interactions[:3]:
        lines.append(
            f"together: {' and '.join(one.ideas)}: {percent(one.effect)} ({interval(one)}) beyond their product"
        )
    if kinds := excess_by_kind(record, lab):
        lines.append(
            "excess loss by kind of token: " + ", ".join(f"{kind} {value:.3f}" for kind, value in kinds.items())
        )
    lines.append(
        "These effects chose the ideas, so the best are too good on average. Only the table of confirm is a result."
    )
    return lines


def screen_json(name: str, screen: analysis.Screen, record: Record, lab: Path) -> dict[str, Any]:
    """Return the report of a screen as one object."""
    blocked = [{"idea": one["text"], "message": one["failure"]} for one in record.ideas.values() if one["failure"]]
    apart = [[record.ideas[key]["text"] for key in pair] for pair in record.failing_pairs()]
    more = {"screen": name, "cannot_be_on": blocked, "fail_together": apart, "kinds": excess_by_kind(record, lab)}
    return screen.to_json() | more


def draw_screen(folder: Path, screen: analysis.Screen) -> Path:
    """Draw a screen into its folder; return the path of the picture."""
    path = folder / "screen.png"
    draw(screen, path)
    return path


def comparison_lines(row: dict[str, Any]) -> list[str]:
    """Return a comparison as text: the result in one sentence, then the costs of both arms."""
    lines = []
    for result in [row, *row["sizes"]]:
        size = f" at {result['size']:g} times the parameters" if result["size"] != 1 else ""
        text = f"{result['verdict'].capitalize()}{size}: {row['idea']}"
        if result["message"]:
            text += f": {result['message']}"
        elif result["effect"] is not None:
            change = percent(result["effect"]) if result["is_ratio"] else f"{result['effect']:+.4g}"
            text += f" changes the loss by {change} ({ends(result)}) in {result['seeds']} seeds"
        if result["compute_multiplier"]:
            text += "; compute multiplier {:.2f} (95%: {:.2f} to {:.2f})".format(*result["compute_multiplier"])
        if result["verdict"] == "unknown" and result["more_seeds"]:
            text += f"; about {result['more_seeds']} more seeds of each arm would decide"
        lines.append(text)
    if row["cost"]:
        table = [["", "baseline", "candidate", "ratio"]]
        for name, (ours, theirs) in row["cost"].items():
            known = isinstance(ours, int | float) and isinstance(theirs, int | float) and ours
            values = [f"{value:,.0f}" if value is not None else "-" for value in (ours, theirs)]
            table.append([name, *values, f"{theirs / ours:.3f}" if known else "-"])
        lines += ["", *aligned(table)]
    return lines


def ends(result: dict[str, Any]) -> str:
    """Format the 95% interval of a result."""
    if not result["is_ratio"]:
        return f"95%: {result['low']:+.4g} to {result['high']:+.4g}"
    return f"95%: {percent(result['low'])} to {percent(result['high'])}"


def confirmation_lines(result: dict[str, Any]) -> list[str]:
    """Return a confirmation as text."""
    table = [["", "against", "size", "screen", "measured", "95% interval", "p", "verdict"]]
    for row in result["rows"]:
        ends = f"{percent(row['low'])} to {percent(row['high'])}"
        sizes = f"{row['size']:g}x", percent(row["predicted"]), percent(row["effect"])
        table.append([row["arm"], row["against"], *sizes, ends, f"{row['p']:.2g}", row["verdict"]])
    data = "" if result["data_seed"] is None else f", data.seed {result['data_seed']}"
    return [f"confirmation with {result['seeds']} seeds of each arm that no screen has used{data}", "", *aligned(table)]


def main(config: ReportConfig) -> None:
    """Print the screens, confirmations and comparisons of a lab, and draw the screens."""
    lab = expand_user_path("lab", config.lab)
    objects: list[dict[str, Any]] = []
    for file in sorted(lab.glob("screens/*/screen.json"), key=lambda file: file.stat().st_mtime):
        record = Record.read(file)
        screen = analyze(record, lab)
        objects.append(screen_json(file.parent.name, screen, record, lab))
        if not config.print_json:
            print("\n".join(screen_lines(file.parent.name, screen, record, lab)))
            print(f"picture: {draw_screen(file.parent, screen)}\n")
    results = log.read(lab)
    if not objects and not results:
        raise ConfigError(f"lab: {lab} has no results")
    if config.print_json:
        print(json.dumps({"screens": objects, "results": results}))
        return
    for result in results:
        print("\n".join([*(confirmation_lines(result) if "rows" in result else comparison_lines(result)), ""]))
