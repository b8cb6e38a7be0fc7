"""The runs of an experiment: trained, evaluated, and kept in EXPERIMENT/results.jsonl.

A run is a variant and a seed, and its name has both, so the same command resumes and another one uses what is there.
"""

import hmac
import json
import math
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open

from runtime.config.errors import ConfigError, RunError
from runtime.files import open_no_link, sha256
from runtime.json_objects import from_json, parse_object
from tools.experiment.change import ROOT, check_checkout
from tools.experiment.variant import Variant, delivered_file, describe_error, last_error, scale_steps
from tools.experiment.verdicts import Group
from tools.jobs.program import ask
from tools.jobs.runner import Job, JobRunner
from trainer.run.directory import LOCK_FILE, Run

# Settings that decide which sequences a run is trained and evaluated on, with those of `data`.
BATCH_SETTINGS = {"steps", "micro_batch_size", "seq_len", "evaluation.num_samples", "evaluation.micro_batch_size"}
BATCH_SETTINGS |= {"evaluation.every"}
BATCH_SETTINGS |= {"schedule.batch_warmup_from", "schedule.batch_warmup_steps"}
SEEDS_OF_RACES, SEEDS_OF_CONFIRMATIONS, EVERY_SEED = range(5000), range(5000, 2**63), range(2**63)
# An evaluation starts a process, and two for each code, which import torch. So several short runs wait for one. But the
# choice of the next run needs results, so a run does not wait if the start takes less than this share of its seconds.
EVALUATED_AT_ONCE, EVALUATION_START_SECONDS, EVALUATION_START_SHARE = 4, 5, 0.05
TIMING_SEED, TIMING_STEPS = 9000, (4, 0.2)  # of short runs that measure the seconds of a step, for --equal seconds
NOT_EVALUATED = "it cannot be evaluated"  # begins the problem that evaluator.py reports where the code of a run ends
RUNS_OF_BROKEN_BASELINE = 2  # that fail before a command gives up
MAX_KILLED = 3  # times that a run is started again after something else killed it
PROGRESS_SECONDS = 30
# Times the seconds of the baseline, after which a run fails; short ones may take longer on a busy machine.
MAX_SLOWDOWN, MIN_LIMIT, MIN_EVALUATION_LIMIT = 10.0, 60.0, 600.0

Planned = tuple[Variant, int]
"""A variant and a seed."""
Next = Planned | Literal["wait"] | None
"""The next run; "wait" for the results of others; None at the end."""


@dataclass(frozen=True)
class Result:
    """What is known of a run that has ended."""

    run: str
    loss: float | None = None
    """Of the test data, in nats per token."""
    excess_loss: float | None = None
    """Loss above the entropy of the data, where that is known."""
    failure: str = ""
    """Why it has no loss."""
    digest: str | None = None
    """Hash of its last weights and moments."""
    seconds: float | None = None
    """CPU seconds of its processes; on a GPU the time from start to end. None if another program trained some steps."""
    evaluation_seconds: float | None = None
    """CPU seconds of the processes of its model while it was evaluated."""
    elapsed: float | None = None
    """Seconds from start to end, if this program trained it in one session."""
    sessions: int = 1
    """How often its training was started."""
    parameters: int | None = None
    """Weights in its checkpoint."""
    forward_tokens: int | None = None
    """Tokens of its forwards that kept a graph, as variant_program.py counted them; None if it was resumed."""
    updates: int | None = None
    """Updates of its weights, counted in the same way."""
    is_stopped: bool = False
    """Whether it was stopped and is to be resumed: `seconds` and `sessions` are those so far."""

    @property
    def digest_of_variant(self) -> str:
        """Digest of its variant."""
        return self.run.rpartition("-")[0]

    @property
    def seed(self) -> int:
        """Its seed."""
        return int(self.run.rpartition("-")[2])

    @property
    def value(self) -> float:
        """The logarithm of the excess loss, or of the loss where the entropy is unknown."""
        return math.log(self.loss if self.excess_loss is None else self.excess_loss)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class EndedRun:
    """A run that waits for its evaluation, with what was read at its end, before other runs could change its files."""

    job: Job
    request: dict[str, Any]
    """For evaluator.py."""
    metrics: dict[str, Any]
    """The last that it logged."""
    work: dict[str, int]
    """Of `count_work`."""


