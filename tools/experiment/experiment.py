"""An experiment: train seeds of both arms until a sequential test decides whether the candidate is better."""

import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from checkpoint.identity import code_hash
from config.errors import ConfigError, RunError
from config.paths import expand_user_path
from data.files import temporary_folder
from distributed.cores import available_cores
from tools.experiment import log, settings, variants
from tools.experiment.arm import Arm, ArmFailed, changed_settings, check_trained_alike, last_frame
from tools.experiment.change import Change, checked_out, parse_change
from tools.experiment.compute_multiplier import BUDGETS, Estimate, estimate_compute_multiplier
from tools.experiment.config_files import copy_config_files
from tools.experiment.outliers import Futile, Identical, check_first_loss, check_losses, is_identical
from tools.experiment.result import Comparison, cost_facts, format_report, make_row
from tools.experiment.score import (
    BITS,
    EXCESS_LOSS,
    LOSS,
    check_metric,
    check_targets,
    choose_metric,
    score_arm,
    score_file,
)
from tools.experiment.sequential_test import (
    MIN_POWER,
    MIN_SEEDS,
    TOTAL_ALPHA,
    additional_seeds,
    conditional_power,
    decide,
    estimate_difference,
)
from tools.experiment.settings import ExperimentConfig, parse_sizes, print_error, refuse_options
from tools.jobs.launch import Launch
from tools.jobs.runner import Failed, Job, JobRunner, OutOfTime, Stopped

BUDGET_SEEDS = 2  # runs of the baseline on each of BUDGETS
LOSS_MARGIN, EXCESS_MARGIN = 0.003, 0.03  # default equivalence margins
SAME_LOSS = 1e-5  # relative tolerance; summing in another order changes a loss by less
MAX_LEAKED = 0.01  # fraction of validation rows among the training rows, beyond that of the baseline
THROUGHPUT_ROUNDS, THROUGHPUT_SECONDS = 3, 4.0
TUNING_FACTORS, TUNING_SEEDS = (0.25, 0.5, 1.0, 2.0, 4.0), 2


def main(config: ExperimentConfig) -> None:
    """Run an experiment, append it to the log and print it.

    With --json, one object is printed whatever happens; without a verdict it has a `message` and an `exit_code`.

    Raises:
        ConfigError: the change or the settings are wrong, or the arms are not comparable.
        RunError: the baseline cannot be trained, or the environment failed, for example by a full disk.
        SystemExit: with code 75 after a signal; rerun the same command to resume.
    """
    try:
        row = run_experiment(config)
    except BaseException as error:
        if config.print_json:
            exit_code = {ConfigError: 2, Stopped: 75, KeyboardInterrupt: 130}.get(type(error), 1)
            print_error(config.arguments[0], str(error) or type(error).__name__, exit_code)
        if isinstance(error, Stopped):
            print(error, file=sys.stderr)
            raise SystemExit(75) from None
        if isinstance(error, OSError):
            raise RunError(f"{error}; fix this, then rerun the same command to resume") from None
        raise
    print(json.dumps(row) if config.print_json else "\n".join(format_report(row)))


def run_experiment(config: ExperimentConfig) -> dict[str, Any]:
    """Run an experiment and append it to the log; return its row. Raise the errors of `main`, and Stopped."""
    lab = expand_user_path("lab", config.lab)
    row = Experiment(config, lab, JobRunner(config.jobs or (1 if config.launch else None))).run()
    log.append(lab, row)
    row["candidates_tried"] = log.count_candidates(lab, row["untuned_baseline"])
    return row


