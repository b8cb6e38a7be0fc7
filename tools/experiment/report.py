"""The results of experiments: each an object of JSON, from which text and pictures are made."""

import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from string import ascii_uppercase
from typing import Any

from runtime.cli.output import aligned
from runtime.config.errors import ConfigError
from runtime.config.paths import expand_user_path
from runtime.files import lock, open_no_link
from tools.experiment import verdicts
from tools.experiment.change import Idea
from tools.experiment.picture import BASELINE, draw, label, unit_of
from tools.experiment.record import Record, Round
from tools.experiment.runs import SEEDS_OF_CONFIRMATIONS, Result, group_of, read_experiment, read_results, runs_of
from tools.experiment.settings import ReportConfig
from tools.experiment.verdicts import Finding, Group
from tools.jobs.runner import EXIT_STOPPED

JSON_VERSION = 1
EFFECT = ("effect", "low", "high", "p", "q")
COSTS = ("steps", "tokens", "flops", "seconds", "parameters")
COUNTS = ("forwards", "updates", "seconds_per_flop", "evaluation")
MIN_TIMED_SECONDS = 5.0  # of a run: the start of a shorter one takes most of its time
SLOW, MORE = 1.3, 1.01  # ratios that the report mentions: seconds to what the FLOPs say, forwards and updates to steps
# Of an evaluation: relative to the baseline, and more, because changed code imports torch for each run.
SLOW_EVALUATION, MORE_SECONDS = 2.0, 10.0
KILLED = "it was killed; run the same command again to resume"
WITHDRAWN = "its patch or line was removed"
HOLDS = {"better": "yes", "worse": "no", "failed": "no"}  # of a gain that was measured elsewhere, by its verdict
MIN_RUNS = 2  # of a variant with reserved seeds: without a race, nothing else tells how much runs scatter
MAX_LOG_RATIO = 700.0
MAX_CHANGE = 100.0  # an interval that ends above says nothing


@contextmanager
def errors_as_json(config: ReportConfig) -> Iterator[None]:
    """With --json, also print the error that ends a command as an object."""
    try:
        yield
    except BaseException as error:
        if config.print_json:
            exit_code = {ConfigError: 2, SystemExit: EXIT_STOPPED, KeyboardInterrupt: 130}.get(type(error), 1)
            message = "stopped by a signal" if isinstance(error, SystemExit) else str(error) or type(error).__name__
            print(json.dumps({"version": JSON_VERSION, "exit_code": exit_code, "message": message}))
        raise


def main(config: ReportConfig) -> None:
    """Print the races and confirmations of all experiments, and draw the races."""
    with errors_as_json(config):
        print(describe_all(config))


def describe_all(config: ReportConfig) -> str:
    """Return the races and confirmations of all experiments, as text or JSON."""
    folder = expand_user_path("folder", config.folder)
    files = sorted([*folder.glob("*/races/*.json"), *folder.glob("*/confirmations/*.json")], key=modification_time)
    results, lines, damaged = [], [], []
    for file in files:
        try:
            is_race = file.parent.name == "races"
            result = describe_race(file) if is_race else {"kind": "confirmation"} | json.loads(file.read_text())
            lines.append("\n".join(race_lines(result) if is_race else confirmation_lines(result)))
            results.append(result)
        except (ConfigError, OSError, ValueError, KeyError, TypeError) as error:
            damaged.append(f"{file} cannot be read: {error}")
            lines.append(damaged[-1])
    if not files:
        raise ConfigError(f"folder: {folder} has no results")
    found = {"version": JSON_VERSION, "results": results, "damaged": damaged}
    return json.dumps(found) if config.print_json else "\n\n".join(lines)


def modification_time(file: Path) -> float:
    """Return when a file was last changed."""
    return file.stat().st_mtime


# From the runs to a result