class Runs:
    """Trains and evaluates the runs of an experiment.

    Args:
        folder: of the experiment.
        baseline: the variant whose code evaluates.
        jobs: trains several runs at once.
        test_seed: seed of the test data.
        metric: a metric that the variant's own code logs, to compare instead of the loss.
    """

    def __init__(self, folder: Path, baseline: Variant, jobs: JobRunner, test_seed: int, metric: str | None = None):
        self.folder, self.baseline, self.jobs = folder, baseline, jobs
        self.test_seed, self.metric = test_seed, metric
        self.key = read_key(folder)
        self.results = read_results(folder)
        self.pending: dict[str, Planned] = {}
        """Runs that are planned, in training or not evaluated yet, by name."""
        self.elapsed: dict[str, float] = {}
        """Seconds from start to end of the runs that this process trained in one session, by name."""
        self._resumed: set[str] = set()
        """Names of the runs whose last session began after the first step."""
        self._untimed: set[str] = set()
        """Names of the runs of which another process trained a part."""
        self._baseline_seconds = [one.elapsed for one in runs_of(self.results, baseline.digest, EVERY_SEED)]
        self._seconds_per_flop: list[float] = []
        """Of the same runs as `elapsed`."""
        self._started: dict[Job, float] = {}
        self._killed: dict[str, int] = {}
        self._last_progress = time.monotonic()

    # What is known

    def check_baseline(self, variant: Variant, seeds: range = SEEDS_OF_RACES) -> None:
        """Raise RunError if the first runs of a baseline failed, so that nothing can be compared with it."""
        results = runs_of(self.results, variant.digest, seeds)
        if len(results) >= RUNS_OF_BROKEN_BASELINE and all(result.failure for result in results):
            raise RunError(f"the baseline does not train: {results[0].failure}")

    def group(self, variant: Variant, seeds: range = SEEDS_OF_RACES) -> Group:
        """Return the results of a variant with seeds in a range, and how many of its runs are pending."""
        group = group_of(runs_of(self.results, variant.digest, seeds))
        pending = [seed for other, seed in self.pending.values() if other.digest == variant.digest]
        group.pending = sum(seed in seeds for seed in pending)
        return group

    def next_seed(self, variant: Variant) -> int:
        """Return the first seed that the variant has not been trained with."""
        seed = 0
        while (name := f"{variant.digest}-{seed}") in self.pending or self.is_known(name):
            seed += 1
        return seed

    def missing(self, planned: Iterable[Planned]) -> list[Planned]:
        """Return the planned runs that have no result yet; variants that train the same have their runs in common."""
        unique = {f"{variant.digest}-{seed}": (variant, seed) for variant, seed in planned}
        return [run for name, run in unique.items() if not self.is_known(name)]

    def is_known(self, name: str) -> bool:
        """Return whether a run has ended with a loss or a failure."""
        return name in self.results and not self.results[name].is_stopped

    def is_time_spent(self, variant: Variant | None = None) -> bool:
        """Return whether a run would end later than the time of the command.

        It is judged by the longest one so far, or, if its variant is given, by its FLOPs.
        """
        seconds = max(self.elapsed.values(), default=0.0)
        if variant:
            of_baseline = (self._typical_seconds() or 0.0) / self.baseline.flops
            seconds = variant.flops * max(self._seconds_per_flop, default=of_baseline)
        return time.monotonic() + seconds > self.jobs.end_time

    # Equal costs

    def equalize(self, variant: Variant, equal: str) -> Variant:
        """Return the variant with as many steps as cost what the baseline costs, in `flops` or `seconds`.

        Raises:
            RunError: a run that would measure its seconds fails.
        """
        if equal == "flops":
            return scale_steps(variant, self.baseline.flops / variant.flops)
        if equal == "seconds":
            seconds = [self._seconds_a_step(one) * one.steps for one in (self.baseline, variant)]
            return scale_steps(variant, seconds[0] / seconds[1])
        return variant

    def _seconds_a_step(self, variant: Variant) -> float:
        """Return the seconds of a step, by one run of few steps and one of more: CPU seconds, on a GPU the time.

        They are trained once, so that the steps of a variant stay the same, and while nothing else trains.
        """
        fewer, more = pairs = list(zip(timing_variants(variant), timing_variants(self.baseline), strict=True))
        seconds = [self._time(one, of_baseline) for one, of_baseline in pairs]
        return max(1e-6, (seconds[1] - seconds[0]) / (more[0].steps - fewer[0].steps))

    def _time(self, variant: Variant, baseline: Variant) -> float:
        """Return the seconds of one run, which is limited by the seconds of the baseline's.

        Raises:
            RunError: it fails, or takes much longer than the baseline's.
        """
        job = replace(variant.job(self.folder, TIMING_SEED), restart=True)
        name = job.run.path.name
        known = self.results.get(f"{baseline.digest}-{TIMING_SEED}")
        limit = (known.elapsed or known.seconds) if known else None
        self.jobs.overdue = lambda job, seconds: describe_overdue(seconds, limit, variant.flops / baseline.flops)
        while not self.is_known(name):
            # The seconds of a session that resumes, or of another process, would be those of a part of the steps.
            is_from_start = not job.run.is_locked()
            if is_from_start:
                remove_run(job.run)
                self.jobs.seconds.pop(job, None)
            start_time = time.monotonic()
            self.jobs.train([job])
            if is_from_start:
                self._keep([replace(self._spent(job), elapsed=time.monotonic() - start_time)])
        return self.results[name].seconds or 0.0

    # Training

    def train_in_order(
        self, planned: Iterable[Planned], may_start: Callable[[Variant], bool] = lambda variant: True
    ) -> None:
        """Train the planned runs that have no result yet, until one may not start; raise the errors of `train`."""
        todo = self.missing(planned)
        self.train(lambda: todo.pop(0) if todo and may_start(todo[0][0]) else None)

    def train(self, next_run: Callable[[], Next]) -> None:
        """Train and evaluate the runs that `next_run` returns, which is called whenever there is room for one.

        Raises:
            SystemExit: a signal was received; what has finished is kept.
            RunError: a disk is full.
        """
        self.jobs.overdue = self._overdue  # one runner may train the runs of several experiments in turn
        with ThreadPoolExecutor(1) as pool:
            ended: list[EndedRun] = []
            evaluation: Future[list[Result]] | None = None

            def jobs() -> Iterator[Job | None]:
                nonlocal evaluation, ended
                while True:
                    if evaluation and evaluation.done():
                        self._keep(evaluation.result())
                        evaluation = None
                    # The choice of the next run needs results, so training does not run ahead of the evaluation.
                    is_behind = evaluation is not None and len(ended) >= EVALUATED_AT_ONCE
                    planned = "wait" if is_behind else next_run()
                    must_wait = planned is None or planned == "wait"
                    if ended and not evaluation and (len(ended) >= self._num_evaluated_at_once() or must_wait):
                        evaluation, ended = pool.submit(self._evaluate, ended), []
                    if must_wait:
                        if planned is None and not self.pending:
                            return
                        yield None
                    else:
                        yield self._start(planned)  # pyright: ignore[reportArgumentType]

            try:
                for job in self.jobs.stream(jobs(), progress=self._print_progress):
                    if self._has_ended(job):
                        try:
                            check_files(job.run)
                            metrics, work = job.run.newest_metrics(), count_work(job.run)
                            ended.append(EndedRun(job, self.request(job), metrics, work))
                        except Exception as error:  # whatever the code of a run has left there
                            self._keep([self._spent(job, failure=f"its files cannot be read: {describe_error(error)}")])
            finally:
                if (evaluation or ended) and not self.jobs.signal:
                    print("evaluating the last runs ...", file=sys.stderr)
                self._keep([*(evaluation.result() if evaluation else []), *self._evaluate(ended)])
                for job in self._started:
                    if self.jobs.outcomes.get(job) == "stopped" and not self.is_known(job.run.path.name):
                        self._keep([self._spent(job, is_stopped=True)])
                self.pending.clear()

    def _num_evaluated_at_once(self) -> int:
        """Return how many runs wait for one evaluation: four short ones, or a single one of minutes."""
        seconds = sum(self.elapsed.values())
        if not seconds:  # no run has ended yet, or the clock has not moved meanwhile
            return EVALUATED_AT_ONCE
        tolerated_seconds = EVALUATION_START_SHARE * seconds / len(self.elapsed)
        return min(EVALUATED_AT_ONCE, math.ceil(EVALUATION_START_SECONDS / tolerated_seconds))

    def _start(self, planned: Planned) -> Job:
        variant, seed = planned
        for code in {variant.code, self.baseline.code}:
            check_checkout(code)
        job = variant.job(self.folder, seed)
        is_lost = job.is_finished() and not job.run.checkpoints.exists()
        if (is_lost or not is_recorded(job, variant)) and not job.run.is_locked():  # train it from the start
            shutil.rmtree(job.run.path, ignore_errors=True)
            for file in delivered_files(job.run):
                file.unlink()
        self._note_earlier_sessions(job)
        self.pending[job.run.path.name] = planned
        self._started[job] = time.monotonic()
        return job

    def _note_earlier_sessions(self, job: Job) -> None:
        """Note whether a run does not begin at its first step: then the time of this session is not that of the run."""
        name, status = job.run.path.name, job.run.status()
        self._resumed.discard(name)
        if job.run.is_locked() or (status and status.step):
            self._resumed.add(name)
            if name not in self.results and job not in self.jobs.starts:  # a killed command has recorded nothing
                self._untimed.add(name)

    def _has_ended(self, job: Job) -> bool:
        """Note how a run ended; return whether it can be evaluated."""
        name = job.run.path.name
        outcome = self.jobs.outcomes.get(job)  # None: another process has trained it
        failure = self.jobs.failures[job] if outcome == "failed" else None  # not that of an earlier start
        if outcome == "locked":
            del self.pending[name]
            return False
        if failure and not (failure.killed and job.is_finished()):  # one that is killed after its last step counts
            message, was_killed = failure.message or "ends with an error after its last step", failure.killed
        elif outcome == "stopped":
            message, was_killed = "stopped by a signal from elsewhere", True
        elif not job.is_finished():
            message, was_killed = "ends before its last step", False
        elif not is_recorded(job, self.pending[name][0]):
            message, was_killed = "ended without a record of its training data", True
        else:
            if outcome and name not in self._resumed:
                self.elapsed[name] = time.monotonic() - self._started[job]
                self._seconds_per_flop.append(self.elapsed[name] / self.pending[name][0].flops)
                if self.pending[name][0].digest == self.baseline.digest:
                    self._baseline_seconds.append(self.elapsed[name])
            return True
        if was_killed:
            self._killed[name] = self._killed.get(name, 0) + 1
            print(f"{job.run.path}: {message}", file=sys.stderr)
            if self._killed[name] < MAX_KILLED:
                del self.pending[name]  # it is planned again
                return False
        self._keep([self._spent(job, failure=message)])
        return False

    def _overdue(self, job: Job, seconds: float) -> str:
        """Return why a run has failed that has trained for so many seconds; "" if it may continue."""
        variant, _ = self.pending.get(job.run.path.name, (self.baseline, 0))
        return describe_overdue(seconds, self._typical_seconds(), variant.flops / self.baseline.flops)

    def _typical_seconds(self) -> float | None:
        """Return the seconds from start to end of a run of the baseline; None before the first one."""
        known = [seconds for seconds in self._baseline_seconds if seconds]
        return sum(known) / len(known) if known else None

    def _spent(self, job: Job, **others: Any) -> Result:
        """Return a result with what the training of a run took, in this process and in earlier ones."""
        name = job.run.path.name
        before = self.results.get(name)
        seconds, sessions = self.jobs.seconds.get(job), self.jobs.starts.get(job, 0)
        if before and before.is_stopped:
            sessions += before.sessions
            seconds = before.seconds if seconds is None or before.seconds is None else before.seconds + seconds
        if name in self._untimed:
            seconds = None
        return Result(name, seconds=seconds, sessions=max(1, sessions), elapsed=self.elapsed.get(name), **others)

    def _keep(self, results: Iterable[Result]) -> None:
        """Add results to the file, where a later row of a run replaces an earlier one, and remove checkpoints."""
        for result in results:
            with open(self.folder / "results.jsonl", "ab+", opener=open_no_link) as file:
                end = file.tell()
                file.seek(max(0, end - 1))
                is_torn = file.read() not in (b"", b"\n")  # a killed process may leave a part of a line
                row = asdict(result)
                row["signature"] = signature(row, self.key)
                file.write(b"\n" * is_torn + json.dumps(row).encode() + b"\n")
            self.results[result.run] = result
            if not result.is_stopped:
                shutil.rmtree(self.folder / "runs" / result.run / "checkpoints", ignore_errors=True)
            if planned := self.pending.pop(result.run, None):
                ended = result.failure or (f"loss {result.loss:.4f}" if result.loss is not None else "stopped")
                print(f"[run {len(self.results)}] {self.label(*planned)}: {ended}", file=sys.stderr)

    def label(self, variant: Variant, seed: int) -> str:
        """Name a run for a reader: what it changes of the baseline, and its seed."""
        of_all_runs = self.baseline.given
        changed = {name: value for name, value in variant.given.items() if of_all_runs.get(name, "") != value}
        changes = [f"--{name} {format_value(value)}" for name, value in changed.items()]
        if variant.changes_code:
            changes.insert(0, variant.code_name)
        return f"{' '.join(changes) or 'baseline'}, seed {seed}"

    def _print_progress(self) -> None:
        """Print a line about the runs that train, every PROGRESS_SECONDS."""
        if time.monotonic() - self._last_progress < PROGRESS_SECONDS:
            return
        self._last_progress = time.monotonic()
        pending = [job for job in self._started if job.run.path.name in self.pending]
        parts, num_finished = [], sum(job.is_finished() for job in pending)
        for job in pending:
            if not job.is_finished():
                variant, seed = self.pending[job.run.path.name]
                step = f"step {newest_step(job.run)} / {job.steps}"
                held = f", another process holds {job.run.path / LOCK_FILE}" if job in self.jobs.waiting else ""
                parts.append(f"{self.label(variant, seed)}: {step}{held}")
        parts += [f"{num_finished} to evaluate"] if num_finished else []
        if parts:
            print(f"runs: {'; '.join(parts)}", file=sys.stderr)

    # Evaluation

    def _evaluate(self, ended: list[EndedRun]) -> list[Result]:
        """Evaluate runs; after a stop signal the same command evaluates them later.

        Raises:
            RunError: a run of the baseline cannot be evaluated, so something else than an idea is wrong.
        """
        if not ended:
            return []
        ended = sorted(ended, key=lambda run: run.request["code"])  # each code is imported once
        requests = [run.request for run in ended]
        for code in {self.baseline.code, *(Path(request["code"]) for request in requests)}:
            check_checkout(code)
        answers = run_evaluator(self.baseline.code, requests, lambda: bool(self.jobs.signal), self._evaluation_limit)
        results = []
        for run, answer in zip_longest(ended, answers):
            if answer is None:
                results.append(self._spent(run.job, is_stopped=True))
                continue
            is_of_baseline = run.job.run.path.name.startswith(f"{self.baseline.digest}-")
            if is_of_baseline and answer["problem"].startswith(NOT_EVALUATED):
                raise RunError(f"the baseline {answer['problem'].removeprefix('it ')}")
            digest = run.metrics.get("state/digest")
            facts: dict[str, Any] = {"digest": digest if isinstance(digest, str) else None}
            loss, excess = answer["loss"], answer["excess_loss"]
            if self.metric and not answer["problem"]:
                loss, excess = run.metrics.get(self.metric), None
            problem = answer["problem"] or problem_of(loss, excess, self.metric)
            facts |= run.work | {"evaluation_seconds": answer.get("seconds")}
            facts |= {"failure": problem} if problem else {"loss": loss, "excess_loss": excess}
            results.append(self._spent(run.job, **facts))
        return results

    def _evaluation_limit(self) -> float:
        """Return the seconds that the evaluation of a run may take."""
        return max(MIN_EVALUATION_LIMIT, MAX_SLOWDOWN * (self._typical_seconds() or math.inf))

    def request(self, job: Job) -> dict[str, Any]:
        """Return what the evaluator must know of a run that has just ended, before others can change its checkpoint.

        Nothing of it was written by the code of the run.
        """
        variant, seed = self.pending[job.run.path.name]
        baseline = self.baseline.settings
        settings = {
            name: value
            for name, value in variant.settings.items()
            if name in baseline and value is not None and (name in BATCH_SETTINGS or name.startswith("data."))
        }
        settings |= {"seed": seed, "global_batch_size": variant.global_batch_size, "data.hash": None}
        manifests = {str(file): sha256(file) for file in sorted(job.run.checkpoints.glob("step-*/manifest.json"))}
        return {
            "code": str(variant.code),
            "hidden": [str(hidden) for hidden in variant.hidden_folders(self.folder)],
            "run": str(job.run.path),
            "config": str(self.baseline.config_file(self.folder)),
            "settings": settings,
            "test_seed": self.test_seed,
            "manifests": manifests,
            "delivered": [str(file) for file in delivered_files(job.run)] if variant.changes_code else [],
            "sessions": self._spent(job).sessions,
            "processes": variant.launch.processes or 1,
        }


