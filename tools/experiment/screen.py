"""A screen of ideas: runs with a few of the ideas on in each.

A lab keeps one screen for each baseline, LAB/screens/BASELINE/screen.json: its ideas and its rows, each a run with the
ideas that are on in it. The same command resumes it; more runs or more ideas extend it.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from config.errors import ConfigError, RunError
from data.files import lock, write_atomically
from data.json_objects import parse_object
from run.directory import Run
from tools.experiment import judge
from tools.experiment.arm import Arm, scale_steps
from tools.experiment.change import Idea, Worktrees, head_commit, idea_texts, is_patch, merge, parse_idea
from tools.experiment.design import extend_design
from tools.experiment.settings import ExperimentConfig
from tools.jobs.launch import Launch
from tools.jobs.runner import Job, JobRunner

# An idea of every screen that measures what compute is worth: it trains this fraction of the steps.
CONTROL_STEPS = 0.8
CONTROL = f"control: {100 - 100 * CONTROL_STEPS:.0f}% fewer steps"
DIGEST_STEPS = 12  # after which merged patches with all ideas off must have the digest of the code without them
RUNS_PER_IDEA, MORE_RUNS = 4, 8
FAILED_TOGETHER = 3  # runs after which two ideas are kept apart that fail together, and never alone
SCORED_AT_ONCE = 4  # runs; for each code, two processes import torch
PROGRESS_SECONDS = 60


@dataclass
class Row:
    """A run of a screen."""

    seed: int
    ideas: list[str]
    """Keys of the ideas that are on."""
    run: str = ""
    """Name of its directory in LAB/runs."""
    code: str | None = None
    """Commit of its code."""
    loss: float | None = None
    """None until the run is finished and scored."""
    failure: str = ""
    """Why the run failed, or its loss is not credible."""

    @property
    def is_done(self) -> bool:
        """Whether the run need not be trained any more."""
        return self.loss is not None or bool(self.failure)


@dataclass
class Record:
    """Content of screen.json."""

    words: list[str]
    """Settings of all runs."""
    ideas: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By key: the fields of each idea, and as `failure` why it cannot be on."""
    exclusive: list[list[str]] = field(default_factory=list)
    """Pairs of keys that are never on together."""
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> "Record":
        """Read screen.json; raise ConfigError if it is absent or damaged."""
        try:
            content: dict[str, Any] = parse_object(file.read_bytes())
            content["rows"] = [Row(**row) for row in content["rows"]]
            return cls(**content)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"lab: {file} cannot be read: {error}") from None

    def failing_pairs(self) -> list[tuple[str, str]]:
        """Return pairs of ideas all of whose runs together have failed, and none with one without the other."""
        done, found = [row for row in self.rows if row.is_done], []
        while True:
            pairs = Counter(pair for row in done if row.failure for pair in combinations(row.ideas, 2))
            for (a, b), number in pairs.most_common():
                only = [row for row in done if {a, b} & {*row.ideas}]
                if number >= FAILED_TOGETHER and all(bool(row.failure) == ({a, b} <= {*row.ideas}) for row in only):
                    found.append((a, b))
                    done = [row for row in done if not {a, b} <= {*row.ideas}]  # its failures are explained
                    break
            else:
                return found

    def add_idea(self, idea: Idea, failure: str) -> None:
        """Add an idea, which never is on if there is a failure."""
        self.ideas[idea.key] = asdict(idea) | {"failure": failure}

    def idea(self, key: str) -> Idea:
        """Return an idea."""
        one = self.ideas[key]
        return Idea(one["text"], tuple(one["settings"]), one["base"], one["diff"])


