"""Is an idea better? python experiment.py IDEA [settings of both sides] answers by as many runs as it takes.

IDEA is settings in one argument ("--model.mlp relu2"), or code: a git branch or commit, a patch file, or . for what the
working tree has changed, against the commit that it stands on. Everything lies in lab/; started again, it goes on.
docs/experiments_on_ideas.md says how the answer is found, and what it is good for.
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from jsonargparse.typing import PositiveFloat, PositiveInt

from checkpoint.identity import code_hash
from cli.output import aligned
from config.errors import ConfigError, RunError
from config.paths import expanded
from data.files import temporary_folder
from experiments import log
from experiments.arm import Refused, Side, budgets, check_ruler, matched, scaled
from experiments.candidate import laid_out, read_idea, with_its_files
from experiments.result import BUDGETS, ONE_SIDED, Answer, Costs, interval, row, sentence, table, worth_in_words
from experiments.sequential_test import FIRST_LOOK, Worth, decide, difference, factor, more_runs, worth
from jobs.runner import Failed, OutOfTime, Stopped, Training, Trainings, launch_command, launched_precision

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "lab.yaml"
BUDGET_SEEDS = 2  # of each share of the steps
OTHER_SEEDS = 1000  # from where on seeds are others than those of the verdict
MARGIN, MARGIN_ABOVE_FLOOR = 0.003, 0.03  # what counts as nothing, of the loss
TURNS, TURN_SECONDS = 3, 4.0
TUNED, TUNED_SEEDS = (0.25, 0.5, 1.0, 2.0, 4.0), 2  # times the value of the setting


@dataclass
class ExperimentConfig:
    """Says whether an idea is better than the baseline, by how much, at what cost, and whether it holds."""

    arguments: list[str]
    """The idea in one argument; then settings of train.py for both sides. Without --config: configs/lab.yaml."""

    max_seeds: PositiveInt = 12
    """Runs of each side at most. More may be added later: the same command with a larger number goes on."""

    budget_minutes: PositiveFloat | None = None
    """No run is begun after so many minutes. null: only max_seeds is a limit."""

    margin: PositiveFloat | None = None
    """The difference that counts as nothing, as a share of the baseline's loss, above the floor where that is known.
    null: 0.03 there, and else 0.003 of the whole loss."""

    jobs: PositiveInt | None = None
    """Runs at once. null: one with launch, else one for each GPU, or for each core, but not more than 8."""

    worth: bool = True
    """Whether to train the baseline for shorter and longer too, to say how many times the steps a gain is worth, and to
    measure by turns how fast both are."""

    sizes: str = "1"
    """Times the parameters, as 1,4: the experiment is repeated with larger models, and tokens in proportion."""

    tune: str | None = None
    """A setting, as optimizer.lr, whose best value of five is searched for each side, on seeds of their own."""

    match: Literal["parameters", "flops"] | None = None
    """Narrow or widen the feed-forward of the idea until it has as many as the baseline."""

    lab: str = "lab"
    """The directory of runs, diffs and the log."""

    launch: str | None = None
    """What starts a run, as "accelerate launch --config_file X". null: python."""

    json: bool = False
    """Print one object instead of text."""


@dataclass
class NotebookConfig:
    """Draws all experiments: LAB/notebook.png, and prints them as a table, LAB/notebook.md."""

    notebook: bool = False
    """Do so."""

    lab: str = "lab"
    """The directory of the log."""


def main(config: ExperimentConfig | NotebookConfig) -> None:
    """Answer, and write the answer into the log.

    Raises:
        ConfigError: the idea is none, a setting of the baseline is wrong, or the sides cannot be compared.
        RunError: a run of the baseline failed, or a disk is full.
        SystemExit: with 75 after a signal: the same command goes on.
    """
    lab = expanded("lab", config.lab)
    if hasattr(config, "notebook"):  # its class is one of the module that was started, which is none of this one
        print(log.publish(lab))
        return
    try:
        found = Experiment(config, lab, Trainings(config.jobs or (1 if config.launch else None))).answer()
        log.append(lab, found)
        tried = log.tried(lab, found["untuned"])
    except Stopped:
        print("stopped as asked; the same command goes on from there", file=sys.stderr)
        raise SystemExit(75) from None
    except OSError as error:
        raise RunError(f"{error}; with that mended, the same command goes on") from None
    print(json.dumps(found | {"ideas_tried": tried}) if config.json else "\n".join(report(found, tried)))


class Experiment:
    """An idea against a baseline."""

    def __init__(self, config: ExperimentConfig, lab: Path, trainings: Trainings):
        self.config, self.lab, self.trainings = config, lab, trainings
        self.text, *self.common = config.arguments
        if not any(word.split("=")[0] == "--config" for word in self.common):
            self.common = ["--config", str(DEFAULT_CONFIG), *self.common]
        self.trainings.until = time.monotonic() + 60 * (config.budget_minutes or math.inf)

    def answer(self) -> dict[str, Any]:
        """A row for the log.

        Raises:
            ConfigError, RunError, Stopped: as main has them.
        """
        sizes, answers, pairs, message = parse_sizes(self.config.sizes), {}, [], ""
        idea = read_idea(self.text)
        diff = idea.keep(self.lab / "diffs")
        self.trainings.code = None if idea.commit else code_hash()  # a worktree is edited by nobody
        with laid_out(idea) as (code, changed):
            baseline = self.side(code, self.common)
            names = dict.fromkeys(("untuned", "baseline"), baseline.name) | {"candidate": f"{self.text} (refused)"}
            try:
                candidate = self.candidate(baseline, changed, idea.settings)
                names["candidate"] = candidate.name
                if idea.commit and candidate.digest == baseline.digest:
                    raise ConfigError(f"idea: what {self.text!r} changes is neither code that trains nor a setting")
                if self.config.tune:
                    self.trainings.train([replace(candidate, first_seed=2 * OTHER_SEEDS).run(0)])  # if it fails, alone
                    candidate, baseline = self.tuned(candidate), self.tuned(baseline)
                    names["tuned"] = [side.settings[self.config.tune] for side in (baseline, candidate)]
                if candidate.digest == baseline.digest:  # A against A: with the same seeds they would be the same runs
                    candidate = replace(candidate, first_seed=OTHER_SEEDS)
                names |= {"baseline": baseline.name, "candidate": candidate.name}
                for size in sizes:
                    pairs.append(self.at_size(baseline, candidate, size))
                    answers[size] = self.compare(*pairs[-1])
                    if self.config.worth and answers[size].verdict in ("better", "worse"):
                        answers[size].worth = self.worth(pairs[-1][0], answers[size])
            except Refused as refused:
                message = str(refused)
            except OutOfTime as error:
                message = str(error) if answers else ""
            except Failed as failed:
                message, ours = f"{failed.training.directory}: {failed}", pairs[-1][0] if pairs else baseline
                if not answers and failed.training.directory.name.startswith(f"{ours.name}-"):
                    raise RunError(message) from None
            costs = self.costs(*pairs[0], idea.num_lines) if answers else None
        words = {"idea": self.text, "settings": self.common, "base": idea.base, "commit": idea.commit}
        return row({**words, **names, "diff": diff and str(diff)}, answers, costs, message)

    def side(self, code: Path, words: list[str]) -> Side:
        """The baseline.

        Raises:
            ConfigError: its settings are refused.
        """
        launch, words = launch_command(self.config.launch), with_its_files(words, code)
        try:
            side = Side.of(code, launch, launched_precision(launch), words, self.lab / "runs")
        except Refused as refused:
            raise ConfigError(str(refused)) from None
        if not side.settings["evaluation.every"]:
            raise ConfigError("evaluation.every: 0 means that there is no val/loss, which is what is compared; set it")
        return side

    def candidate(self, baseline: Side, code: Path, own: tuple[str, ...]) -> Side:
        """The other side.

        Raises:
            Refused: its settings are refused, or no feed-forward of it is as large as asked.
        """
        words = with_its_files([*self.common, *own], code)
        return self.matched(Side.of(code, list(baseline.launch), baseline.precision, words, baseline.runs), baseline)

    def matched(self, candidate: Side, baseline: Side) -> Side:
        """With a feed-forward that makes it as large as asked.

        Raises:
            Refused: there is none.
        """
        what = {"flops": "flops_per_token"}.get(self.config.match, self.config.match)
        return matched(candidate, baseline, what) if what else candidate

    def at_size(self, baseline: Side, candidate: Side, size: float) -> tuple[Side, Side]:
        """Both with so many times the parameters."""
        ours, theirs = scaled(baseline, size), scaled(candidate, size)
        return ours, theirs if size == 1 else self.matched(theirs, ours)

    def compare(self, baseline: Side, candidate: Side) -> Answer:
        """Train seeds of both until it is known, the candidate first: if it fails, it has cost one run.

        Raises:
            Failed: a run of either has.
            Refused, ConfigError: the two cannot be compared.
            OutOfTime: before anything can be said.
        """

        def runs(n: int) -> list[Training]:
            return [side.run(seed) for seed in range(n) for side in (candidate, baseline)]

        def num_unfinished(n: int) -> int:
            return sum(not run.is_finished() for run in runs(n))

        at_once, most, answer = self.trainings.at_once, max(self.config.max_seeds, FIRST_LOOK), None
        self.trainings.train(runs(1 if at_once <= 2 else FIRST_LOOK))
        metric = check_ruler(baseline, candidate)
        for n in range(FIRST_LOOK, most + 1):
            ahead = n
            while ahead < most and 0 < num_unfinished(n) and num_unfinished(ahead) < at_once:
                ahead += 1  # no core is idle; what is looked at does not depend on it
            try:
                self.trainings.train(runs(ahead) if num_unfinished(n) else [])
            except OutOfTime:
                break
            losses = baseline.losses(n, metric), candidate.losses(n, metric)
            floor, found = baseline.measured()["floor"], difference(*losses)
            share = self.config.margin or (MARGIN if floor is None else MARGIN_ABOVE_FLOOR)
            margin = share * statistics.fmean(losses[0])
            answer = Answer(decide(found, margin), found, *losses, floor, share, metric)
            if answer.verdict != "unknown":
                return answer
        if answer is None:
            raise OutOfTime
        answer.more = more_runs(found, margin)
        return answer

    def worth(self, baseline: Side, answer: Answer) -> Worth | None:
        """Train the baseline for shorter and longer, and read off how many steps would have done the same."""
        sides, stages = budgets(baseline, BUDGETS)
        try:
            for stage in stages:
                self.trainings.train([side.run(seed) for side in stage for seed in range(BUDGET_SEEDS)])
        except (OutOfTime, Failed) as error:
            print(f"what it is worth is not known: {error}", file=sys.stderr)
            return None
        points = [(share, loss) for share, side in sides.items() for loss in side.losses(BUDGET_SEEDS, answer.metric)]
        points += [(1.0, loss) for loss in answer.baseline]
        return worth(points, statistics.fmean(answer.baseline), answer.found)

    def costs(self, baseline: Side, candidate: Side, num_lines: int) -> Costs:
        """What both need."""
        sides, speeds = (baseline, candidate), ([], [])
        try:
            if self.config.worth:
                speeds = self.speeds(sides)
        except (Failed, OutOfTime, RunError) as error:
            print(f"how fast they are is not known: {error}", file=sys.stderr)
        ratios = [theirs / ours for ours, theirs in zip(*speeds, strict=True)]
        measured = tuple(side.measured() | {"tokens": side.tokens} for side in sides)
        memory = tuple(side.peak_memory_bytes() for side in sides)
        return Costs(measured, memory, speeds, factor(ratios) if ratios else None, num_lines)

    def speeds(self, sides: tuple[Side, Side]) -> tuple[list[float], list[float]]:
        """Tokens a second of both, by turns, in short runs that are thrown away."""
        speeds = [], []
        for turn in range(TURNS):
            with temporary_folder(self.lab, "speed-") as folder:
                for side, measured in [*zip(sides, speeds, strict=True)][:: 1 if turn % 2 else -1]:
                    run = side.short(TURN_SECONDS, folder).run(0)
                    self.trainings.train([run])
                    measured.append(run.tokens_per_second())
        return speeds

    def tuned(self, side: Side) -> Side:
        """With the best of a few values of a setting, by the mean of seeds that no verdict uses.

        Raises:
            ConfigError: the setting is no number, or 0.
        """
        setting = self.config.tune
        value = side.settings.get(setting)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value:
            raise ConfigError(f"tune: {setting!r} is {value!r}, which is no number to search around")
        values = [value * factor for factor in TUNED]
        if isinstance(value, int):
            values = sorted({max(1, round(one)) for one in values})
        tried = [replace(side.changed({setting: one}), first_seed=2 * OTHER_SEEDS) for one in values]
        self.trainings.train([one.run(seed) for one in tried for seed in range(TUNED_SEEDS)], until_failure=False)
        # Where one does not train, as with a learning rate at which nothing is learned, that value is none.
        trained = [one for one in tried if all(one.run(seed).is_finished() for seed in range(TUNED_SEEDS))]
        if not trained:
            raise ConfigError(f"tune: with none of {len(values)} values around {value:g} of {setting} does it train")
        best = min(trained, key=lambda one: statistics.fmean(one.losses(TUNED_SEEDS)))
        if best in (tried[0], tried[-1]):
            print(
                f"tune: the best {setting} tried, {best.settings[setting]:g}, is at an end of the range",
                file=sys.stderr,
            )
        return replace(best, first_seed=side.first_seed)


def report(found: dict[str, Any], tried: int) -> Iterator[str]:
    """The answer in one sentence, then the table, then how it was found."""
    yield sentence(found)
    if "difference" in found:
        yield from ["", *aligned(list(table(found)))]
    yield ""
    for side, commit in (("baseline", found["base"]), ("candidate", found["commit"])):
        yield f"{side}: {found[side]}" + (f", commit {commit[:12]}" if commit else "")
    if "tuned" in found:
        yield f"tuned: {found['tuned'][0]:g} for the baseline, {found['tuned'][1]:g} for the idea"
    elif found["verdict"] in ("better", "worse"):
        yield "no side is tuned: --tune optimizer.lr tells whether its learning rate only suits one of them better"
    if found["diff"]:
        yield f"the diff lies in {found['diff']}"
    for size in found.get("sizes", []):
        by = interval([size[name] for name in ("difference", "low", "high")], "+.1f")
        worth = f", worth {worth_in_words(size['worth'])} times the steps" if size.get("worth") else ""
        yield f"{size['size']:g} times the parameters, {size['seeds']} seeds: {size['verdict']}, {by} percent{worth}"
    if "difference" in found:
        yield (
            f"{found['seeds']} seeds of each side, looked at after each from number {FIRST_LOOK}: repeated confidence "
            "intervals with Welch's t, which hold whenever one stops (docs/experiments_on_ideas.md)"
        )
    yield (
        f"{tried} idea(s) were tried against this baseline; of as many that do nothing, chance calls about "
        f"{ONE_SIDED * tried:.2g} better"
    )


def parse_sizes(text: str) -> list[float]:
    """Numbers between commas.

    Raises:
        ConfigError: one is none, or below 1.
    """
    try:
        sizes = [float(word) for word in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(1 <= size < math.inf for size in sizes):
        raise ConfigError(f"sizes: {text!r} must be numbers of at least 1 with commas between, as 1,4")
    return sorted(set(sizes))


def kind_of(words: list[str]) -> type:
    """Which of the two the command line asks for."""
    return NotebookConfig if any(word.split("=")[0] == "--notebook" for word in words) else ExperimentConfig


if __name__ == "__main__":
    from cli.scripts import run_and_exit
    from config.parser import own_arguments_first

    kind = kind_of(sys.argv[1:])
    if kind is ExperimentConfig:
        sys.argv[1:] = own_arguments_first(sys.argv[1:], kind)
    run_and_exit("experiment", kind, needs_torch=False)