def run_evaluator(
    code: Path,
    requests: list[dict[str, Any]],
    is_stopped: Callable[[], bool] = lambda: False,
    max_silence: Callable[[], float] = lambda: math.inf,
) -> list[dict[str, Any]]:
    """Return the answers of tools/experiment/evaluator.py, with the code of the baseline; fewer after a stop signal.

    If it ends, or says nothing for too long, the run that it was evaluating fails.
    """
    command = [sys.executable, "-m", "tools.experiment.evaluator", str(code)]
    answers = ask(command, list(map(json.dumps, requests)), is_stopped, max_silence=max_silence, folder=ROOT)
    return [
        parse_object(answer)
        if isinstance(answer, str)
        else {"loss": None, "excess_loss": None, "problem": f"{NOT_EVALUATED}: {last_error(answer, code)}"}
        for answer in answers
    ]


def timing_variants(variant: Variant) -> list[Variant]:
    """Return the variant with few steps, and with somewhat more."""
    numbers = TIMING_STEPS[0], TIMING_STEPS[0] + max(8, round(TIMING_STEPS[1] * variant.steps))
    shorter = [(number, scale_steps(variant, number / variant.steps)) for number in numbers]
    return [one.changed({"steps": number, "evaluation.num_samples": 2}) for number, one in shorter]


