"""A run as it recorded itself on disk, and retraining of a part of it.

Steps are retrained from a checkpoint of the recorded run, in one run directory per session in a temporary folder.
"""

import contextlib
import math
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import train
from checkpoint.identity import SUMMATION_ORDER, compare_facts, compare_summation_order, describe_code
from checkpoint.manifest import InvalidCheckpoint, Manifest, read_manifest, step_directory, validate
from checkpoint.provenance import provenance
from config.errors import RunError
from config.resolve import replace_settings
from config.schema import TrainConfig
from distributed.collectives import broadcast_from_main
from distributed.cpu import prepare_exact
from distributed.launch import env_flag, uses_cpu
from distributed.nested import nested_training
from distributed.world import is_main_process, num_processes
from run.reader import RunReader, Session, surviving_sessions
from run.stored_settings import config_of
from training.results import NonFiniteError
from training.schedule import should_compare_replicas, should_evaluate, should_log, should_save

# Settings that a resume may change and that affect what a step computes or logs: each step is retrained with the values
# of its session.
SESSION_SETTINGS = ("steps", "schedule", "evaluation", "on_nonfinite", "max_skipped_in_a_row")
SESSION_SETTINGS += ("compile", "activation_checkpointing", "chunked_loss")
MISSING = "missing"
RELATIVE_TOLERANCE = 1e-3  # for metrics retrained on another processor or number of processes