class Screen:
    """The screen of a baseline while it runs.

    Raises ConfigError if an idea is refused, its patch does not apply, or it changes what the loss means, and RunError
    if the baseline does not start.
    """

    def __init__(self, config: ExperimentConfig, lab: Path, trees: Worktrees, jobs: JobRunner):
        self.config, self.lab, self.trees, self.jobs = config, lab, trees, jobs
        self.head = head_commit()
        self.merged: list[tuple[set[str], str | None]] = []
        """Commits of the head with patches that settings switch, as many as can be merged, and the keys of the ideas.
        Runs with some of them on share this code."""
        self.baseline = Arm.resolve(trees.folder(self.head), Launch.parse(config.launch), config.common, lab)
        self.folder = lab / "screens" / self.baseline.name
        self.folder.mkdir(parents=True, exist_ok=True)
        file = trees.enter_context((self.folder / ".lock").open("w"))
        if not lock(file):
            remedy = "to add ideas, write patches into a folder that it was given"
            raise ConfigError(f"lab: another process runs {self.folder}; {remedy}")
        file = self.folder / "screen.json"
        self.record = Record.read(file) if file.exists() else Record([*self.baseline.words])
        self.num_ended = sum(row.is_done for row in self.record.rows)
        self.wanted: list[str] = []
        """Keys of the ideas that new rows may have."""
        self.started: dict[Job, tuple[Row, Arm, float]] = {}
        self.unscored: list[tuple[Row, Arm]] = []
        self.durations: list[float] = []
        self.read_ideas: dict[tuple[str, int], Idea | None] = {}
        """By text and time of the file: ideas, None if refused. Each is read once, so that edits of the working tree
        while the screen runs are no new idea."""
        self.start_time = self.last_progress = time.monotonic()
        self.find_ideas()

    def save(self) -> None:
        """Write screen.json."""
        write_atomically(self.folder / "screen.json", json.dumps(asdict(self.record), indent=1) + "\n")

    # Ideas

    def find_ideas(self) -> bool:
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
            return self.find_ideas()
        self.wanted = wanted
        self.save()
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
            expected = self.short_digest(self.head)
            if self.short_digest(commit) != expected:
                common = [self.record.idea(key) for key in wanted if key in keys]
                alone = [idea for idea in common if self.short_digest(merge(self.head, [idea])) != expected]
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
            is_same = self.short_digest(commit) == self.short_digest(self.head)
            self.merged.append((keys, commit) if is_same else (own, merge(self.head, patches)))

    def short_digest(self, commit: str | None) -> str:
        """Return `state/digest` of a short run of the baseline's settings with the code of a commit, or its error."""
        try:
            arm = Arm.resolve(self.trees.folder(commit), self.baseline.launch, [*self.baseline.words], self.lab)
            return self.short_run(arm).newest_metrics()["state/digest"]
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
        return Arm.resolve(code, self.baseline.launch, words, self.lab, is_judged=code != self.baseline.code)

    # Rows

    @property
    def num_runs(self) -> int:
        """Number of rows of the whole screen, as far as it is known."""
        if self.config.runs:
            return self.config.runs
        if not self.config.minutes:
            return RUNS_PER_IDEA * len(self.wanted) + MORE_RUNS
        left = 60 * self.config.minutes - (time.monotonic() - self.start_time)
        per_run = float(np.mean(self.durations)) if self.durations else math.inf
        more = math.ceil(left / per_run * self.jobs.max_running)
        # Planning takes seconds for thousands of rows, and is repeated for each new idea.
        more = min(more, RUNS_PER_IDEA * len(self.wanted) + MORE_RUNS)
        return len(self.record.rows) + max(more, self.jobs.max_running)

    def is_time_left(self) -> bool:
        """Return whether a run that starts now would end in time."""
        if not self.config.minutes:
            return True
        ends_at = time.monotonic() - self.start_time + max(self.durations, default=0)
        return ends_at < 60 * self.config.minutes

    def plan(self) -> list[Row]:
        """Return the next rows of the design."""
        columns = self.wanted
        before = np.array([[key in row.ideas for key in columns] for row in self.record.rows], bool)
        apart = [*self.record.exclusive, *self.record.failing_pairs()]
        exclusive = [(columns.index(a), columns.index(b)) for a, b in apart if {a, b} <= {*columns}]
        num_rows = len(self.record.rows)
        new = extend_design(before.reshape(num_rows, len(columns)), self.num_runs - num_rows, exclusive=exclusive)
        return [
            Row(num_rows + index, [key for key, is_on in zip(columns, row, strict=True) if is_on])
            for index, row in enumerate(new)
        ]

    def jobs_to_train(self) -> Iterator[Job]:
        """Yield the runs that are not finished, then those of new rows, each planned when it is asked for."""
        for row in self.record.rows:
            if not row.is_done:
                yield self.start(row)
        planned: list[Row] = []
        num_apart = 0
        while len(self.record.rows) < self.num_runs and self.is_time_left():
            new_ideas, was_apart = self.find_ideas(), num_apart
            num_apart = len(self.record.exclusive) + len(self.record.failing_pairs())
            if new_ideas or num_apart != was_apart or not planned:
                planned = self.plan()
            row = planned.pop(0)
            job = self.start(row)
            self.record.rows.append(row)
            self.save()
            yield job

    def start(self, row: Row) -> Job:
        """Return the run of a row, after removing from it ideas that cannot be on together."""
        on = [*map(self.record.idea, row.ideas)]
        if not row.run:
            self.share_code(on)
        while True:
            try:
                row.code = row.code or self.code_of(on)
                arm = self.arm(on, row.code)
                break
            except (ConfigError, RunError):
                row.code = None
                if len(on) < 2:
                    raise
                pair = self.find_pair(on)
                if pair:
                    self.record.exclusive.append([idea.key for idea in pair])
                on.remove(pair[1] if pair else on[-1])
        row.ideas = [idea.key for idea in on]
        job = arm.job(row.seed)
        row.run = job.run.path.name
        self.started[job] = row, arm, time.monotonic()
        return job

    def find_pair(self, on: list[Idea]) -> tuple[Idea, Idea] | None:
        """Return two ideas of a row that cannot be on together; None if only more than two cannot."""
        for pair in combinations(on, 2):
            try:
                self.arm([*pair])
            except (ConfigError, RunError):
                return pair
        return None

    # Running

    def run(self) -> None:
        """Train and score runs until there are enough, or the time is spent.

        Raises:
            SystemExit: a signal was received; what has finished is saved.
            RunError: a disk is full.
        """
        with ThreadPoolExecutor(1) as pool:
            scoring: list[Future[None]] = []
            try:
                for job in self.jobs.stream(self.jobs_to_train(), progress=self.print_progress):
                    row, arm, start_time = self.started.pop(job)
                    if job in self.jobs.failures:
                        row.failure = self.jobs.failures[job].message or "ends with an error after its last step"
                    elif job.is_finished():
                        if job in self.jobs.outcomes:  # it was trained now
                            self.durations.append(time.monotonic() - start_time)
                        self.unscored.append((row, arm))
                        if len(self.unscored) >= SCORED_AT_ONCE or not arm.is_judged:
                            scoring.append(pool.submit(self.score, self.unscored))
                            self.unscored = []
                    self.num_ended += 1
                    self.save()
                    print(self.describe(row), file=sys.stderr)
            finally:
                scoring.append(pool.submit(self.score, self.unscored))
                if not all(future.done() for future in scoring):
                    print("scoring the last runs ...", file=sys.stderr)
                wait(scoring)
                self.save()
            for future in scoring:
                future.result()  # raises what scoring raised

    def score(self, runs: list[tuple[Row, Arm]]) -> None:
        """Set the losses of finished rows."""
        try:
            scores = judge.score(self.baseline, [(arm, Run(self.lab / "runs" / row.run)) for row, arm in runs])
            for (row, _), score in zip(runs, scores, strict=True):
                row.loss, row.failure = (None if score.problem else score.loss), score.problem
        except RunError as error:
            if len(runs) > 1:  # the others are not to blame
                for one in runs:
                    self.score([one])
            else:
                runs[0][0].failure = str(error)

    def describe(self, row: Row) -> str:
        """Return a line about a row that has ended."""
        ideas = ", ".join(self.record.idea(key).text for key in row.ideas) or "the baseline"
        loss = Run(self.lab / "runs" / row.run).newest_metrics().get("val/loss")
        result = row.failure or ("stopped" if loss is None else f"val/loss {loss:.4f}")
        return f"[run {self.num_ended} / {self.num_runs}] {result}; on: {ideas}{self.time_left()}"

    def time_left(self) -> str:
        """Return how long the screen still takes, as text."""
        if not self.durations:
            return ""
        left = self.num_runs - self.num_ended
        return f"; about {left * np.mean(self.durations) / self.jobs.max_running / 60:.1f} minutes left"

    def print_progress(self) -> None:
        """Print a line about the runs that train, every PROGRESS_SECONDS."""
        if time.monotonic() - self.last_progress < PROGRESS_SECONDS:
            return
        self.last_progress = time.monotonic()
        steps = (
            f"row {row.seed} at step {job.run.newest_metrics()['step']}" for job, (row, _, _) in self.started.items()
        )
        print(f"training {', '.join(steps)}{self.time_left()}", file=sys.stderr)


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