def describe_overdue(seconds: float, seconds_of_baseline: float | None, flops: float) -> str:
    """Return why a run has failed that has trained for so many seconds; "" if it may continue.

    Args:
        seconds: of the run.
        seconds_of_baseline: from start to end; None before its first run has ended.
        flops: of the run, relative to the baseline.
    """
    factor = MAX_SLOWDOWN * max(1.0, flops)
    if seconds <= max(MIN_LIMIT, factor * (seconds_of_baseline or math.inf)):
        return ""
    times = "" if factor == MAX_SLOWDOWN else f", {factor:.0f} for its FLOPs"
    return (
        f"took {seconds:.0f} seconds and had not ended, where the baseline takes {seconds_of_baseline:.0f} "
        f"(the limit is {MAX_SLOWDOWN:.0f} times those{times})"
    )


def remove_run(run: Run) -> None:
    """Remove what earlier sessions of a run have left; raise RunError if that is impossible."""
    try:
        shutil.rmtree(run.path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(f"{run.path} cannot be removed: {error.strerror}") from None


def problem_of(loss: float | None, excess_loss: float | None, metric: str | None) -> str:
    """Return why a loss cannot be compared; "" if it can."""
    what = metric or "its loss"
    if not isinstance(loss, int | float):
        return f"{what} is not logged"
    if not math.isfinite(loss):
        return f"{what} is {loss}"
    if excess_loss is not None and excess_loss <= 0:
        return f"its loss is below the entropy of the data, by {-excess_loss:.4g} nats/token"
    return f"{what} is {loss:g}, and only positive values are compared" if loss <= 0 else ""


def format_value(value: Any) -> str:
    """Return the value of a setting as on a command line."""
    return f"[{','.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)


def delivered_files(run: Run) -> list[Path]:
    """Return the records of what was delivered to the processes of a run."""
    file = delivered_file(run)
    return sorted(file.parent.glob(f"{file.name}.*"))


def newest_step(run: Run) -> int | str:
    """Return the step of the newest metrics of a run that trains; "?" if its code has made them unreadable."""
    try:
        return run.newest_metrics()["step"]
    except ConfigError:
        return "?"


def check_files(run: Run) -> None:
    """Raise RunError if the code of a run has left something in its folder that is neither a file nor a folder.

    To read a pipe would block, and a link may lead out of the folder.
    """
    for path in (*run.path.iterdir(), *run.checkpoints.rglob("*")):
        if not stat.S_ISREG(mode := path.lstat().st_mode) and not stat.S_ISDIR(mode):
            raise RunError(f"{path.relative_to(run.path)} is no regular file")


def count_work(run: Run) -> dict[str, int]:
    """Return the parameters in the newest checkpoint of a run, its forward tokens and updates; without unknown ones."""
    counts: dict[str, int] = {}
    for file in run.path.glob("counts.*"):
        sessions = [parse_object(line) for line in file.read_text().splitlines()]
        if len(sessions) == 1:  # otherwise one may have been killed, which counts nothing
            counts["forward_tokens"] = counts.get("forward_tokens", 0) + int(sessions[0]["tokens"])
            counts["updates"] = max(counts.get("updates", 0), int(sessions[0]["updates"]))
    checkpoints = sorted(run.checkpoints.glob("step-*"))
    for file in checkpoints[-1].glob("*.safetensors") if checkpoints else ():
        with safe_open(file, "np") as tensors:  # which reads the header alone
            names = [name for name in tensors.keys() if name.startswith("model.")]  # noqa: SIM118 - it is no dict
            sizes = [math.prod(tensors.get_slice(name).get_shape()) for name in names]
        counts["parameters"] = counts.get("parameters", 0) + sum(sizes)
    return counts


def is_recorded(job: Job, variant: Variant) -> bool:
    """Return whether the training data of a run can be compared; those of the baseline's code need not be.

    Each session writes its record after its status. One that was killed writes none, so its record is older or absent.
    """
    record, status = Path(f"{delivered_file(job.run)}.0"), job.status_stamp()
    is_newest = status is not None and record.exists() and record.stat().st_mtime_ns >= status[1]
    return is_newest or not variant.changes_code


def runs_of(results: Mapping[str, Result], digest: str, seeds: range = SEEDS_OF_RACES) -> list[Result]:
    """Return the runs of the variant with this digest that have ended, by seed; by default those of races."""
    runs = [run for run in results.values() if run.digest_of_variant == digest and run.seed in seeds]
    return sorted((run for run in runs if not run.is_stopped), key=attrgetter("seed"))


def group_of(runs: Iterable[Result]) -> Group:
    """Return the values of runs that have ended."""
    runs = list(runs)
    return Group([run.value for run in runs if not run.failure], sum(bool(run.failure) for run in runs))


def read_experiment(folder: Path) -> dict[str, Any]:
    """Return what an experiment has in common; {} if it cannot be read."""
    try:
        return parse_object((folder / "experiment.json").read_bytes())
    except (OSError, ValueError):
        return {}


def read_key(folder: Path) -> str:
    """Return the key by which the runner signs the rows of an experiment; "" if it was begun without one."""
    return read_experiment(folder).get("key", "")


def signature(row: Mapping[str, Any], key: str) -> str:
    """Return a keyed hash of a row, without its signature."""
    content = json.dumps({name: value for name, value in row.items() if name != "signature"}, sort_keys=True)
    return hmac.digest(key.encode(), content.encode(), "sha256").hex()[:32]


def read_results(folder: Path) -> dict[str, Result]:
    """Read results.jsonl, by the name of the run; a line that is damaged or that the runner did not sign is skipped."""
    results, key = {}, read_key(folder)
    try:
        lines = (folder / "results.jsonl").read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_object(line)
            if key and not hmac.compare_digest(str(row.get("signature")), signature(row, key)):
                raise ValueError("tools.experiment did not write it")
            result = from_json(row, Result)
            if not (result.failure or result.is_stopped or result.seed == TIMING_SEED):
                _ = result.value  # which must exist
        except (ValueError, TypeError) as error:
            print(f"{folder / 'results.jsonl'}, line {number} is skipped: {error}", file=sys.stderr)
        else:
            results[result.run] = result
    return results
