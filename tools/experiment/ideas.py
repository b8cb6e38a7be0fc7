"""The ideas of a screen, checked before they are on in a run, and the code with some of them on."""

import math
import shutil
import sys
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import combinations
from pathlib import Path

from config.errors import ConfigError, RunError
from run.directory import Run
from tools.experiment import judge
from tools.experiment.arm import Arm, Recipe, last_error, run_program, scale_steps
from tools.experiment.change import Idea, idea_texts, is_patch, merge, parse_idea, split_words
from tools.experiment.record import Record, ScreenRun
from tools.experiment.settings import ExperimentConfig

# An idea of every screen that measures what compute is worth: it trains this fraction of the steps.
CONTROL_STEPS = 0.8
CONTROL = f"control: {100 - 100 * CONTROL_STEPS:.0f}% fewer steps"
DIGEST_STEPS = 12  # after which merged patches with all ideas off must have the digest of the code without them
OTHER_DEFAULT = "with its settings off, its code trains other weights; new settings must change nothing by default"
OTHER_MERGED = "merged with the patches of other ideas, its code trains other weights with all of their settings off"


class Ideas:
    """The ideas that the runs of a screen may have.

    Raises ConfigError if an idea is refused, its patch does not apply, or it changes what the loss means.
    """

    def __init__(self, config: ExperimentConfig, recipe: Recipe, baseline: Arm, record: Record):
        self.config, self.recipe, self.baseline, self.record = config, recipe, baseline, record
        self.wanted: list[str] = []
        """Keys of the ideas that new runs may have."""
        self.codes: list[tuple[list[str], str | None]] = []
        """Keys of ideas with patches that settings switch, as many as can be merged, and the commit of them all. Runs
        with some of them on share this code."""
        self.keys: dict[tuple[str, int], str] = {}
        """By text and time of the file: keys of ideas, "" if refused. Each is read once, so that edits of the working
        tree while the screen runs are no new idea."""
        self.find()

    def find(self) -> bool:
        """Read the ideas, of which folders may have new ones; return whether those for new runs have changed.

        A wrong argument of the command raises ConfigError the first time; later, and in a folder or a text file, a
        wrong idea is reported and ignored.
        """
        is_first, keys = not self.wanted, []
        for text in idea_texts(self.config.ideas):
            version = text, file_time(text)
            if version not in self.keys:
                self.keys[version] = ""
                try:
                    self.keys[version] = self.add(parse_idea(text))
                except ConfigError as error:
                    if is_first and text in self.config.ideas:
                        raise
                    print(f"ignored: {error}", file=sys.stderr)
            keys.append(self.keys[version])
        keys.append(self.add(control(self.baseline)))
        wanted = [key for key in dict.fromkeys(keys) if key and not self.record.ideas[key].failure]
        if wanted == self.wanted:
            return False
        self.wanted = self.merge_patches(wanted)
        return True

    def add(self, idea: Idea) -> str:
        """Check an idea and find the others that cannot be on with it; return its key.

        Those of earlier commands passed, or are checked again: a limit may be another now.
        """
        if (known := self.record.ideas.get(idea.key)) and not known.failure:
            return idea.key
        failure = ""
        try:
            arm = self.recipe.arm([idea])
            judge.check_settings(self.baseline, arm)
            failure = judge.failed_checks(arm) or self.excess_size(arm)
        except ConfigError as error:
            raise ConfigError(f"idea: {idea.text!r}: {error}") from None
        except RunError as error:
            failure = str(error)
        for key, other in self.record.ideas.items():
            if not known and (idea.setting_names & other.setting_names or self.conflict(other, idea)):
                self.record.exclusive.append([key, idea.key])
        self.record.ideas[idea.key] = idea
        if failure:
            self.block(idea.key, failure)
        return idea.key

    def block(self, key: str, failure: str) -> None:
        """Let an idea never be on in a run."""
        self.record.ideas[key] = replace(self.record.ideas[key], failure=failure)
        print(f"idea: {self.record.ideas[key].text}: {failure}", file=sys.stderr)

    def conflict(self, one: Idea, other: Idea) -> bool:
        """Return whether the patches of two ideas cannot be merged."""
        try:
            if one.files & other.files:
                merge(self.recipe.commit, [one, other])
        except ConfigError:
            return True
        return False

    def excess_size(self, arm: Arm) -> str:
        """Return which of --max_parameters and --max_flops an arm exceeds; "" if none."""
        limits = {"parameters": self.config.max_parameters, "flops_per_token": self.config.max_flops}
        if not any(limits.values()):
            return ""
        own, baseline = (self.short_run(one).sessions()[-1] for one in (arm, self.baseline))
        for name, limit in limits.items():
            ratio = (getattr(own, name) or 0) / (getattr(baseline, name) or math.inf)
            if limit and ratio > limit:
                return f"has {ratio:.3f} times the {name} of the baseline, of which {limit:g} are allowed"
        return ""

    def merge_patches(self, wanted: list[str]) -> list[str]:
        """Merge the patches that settings switch into `codes`, such that each is in one of them.

        Returns:
            The wanted ideas, without those whose patches change what is trained with their settings off.
        """
        self.codes = []
        switched = [key for key in wanted if self.record.ideas[key].diff and self.record.ideas[key].settings]
        for first in switched:
            if any(first in keys for keys, _ in self.codes):
                continue
            keys, commit = self.merge_with(first, switched)
            if self.short_digest(commit) != self.head_digest:
                commits = {key: merge(self.recipe.commit, [self.record.ideas[key]]) for key in keys}
                wrong = {key: OTHER_DEFAULT for key in keys if self.short_digest(commits[key]) != self.head_digest}
                wrong = wrong or {keys[-1]: OTHER_MERGED}
                for key, failure in wrong.items():
                    self.block(key, failure)
                return self.merge_patches([key for key in wanted if key not in wrong])
            self.codes.append((keys, commit))
        return wanted

    def merge_with(self, first: str, others: list[str]) -> tuple[list[str], str | None]:
        """Merge the patches of one idea and of all others that do not conflict; return their keys and the commit."""
        keys, commit = [first], merge(self.recipe.commit, [self.record.ideas[first]])
        for key in others:
            is_apart = any(key in pair and {*pair} & {*keys} for pair in self.record.exclusive)
            if key not in keys and not is_apart:
                with suppress(ConfigError):
                    commit = merge(commit, [self.record.ideas[key]])
                    keys.append(key)
        return keys, commit

    @cached_property
    def head_digest(self) -> str:
        """`state/digest` of a short run of the code without ideas."""
        return self.short_digest(self.recipe.commit)

    def short_digest(self, commit: str | None) -> str:
        """Return `state/digest` of a short run of the baseline's settings with the code of a commit, or its error."""
        try:
            return self.short_run(self.recipe.arm(commit=commit)).newest_metrics()["state/digest"]
        except (ConfigError, RunError) as error:
            if commit == self.recipe.commit:
                raise
            return str(error)

    def short_run(self, arm: Arm) -> Run:
        """Train a few steps of an arm; raise RunError if that fails."""
        short = scale_steps(replace(arm, is_judged=False), DIGEST_STEPS / arm.settings["steps"])
        job = short.changed({"evaluation.num_samples": 2}).job(0)
        if not job.is_finished():  # without JobRunner, which may be training others
            done = run_program(job.command)
            if done.returncode:
                raise RunError(f"does not train: {last_error(done, arm.code)}")
            shutil.rmtree(job.run.checkpoints, ignore_errors=True)
        return job.run

    def arm(self, on: list[Idea]) -> Arm:
        """Return the arm with some ideas on, of shared code if there is some; raise as `Recipe.arm` does."""
        patches = {idea.key for idea in on if idea.diff}
        shared = (commit for keys, commit in self.codes if patches and patches <= {*keys})
        return self.recipe.arm(on, next(shared, None))

    def arm_of_run(self, run: ScreenRun) -> Arm:
        """Return the arm of a run, after removing from the run ideas that cannot be on together."""
        while True:
            on = [self.record.ideas[key] for key in run.ideas]
            try:
                return self.arm(on)
            except (ConfigError, RunError):
                if len(on) < 2:
                    raise
                pair = self.find_pair(on)
                if pair:
                    self.record.exclusive.append(pair)
                run.ideas.remove(pair[1] if pair else run.ideas[-1])

    def find_pair(self, on: list[Idea]) -> list[str] | None:
        """Return the keys of two ideas that cannot be on together; None if only more than two cannot."""
        for pair in combinations(on, 2):
            try:
                self.arm([*pair])
            except (ConfigError, RunError):
                return [idea.key for idea in pair]
        return None


def file_time(text: str) -> int:
    """Return when the patch that an idea names was last changed, in nanoseconds; 0 if it names none."""
    with suppress(ConfigError):
        file = Path(next(iter(split_words(text)), "")).expanduser()
        return file.stat().st_mtime_ns if is_patch(file) else 0
    return 0  # `parse_idea` refuses it


def control(baseline: Arm) -> Idea:
    """Return the idea of every screen that trains fewer steps, with a schedule of the same shape."""
    shorter = scale_steps(baseline, CONTROL_STEPS)
    changes = {name: value for name, value in shorter.settings.items() if baseline.settings[name] != value}
    changes.pop("data.num_samples", None)
    return Idea(CONTROL, [word for name, value in changes.items() for word in (f"--{name}", str(value))])
