"""A race of ideas: each run trains the baseline or one idea on top of it, and all ideas share the baseline's runs.

Runs go to the ideas that may be the best (verdicts.py). When the best idea of a round is settled as better, it joins
the baseline, and the others race again on top. EXPERIMENT/races/RACE.json has the ideas and the rounds, and
EXPERIMENT/results.jsonl the runs, which all races of a baseline share. So the same command resumes, and one with more
ideas or a larger budget uses the runs that are there.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from typing import Any

import yaml

from runtime.config.errors import ConfigError, RunError
from runtime.config.paths import expand_user_path
from runtime.files import write_atomically
from tools.experiment import change, reach, report, verdicts
from tools.experiment.baseline import (
    baseline_margin,
    experiment_folder,
    open_experiment,
    resolve_baseline,
    with_base,
)
from tools.experiment.change import Checkouts, Idea, head_commit, idea_texts, is_patch, parse_idea, split_words
from tools.experiment.record import Record, Round, describe
from tools.experiment.runs import Next, Runs, runs_of
from tools.experiment.settings import ExperimentConfig
from tools.experiment.variant import Recipe, Variant, check_targets, scale_steps
from tools.experiment.verdicts import BASELINE, Finding
from tools.jobs.launch import Launch
from tools.jobs.runner import JobRunner

RUNS_PER_IDEA, MORE_RUNS = 8, 40
CHECKED_AT_ONCE = 2  # pieces of code, while runs train
STOP_SECONDS = 20.0  # after a signal: then a run that has not saved is killed
MIN_COUNTED_RUNS = 2  # of a variant, whose mean costs are compared with a limit
CLEAR_HARM = 4.0  # standard errors, perhaps of a single run: enough to save the runs of an idea in later rounds


def main(config: ExperimentConfig) -> None:
    """Race ideas and print the result.

    Raises:
        ConfigError: an idea or a setting is refused.
        RunError: the baseline cannot be trained, or the environment failed, for example by a full disk.
        SystemExit: with code 75 after a signal; run the same command again to resume.
    """
    run_with_json(config, race)


def run_with_json(config: Any, run: Callable[[Any, Recipe, JobRunner], list[str]]) -> None:
    """Print the lines of `run`, called with the config, its recipe and a job runner."""
    jobs = JobRunner(config.jobs or (1 if config.launch else None))
    jobs.stop_seconds = STOP_SECONDS
    if not (config.launch or jobs.gpus):
        jobs.threads = 1  # runs with more threads than free cores take several times as long
    with report.errors_as_json(config), Checkouts() as checkouts:
        recipe = Recipe(
            head_commit(),
            config.common,
            Launch.parse(config.launch),
            checkouts,
            is_stopped=lambda: bool(jobs.signal),
            experiments=expand_user_path("folder", config.folder),
        )
        print("\n".join(run(config, recipe, jobs)))


def race(config: ExperimentConfig, recipe: Recipe, jobs: JobRunner) -> list[str]:
    """Race the ideas of a command and return the result as lines."""
    if not config.ideas:
        raise ConfigError('idea: name at least one, before other options; quote settings: "--model.mlp relu2"')
    if config.note is not None and len(idea_texts(config.ideas)) > 1:
        raise ConfigError("note: is for a single idea; write it above the first diff of each patch")
    texts = [text for text in idea_texts(config.ideas) if text in config.ideas]
    named = {text: parse_idea(text) for text in recipe.until_stopped(texts)}
    if config.note is not None:
        named = {text: replace(idea, why=config.note) for text, idea in named.items()}
    baseline, recipe = resolve_baseline(with_base(recipe, config.ideas, named))
    running = Race(config, recipe, baseline, named, jobs)
    with running.recorded():
        running.run()
    result = report.describe_race(running.file)
    if config.compute_multiplier:
        result["compute_multiplier"] = running.compute_multiplier()
    return [json.dumps(result)] if config.print_json else report.race_lines(result)


def race_name(arguments: Sequence[str], named: Mapping[str, Idea], tune: str | None) -> str:
    """Return the name of a race: a hash of its ideas, and of what it tunes.

    Folders and text files count by their path, because ideas may be added to them. Code that is an argument, such as
    `.`, counts by its diff, so another edit is another race.
    """
    ideas = [named[text].key if text in named else text for text in arguments]
    return sha256(repr([*ideas, *([tune] if tune else [])]).encode()).hexdigest()[:8]


class Race:
    """A race while it runs.

    Args:
        named: the ideas that are arguments of the command, by their text; others are in folders and text files.

    Raises ConfigError if an idea is refused, or another process runs the race.
    """

    def __init__(
        self, config: ExperimentConfig, recipe: Recipe, baseline: Variant, named: Mapping[str, Idea], jobs: JobRunner
    ):
        self.config, self.recipe, self.baseline, self.jobs = config, recipe, baseline, jobs
        self.grid = config.grid
        jobs.limit_minutes(config.minutes)
        self.texts: dict[tuple[str, int], list[Idea]] = {
            (text, file_time(text)): change.arms(idea, self.grid) for text, idea in named.items()
        }
        """The arms of each idea by its text and the time of its file; [] if it is refused. Each is read once."""
        self.messages: dict[tuple[str, int], str] = {}
        """Why an idea is refused, by the same."""
        self.listed: dict[str, list[str]] = {text: [text] for text in named}
        """The texts of the ideas that each argument of the command stands for, as they could last be read."""
        self.named = {text: file_time(text) for text in named}
        """When the files of the command's arguments were read; a later change of them is another race."""
        self.present: set[str] = set()
        """Keys of the ideas that the arguments name now."""
        self.has_changed = False
        """Whether ideas were withdrawn or refused since the record was written."""
        self.variants: dict[str, Variant] = {}
        """The variants of the open round that race, by the key of the idea; the baseline by ""."""
        folder = experiment_folder(config, recipe, baseline)
        self.file = folder / "races" / f"{race_name(config.ideas, named, config.tune)}.json"
        self.record = Record.read(self.file) if self.file.exists() else Record(recipe.name, rounds=[Round([])])
        self.record.margin, self.record.equal = baseline_margin(config, baseline), config.equal
        self.record.metric = config.metric
        self.pool = ThreadPoolExecutor(CHECKED_AT_ONCE)
        self.checks: dict[Future[list[Variant | ConfigError | RunError]], list[str]] = {}
        """Keys of the ideas that are being checked while runs train; those with the same code share a check."""
        self.measured: tuple[list[str], list[reach.Change]] = [], []
        """The stack whose reach is measured, and under which changes."""
        # Those that are arguments may refuse the command. The others are checked while runs train.
        new = [key for key in self.unchecked_ideas() if self.may_refuse(key)]
        if not any(self.texts.values()):
            raise ConfigError(f"idea: none in {', '.join(config.ideas)}; write the first one, then start the race")
        if self.is_tuning:
            self.resolve(new)  # may refuse ideas; they race in the next round
            new = self.arms_of_baseline()
        keys = [self.round.winner] if self.round.winner else [*self.check_again(), *new]
        resolved = self.resolve(keys)  # may refuse ideas, so before all writing
        test_seed = open_experiment(folder, recipe, baseline, self.file.stem)
        self.runs = Runs(folder, baseline, jobs, test_seed, config.metric)
        self.enter(resolved)

    @property
    def round(self) -> Round:
        """The open round."""
        return self.record.rounds[-1]

    @property
    def is_tuning(self) -> bool:
        """Whether the open round tunes the baseline, before the ideas race."""
        return bool(self.grid) and len(self.record.rounds) == 1

    # Ideas

    def arms_of_baseline(self) -> list[str]:
        """Return the keys of the baseline with each factor but 1; they are ideas of the first round."""
        arms = change.arms(Idea(""), self.grid)[1:]
        return [self.record.ideas.setdefault(arm.key, arm).key for arm in arms if arm.key not in self.round.ideas]

    def check_again(self) -> list[str]:
        """Let the ideas of the open round of an earlier command be checked again, because the limits may have changed.

        Return the keys of those that may refuse the command.
        """
        keys = [*self.round.ideas, *self.round.out]
        self.round.out, self.round.crashed = {}, []
        self.round.unchecked += keys
        return [key for key in keys if self.may_refuse(key)]

    def may_refuse(self, key: str) -> bool:
        """Return whether an idea is checked before anything is trained: an argument of the command, or its --tune."""
        text = self.record.ideas[key].text
        return not self.round.stack and (text in self.named or not text)

    def unchecked_ideas(self) -> list[str]:
        """Return the keys of ideas that are to be checked in the open round; folders may have new ones at any time.

        A patch or line that is removed withdraws its idea, and a changed file replaces it, also for a command that
        resumes. A wrong idea is named and does not race. After a signal raise SystemExit.
        """
        arms: list[Idea] = []
        refused = self.read_arguments()
        texts = [text for argument in self.config.ideas for text in self.listed[argument]]
        for text in self.recipe.until_stopped(texts):
            version = text, self.named.get(text, file_time(text))
            if version not in self.texts:
                self.texts[version] = []
                try:
                    self.texts[version] = change.arms(parse_idea(text), self.grid)
                except ConfigError as error:
                    print(f"refused: {text}: {error}", file=sys.stderr)
                    self.messages[version] = str(error)
            arms += self.texts[version]
            if version in self.messages:
                refused[text] = self.messages[version]
        self.has_changed |= refused != self.record.refused
        self.record.refused = refused
        for arm in arms:
            known = self.record.ideas.setdefault(arm.key, arm)
            if arm.why and arm.why != known.why:  # it was written after the idea began to race
                self.record.ideas[arm.key] = replace(known, why=arm.why)
                self.has_changed = True
        self.present = {arm.key for arm in arms}
        self.withdraw()
        rounds = self.record.rounds
        seen = {key for entry in rounds for key in (*entry.stack, *entry.ideas, *entry.out, entry.winner)}
        seen = (seen - {*self.round.withdrawn}) | {*self.record.same, *self.round.out}
        new = [arm.key for arm in arms if arm.key not in seen]
        return list(dict.fromkeys([*(key for key in self.round.unchecked if key in self.present), *new]))

    def read_arguments(self) -> dict[str, str]:
        """Read again which ideas the arguments stand for; return why one cannot be read, whose earlier ideas stay."""
        refused = {}
        for argument in self.config.ideas:
            try:
                texts = idea_texts([argument])
                if texts == [argument] and argument not in self.named:
                    raise ConfigError(f"idea: {argument!r} is not there any more")
                self.listed[argument] = texts
            except ConfigError as error:
                refused[argument] = str(error)
                self.listed.setdefault(argument, [])
                if self.record.refused.get(argument) != str(error):
                    print(f"refused: {error}; its earlier ideas race on", file=sys.stderr)
        return refused

    def withdraw(self) -> None:
        """Withdraw the ideas of the open round that are not present; an idea that has joined stays in the baseline."""
        entry, ideas = self.round, self.record.ideas
        absent = [key for key in (*entry.ideas, *entry.out) if key not in self.present and ideas[key].text]
        for key in absent if not entry.winner else ():
            self.has_changed = True
            print(f"idea: {ideas[key].name}: {report.WITHDRAWN} or changed, so it is withdrawn", file=sys.stderr)
            entry.out.pop(key, None)
            self.variants.pop(key, None)
            if described := entry.ideas.pop(key, None):
                entry.withdrawn[key] = described
        if absent and not entry.winner:
            self.record.same.clear()  # those that trained the same may race in its place

    def resolve(self, keys: Sequence[str]) -> dict[str, Variant]:
        """Return the variants of ideas that are new in the open round, and its baseline the first time, under "".

        Ideas that do not race are noted. An argument of the command that cannot be trained raises ConfigError.
        """
        keys = [*([] if self.variants else [""]), *keys]
        return self.admit(keys, self.recipe.variants(self.stack_with(key) for key in keys))

    def stack_with(self, key: str) -> list[Idea]:
        """Return the ideas in the baseline of the open round, and one on top of them; none for the key ""."""
        return [self.record.ideas[one] for one in (*self.round.stack, *([key] if key else []))]

    def admit(self, keys: Sequence[str], resolved: Sequence[Variant | ConfigError | RunError]) -> dict[str, Variant]:
        """Return the variants that may race in the open round; the others are noted, or raise what `resolve` raises."""
        ideas, taken = self.record.ideas, {name: one for one in self.stack_with("") for name in one.setting_names}
        variants: dict[str, Variant] = {}
        self.round.unchecked = [key for key in self.round.unchecked if key not in keys]
        for key, variant in zip(keys, resolved, strict=True):
            reason = ""
            if key in ("", self.round.winner):  # the baseline of this round or of the next one
                if isinstance(variant, Exception):
                    raise variant
            elif both := taken.keys() & ideas[key].setting_names:
                reason = f"sets {min(both)}, as {taken[min(both)].name!r} in the baseline does"
            elif isinstance(variant, Exception):
                reason = str(variant)
                if isinstance(variant, ConfigError) and not self.round.stack and ideas[key].text in self.config.ideas:
                    raise ConfigError(f"idea: {ideas[key].text!r}: {variant}")
            else:
                reason = self.reason_against(key, variant)
            if reason:
                self.leave_out(key, reason, has_crashed=isinstance(variant, RunError))
            else:
                assert isinstance(variant, Variant), "otherwise there is a reason"
                variants[key] = variant
        return variants

    def check_ideas(self) -> None:
        """Begin to check ideas, and let those race whose check has ended; ideas with equal code share a check."""
        begun = {key for keys in self.checks.values() for key in keys}
        by_code: dict[str, list[str]] = {}
        for key in self.unchecked_ideas():
            if key not in begun:
                by_code.setdefault(self.record.ideas[key].diff, []).append(key)
        for keys in by_code.values():
            self.checks[self.pool.submit(self.recipe.variants, [self.stack_with(key) for key in keys])] = keys
        must_wait = self.config.equal == "seconds" and not self.is_quiet
        for future in [future for future in self.checks if future.done() and not must_wait]:
            found = dict(zip(self.checks.pop(future), future.result(), strict=True))
            found = {key: variant for key, variant in found.items() if key in self.present}
            self.enter(self.admit([*found], [*found.values()]))

    @property
    def is_quiet(self) -> bool:
        """Whether neither runs nor checks of ideas are in progress, which would slow down runs that are timed."""
        return not self.runs.pending and all(future.done() for future in self.checks)

    def leave_out(self, key: str, reason: str, has_crashed: bool) -> None:
        """Note that an idea does not race in the open round."""
        self.variants.pop(key, None)
        self.round.ideas.pop(key, None)
        self.round.out[key] = reason
        self.round.crashed += [key] * has_crashed
        print(f"idea: {self.record.ideas[key].name}: {reason}", file=sys.stderr)

    def enter(self, variants: dict[str, Variant]) -> None:
        """Let variants race in the open round; of ideas that train the same, the first stands for all of them."""
        ideas = self.record.ideas
        for key, variant in variants.items():
            try:
                variant = self.runs.equalize(variant, self.config.equal)
            except RunError as error:
                if not key:
                    raise
                self.leave_out(key, str(error), has_crashed=True)
                continue
            self.round.withdrawn.pop(key, None)  # its patch is there again
            first = next((other for other, one in self.variants.items() if one.digest == variant.digest), "")
            if first:
                print(f"idea: {ideas[key].name}: trains the same as {ideas[first].name}", file=sys.stderr)
                self.record.same.append(key)
                self.round.ideas.pop(key, None)
            elif key:
                self.variants[key], self.round.ideas[key] = variant, describe(variant)
            else:
                self.variants[""], self.round.baseline = variant, describe(variant)
        self.record.write(self.file)

    def reason_against(self, key: str, variant: Variant) -> str:
        """Return why an idea does not race; "" if it does."""
        idea, baseline = self.record.ideas[key], self.baseline
        try:
            check_targets(baseline, variant)
            if idea.diff and variant.digest == baseline.digest:
                raise ConfigError("changes neither code that trains nor a setting")
        except ConfigError as error:
            if not self.round.stack and idea.text in self.config.ideas:
                raise ConfigError(f"idea: {idea.text!r}: {error}") from None
            return str(error)
        # Of the race, not of the round: so what a race finds is within the limits.
        return self.reason_of_costs(
            {name: getattr(variant, name) / getattr(baseline, name) for name in ("parameters", "flops")}
        )

    def reason_of_costs(self, ratios: Mapping[str, float | None]) -> str:
        """Return why a variant costs too much, by its costs relative to the baseline of the race; "" if it does not."""
        config = self.config
        limits = {"parameters": config.max_parameters, "flops": config.max_flops, "seconds": config.max_seconds}
        for name, limit in limits.items():
            ratio = ratios.get(name)
            if limit and ratio and ratio > limit:
                return f"has {ratio:.3f} times the {name} of the baseline; --max_{name} is {limit:g}"
        return ""

    def check_costs(self) -> None:
        """Leave out the ideas whose runs cost more than a limit allows, as was counted, whatever their code says."""
        baseline = runs_of(self.runs.results, self.record.rounds[0].baseline["digest"])
        for key in [key for key in self.round.ideas if key in self.variants]:
            described = self.round.ideas[key]
            runs = runs_of(self.runs.results, described["digest"])
            if min(len(runs), len(baseline)) < MIN_COUNTED_RUNS:
                continue
            costs = report.cost_ratios(runs, baseline, described, self.record.rounds[0].baseline)
            if reason := self.reason_of_costs(costs):
                self.leave_out(key, reason, has_crashed=False)
                self.has_changed = True

    # Running

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Write into the record that the race runs, then why it has ended."""
        self.record.ended = ""
        self.record.write(self.file)
        needed = verdicts.MIN_BASELINE_RUNS + verdicts.MIN_RUNS_OF_DISCOVERY
        if self.config.runs and self.config.runs < needed:
            parts = f"{verdicts.MIN_BASELINE_RUNS} of the baseline and {verdicts.MIN_RUNS_OF_DISCOVERY} of its own"
            print(
                f"runs: {self.config.runs} are too few for a verdict; one idea needs {needed}, {parts}", file=sys.stderr
            )
        try:
            yield
        except BaseException as error:
            self.record.ended = "stopped by a signal" if isinstance(error, SystemExit) else str(error) or repr(error)
            raise
        else:
            self.record.ended = self.reason_to_end()
        finally:
            self.record.write(self.file)

    def reason_to_end(self) -> str:
        """Return why the race has ended."""
        has_more = self.next_ideas() if self.round.winner else self.checks or self.next_variant()
        if not self.may_grow and not has_more:
            return "nothing is left to train; the same command races new ideas"
        if self.config.runs and self.num_runs() >= self.config.runs:
            of_baseline = len(runs_of(self.runs.results, self.record.rounds[0].baseline["digest"]))
            return f"--runs {self.config.runs} are trained, {of_baseline} of them of the baseline"
        if self.runs.is_time_spent():
            return f"--minutes {self.config.minutes:g} are over"
        if self.is_budget_spent():
            return "8 runs for each idea and 40 more are trained; --runs or --minutes continue it"
        if self.config.rounds and len(self.record.rounds) >= self.config.rounds:
            return f"--rounds {self.config.rounds} are over"
        return "a round found nothing better"

    def run(self) -> None:
        """Race; then measure the reach of what was found, and wait for new ideas as long as some may be added."""
        with self.pool:
            try:
                while True:
                    self.run_rounds()
                    self.measure_reach()
                    if not self.wait_for_ideas():
                        return
            finally:
                self.pool.shutdown(cancel_futures=True)

    @property
    def may_grow(self) -> bool:
        """Whether ideas may be added before the minutes are over: some are in a folder or a text file."""
        is_over = self.round.winner and len(self.record.rounds) >= (self.config.rounds or math.inf)
        return self.config.minutes is not None and not is_over and not {*self.config.ideas} <= {*self.named}

    def wait_for_ideas(self) -> bool:
        """Wait for new ideas; return False if none may be added, or the budget is spent."""
        if not self.may_grow or self.is_budget_spent():
            return False
        print("nothing is left to train; waiting for new ideas until the minutes are over", file=sys.stderr)

        def next_run() -> Next:
            has_new_ideas = bool(self.unchecked_ideas())
            self.write_changes()
            return None if has_new_ideas or self.is_budget_spent() else "wait"

        self.runs.train(next_run)
        return not self.is_budget_spent()

    def run_rounds(self) -> None:
        """Run rounds until one finds nothing better, or the budget is spent.

        Raises:
            SystemExit: a signal was received; what has finished is saved.
            RunError: the baseline does not train, or a disk is full.
        """
        while True:
            if self.round.winner is None:
                self.runs.train(self.next_run)  # whose last call has seen all results
                keys, findings = self.findings()
                # If the budget is spent, another idea may be better than the best.
                if (best := verdicts.best_idea(findings)) is not None:
                    self.accept(keys[best])
                elif not self.is_tuning or self.is_budget_spent():
                    self.say_if_too_short(findings)
                    return
            if not self.open_next_round():
                return

    def say_if_too_short(self, findings: Sequence[Finding]) -> None:
        """Print what a verdict needs, if the runs or the minutes sufficed for no estimate."""
        if not all(math.isnan(found.effect) and not found.is_settled for found in findings):
            return
        needed = verdicts.MIN_BASELINE_RUNS + verdicts.MIN_RUNS_OF_DISCOVERY
        if self.config.runs and self.num_runs() >= self.config.runs:
            problem, change = f"runs: {self.config.runs} are too few for an estimate", "with more --runs"
        elif self.config.minutes and self.runs.elapsed:
            seconds = sum(self.runs.elapsed.values()) / len(self.runs.elapsed)
            spent = f"{len(self.runs.elapsed)} runs, which took {seconds:.0f} s each"
            problem, change = f"minutes: {self.config.minutes:g} were enough for {spent}", "again"
        else:
            return
        advice = f"`better` needs at least {needed}. Run the same command {change} to resume."
        print(f"{problem}; {advice}", file=sys.stderr)

    def open_next_round(self) -> bool:
        """Open a round on top of what was found; return False if no idea or no run is left for it."""
        others, winner = self.next_ideas(), self.round.winner
        if not others or len(self.record.rounds) >= (self.config.rounds or math.inf) or self.is_budget_spent():
            return False
        baseline = self.variants[winner or ""]
        self.record.rounds.append(Round(self.record.stack, unchecked=others))
        self.variants, self.checks = {}, {}
        self.enter({"": baseline})
        return True

    def next_ideas(self) -> list[str]:
        """Return the keys of the ideas that race in the next round, on top of what was found."""
        new = self.unchecked_ideas()
        keys, findings = self.findings()
        joined = {self.record.ideas[key].text for key in self.record.stack}  # with all their arms
        others = [
            key
            for key, found in zip(keys, findings, strict=True)
            if races_on(found) and self.record.ideas[key].text not in joined and not self.is_tuning
        ]
        return [*(key for key in others if key in self.present), *new]

    def accept(self, winner: str) -> None:
        """Let an idea join the baseline, and write what the race has found so far."""
        idea = self.record.ideas[winner]
        print(f"round {len(self.record.rounds)}: better, and in the baseline from now on: {idea.name}", file=sys.stderr)
        # The settings of its runs as one config, and its changes of the code as one patch.
        ideas = [self.record.ideas[key] for key in (*self.round.stack, winner)]
        settings = yaml.safe_dump(self.variants[winner].given, sort_keys=False)
        write_atomically(self.file.with_suffix(".yaml"), settings)
        if self.recipe.commit and any(idea.diff for idea in ideas):
            commit = str(change.merge(self.recipe.commit, ideas))
            patch = change.git("diff-tree", "-p", "--binary", "--full-index", self.recipe.commit, commit) + "\n"
            write_atomically(self.file.with_suffix(".patch"), patch.encode(errors="surrogateescape"))
        self.round.winner = winner
        self.record.write(self.file)

    def next_run(self) -> Next:
        """Return the run that helps most to find the best idea, as far as the results are known."""
        if not self.is_tuning:
            self.check_ideas()
            if self.checks and self.config.equal == "seconds":
                return "wait"  # runs that are timed must have the machine for themselves
        self.check_costs()
        self.write_changes()
        self.runs.check_baseline(self.variants[""])
        if self.is_budget_spent():
            is_checked = self.round.ideas.keys() <= self.variants.keys()  # those of an earlier command, too
            return None if is_checked else "wait"
        variant = self.next_variant()
        if variant is None:
            return "wait" if self.checks else None
        return variant, self.runs.next_seed(variant)

    def write_changes(self) -> None:
        """Write the record if ideas were withdrawn, refused or left out since it was written."""
        if self.has_changed:
            self.record.write(self.file)
            self.has_changed = False

    def next_variant(self) -> Variant | None:
        """Return the variant whose next run helps most; None if the round has nothing left to train."""
        if len(self.variants) == 1 and not self.checks:
            return None
        known = dict(zip(*self.findings(), strict=True))
        keys = [key for key in known if key in self.variants]  # the others are not checked yet
        groups, findings = [self.runs.group(self.variants[key]) for key in keys], [known[key] for key in keys]
        index = verdicts.choose_next(self.runs.group(self.variants[""]), groups, findings, self.record.margin)
        return None if index is None else self.variants["" if index == BASELINE else keys[index]]

    def findings(self) -> tuple[list[str], list[Finding]]:
        """Return the keys of the ideas of the open round, and what is known of each."""
        return [*self.round.ideas], report.find(self.round, self.runs.results, self.record.margin)

    def num_runs(self) -> int:
        """Return how many runs of the race have ended or are pending."""
        return len(self.runs.pending) + sum(len(runs_of(self.runs.results, one)) for one in self.record.digests)

    def is_budget_spent(self) -> bool:
        """Return whether no further run may start."""
        limit: float = self.config.runs or math.inf
        if not (self.config.runs or self.config.minutes):
            limit = RUNS_PER_IDEA * len(self.record.ideas) + MORE_RUNS
        return self.num_runs() >= limit or self.runs.is_time_spent()

    def measure_reach(self) -> None:
        """Measure what was found elsewhere, if that is asked for or minutes are left."""
        if not self.record.stack or self.config.reach is False or not (self.config.reach or self.config.minutes):
            return

        def may_start(variant: Variant) -> bool:
            is_late = self.runs.is_time_spent(variant)
            return not is_late and not (self.may_grow and self.unchecked_ideas())

        stack, changes = self.measured
        if stack != self.record.stack:
            ideas = [self.record.ideas[key] for key in self.record.stack]
            changes = reach.plan(self.config, self.recipe, self.runs, ideas, changes)
            self.measured = [*self.record.stack], changes
            reach.note(self.record, changes)
            self.record.write(self.file)
        reach.train(changes, may_start)

    def compute_multiplier(self) -> list[float] | None:
        """Return how many times its steps the baseline would need for the loss of what was found, with its interval."""
        from tools.experiment.compute_multiplier import BUDGETS, SEEDS_OF_BUDGET, estimate_compute_multiplier

        if not self.round.stack and not self.round.winner:
            return None
        variants = {factor: scale_steps(self.baseline, factor) for factor in BUDGETS}
        seeds = range(SEEDS_OF_BUDGET)
        self.runs.train_in_order((variant, seed) for variant in variants.values() for seed in seeds)
        points = [(1.0, value) for value in self.runs.group(self.baseline).values]
        points += [(factor, value) for factor in BUDGETS for value in self.runs.group(variants[factor]).values]
        found = self.variants[self.round.winner or ""]
        estimate = estimate_compute_multiplier(points, self.runs.group(found).values)
        return None if estimate is None else list(estimate)


def races_on(finding: Finding) -> bool:
    """Return whether an idea races in the next round: it neither fails nor clearly harms, and it changes something."""
    is_harmful = finding.verdict == "worse" or finding.effect > CLEAR_HARM * finding.standard_error
    return finding.verdict not in ("failed", "identical") and not is_harmful


def file_time(text: str) -> int:
    """Return when the patch that an idea names was last changed, in nanoseconds; 0 if it names none."""
    with suppress(ConfigError, OSError):  # OSError: it has just been removed
        file = expand_user_path("idea", next(iter(split_words(text)), ""))
        return file.stat().st_mtime_ns if is_patch(file) else 0
    return 0  # `parse_idea` refuses it