def is_identical(results: Mapping[str, Result], baseline: str, variant: str) -> bool:
    """Return whether a variant trains the weights of the baseline bit for bit, and they have the same loss."""
    if baseline == variant:
        return True
    both = results.get(f"{baseline}-0"), results.get(f"{variant}-0")
    if both[0] is None or both[1] is None or both[0].digest is None or both[0].failure:
        return False
    return both[0].digest == both[1].digest and both[0].loss == both[1].loss


class Groups:
    """The runs of variants with reserved seeds, as groups for verdicts.py, in the order in which they are asked for."""

    def __init__(self, results: Mapping[str, Result]):
        self.results, self.by_digest = results, dict[str, Group]()

    def indices(self, *digests: str) -> list[int]:
        """Return the index of the group of each digest."""
        for digest in digests:
            self.by_digest.setdefault(digest, group_of(runs_of(self.results, digest, SEEDS_OF_CONFIRMATIONS)))
        return [list(self.by_digest).index(digest) for digest in digests]

    @property
    def all(self) -> list[Group]:
        """All groups."""
        return [*self.by_digest.values()]

    @property
    def values(self) -> list[list[float]]:
        """The values of each group."""
        return [group.values for group in self.by_digest.values()]


def compare_runs(groups: Groups, pairs: Iterable[tuple[str, str]], margin: float) -> list[Finding]:
    """Return what reserved seeds say of pairs of digests (baseline, variant)."""
    indices = [tuple(groups.indices(*pair)) for pair in pairs]
    known = [
        (first, second)
        for first, second in dict.fromkeys(indices)
        if first != second and all(len(groups.values[index]) >= MIN_RUNS for index in (first, second))
    ]
    found = dict(zip(known, verdicts.find(groups.all, known, margin, len(known)), strict=True))
    findings = []
    for first, second in indices:
        finding = found.get((first, second), Finding())
        if first == second:
            finding = Finding("identical", 0.0, 0.0)
        elif verdicts.fails_more_often(groups.all[second], groups.all[first]):
            finding = replace(finding, verdict="failed")
        findings.append(finding)
    return findings


def describe_comparisons(
    results: Mapping[str, Result], pairs: Sequence[tuple[str, str]], margin: float
) -> list[dict[str, Any]]:
    """Return what reserved seeds say of pairs of digests (baseline, variant), and the runs of the variants."""
    groups, rows = Groups(results), []
    for (_, digest), finding in zip(pairs, compare_runs(groups, pairs, margin), strict=True):
        group = groups.by_digest[digest]
        rows.append(describe_finding(finding) | {"runs": group.num_ended, "failed": group.failed})
    return rows


def describe_race(file: Path) -> dict[str, Any]:
    """Return the result of a race as the object of `--json`, and draw its picture.

    Fields: `ideas`, each with the finding of the last round in which it raced, and why it is out since; `rounds`, each
    with the findings of all its ideas; `stack`, the ideas that the rounds found, in their order.
    """
    record, results = Record.read(file), read_results(file.parents[1])
    rounds = [describe_round(number, entry, record, results) for number, entry in enumerate(record.rounds, start=1)]
    for entry, reaches in zip(rounds, describe_reach(record, file.parents[2]), strict=True):
        for idea in entry["ideas"]:
            idea["reach"] = reaches if idea["joined"] else None
    last: dict[str, dict[str, Any]] = {}
    for entry in rounds:
        for idea in entry["ideas"]:
            if idea["verdict"] is None and idea["idea"] in last:  # it is out, and has a finding of an earlier round
                last[idea["idea"]] |= {"message": idea["message"]}
            else:
                last[idea["idea"]] = idea | {"verdict": idea["verdict"] or "refused"}
    ended = [run for digest in record.digests for run in runs_of(results, digest)]
    stack = [record.ideas[key].name for key in record.stack]
    stack_file, patch = file.with_suffix(".yaml"), file.with_suffix(".patch")
    runs_now = is_running(file)
    result = {
        "version": JSON_VERSION,
        "kind": "race",
        "state": "running" if runs_now and not record.ended else "ended",
        "reason": record.ended or (None if runs_now else KILLED),
        "race": str(file),
        "baseline": record.baseline,
        "data": read_experiment(file.parents[1]).get("data", {}),
        "compared": record.metric or ("excess loss" if has_entropy(results) else "loss"),
        "equal": record.equal,
        "margin": math.expm1(record.margin),
        "runs": len(ended),
        "failed": sum(bool(run.failure) for run in ended),
        "seconds": sum(run.seconds or 0.0 for run in ended),
        "ideas": list(last.values()),
        "refused": [{"idea": text, "message": message} for text, message in record.refused.items()]
        + [{"idea": one["idea"], "message": one["message"]} for one in last.values() if one["verdict"] == "refused"],
        "rounds": rounds,
        "stack": stack,
        "stack_config": str(stack_file) if stack_file.exists() and stack else None,
        "stack_patch": str(patch) if patch.exists() and stack else None,
        "picture": str(file.with_suffix(".png")),
    }
    draw(result, file.with_suffix(".png"))
    return result


