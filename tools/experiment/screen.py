"""A screen of ideas: runs with a few of the ideas on in each.

A lab keeps one screen for each baseline, LAB/screens/BASELINE/screen.json: its ideas and its rows, each a run with the
ideas that are on in it. The same command resumes it; more runs or more ideas extend it.
"""

import json
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path

import numpy as np

from config.errors import ConfigError, RunError
from data.files import lock, write_atomically
from run.directory import Run
from tools.experiment import judge
from tools.experiment.arm import Arm
from tools.experiment.change import Worktrees, head_commit
from tools.experiment.design import extend_design
from tools.experiment.ideas import Ideas
from tools.experiment.record import Record, Row
from tools.experiment.settings import ExperimentConfig
from tools.jobs.launch import Launch
from tools.jobs.runner import Job, JobRunner

RUNS_PER_IDEA, MORE_RUNS = 4, 8
SCORED_AT_ONCE = 4  # runs; for each code, two processes import torch
PROGRESS_SECONDS = 60


class Screen:
    """The screen of a baseline while it runs.

    Raises ConfigError if an idea is refused, or another process runs the screen, and RunError if the baseline does not
    start.
    """

    def __init__(self, config: ExperimentConfig, lab: Path, trees: Worktrees, jobs: JobRunner):
        self.config, self.lab, self.jobs = config, lab, jobs
        head = head_commit()
        self.baseline = Arm.resolve(trees.folder(head), Launch.parse(config.launch), config.common, lab)
        self.folder = lab / "screens" / self.baseline.name
        self.folder.mkdir(parents=True, exist_ok=True)
        file = trees.enter_context((self.folder / ".lock").open("w"))
        if not lock(file):
            remedy = "to add ideas, write patches into a folder that it was given"
            raise ConfigError(f"lab: another process runs {self.folder}; {remedy}")
        file = self.folder / "screen.json"
        self.record = Record.read(file) if file.exists() else Record([*self.baseline.words])
        self.ideas = Ideas(config, trees, head, self.baseline, self.record)
        self.num_ended = sum(row.is_done for row in self.record.rows)
        self.started: dict[Job, tuple[Row, Arm, float]] = {}
        self.unscored: list[tuple[Row, Arm]] = []
        self.durations: list[float] = []
        self.start_time = self.last_progress = time.monotonic()
        self.save()

    def save(self) -> None:
        """Write screen.json."""
        write_atomically(self.folder / "screen.json", json.dumps(asdict(self.record), indent=1) + "\n")

    # Rows

    @property
    def num_runs(self) -> int:
        """Number of rows of the whole screen, as far as it is known."""
        if self.config.runs:
            return self.config.runs
        if not self.config.minutes:
            return RUNS_PER_IDEA * len(self.ideas.wanted) + MORE_RUNS
        left = 60 * self.config.minutes - (time.monotonic() - self.start_time)
        per_run = float(np.mean(self.durations)) if self.durations else math.inf
        more = math.ceil(left / per_run * self.jobs.max_running)
        # Planning takes seconds for thousands of rows, and is repeated for each new idea.
        more = min(more, RUNS_PER_IDEA * len(self.ideas.wanted) + MORE_RUNS)
        return len(self.record.rows) + max(more, self.jobs.max_running)

    def is_time_left(self) -> bool:
        """Return whether a run that starts now would end in time."""
        if not self.config.minutes:
            return True
        ends_at = time.monotonic() - self.start_time + max(self.durations, default=0)
        return ends_at < 60 * self.config.minutes

    def plan(self) -> list[Row]:
        """Return the next rows of the design."""
        columns = self.ideas.wanted
        before = np.array([[key in row.ideas for key in columns] for row in self.record.rows], bool)
        apart = self.record.pairs_apart()
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
        apart: set[tuple[str, str]] = set()
        while len(self.record.rows) < self.num_runs and self.is_time_left():
            if self.ideas.find() or apart != {*self.record.pairs_apart()} or not planned:
                planned, apart = self.plan(), {*self.record.pairs_apart()}
            row = planned.pop(0)
            job = self.start(row)
            self.record.rows.append(row)
            self.save()
            yield job

    def start(self, row: Row) -> Job:
        """Return the run of a row, after removing from it ideas that cannot be on together."""
        on = [*map(self.record.idea, row.ideas)]
        if not row.run:
            self.ideas.share_code(on)
        while True:
            try:
                row.code = row.code or self.ideas.code_of(on)
                arm = self.ideas.arm(on, row.code)
                break
            except (ConfigError, RunError):
                row.code = None
                if len(on) < 2:
                    raise
                pair = self.ideas.find_pair(on)
                if pair:
                    self.record.exclusive.append([idea.key for idea in pair])
                on.remove(pair[1] if pair else on[-1])
        row.ideas = [idea.key for idea in on]
        job = arm.job(row.seed)
        row.run = job.run.path.name
        self.started[job] = row, arm, time.monotonic()
        return job

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
