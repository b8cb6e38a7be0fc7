"""A screen of ideas: runs with a few of the ideas on in each.

A lab keeps one screen for each baseline, LAB/screens/BASELINE/screen.json: its ideas and its runs. The same command
resumes it; more runs or more ideas extend it.
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict

import numpy as np

from config.errors import ConfigError, RunError
from run.directory import Run
from storage.files import lock, write_atomically
from tools.experiment import judge
from tools.experiment.arm import Arm, Recipe
from tools.experiment.design import extend_design
from tools.experiment.ideas import Ideas
from tools.experiment.record import Record, ScreenRun
from tools.experiment.settings import ExperimentConfig
from tools.jobs.runner import Job, JobRunner

RUNS_PER_IDEA, MORE_RUNS = 4, 8
SCORED_AT_ONCE = 4  # runs; for each code, two processes import torch
PROGRESS_SECONDS = 60


class Screen:
    """The screen of a baseline while it runs.

    Raises ConfigError if an idea is refused, or another process runs the screen, and RunError if the baseline does not
    start.
    """

    def __init__(self, config: ExperimentConfig, recipe: Recipe, jobs: JobRunner):
        self.config, self.jobs, self.runs_folder = config, jobs, recipe.lab / "runs"
        self.baseline = recipe.arm()
        self.folder = recipe.lab / "screens" / self.baseline.name
        self.folder.mkdir(parents=True, exist_ok=True)
        file = recipe.checkouts.enter_context((self.folder / ".lock").open("w"))
        if not lock(file):
            remedy = "to add ideas, write patches into a folder that it was given"
            raise ConfigError(f"lab: another process runs {self.folder}; {remedy}")
        file = self.folder / "screen.json"
        self.record = Record.read(file) if file.exists() else Record()
        self.ideas = Ideas(config, recipe, self.baseline, self.record)
        self.num_ended = sum(run.is_done for run in self.record.runs)
        self.started: dict[Job, tuple[ScreenRun, Arm, float]] = {}
        self.durations: list[float] = []
        self.start_time = self.last_progress = time.monotonic()
        self.save()

    def save(self) -> None:
        """Write screen.json."""
        write_atomically(self.folder / "screen.json", json.dumps(asdict(self.record), indent=1) + "\n")

    # Planning

    @property
    def num_runs(self) -> float:
        """Number of runs of the whole screen; infinite if only the time limits it."""
        if self.config.runs:
            return self.config.runs
        return math.inf if self.config.minutes else self.default_runs

    @property
    def default_runs(self) -> int:
        """Number of runs for the ideas."""
        return RUNS_PER_IDEA * len(self.ideas.wanted) + MORE_RUNS

    def is_time_left(self) -> bool:
        """Return whether a run that starts now would end in time."""
        if not self.config.minutes:
            return True
        ends_at = time.monotonic() - self.start_time + max(self.durations, default=0)
        return ends_at < 60 * self.config.minutes

    def plan(self) -> list[ScreenRun]:
        """Return the next runs: a row of the design for each."""
        columns, runs = self.ideas.wanted, self.record.runs
        before = np.array([[key in run.ideas for key in columns] for run in runs], bool)
        apart = self.record.pairs_apart()
        exclusive = [(columns.index(a), columns.index(b)) for a, b in apart if {a, b} <= {*columns}]
        num_rows = int(min(self.num_runs - len(runs), self.config.runs or self.default_runs))
        rows = extend_design(before.reshape(len(runs), len(columns)), num_rows, exclusive=exclusive)
        return [
            ScreenRun(len(runs) + index, [key for key, is_on in zip(columns, row, strict=True) if is_on])
            for index, row in enumerate(rows)
        ]

    def jobs_to_train(self) -> Iterator[Job]:
        """Yield the runs that are not finished, then new ones, each planned when it is asked for."""
        for run in self.record.runs:
            if not run.is_done:
                yield self.start(run)
        planned: list[ScreenRun] = []
        apart: list[tuple[str, str]] = []
        while len(self.record.runs) < self.num_runs and self.is_time_left():
            if self.ideas.find() or apart != self.record.pairs_apart() or not planned:
                planned, apart = self.plan(), self.record.pairs_apart()
            run = planned.pop(0)
            job = self.start(run)
            self.record.runs.append(run)
            self.save()
            yield job

    def start(self, run: ScreenRun) -> Job:
        """Return the job that trains a run."""
        arm = self.ideas.arm_of_run(run)
        job = arm.job(run.seed)
        run.name = job.run.path.name
        self.started[job] = run, arm, time.monotonic()
        return job

    # Running

    def run(self) -> None:
        """Train and score runs until there are enough, or the time is spent.

        Raises:
            SystemExit: a signal was received; what has finished is saved.
            RunError: a disk is full.
        """
        unscored: list[tuple[ScreenRun, Arm]] = []
        with ThreadPoolExecutor(1) as pool:
            scoring: list[Future[None]] = []
            try:
                for job in self.jobs.stream(self.jobs_to_train(), progress=self.print_progress):
                    run, arm, start_time = self.started.pop(job)
                    failure = self.jobs.failures.get(job)
                    if failure and failure.killed:  # no idea is to blame
                        print(f"{job.run.path}: {failure.message}; the same command trains it again", file=sys.stderr)
                    elif failure:
                        run.failure = failure.message or "ends with an error after its last step"
                    elif job.is_finished():
                        if job in self.jobs.outcomes:  # it was trained now
                            self.durations.append(time.monotonic() - start_time)
                        unscored.append((run, arm))
                        if len(unscored) >= SCORED_AT_ONCE or not arm.is_judged:
                            scoring.append(pool.submit(self.score, unscored))
                            unscored = []
                    self.num_ended += 1
                    self.save()
                    print(self.describe(run), file=sys.stderr)
            finally:
                scoring.append(pool.submit(self.score, unscored))
                if not all(future.done() for future in scoring):
                    print("scoring the last runs ...", file=sys.stderr)
                wait(scoring)
                self.save()
            for future in scoring:
                future.result()  # raises what scoring raised

    def score(self, runs: list[tuple[ScreenRun, Arm]]) -> None:
        """Set the losses of finished runs."""
        try:
            scores = judge.score(self.baseline, [(arm, Run(self.runs_folder / run.name)) for run, arm in runs])
            for (run, _), score in zip(runs, scores, strict=True):
                run.loss, run.failure = (None if score.problem else score.loss), score.problem
        except RunError as error:
            if len(runs) > 1:  # the others are not to blame
                for one in runs:
                    self.score([one])
            else:
                runs[0][0].failure = str(error)

    def describe(self, run: ScreenRun) -> str:
        """Return a line about a run that has ended."""
        ideas = ", ".join(self.record.ideas[key].text for key in run.ideas) or "the baseline"
        loss = Run(self.runs_folder / run.name).newest_metrics().get("val/loss")
        result = run.failure or ("stopped" if loss is None else f"val/loss {loss:.4f}")
        of = "" if math.isinf(self.num_runs) else f" / {self.num_runs}"
        return f"[run {self.num_ended}{of}] {result}; on: {ideas}{self.time_left()}"

    def time_left(self) -> str:
        """Return how long the screen still takes, as text."""
        if not self.durations:
            return ""
        seconds = (self.num_runs - self.num_ended) * statistics.fmean(self.durations) / self.jobs.max_running
        if self.config.minutes:
            seconds = min(seconds, 60 * self.config.minutes - (time.monotonic() - self.start_time))
        return f"; about {seconds / 60:.1f} minutes left"

    def print_progress(self) -> None:
        """Print a line about the runs that train, every PROGRESS_SECONDS."""
        if time.monotonic() - self.last_progress < PROGRESS_SECONDS:
            return
        self.last_progress = time.monotonic()
        steps = (
            f"run {run.seed} at step {job.run.newest_metrics()['step']}" for job, (run, _, _) in self.started.items()
        )
        print(f"training {', '.join(steps)}{self.time_left()}", file=sys.stderr)