class Experiment:
    """A candidate arm against a baseline arm.

    Attributes:
        total_alpha: Two-sided type I error of all analyses together.
    """

    def __init__(self, config: ExperimentConfig, lab: Path, jobs: JobRunner):
        self.config, self.lab, self.jobs = config, lab, jobs
        self.text, *self.common = config.arguments
        if self.common and not self.common[0].startswith("-"):
            raise ConfigError(f"idea: {self.text!r} {self.common[0]!r} are two arguments; quote the idea as one")
        if not any(word.split("=")[0] == "--config" for word in self.common):
            self.common = ["--config", str(settings.DEFAULT_CONFIG), *self.common]
        self.start_time, self.cpu_seconds = time.monotonic(), cpu_seconds_of_children()
        self.jobs.deadline = self.start_time + 60 * (config.budget_minutes or math.inf)
        self.launch = Launch.parse(config.launch)
        if not (config.launch or jobs.gpus):  # the same for all runs: the number of threads changes bits
            inherited = os.environ.get("OMP_NUM_THREADS", "")
            jobs.threads = int(inherited) if inherited.isdigit() else max(1, available_cores() // jobs.max_running)
        self.max_seeds, self.baseline_seeds = max(config.max_seeds, MIN_SEEDS), config.baseline_seeds or 0
        self.total_alpha = TOTAL_ALPHA
        self.facts: dict[str, Any] = {"note": config.note} if config.note else {}
        """Facts of the experiment, for its row of the log."""

    def run(self, change: Change | None = None) -> dict[str, Any]:
        """Run the experiment and return its row for the log; raise the errors of `main`, and Stopped.

        Without a `change`, the first argument of the command line is tested.
        """
        sizes = parse_sizes(self.config.sizes)
        baseline_seeds, max_seeds = self.config.baseline_seeds, self.config.max_seeds
        if baseline_seeds and baseline_seeds <= max_seeds:
            raise ConfigError(
                f"baseline_seeds: {baseline_seeds} must be more than max_seeds, {max_seeds}; null for equal numbers"
            )
        change = change or parse_change(self.text, self.config.onto)
        refuse_options([*self.common, *change.settings])
        diff = change.save_diff(self.lab / "diffs")
        # Edits do not reach worktrees. Without worktrees, no run starts once the code has changed.
        self.jobs.code = None if change.commit else code_hash()
        self.facts |= {"idea": self.text, "settings": self.common, "base": change.base, "commit": change.commit}
        self.facts |= {"commits_behind": change.commits_behind, "diff": diff and str(diff)}
        self.facts |= {"data_changes": self.allowed_data_changes(change)}
        comparisons: dict[float, Comparison] = {}
        pairs: list[tuple[Arm, Arm]] = []
        message, verdict = "", "unknown"
        print(describe_load(self.jobs), file=sys.stderr)
        with checked_out(change) as (base_code, changed_code):
            baseline = self.resolve_baseline(base_code)
            self.facts["uncommitted"] = bool(change.commit) and not change.diff and self.is_edited(baseline)
            self.facts |= {name: baseline.name for name in ("untuned_baseline", "baseline")}
            self.facts["candidate"] = f"{self.text} (not resolved)"
            try:
                baseline, candidate = self.resolve_arms(baseline, changed_code, change)
                for size in sizes:
                    pairs.append(self.scale_both(baseline, candidate, size))
                    comparison = comparisons[size] = self.compare(*pairs[-1])
                    if self.config.speedup and comparison.verdict in ("better", "worse"):
                        comparison.multiplier = self.compute_multiplier(pairs[-1][0], comparison)
            except Identical as same:
                message, verdict = str(same), "identical"
            except Futile as futile:
                message, verdict = str(futile), "futile"
            except ArmFailed as failed:
                message, verdict = str(failed), "failed"
            except OutOfTime as error:
                message = str(error)
            except Failed as failed:
                # Without pairs the tuning failed. Once one size was compared, the baseline is known to train.
                if not comparisons:
                    reference = pairs[-1][0] if pairs else variants.with_tuning_seeds(baseline)
                    self.check_candidate_at_fault(failed, reference.job(0))
                message, verdict = describe_failure(failed), "failed"
            cost = self.cost(*pairs[0], change.num_lines) if comparisons else None
        return make_row(self.facts | self.spent(), comparisons, cost, message, verdict)

    def spent(self) -> dict[str, float]:
        """Return the seconds since the experiment began, and the CPU seconds of child processes that ended since."""
        seconds, cpu_seconds = time.monotonic() - self.start_time, cpu_seconds_of_children() - self.cpu_seconds
        return {"seconds": round(seconds, 1), "cpu_seconds": round(cpu_seconds, 1)}

    def is_edited(self, baseline: Arm) -> bool:
        """Return whether the working tree has other code or config files than the baseline; if so, warn."""
        words = copy_config_files(self.common, self.lab / "configs")  # a copy's path contains the hash of its content
        edited = code_hash() != baseline.code_hash or tuple(words) != baseline.words
        if edited:
            print("uncommitted changes of code or config files are in neither arm", file=sys.stderr)
        return edited

    def allowed_data_changes(self, change: Change) -> list[str]:
        """Return the files of the change that define what the losses mean.

        Raises:
            ConfigError: there are some, and `--allow_data_changes` is not given.
        """
        if change.data_files and not self.config.allow_data_changes:
            raise ConfigError(
                f"idea: {self.text!r} changes {', '.join(change.data_files)}, which define the data, the evaluation or "
                "the seeds, so losses may mean something else in the two arms; --allow_data_changes compares them "
                "nevertheless"
            )
        return change.data_files

    def resolve_arms(self, baseline: Arm, code: Path, change: Change) -> tuple[Arm, Arm]:
        """Return both arms, tuned if requested, after the checks that need no whole run.

        Raises:
            ConfigError: the arms are not comparable.
            ArmFailed: the candidate is broken.
            Identical: both arms train the same weights.
            Failed, OutOfTime: the tuning fails, or is stopped by the deadline.
        """
        untuned, candidate = baseline, self.resolve_candidate(baseline, code, change)
        self.facts |= {"candidate": candidate.name, "changed_settings": changed_settings(untuned, candidate)}
        check_targets(baseline, candidate)
        candidate = variants.use_separate_seeds_if_equal(candidate, baseline)
        is_a_a_test = candidate.first_seed != baseline.first_seed
        if not (self.config.launch or is_a_a_test or candidate.settings["branch_from"]):
            self.preview(baseline, candidate, change.has_code)
        if self.config.tune:
            self.train([variants.with_tuning_seeds(arm).job(0) for arm in (baseline, candidate)])  # finds a broken arm
            baseline, candidate = self.tune(baseline), self.tune(candidate)
            self.facts["tuned"] = [arm.settings[self.config.tune] for arm in (baseline, candidate)]
            candidate = variants.use_separate_seeds_if_equal(candidate, baseline)
        self.facts |= {"baseline": baseline.name, "candidate": candidate.name}
        self.facts["changed_settings"] = changed_settings(untuned, candidate)
        self.facts["candidate_settings"] = candidate.compared_settings
        return baseline, candidate

    def preview(self, baseline: Arm, candidate: Arm, has_code: bool) -> None:
        """Train a few steps of both arms and, if code changes, run the checks of verify.py that take seconds.

        A preview that fails decides nothing, because a setting that a fork added may need more steps.

        Raises:
            ArmFailed: the candidate trains on the validation set.
            Identical: both arms have the same weights and loss after these steps.
        """
        try:
            with ThreadPoolExecutor(2) as pool:
                reference, preview = pool.map(variants.preview_arm, (baseline, candidate), ("", "verify" * has_code))
        except RunError as error:
            print(f"nothing is checked before the first seed: {error}", file=sys.stderr)
            self.facts["verify"] = f"not run: {error}" if has_code else None
            return
        self.facts["verify"] = "; ".join(preview["broken"]) or "passed" if has_code else None
        baseline_leaked, leaked = (one["validation_rows"] / max(1, one["rows"]) for one in (reference, preview))
        if leaked > baseline_leaked + MAX_LEAKED:
            raise ArmFailed(
                f"it trains on the validation set: {preview['validation_rows']} of the {preview['rows']} rows of its "
                f"first {variants.PREVIEW_STEPS} steps are in it"
            )
        is_same = reference["digest"] is not None and reference["digest"] == preview["digest"]
        if is_same and math.isclose(reference["loss"], preview["loss"], rel_tol=SAME_LOSS) and self.config.stop_early:
            raise Identical(f"after {variants.PREVIEW_STEPS} steps with a schedule of the same shape")

    def train(self, wanted: Iterable[Job], until_failure: bool = True) -> None:
        """Train runs as JobRunner.train does.

        Score files of runs that were unfinished are deleted: the scorer reads only finished runs, so the arm's own
        training code must have written them.
        """
        unfinished = [run for run in wanted if not run.is_finished()]
        try:
            self.jobs.train(unfinished, until_failure)
        finally:
            for run in unfinished:
                score_file(run).unlink(missing_ok=True)

    def check_candidate_at_fault(self, failed: Failed, baseline: Job) -> None:
        """Raise RunError unless a failure is the candidate's: no signal ended the run, and the baseline trains."""
        if failed.killed:
            raise RunError(f"{failed.job.run.path}: {failed}; rerun the same command to resume")
        try:
            self.train([baseline])
        except OutOfTime:
            return
        except Failed as error:
            raise RunError(f"{error.job.run.path}: the baseline does not train: {error}") from None

    def resolve_baseline(self, code: Path) -> Arm:
        """Return the baseline arm.

        Raises:
            ConfigError: its settings are refused.
            RunError: its code crashes.
        """
        try:
            arm = Arm.resolve(code, self.launch, self.common, self.lab / "runs")
        except ArmFailed as failed:
            raise RunError(f"the baseline does not start: {failed}") from None
        if not arm.settings["evaluation.every"]:
            raise ConfigError("evaluation.every: 0 means no val/loss, which is compared; set it")
        return replace(arm, first_seed=self.config.first_seed)

    def resolve_candidate(self, baseline: Arm, code: Path, change: Change) -> Arm:
        """Return the candidate arm, matched in size to the baseline if requested.

        Raises:
            ConfigError: its settings are refused, or it has neither other code nor other settings.
            ArmFailed: its code crashes, or no width matches.
        """
        words = [*self.common, *change.settings]
        arm = self.match(Arm.resolve(code, self.launch, words, baseline.runs), baseline)
        if change.diff and arm.digest == baseline.digest:
            raise ConfigError(f"idea: {self.text!r} changes neither code that trains nor a setting")
        return replace(arm, first_seed=baseline.first_seed)

    def match(self, candidate: Arm, baseline: Arm) -> Arm:
        """Return the candidate with the feed-forward width of `--match`; raise ArmFailed if there is none."""
        if self.config.match is None:
            return candidate
        return variants.match_width(
            candidate, baseline, {"flops": "flops_per_token"}.get(self.config.match, self.config.match)
        )

    def scale_both(self, baseline: Arm, candidate: Arm, factor: float) -> tuple[Arm, Arm]:
        """Return both arms with `factor` times the parameters."""
        baseline, candidate = variants.scale_parameters(baseline, factor), variants.scale_parameters(candidate, factor)
        return baseline, candidate if factor == 1 else self.match(candidate, baseline)

    def wanted_runs(self, baseline: Arm, candidate: Arm, n: int) -> list[Job]:
        """Return the runs that are compared after n seeds; from MIN_SEEDS on, they include all `baseline_seeds`."""
        pairs = [arm.job(seed) for seed in range(n) for arm in (baseline, candidate)]
        return pairs + [baseline.job(seed) for seed in range(n, self.baseline_seeds if n >= MIN_SEEDS else 0)]

    def train_seeds(self, baseline: Arm, candidate: Arm, n: int) -> None:
        """Train the runs that are compared after n seeds, and runs of later seeds on cores that would be idle.

        Raises OutOfTime only if the former are not finished.
        """
        self.jobs.raise_if_stopped()
        needed = self.wanted_runs(baseline, candidate, n)
        later = (self.wanted_runs(baseline, candidate, more) for more in range(n + 1, self.max_seeds + 1))
        try:
            if num_unfinished(needed):
                ahead = takewhile(lambda runs: num_unfinished(runs) <= self.jobs.max_running, later)
                self.train([needed, *ahead][-1])
        except OutOfTime:
            if num_unfinished(needed):
                raise

    def compare(self, baseline: Arm, candidate: Arm) -> Comparison:
        """Train seeds of both arms until the sequential test decides.

        Raises:
            Identical: both arms train the same weights.
            Futile: the first run of the candidate is far worse than the baseline.
            Failed: a run has failed.
            ArmFailed, ConfigError: the arms are not comparable.
            OutOfTime: there is no result yet.
        """
        stop_early = self.config.stop_early and candidate.first_seed == baseline.first_seed  # not in an A/A test
        comparison = None
        try:
            self.train_seeds(baseline, candidate, 1)
            check_trained_alike(baseline, candidate)
            if is_identical(baseline, candidate):
                raise Identical("after all steps")
            natural = choose_metric(baseline, candidate)
            metric = check_metric(self.config.metric, baseline, candidate) if self.config.metric else natural
            all_seeds = max(self.baseline_seeds, self.max_seeds)
            if stop_early and not num_unfinished([baseline.job(seed) for seed in range(all_seeds)]):
                # An earlier experiment trained the whole baseline, so its noise is known.
                check_first_loss(baseline.losses(all_seeds, metric), candidate.losses(1, metric)[0], metric)
            entropy = score_arm(baseline)["entropy"] if metric == EXCESS_LOSS else None
            fraction = self.config.margin or (LOSS_MARGIN if metric in (LOSS, BITS) else EXCESS_MARGIN)
            for n in range(MIN_SEEDS, self.max_seeds + 1):
                self.train_seeds(baseline, candidate, n)
                losses = baseline.losses(max(n, self.baseline_seeds), metric), candidate.losses(n, metric)
                check_losses(*losses, candidate.losses(n, EXCESS_LOSS) if natural == EXCESS_LOSS else None)
                difference = estimate_difference(*losses, self.total_alpha)
                margin = fraction * statistics.fmean(losses[0])
                comparison = Comparison(decide(difference, margin), difference, *losses, entropy, fraction, metric)
                if comparison.verdict != "unknown":
                    return comparison
                comparison.more_seeds = additional_seeds(difference, margin)
                if stop_early and n < self.max_seeds and conditional_power(difference, self.max_seeds) < MIN_POWER:
                    comparison.verdict = "futile"
                    return comparison
        except OutOfTime:
            if comparison is None:
                self.facts["finished_runs"] = [
                    sum(arm.job(seed).is_finished() for seed in range(self.max_seeds)) for arm in (baseline, candidate)
                ]
                raise
        assert comparison is not None, "max_seeds >= MIN_SEEDS, so the loop ran"
        return comparison

    def compute_multiplier(self, baseline: Arm, comparison: Comparison) -> Estimate | None:
        """Train the baseline on shorter and longer budgets, and convert the difference into steps."""
        arms = {factor: variants.scale_steps(baseline, factor) for factor in BUDGETS}
        try:
            self.train([arm.job(seed) for arm in arms.values() for seed in range(BUDGET_SEEDS)])
        except (OutOfTime, Failed) as error:
            print(f"the compute multiplier is unknown: {error}", file=sys.stderr)
            return None
        for arm in arms.values():
            check_trained_alike(baseline, arm)
        points = [
            (factor, loss) for factor, arm in arms.items() for loss in arm.losses(BUDGET_SEEDS, comparison.metric)
        ]
        points += [(1.0, loss) for loss in comparison.baseline]
        return estimate_compute_multiplier(points, comparison.baseline, comparison.candidate)

    def cost(self, baseline: Arm, candidate: Arm, num_lines: int) -> dict[str, Any]:
        """Return the resources that both arms need, as `cost_facts`."""
        arms = baseline, candidate
        speeds: tuple[list[float], list[float]] = ([], [])
        try:
            if self.config.speedup:
                speeds = self.measure_throughput(arms)
        except (Failed, OutOfTime, RunError) as error:
            print(f"the relative throughput is unknown: {error}", file=sys.stderr)
        scores = [score_arm(arm) | {"tokens": arm.train_tokens} for arm in arms]
        memory_bytes = [arm.job(0).run.newest_metrics().get("perf/peak_memory_bytes", math.nan) for arm in arms]
        return cost_facts(scores, memory_bytes, speeds, num_lines)

    def measure_throughput(self, arms: tuple[Arm, Arm]) -> tuple[list[float], list[float]]:
        """Return tokens per second of both arms, measured in interleaved short runs that are deleted."""
        speeds: tuple[list[float], list[float]] = ([], [])
        for turn in range(THROUGHPUT_ROUNDS):
            with temporary_folder(self.lab, "speed-") as folder:
                for index in (0, 1) if turn % 2 else (1, 0):  # alternate which arm runs first
                    job = variants.short_arm(
                        arms[index], variants.steps_in(arms[index], THROUGHPUT_SECONDS), folder
                    ).job(0)
                    self.train([job])
                    speeds[index].append(job.run.tokens_per_second())
        return speeds

    def tune(self, arm: Arm) -> Arm:
        """Return the arm with the best of several values of a setting, by the mean over separate seeds.

        Raises:
            ConfigError: the setting is not a number, or 0.
            RunError: a run was killed.
        """
        setting = self.config.tune or ""
        value = arm.settings.get(setting)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value:
            raise ConfigError(f"tune: {setting!r} is {value!r}; name a setting with a number other than 0")
        values: list[float] = [value * factor for factor in TUNING_FACTORS]
        if isinstance(value, int):
            values = sorted({max(1, round(one)) for one in values})
        arms = [variants.with_tuning_seeds(arm.changed({setting: one})) for one in values]
        runs = {one.digest: [one.job(seed) for seed in range(TUNING_SEEDS)] for one in arms}
        self.train([run for several in runs.values() for run in several], until_failure=False)
        if killed := [failed for failed in self.jobs.failures.values() if failed.killed]:
            raise RunError(f"{killed[0].job.run.path}: {killed[0]}; rerun the same command to resume")
        # A value with which a run fails, such as a learning rate at which it diverges, cannot be the best.
        trained = [one for one in arms if all(run.is_finished() for run in runs[one.digest])]
        if not trained:
            raise ConfigError(f"tune: training fails with all of {len(values)} values of {setting} around {value:g}")
        best = min(trained, key=lambda one: statistics.fmean(one.losses(TUNING_SEEDS)))
        if best in (arms[0], arms[-1]):
            print(f"tune: the best {setting}, {best.settings[setting]:g}, is at an end of the range", file=sys.stderr)
        return replace(best, first_seed=arm.first_seed)


def describe_load(jobs: JobRunner) -> str:
    """Return how many runs share the machine, and a warning if other programs use it."""
    text, cores, load = f"at most {jobs.max_running} run(s) at once", available_cores(), os.getloadavg()[0]
    if jobs.threads:
        text += f", {jobs.threads} thread(s) each, on {cores} core(s)"
        if load > cores / 2:
            text += f"; the machine is busy (load {load:.1f})"
            text += f", where several threads can be much slower than one: --jobs {cores}" if jobs.threads > 1 else ""
    return text


def cpu_seconds_of_children() -> float:
    """Return the CPU time of the child processes that have ended, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def describe_failure(failed: Failed) -> str:
    """Return why a run failed, the innermost line of the repository in its traceback, and the path of its output."""
    job = failed.job
    code = next(Path(word).parent for word in job.command if Path(word).name == "train.py")
    frame = last_frame(job.output.read_text(errors="replace"), code) if job.output.exists() else ""
    return f"does not train: {failed}{frame}; log: {job.output}"


def num_unfinished(runs: list[Job]) -> int:
    """Return how many runs are not finished."""
    return sum(not run.is_finished() for run in runs)