def is_running(file: Path) -> bool:
    """Return whether a command trains this race: it has locked the experiment, and written its name into the lock."""
    lock_file = file.parents[1] / ".lock"
    if not lock_file.exists() or lock_file.read_text() != file.stem:
        return False
    with open(lock_file, "a", opener=open_no_link) as opened:
        return not lock(opened)


def has_entropy(results: Mapping[str, Result]) -> bool:
    """Return whether excess losses are compared."""
    return any(result.excess_loss is not None for result in results.values())


def find(entry: Round, results: Mapping[str, Result], margin: float) -> list[Finding]:
    """Return what is known of each idea of a round."""
    baseline, *groups = (group_of(runs_of(results, one["digest"])) for one in (entry.baseline, *entry.ideas.values()))
    return [
        Finding("identical", 0.0, 0.0) if is_identical(results, entry.baseline["digest"], one["digest"]) else finding
        for one, finding in zip(
            entry.ideas.values(), verdicts.assess(baseline, groups, margin, len(entry.withdrawn)), strict=True
        )
    ]


def describe_round(number: int, entry: Round, record: Record, results: Mapping[str, Result]) -> dict[str, Any]:
    """Return what is known of the ideas of a round, the best first; ideas that are out come last."""
    baseline = runs_of(results, entry.baseline["digest"])
    ideas = []
    for (key, described), finding in zip(entry.ideas.items(), find(entry, results, record.margin), strict=True):
        runs = runs_of(results, described["digest"])
        ideas.append(describe_idea(record.ideas[key].name, number, finding, runs, baseline, described, entry.baseline))
        ideas[-1] |= {"joined": key == entry.winner, **describe_arm(record.ideas[key])}
    ideas = group_arms(ideas)
    for key, reason in entry.out.items():
        verdict = ("failed" if key in entry.crashed else "refused") if number == 1 else None
        ideas.append(describe_absent(record.ideas[key], number, verdict, reason, Group()))
    names = {idea["idea"] for idea in ideas}
    for key, described in entry.withdrawn.items():
        if record.ideas[key].name not in names:  # otherwise a changed file has replaced it
            runs = group_of(runs_of(results, described["digest"]))
            ideas.append(describe_absent(record.ideas[key], number, "withdrawn", WITHDRAWN, runs))
    return {
        "round": number,
        "stack": [record.ideas[key].name for key in entry.stack],
        "baseline_loss": mean(run.loss for run in baseline),
        "baseline_excess_loss": mean_excess(baseline),
        "baseline_runs": len(baseline),
        "ideas": ideas,
    }


def describe_absent(idea: Idea, number: int, verdict: str | None, message: str, runs: Group) -> dict[str, Any]:
    """Return an idea that does not race in a round, or not any more, with why."""
    out = {"idea": idea.name, "round": number, "verdict": verdict, "message": message, "joined": False, "warnings": []}
    out |= {"runs": runs.num_ended, "failed": runs.failed}
    return out | describe_arm(idea) | dict.fromkeys((*EFFECT, "loss", "excess_loss", *COSTS, *COUNTS))


