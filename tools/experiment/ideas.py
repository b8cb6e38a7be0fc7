"""The ideas of a screen, checked before they are on in a run, and the code with some of them on."""

import math
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import combinations
from pathlib import Path

from config.errors import ConfigError, RunError
from run.directory import Run
from tools.experiment import judge
from tools.experiment.arm import Arm, scale_steps
from tools.experiment.change import Idea, Worktrees, idea_texts, is_patch, merge, parse_idea
from tools.experiment.record import Record
from tools.experiment.settings import ExperimentConfig

# An idea of every screen that measures what compute is worth: it trains this fraction of the steps.
CONTROL_STEPS = 0.8
CONTROL = f"control: {100 - 100 * CONTROL_STEPS:.0f}% fewer steps"
DIGEST_STEPS = 12  # after which merged patches with all ideas off must have the digest of the code without them


class Ideas:
    """The ideas that the rows of a screen may have.

    Raises ConfigError if an idea is refused, its patch does not apply, or it changes what the loss means, and RunError
    if the baseline does not start.
    """

    def __init__(self, config: ExperimentConfig, trees: Worktrees, head: str | None, baseline: Arm, record: Record):
        self.config, self.trees, self.head, self.baseline, self.record = config, trees, head, baseline, record
        self.wanted: list[str] = []
        """Keys of the ideas that new rows may have."""
        self.merged: list[tuple[set[str], str | None]] = []
        """Commits of the head with patches that settings switch, as many as can be merged, and the keys of the ideas.
        Runs with some of them on share this code."""
        self.read_ideas: dict[tuple[str, int], Idea | None] = {}
        """By text and time of the file: ideas, None if refused. Each is read once, so that edits of the working tree
        while the screen runs are no new idea."""
        self.find()

    def find(self) -> bool:
        """Read the ideas, of which folders may have new ones; return whether there are any.

        The first time, a wrong idea raises ConfigError; later it is reported and ignored.
        """
        is_first, ideas = not self.wanted, []
        for text in idea_texts(self.config.ideas):
            try:
                idea = self.read(text)
            except ConfigError as error:
                if is_first:
                    raise
                print(f"ignored: {error}", file=sys.stderr)
                continue
            ideas += [idea] if idea else []
        ideas.append(control(self.baseline))
        if ideas[-1].key not in self.record.ideas:
            self.add(ideas[-1])
        keys = dict.fromkeys(idea.key for idea in ideas)
        wanted = [key for key in keys if not self.record.ideas[key]["failure"]]
        if wanted == self.wanted:
            return False
        if bad := self.merge_patches(wanted):
            message = (
                "with the settings off, this code trains other weights; new settings must change nothing by default"
            )
            if is_first:
                raise ConfigError(f"idea: {', '.join(idea.text for idea in bad)}: {message}")
            for idea in bad:
                print(f"ignored: {idea.text}: {message}", file=sys.stderr)
                self.record.ideas[idea.key]["failure"] = message
            return self.find()
        self.wanted = wanted
        return True

    def read(self, text: str) -> Idea | None:
        """Return an idea, added the first time; if it is refused, raise ConfigError once and then return None."""
        version = text, file_time(text)
        if version not in self.read_ideas:
            self.read_ideas[version] = None
            idea = parse_idea(text)
            if idea.key not in self.record.ideas:
                self.add(idea)
            self.read_ideas[version] = idea
        return self.read_ideas[version]

    def add(self, idea: Idea) -> None:
        """Check a new idea, and find the others that cannot be on with it."""
        failure = ""
        try:
            arm = self.arm([idea])
            judge.check_targets(self.baseline, arm.settings)
            if idea.diff and arm.digest == self.baseline.digest:
                raise ConfigError("changes neither code that trains nor a setting")
            failure = (judge.failed_checks(arm) if idea.diff else "") or self.excess_size(arm)
        except ConfigError as error:
            raise ConfigError(f"idea: {idea.text!r}: {error}") from None
        except RunError as error:
            failure = str(error)
        for key in self.record.ideas:
            other = self.record.idea(key)
            if idea.setting_names & other.setting_names or (idea.files & other.files and self.conflict(other, idea)):
                self.record.exclusive.append([key, idea.key])
        self.record.add_idea(idea, failure)
        if failure:
            print(f"idea: {idea.text}: {failure}", file=sys.stderr)

    def conflict(self, *ideas: Idea) -> bool:
        """Return whether the patches of ideas cannot be merged."""
        try:
            merge(self.head, ideas)
        except ConfigError:
            return True
        return False

    def merge_patches(self, wanted: list[str]) -> list[Idea]:
        """Merge the patches that a setting switches, unless some change what is trained with the settings off.

        Returns:
            The ideas that do so.
        """
        known = self.merged[0][0] if self.merged else set()
        keys, commit = self.merge_more([], wanted)
        if keys != known:
            if self.short_digest(commit) != self.head_digest:
                common = [self.record.idea(key) for key in wanted if key in keys]
                alone = [idea for idea in common if self.short_digest(merge(self.head, [idea])) != self.head_digest]
                return alone or [idea for idea in common if idea.key not in known]
            self.merged.insert(0, (keys, commit))
        return []

    def merge_more(self, ideas: list[Idea], others: list[str]) -> tuple[set[str], str | None]:
        """Merge the patches of ideas, and all others that a setting switches and that do not conflict with them.

        Raises:
            ConfigError: the patches of `ideas` conflict.
        """
        commit, keys = merge(self.head, ideas), {idea.key for idea in ideas}
        for idea in map(self.record.idea, others):
            is_switched = idea.diff and idea.settings and idea.key not in keys
            if is_switched and not any(idea.key in pair and keys & {*pair} for pair in self.record.exclusive):
                with suppress(ConfigError):
                    commit = merge(commit, [idea])
                    keys.add(idea.key)
        return keys, commit

    def share_code(self, on: list[Idea]) -> None:
        """Merge more patches with those of a new row, so that later rows have its code too."""
        patches = [idea for idea in on if idea.diff]
        own = {idea.key for idea in patches}
        if not own or not all(idea.settings for idea in patches) or any(own <= keys for keys, _ in self.merged):
            return
        with suppress(ConfigError):  # they conflict, which `arm` reports
            keys, commit = self.merge_more(patches, self.wanted)
            is_same = self.short_digest(commit) == self.head_digest
            self.merged.append((keys, commit) if is_same else (own, merge(self.head, patches)))

    @cached_property
    def head_digest(self) -> str:
        """`state/digest` of a short run of the code without ideas."""
        return self.short_digest(self.head)

    def short_digest(self, commit: str | None) -> str:
        """Return `state/digest` of a short run of the baseline's settings with the code of a commit, or its error."""
        try:
            return self.short_run(self.arm([], commit)).newest_metrics()["state/digest"]
        except (ConfigError, RunError) as error:
            if commit == self.head:
                raise
            return str(error)

    def short_run(self, arm: Arm) -> Run:
        """Train a few steps of an arm; raise RunError if that fails."""
        short = scale_steps(replace(arm, is_judged=False), DIGEST_STEPS / arm.settings["steps"])
        job = short.changed({"evaluation.num_samples": 2}).job(0)
        if not job.is_finished():  # without JobRunner, which may be training others
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(job.command, env=environment, capture_output=True, text=True, start_new_session=True)
            if done.returncode:
                raise RunError(f"does not train: {judge.last_line(done)}")
            shutil.rmtree(job.run.checkpoints, ignore_errors=True)
        return job.run

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

    def code_of(self, on: list[Idea]) -> str | None:
        """Return the commit of the code with some ideas on; raise ConfigError if their patches conflict."""
        own = {idea.key for idea in on if idea.diff}
        shared = (commit for keys, commit in self.merged if own and own <= keys)
        return next(shared, None) or merge(self.head, on)

    def arm(self, on: list[Idea], commit: str | None = None) -> Arm:
        """Return the arm with some ideas on; raise ConfigError if it is refused, RunError if its code crashes.

        `commit` is by default `code_of` the ideas.
        """
        code = self.trees.folder(commit or self.code_of(on))
        words = [*self.baseline.words, *(word for idea in on for word in idea.settings)]
        return Arm.resolve(code, self.baseline.launch, words, self.baseline.lab, is_judged=code != self.baseline.code)

    def find_pair(self, on: list[Idea]) -> tuple[Idea, Idea] | None:
        """Return two ideas of a row that cannot be on together; None if only more than two cannot."""
        for pair in combinations(on, 2):
            try:
                self.arm([*pair])
            except (ConfigError, RunError):
                return pair
        return None


def file_time(text: str) -> int:
    """Return when the patch that an idea names was last changed, in nanoseconds; 0 if it names none."""
    file = Path(text).expanduser()
    return file.stat().st_mtime_ns if is_patch(file) else 0


def control(baseline: Arm) -> Idea:
    """Return the idea of every screen that trains fewer steps, with a schedule of the same shape."""
    shorter = scale_steps(baseline, CONTROL_STEPS)
    changes = {name: value for name, value in shorter.settings.items() if baseline.settings[name] != value}
    changes.pop("data.num_samples", None)
    words = [word for name, value in changes.items() for word in (f"--{name}", str(value))]
    return Idea(CONTROL, tuple(words))


def is_control(idea: Idea) -> bool:
    """Return whether an idea is the control of a screen."""
    return idea.text == CONTROL
