"""The results of a lab: each an object of JSON, from which text and pictures are made."""

import json
import math
from collections import defaultdict
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from cli.output import aligned
from config.errors import ConfigError
from config.paths import expand_user_path
from run.directory import Run
from storage.files import write_atomically
from storage.json_objects import parse_object
from tools.experiment import analysis
from tools.experiment.ideas import CONTROL, CONTROL_STEPS
from tools.experiment.picture import draw, sorted_ideas
from tools.experiment.record import Record, ScreenRun
from tools.experiment.settings import ReportConfig

KIND = "val/excess_loss/"  # prefix of the metrics of kinds of tokens


def main(config: ReportConfig) -> None:
    """Print the screens, confirmations and comparisons of a lab, and draw the screens."""
    lab = expand_user_path("lab", config.lab)
    files = sorted(lab.glob("screens/*/screen.json"), key=lambda file: file.stat().st_mtime)
    screens = [report_screen(file.parent, lab) for file in files]
    files = sorted(lab.glob("results/*.json"), key=lambda file: file.stat().st_mtime)
    results = [parse_object(file.read_bytes()) for file in files]
    if not screens and not results:
        raise ConfigError(f"lab: {lab} has no results")
    if config.print_json:
        print(json.dumps({"screens": screens, "results": results}))
        return
    texts = [screen_lines(screen) for screen in screens]
    texts += [confirmation_lines(one) if "differences" in one else comparison_lines(one) for one in results]
    print("\n\n".join("\n".join(lines) for lines in texts))


def save_result(lab: Path, result: dict[str, Any], *identity: object) -> None:
    """Write a comparison or confirmation into LAB/results, in place of an earlier one of this identity."""
    folder = lab / "results"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{sha256(repr(identity).encode()).hexdigest()[:12]}.json", json.dumps(result) + "\n")


def analyze(record: Record, lab: Path) -> analysis.Analysis:
    """Analyze the runs of a screen that are finished and scored, or have failed."""
    left_out = record.runs_of_failing_pairs()
    keys, runs = [*record.ideas], [run for run in record.runs if run.is_done and run not in left_out]
    on = np.array([[key in run.ideas for key in keys] for run in runs], bool).reshape(len(runs), len(keys))
    losses = np.log([run.loss or math.nan for run in runs])
    columns = np.array([run_costs(run, lab) for run in runs]).reshape(len(runs), 4).T
    costs: dict[str, np.ndarray] = dict(zip(("seconds", "parameters", "flops"), columns, strict=False))
    names = [idea.text for idea in record.ideas.values()]
    control = (names.index(CONTROL), CONTROL_STEPS) if CONTROL in names else None
    return analysis.analyze(names, on, losses, costs, columns[3], control)


def run_costs(one: ScreenRun, lab: Path) -> list[float]:
    """Return seconds a step, parameters, FLOPs per token, and seconds of all steps of a run; NaN if it failed."""
    if one.loss is None:
        return [math.nan] * 4
    run = Run(lab / "runs" / one.name)
    newest, session = run.newest_metrics(), run.sessions()[-1]
    seconds = newest["train/tokens"] / run.tokens_per_second()
    parameters, flops = session.parameters or math.nan, session.flops_per_token or math.nan
    return [seconds / newest["step"], parameters, flops, seconds]


def excess_by_kind(record: Record, lab: Path) -> dict[str, float]:
    """Return the mean excess loss of each kind of token over all runs, the largest first."""
    kinds = defaultdict(list)
    for one in record.runs:
        if one.loss is not None:
            for name, value in Run(lab / "runs" / one.name).newest_metrics().items():
                if name.startswith(KIND) and value is not None:
                    kinds[name.removeprefix(KIND)].append(value)
    return dict(sorted(((name, fmean(values)) for name, values in kinds.items()), key=lambda pair: -pair[1]))


def report_screen(folder: Path, lab: Path) -> dict[str, Any]:
    """Return the result of a screen as the object of `--json`, and draw its picture."""
    record = Record.read(folder / "screen.json")
    texts = {key: idea.text for key, idea in record.ideas.items()}
    picture = folder / "screen.png"
    result = analyze(record, lab).to_json() | {
        "screen": folder.name,
        "picture": str(picture),
        "failures": sorted({run.failure for run in record.runs if run.failure}),
        "cannot_be_on": [
            {"idea": idea.text, "message": idea.failure} for idea in record.ideas.values() if idea.failure
        ],
        "fail_together": [[texts[key] for key in pair] for pair in record.failing_pairs()],
        "left_out": len(record.runs_of_failing_pairs()),
        "kinds": excess_by_kind(record, lab),
    }
    draw(result, picture)
    return result