def describe_reach(record: Record, folder: Path) -> list[list[dict[str, Any]]]:
    """Return where the winner of each round was measured again, and whether its gain holds there.

    Args:
        record: of the race.
        folder: of all experiments.
    """
    reaches: list[list[dict[str, Any]]] = [[] for _ in record.rounds]
    for name in dict.fromkeys(name for entry in record.rounds for name in entry.reach):
        measured = {number: entry.reach[name] for number, entry in enumerate(record.rounds) if name in entry.reach}
        first = next(iter(measured.values()))
        pairs = [(one["baseline"], one["variant"]) for one in measured.values()]
        rows = describe_comparisons(read_results(folder / first["folder"]), pairs, first["margin"])
        for number, row in zip(measured, rows, strict=True):
            reaches[number].append({"change": name, "holds": HOLDS.get(row["verdict"], "unknown")} | row)
    return reaches


def describe_arm(idea: Idea) -> dict[str, Any]:
    """Return why an idea may help, its lines of code and those to read; of which idea it is an arm, and its factors."""
    change = {"why": idea.why, "lines": idea.lines, "lines_to_read": idea.lines_to_read}
    return {"arm_of": idea.text or BASELINE, "factors": idea.factors, "edge": None} | change


def group_arms(ideas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ideas, the best first; the arms of an idea follow its best one.

    If that is at an edge of the grid, it says so, because the best of all arms may then lie beyond the grid.
    """

    def effect(idea: Mapping[str, Any]) -> float:
        return math.inf if idea["effect"] is None else idea["effect"]

    families: dict[str, list[dict[str, Any]]] = {}
    for idea in sorted(ideas, key=effect):
        families.setdefault(idea["arm_of"], []).append(idea)
    for best, *others in families.values():
        for name, factor in best["factors"].items():
            factors = [1.0, *(arm["factors"][name] for arm in others)]
            if best["effect"] is not None and not min(factors) < factor < max(factors):
                best["edge"] = (
                    f"{name} x{factor:g} is the {'lowest' if factor <= min(factors) else 'highest'} of its grid"
                )
    return [idea for family in families.values() for idea in family]


def describe_idea(
    text: str,
    number: int,
    finding: Finding,
    runs: list[Result],
    baseline: list[Result],
    described: dict[str, Any],
    described_baseline: dict[str, Any],
) -> dict[str, Any]:
    """Return what is known of an idea; its costs are relative to the baseline."""
    costs = cost_ratios(runs, baseline, described, described_baseline)
    failures = sorted({run.failure for run in runs if run.failure})
    return {
        "idea": text,
        "round": number,
        **describe_finding(finding),
        "message": "; ".join(failures),
        "runs": len(runs),
        "failed": sum(bool(run.failure) for run in runs),
        "loss": mean(run.loss for run in runs),
        "excess_loss": mean_excess(runs),
        **{name: costs[name] for name in (*COSTS, *COUNTS)},
        "warnings": described["warnings"],
    }


def cost_ratios(
    runs: list[Result], baseline: list[Result], described: dict[str, Any], described_baseline: dict[str, Any]
) -> dict[str, float | None]:
    """Return the costs of a variant relative to the baseline: COSTS and COUNTS.

    Parameters and forwards are counted where that is possible, because the code of an idea describes itself.
    """
    both = (runs, described), (baseline, described_baseline)
    costs: dict[str, float | None] = {name: described[name] / described_baseline[name] for name in ("steps", "tokens")}

    def counted(name: str) -> float | None:
        return ratio(*(mean(getattr(run, name) for run in some) for some, _ in both))

    of_a_token = ratio(*(one["flops"] / one["tokens"] for _, one in both))
    costs |= {"forwards": counted("forward_tokens"), "updates": counted("updates"), "seconds": counted("seconds")}
    costs["flops"] = (of_a_token or 0.0) * (costs["forwards"] or costs["tokens"] or 0.0)
    costs["parameters"] = counted("parameters") or described["parameters"] / described_baseline["parameters"]
    is_timed = all((mean(run.seconds for run in some) or 0.0) >= MIN_TIMED_SECONDS for some, _ in both)
    own, others = (mean(run.evaluation_seconds for run in some) or 0.0 for some, _ in both)
    costs["evaluation"] = ratio(own, others) if own > SLOW_EVALUATION * others + MORE_SECONDS else None
    costs["seconds_per_flop"] = ratio(costs["seconds"], costs["flops"]) if is_timed else None
    return costs


def describe_finding(finding: Finding) -> dict[str, Any]:
    """Return a verdict and its effect, as a change of the geometric mean with its interval; None if it is unknown."""
    if math.isnan(finding.effect):
        return {"verdict": finding.verdict} | dict.fromkeys(EFFECT)
    ends = finding.effect - finding.half_width, finding.effect + finding.half_width
    values = (*map(change, (finding.effect, *ends)), finding.p, finding.q)
    return {"verdict": finding.verdict} | dict(zip(EFFECT, values, strict=True))


def change(log_ratio: float) -> float:
    """Return a log ratio as a relative change; one that is too large for a float is very large."""
    return math.expm1(min(log_ratio, MAX_LOG_RATIO))


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def mean_excess(runs: Iterable[Result]) -> float | None:
    """Return the geometric mean of the excess losses of runs, in nats per token."""
    values = [math.log(run.excess_loss) for run in runs if run.excess_loss]
    return math.exp(fmean(values)) if values else None


def ratio(one: float | None, other: float | None) -> float | None:
    """Return a quotient, None where it is unknown."""
    return one / other if one is not None and other else None


# Text


def percent(change: float | None) -> str:
    """Format a change."""
    return "-" if change is None else f"{100 * change:+.1f}%"


def number(value: float | None, form: str = ".2f") -> str:
    """Format a number that may be unknown."""
    return "-" if value is None else format(value, form)


def interval(effect: Mapping[str, Any]) -> str:
    """Format the interval of an effect."""
    if effect["low"] is None or effect["high"] > MAX_CHANGE:
        return "-"
    return f"{percent(effect['low'])} to {percent(effect['high'])}"


def race_lines(race: dict[str, Any]) -> list[str]:
    """Return the report of a race as text: a sentence for each round, then a table of the ideas."""
    lines = [
        f"{race['race']}: {race['runs']} runs, {race['failed']} of them failed, {race['seconds'] / 3600:.2f} hours",
        ": ".join(filter(None, [race["state"], race["reason"]])) + "; the seeds of each variant are 0, 1, 2, ...",
    ]
    lines += data_lines(race) + [f"refused: {one['idea']}: {one['message']}" for one in race["refused"]]
    for entry in race["rounds"]:
        lines += ["", *round_lines(entry, race)]
    if race["stack"]:
        lines += ["", f"Found: {' + '.join(race['stack'])}"]
        if race["stack_config"]:  # it is written when the round ends
            lines.append(f"Its settings: --config {shlex.quote(race['stack_config'])}")
            if race["stack_patch"]:  # --3way also adds new files to the index, so that `git commit` has them
                lines.append(f"Its code: git apply --3way {shlex.quote(race['stack_patch'])}")
        lines.append("`confirm` trains it on seeds that no race has used.")
    if race.get("compute_multiplier"):
        lines.append(
            "Compute multiplier of what was found: {:.2f} (95%: {:.2f} to {:.2f})".format(*race["compute_multiplier"])
        )
    lines.append(f"picture: {race['picture']}")
    return lines


def round_lines(entry: dict[str, Any], race: dict[str, Any]) -> list[str]:
    """Return a round as text."""
    on = " + ".join(entry["stack"])
    excess = entry["baseline_excess_loss"]
    losses = name_loss(number(entry["baseline_loss"], ".4f"), race) + (f", excess loss {excess:.4f}" if excess else "")
    lines = [f"Round {entry['round']}, on {on or 'the baseline'}: {losses} in {entry['baseline_runs']} runs"]
    for idea in entry["ideas"]:
        if idea["verdict"] == "better":
            lines += [sentence(idea, entry, race), *reach_lines(idea)]
    if len(entry["ideas"]) == 1 and entry["ideas"][0]["verdict"] != "better":
        lines.append(sentence(entry["ideas"][0], entry, race))
    changes_code = any(idea["lines"] for idea in entry["ideas"])
    table = [
        ["idea", race["compared"], "95% interval", *["lines"] * changes_code, "verdict", "q", "runs", "failed", *COSTS]
    ]
    seen: set[str] = set()
    for idea in entry["ideas"]:
        costs = [number(idea[name]) for name in COSTS]
        size = "+{added} -{removed}".format(**idea["lines"]) if idea["lines"] else "-"
        known = [percent(idea["effect"]), interval(idea), *[size] * changes_code]
        known += [verdict_text(idea), number(idea["q"], ".2g")]
        is_best_arm = idea["arm_of"] not in seen
        name = idea["idea"] if is_best_arm else f"    {idea['idea'].removeprefix(idea['arm_of']).strip() or '[x1]'}"
        seen.add(idea["arm_of"])
        table.append([label(name), *known, str(idea["runs"]), str(idea["failed"] or ""), *costs])
    lines += ["", *aligned(table)]
    for idea in entry["ideas"]:
        if idea["message"] and idea["verdict"] != "refused":
            has_failed = idea["runs"] and idea["verdict"] != "withdrawn"
            lines.append(f"{'failed' if has_failed else 'out'}: {idea['idea']}: {idea['message']}")
        lines += work_lines(idea)
        lines += [f"warning: {idea['idea']}: {warning}" for warning in idea["warnings"]]
    at_edges: dict[str, list[str]] = {}
    for idea in entry["ideas"]:
        if idea["edge"] and idea["verdict"] != "worse":
            at_edges.setdefault(idea["edge"], []).append(label(idea["arm_of"]))
    for edge, names in at_edges.items():
        lines.append(f"at the edge: {edge}; a wider --tune may find a better one: {'; '.join(names)}")
    best_arms = {idea["arm_of"]: idea for idea in reversed(entry["ideas"])}
    for name, idea in best_arms.items():
        lines += [f"why: {name}: {idea['why']}"] if idea["why"] else []
        lines += [f"read: {name}: {line}" for line in idea["lines_to_read"]]
    return lines


def reach_lines(idea: Mapping[str, Any]) -> list[str]:
    """Return where a winner was measured again, and whether its gain holds there, as a line."""
    parts = []
    for one in idea["reach"] or ():
        known = [] if one["effect"] is None else [percent(one["effect"]), interval(one)]
        known.append(f"{one['runs']} runs")
        parts.append(f"{one['change']}: {one['holds']} ({', '.join(known)})")
    return [f"    holds {'; '.join(parts)}"] if parts else []


def verdict_text(idea: Mapping[str, Any]) -> str:
    """Return the verdict, and of an open one what is known; it says if an idea takes longer than its FLOPs say.

    The model of an idea may also compute while it is evaluated, for example train.
    """
    text = idea["verdict"] or "out"
    if idea["verdict"] == "unknown" and idea["low"] is not None and idea["low"] < 0:
        text = f"unknown, gains at most {-100 * idea['low']:.1f}%"
    if (slowdown := idea.get("seconds_per_flop") or 0.0) > SLOW:
        text += f", takes {slowdown:.1f} times the seconds of its FLOPs"
    if slowdown := idea.get("evaluation"):
        text += f", is evaluated in {slowdown:.1f} times the seconds of the baseline"
    return text


def work_lines(idea: Mapping[str, Any]) -> list[str]:
    """Return a line if a variant computes more forwards or updates than its steps and tokens say."""
    pairs = ("forwards", "tokens"), ("updates", "steps")
    more = [f"{idea[name]:.2f} times the {name}" for name, of in pairs if (idea[name] or 0) > MORE * (idea[of] or 1)]
    return [f"computes more: {idea['idea']}: {' and '.join(more)} of the baseline"] if more else []


def name_loss(values: str, race: Mapping[str, Any]) -> str:
    """Return values with the name of what they are: the loss, or the metric that is compared instead."""
    unit = unit_of(race)
    return f"{'loss' if unit else race['compared']} {values}{unit}"


def sentence(idea: Mapping[str, Any], entry: Mapping[str, Any], race: Mapping[str, Any]) -> str:
    """Return an idea with its losses, in nats and as changes."""
    verdict = verdict_text(idea)
    text = f"{verdict[0].upper()}{verdict[1:]}: {idea['idea']}"
    if idea["loss"] is not None and entry["baseline_loss"]:
        change = idea["loss"] / entry["baseline_loss"] - 1
        losses = f"{entry['baseline_loss']:.4f} -> {idea['loss']:.4f}"
        text += f": {name_loss(losses, race)} ({percent(change)}"
        # The interval is that of a ratio: of excess losses, or of losses where the entropy is unknown.
        compared = {"excess loss": entry["baseline_excess_loss"], "loss": entry["baseline_loss"]}.get(race["compared"])
        if compared and idea["low"] is not None and idea["high"] <= MAX_CHANGE:
            text += f"; 95%: {compared * idea['low']:+.4f} to {compared * idea['high']:+.4f} nats/token"
        text += ")"
        if idea["effect"] is not None and race["compared"] != "loss":
            text += f", {race['compared']} {percent(idea['effect'])} ({interval(idea)})"
    return text


def confirmation_lines(confirmation: dict[str, Any]) -> list[str]:
    """Return a confirmation as text, in which letters stand for the ideas."""
    ideas = confirmation["ideas"]
    names = {"baseline": "baseline"}
    for end, (idea, letter) in enumerate(zip(ideas, ascii_uppercase, strict=False), 1):
        names[" + ".join(ideas[:end])] = " + ".join(ascii_uppercase[:end])
        names[f"all without {idea}"] = f"all without {letter}"
    table = [["", "against", "size", confirmation["compared"], "95% interval", "q", "verdict", "runs", "failed"]]
    for one in confirmation["differences"]:
        known = [percent(one["effect"]), interval(one), number(one["q"], ".2g"), verdict_text(one)]
        counts = [str(one["runs"]), str(one["failed"] or "")]
        compared = [names.get(name, name) for name in (one["variant"], one["against"])]
        table.append([*compared, f"{one['size']:g}x", *known, *counts])
    trends: list[list[str]] = [["", "against", "size", "effect", "change", "95% interval"]]
    for one in confirmation.get("trends", ()):  # an older file has none
        compared = [names.get(name, str(name)) for name in (one["variant"], one["against"])]
        trends.append(
            [*compared, f"{one['from']:g}x to {one['to']:g}x", one["trend"], percent(one["change"]), interval(one)]
        )
    seed = confirmation["data_seed"]
    data = "" if seed is None else f", data.seed {seed}"
    lines = [
        f"Confirmation on seeds that no race has used{data}:",
        *(f"    {letter}: {idea}" for idea, letter in zip(ideas, ascii_uppercase, strict=False)),
        "",
        *aligned(table),
        *(["", *aligned(trends)] if len(trends) > 1 else []),
    ]
    return lines + data_lines(confirmation) + [f"failed: {message}" for message in confirmation["failures"]]


def data_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the identity of each corpus as text; results of earlier versions have none."""
    return [f"data: {path}, hash {content}" for path, content in result.get("data", {}).items()]