class RecordedRun:
    """Records of a run: settings, sessions, metrics, generations and checkpoints.

    Attributes:
        sessions: Rows of sessions.jsonl, oldest first.
        rows: Rows of metrics.jsonl by step.
        generations: Rows of generations.jsonl by step.
        manifests: Manifests of the checkpoints, newest first.
        branch_point: For a branch, its initial checkpoint {path: manifest}; empty if that no longer exists.
        initial_step: Number of steps that a branch shares with its parent; 0 for other runs.
        other_code: A message that names the code that trained the run; "" if it was this code.
        unlogged: Metrics that retraining logs, but the other code that trained the run did not.
    """

    def __init__(self, path: Path):
        reader = RunReader(path)
        self.path, self.settings, self.config = path, reader.settings, config_of(reader.settings)
        self.manifests, self.sessions, logged = reader.manifests(), reader.sessions(), reader.metrics()
        self.logged_steps, self.rows = [row["step"] for row in logged], {row["step"]: row for row in logged}
        self.logged_names, self.unlogged = {name for row in logged for name in row}, set()
        self.generations = group_by_step(reader.generations())
        self.branch_point: dict[Path, Manifest] = {}
        self.initial_step = 0
        if self.config.branch_from is not None:
            with contextlib.suppress(InvalidCheckpoint):
                self.branch_point = {Path(self.config.branch_from): read_manifest(Path(self.config.branch_from))}
            steps = [start.step for start in (*self.branch_point.values(), *self.sessions)]
            self.initial_step = steps[0] if steps else 0
        self.other_code = self._describe_other_code()
        if self.config.exact:
            prepare_exact()  # before anything is computed

    def session_at(self, step: int) -> Session:
        """Return the session that computed `step`; if its row is lost, one made from the next manifest."""
        for session in reversed(self.sessions):
            if session.step < step:
                return session
        later = [manifest for manifest in self.manifests.values() if manifest.step >= step]
        if not later:
            return Session(self.initial_step)
        manifest = min(later, key=lambda manifest: manifest.step)
        facts = {name: getattr(manifest, name) for name in ("config", "mixed_precision", *SUMMATION_ORDER)}
        return Session(self.initial_step, **facts)

    def config_at(self, step: int) -> TrainConfig:
        """Return the settings that `step` was trained with."""
        recorded = self.session_at(step).config
        return config_of(recorded) if recorded else self.config

    def session_ends(self, begin: int, end: int) -> list[int]:
        """Return the last step of each session that trained steps begin + 1 to `end`."""
        return [*sorted({session.step for session in self.sessions if begin < session.step < end}), end]

    def missing_metrics(self, step: int, names: Iterable[str]) -> list[str]:
        """List which of `names`, the metrics of retrained `step`, are missing from the run's log.

        Retraining logs every step, the run only those that its settings select. Metrics that other code never logged
        are added to `unlogged` instead.
        """
        config = self.config_at(step)
        ignored = ["step", "perf/"]
        if not should_log(config, step):
            ignored += ["train/", "layers/"]
        if not config.tracking.block_stats:
            ignored.append("layers/")
        if not logs_digest(config, step):
            ignored.append("state/")
        logged = self.rows.get(step, {})
        missing = {name for name in names if not name.startswith(tuple(ignored)) and name not in logged}
        if self.other_code:
            self.unlogged |= missing - self.logged_names
            missing &= self.logged_names
        return sorted(missing)

    def why_inexact(self, begin: int, end: int) -> str:
        """Explain why retraining steps begin + 1 to `end` here may differ by rounding; "" if it is bitwise equal."""
        here: dict[str, Any] = {"processes": num_processes(), "shards": 1}
        if env_flag(os.environ, "ACCELERATE_USE_FSDP"):
            here["shards"] = int(os.environ.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", num_processes()))
        if num_processes() > 1:  # a single process sets its number of threads to the recorded one
            here["threads"] = torch.get_num_threads()
        gpu_here, reasons = not uses_cpu(os.environ), []
        for session in map(self.session_at, self.session_ends(begin, end)):
            on_gpu = session.threads is None  # threads are recorded only on a CPU
            if session.processes is None:
                reasons.append("no record of how many processes trained it")
            elif on_gpu != gpu_here:
                reasons.append("a GPU in the run, a CPU here" if on_gpu else "a CPU in the run, a GPU here")
            elif on_gpu and not self.config.exact:
                reasons.append("sums on a GPU have no fixed order without exact: true")
            changed = compare_summation_order(vars(session), here, self.config.exact)
            reasons += [f"{getattr(session, name)} {name} in the run, {here[name]} here" for name in changed]
        return ", ".join(dict.fromkeys(reasons))

    def _describe_other_code(self) -> str:
        here = provenance()
        last = max([*self.logged_steps, *(manifest.step for manifest in self.manifests.values())], default=0)
        trained = map(vars, surviving_sessions(self.sessions, last))
        others = [session for session in trained if "code" in compare_facts(session, here)]
        names = " and ".join(dict.fromkeys(map(describe_code, others)))
        return f"Other code: {self.path} was trained by {names}, and this is {describe_code(here)}." if others else ""

    def checkpoint_before(self, step: int) -> Path | None:
        """Return the newest valid checkpoint older than `step`, or None."""
        for path, manifest in (self.manifests | self.branch_point).items():
            if manifest.step < step:
                with contextlib.suppress(InvalidCheckpoint):
                    validate(path)
                    return path
        return None

    def retrain(
        self, checkpoint: Path | None, until: int, folder: Path, changes: dict[str, Any] | None = None
    ) -> "Retrained":
        """Train from a checkpoint, or from initial weights, through step `until`.

        Each session has a run directory in `folder`, so that training stops and resumes at the same steps as the run
        did. `changes` overrides settings, as `section.name`.

        Raises:
            Preempted: A stop signal was received.
        """
        rows, generations, failure = {}, {}, None
        for end in self.session_ends(read_manifest(checkpoint).step if checkpoint else 0, until):
            part = self._retrain_session(checkpoint, end, folder, changes or {})
            checkpoint, rows, generations = part.checkpoint, rows | part.rows, generations | part.generations
            if failure := part.failure:
                break
        assert checkpoint is not None
        return Retrained(checkpoint, rows, generations, failure)

    def _retrain_session(self, checkpoint: Path | None, end: int, folder: Path, changes: dict) -> "Retrained":
        session, session_config = self.session_at(end), self.config_at(end)
        settings = {name: getattr(session_config, name) for name in (*SESSION_SETTINGS, "tracking")}
        settings |= {"out_dir": str(folder), "name": f"until-{end}", "resume": "auto", "stop_after": end}
        settings |= {"tracking.tracker": "wandb", "tracking.wandb": "disabled", "tracking.log_every": 1}
        settings |= {"check_replicas_every": 0, "checkpoint.every": 10**9, "checkpoint.keep_every": 0}
        if checkpoint is not None:
            settings |= {"branch_from": str(checkpoint.resolve()), "init_from": None}
        config = replace_settings(self.config, settings | changes)
        os.environ["ACCELERATE_MIXED_PRECISION"] = session.mixed_precision or "no"
        if session.threads and num_processes() == 1:
            os.environ["OMP_NUM_THREADS"] = f"{session.threads:02}"  # Accelerate would replace a plain 1
            torch.set_num_threads(session.threads)
        failure = None
        with nested_training():
            try:
                train.main(config)
            except NonFiniteError as error:
                failure = RunError(error.cause)  # not its remedy, which names the temporary folder
            except RunError as error:
                failure = error
        path = folder / f"until-{end}"
        reader = RunReader(path)
        recorded = (reader.metrics(), group_by_step(reader.generations())) if is_main_process() else None
        rows, generations = broadcast_from_main(recorded)
        rows = {row["step"]: row for row in rows}
        if failure is None and end not in rows:
            raise RunError(f"retraining stopped before step {end}")
        return Retrained(step_directory(path / "checkpoints", end), rows, generations, failure)


def group_by_step(rows: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Group rows of a JSON-lines file by their step."""
    grouped = defaultdict(list)
    for row in rows:
        grouped[row["step"]].append(row)
    return dict(grouped)


def logs_digest(config: TrainConfig, step: int) -> bool:
    """Return whether training logs `state/digest` after a step."""
    saves = should_save(config, step)
    compares = should_compare_replicas(config, step, saves)
    return should_log(config, step) or should_evaluate(config, step) or saves or compares


@dataclass
class Retrained:
    """The result of retraining a part of a run."""

    checkpoint: Path
    """The checkpoint after its last step."""
    rows: dict[int, dict[str, Any]]
    """Rows of metrics.jsonl by step; every step has one."""
    generations: dict[int, list[dict[str, Any]]]
    """Rows of generations.jsonl by step."""
    failure: RunError | None
    """The error that ended it before its last step."""

    def difference(self, run: RecordedRun, why_inexact: str) -> str:
        """Describe the first metric or text in which the run differs; "" if there is none.

        If `why_inexact` (RecordedRun.why_inexact) is not empty, numbers may differ by RELATIVE_TOLERANCE, and digests
        and sampled texts are not compared.
        """
        for step, retrained in self.rows.items():
            if missing := run.missing_metrics(step, retrained):
                return f"metrics.jsonl has no {missing[0]} at step {step}"
            for name, recorded in run.rows.get(step, {}).items():
                value = retrained.get(name, MISSING)
                if name.startswith("perf/") or recorded == value:
                    continue
                # Rounding can change a sampled token.
                if why_inexact and (name.startswith(("state/", "generation/")) or is_close(recorded, value)):
                    continue
                return f"step {step}: {name} is {recorded} in the run, and {value} when retrained"
            if not why_inexact and run.generations.get(step) != self.generations.get(step):
                return f"generations.jsonl differs from the texts that retraining generates at step {step}"
        return ""


def is_close(one: Any, other: Any) -> bool:
    """Return whether both are numbers that differ by at most RELATIVE_TOLERANCE."""
    if not {type(one), type(other)} <= {int, float}:
        return False
    try:
        return math.isclose(one, other, rel_tol=RELATIVE_TOLERANCE)
    except OverflowError:  # an integer beyond the range of a float
        return False


def describe_outcome(run: RecordedRun, retrained: Retrained, why_inexact: str) -> str:
    """Describe how retrained steps compare with the run's log."""
    num_digests = sum("state/digest" in run.rows.get(step, {}) for step in retrained.rows)
    if difference := retrained.difference(run, why_inexact):
        return f"NOT reproduced: {difference}" + (f" ({why_inexact})" if why_inexact else "")
    if why_inexact:
        return f"reproduced up to rounding ({why_inexact})"
    return f"reproduced bitwise ({num_digests} digest(s))" if num_digests else "the run logged nothing to compare with"


def print_on_main(text: str) -> None:
    """Print and flush on the main process only."""
    if is_main_process():
        print(text, flush=True)