def percent(change: float | None) -> str:
    """Format a change."""
    return "-" if change is None else f"{100 * change:+.1f}%"


def number(value: float | None, form: str = ".2f") -> str:
    """Format a number that may be unknown."""
    return "-" if value is None else format(value, form)


def interval(effect: dict[str, Any]) -> str:
    """Format the interval of an effect."""
    return "-" if effect["low"] is None else f"{percent(effect['low'])} to {percent(effect['high'])}"


def screen_lines(screen: dict[str, Any]) -> list[str]:
    """Return the report of a screen as text."""
    table = [["idea", "effect", "95% interval", "p", "q", "verdict", "failed", "s/step", "params", "FLOPs", "equal s"]]
    for one in sorted_ideas(screen):
        p, q = number(one["p"], ".2g"), number(one["q"], ".2g")
        cost = [number(one[name]) for name in ("seconds", "parameters", "flops")]
        equal = percent((one["equal_compute"] or {}).get("effect"))
        effect = [percent(one["effect"]), interval(one), p, q, one["verdict"], str(one["failed"] or "")]
        table.append([one["idea"], *effect, *cost, equal])
    left_out = f"; {screen['left_out']} more have ideas that fail together" if screen["left_out"] else ""
    lines = [
        f"{screen['screen']}: {screen['runs']} runs, {screen['failed']} of them failed{left_out}",
        "",
        *aligned(table),
        "",
        "effect: change of the geometric mean over seeds of the excess loss (the loss, if the entropy is unknown), "
        "averaged over runs with a few other ideas on",
        "equal s: the effect if the runs without the idea trained for as many seconds as those with it; known once the "
        "effect of the control is significant",
    ]
    lines += [f"failed: {text}" for text in screen["failures"]]
    lines += [f"cannot be on: {one['idea']}: {one['message']}" for one in screen["cannot_be_on"]]
    lines += [f"fail together, and are kept apart: {' and '.join(pair)}" for pair in screen["fail_together"]]
    for one in screen["interactions"][:3]:
        change = f"{percent(one['effect'])} ({interval(one)})"
        lines.append(f"together: {' and '.join(one['ideas'])}: {change} beyond their product")
    if screen["kinds"]:
        kinds = ", ".join(f"{kind} {value:.3f}" for kind, value in screen["kinds"].items())
        lines.append(f"excess loss by kind of token: {kinds}")
    return [
        *lines,
        "These effects chose the ideas, so the best are too good on average. Only the table of confirm is a result.",
        f"picture: {screen['picture']}",
    ]


def comparison_lines(comparison: dict[str, Any]) -> list[str]:
    """Return a comparison as text: the result in one sentence, then the costs of both arms."""
    lines = []
    for result in [comparison, *comparison["sizes"]]:
        size = f" at {result['size']:g} times the parameters" if result["size"] != 1 else ""
        text = f"{result['verdict'].capitalize()}{size}: {comparison['idea']}"
        if result["message"]:
            text += f": {result['message']}"
        elif result["effect"] is not None:
            form = percent if result["is_ratio"] else "{:+.4g}".format
            change, low, high = (form(result[name]) for name in ("effect", "low", "high"))
            text += f" changes the loss by {change} (95%: {low} to {high}) in {result['seeds']} seeds"
        if result["compute_multiplier"]:
            text += "; compute multiplier {:.2f} (95%: {:.2f} to {:.2f})".format(*result["compute_multiplier"])
        if result["verdict"] == "unknown" and result["more_seeds"]:
            text += f"; about {result['more_seeds']} more seeds of each arm would decide"
        lines.append(text)
    if comparison["cost"]:
        table = [["", "baseline", "candidate", "ratio"]]
        for name, (ours, theirs) in comparison["cost"].items():
            ratio = theirs / ours if ours and theirs is not None else None
            table.append([name, number(ours, ",.0f"), number(theirs, ",.0f"), number(ratio, ".3f")])
        lines += ["", *aligned(table)]
    return lines


def confirmation_lines(confirmation: dict[str, Any]) -> list[str]:
    """Return a confirmation as text."""
    table = [["", "against", "size", "screen", "measured", "95% interval", "p", "verdict"]]
    for one in confirmation["differences"]:
        changes = percent(one["predicted"]), percent(one["effect"]), interval(one)
        table.append([one["arm"], one["against"], f"{one['size']:g}x", *changes, f"{one['p']:.2g}", one["verdict"]])
    seed, seeds = confirmation["data_seed"], confirmation["seeds"]
    data = "" if seed is None else f", data.seed {seed}"
    return [f"confirmation with {seeds} seeds of each arm that no screen has used{data}", "", *aligned(table)]
