"""Trains parts of a run again and compares: what replay.py stands on, and its `--audit`.

Training goes on in a run of its own, in a folder that is thrown away, from a checkpoint of the run that is looked at.
"""

import contextlib
import math
import os
import random
from collections import ChainMap, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import train
from checkpoint.identity import compare_facts, compare_summation_order, describe_code, lasting_starts
from checkpoint.manifest import (
    MANIFEST,
    InvalidCheckpoint,
    Manifest,
    checkpoints_in,
    read_manifest,
    readable_checkpoints,
    step_directory,
    validate,
)
from checkpoint.provenance import provenance
from checkpoint.tokenizer_files import changed_files
from checkpoint.unshard import whole_tensors
from config.errors import ConfigError, RunError
from config.resolve import replace_settings
from config.schema import TrainConfig
from data.json_objects import typed
from distributed.cpu import prepare_exact
from distributed.launch import is_on, uses_cpu
from distributed.nested import broadcast_from_main, nested_training
from distributed.state_hash import digests
from distributed.world import is_main_process, num_processes
from run.metrics_log import read_rows
from run.resume import differences
from run.stored_settings import complete_settings, config_of, read_settings
from training.schedule import should_compare_replicas, should_evaluate, should_log, should_save

# What may change when a run goes on, and shows in what it logs: a step is trained again with what it was done with.
AS_THEN = ("steps", "schedule", "evaluation", "on_nonfinite", "max_skipped_in_a_row")
AS_THEN += ("compile", "activation_checkpointing", "chunked_loss")
LOGGED = ("train/loss", "train/grad_norm", "train/lr")
NOTHING = "nothing"  # where there is no number
ROUNDING = 1e-3  # relative; what other processors and numbers of processes make of the same step


@dataclass(frozen=True)
class StartFacts:
    """What a line of sessions.jsonl says of how the steps after it were computed; those of older versions say less."""

    processes: int | None = None
    shards: int | None = None
    threads: int | None = None
    mixed_precision: str | None = None
    config: dict[str, Any] | None = None


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of a run, none if it is not there.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return list(read_rows(file))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"run: {file} cannot be read: {error.strerror}") from None


def texts_of(file: Path) -> dict[int, list[dict[str, Any]]]:
    """The rows of a generations.jsonl, by their step."""
    texts = defaultdict(list)
    for row in rows_of(file):
        texts[row["step"]].append(row)
    return dict(texts)


class Run:
    """What a run left behind, and how to train a part of it again."""

    def __init__(self, path: Path):
        settings = read_settings(path / "config.yaml", remedy="")
        if settings is None:
            raise ConfigError(f"run: {str(path)!r} is not the directory of a run: it has no config.yaml")
        self.path, self.settings, self.config = path, settings, config_of(settings)
        self.manifests = readable_checkpoints(path / "checkpoints")
        logged = rows_of(path / "metrics.jsonl")
        self.logged_steps, self.rows = [row["step"] for row in logged], {row["step"]: row for row in logged}
        self.logged_names, self.never_logged = {name for row in logged for name in row}, set()
        self.texts, self.starts = texts_of(path / "generations.jsonl"), rows_of(path / "sessions.jsonl")
        try:
            for start in self.starts:
                typed(start, StartFacts, "start")
        except ValueError as error:
            raise ConfigError(f"run: {path / 'sessions.jsonl'} is damaged: {error}") from None
        self.origin: dict[Path, Manifest] = {}  # of a branch: the checkpoint that it began from, if it is still there
        if self.config.branch_from is not None:
            with contextlib.suppress(InvalidCheckpoint):
                self.origin = {Path(self.config.branch_from): read_manifest(Path(self.config.branch_from))}
        steps = [manifest.step for manifest in self.origin.values()] or [start["step"] for start in self.starts]
        self.begin = steps[0] if steps else 0
        if self.config.exact:
            prepare_exact()  # before anything is computed

    def computed(self, step: int) -> dict:
        """How `step` was computed, by what its start or else the checkpoint after it wrote down."""
        later = sorted((m for m in self.manifests.values() if m.step >= step), key=lambda m: m.step)[:1]
        started = [start for start in self.starts if start["step"] < step][-1:]
        facts = ChainMap(*started, *map(vars, later))
        return {name: facts.get(name) for name in ("processes", "shards", "threads", "mixed_precision", "config")}

    def config_then(self, step: int) -> TrainConfig:
        """The settings that `step` was done with."""
        stored = self.computed(step)["config"]
        return config_of(stored) if stored else self.config

    def ends(self, begin: int, until: int) -> list[int]:
        """Where the starts ended that did the steps after `begin` until `until`."""
        return [*sorted({start["step"] for start in self.starts if begin < start["step"] < until}), until]

    def missing(self, step: int, names: Iterable[str]) -> list[str]:
        """Of the names of numbers that training `step` again logs, every step as it does: those that the run lacks.

        What it logged at no step at all, its version may not have known: that is noted in `never_logged`.
        """
        config = self.config_then(step)
        ignored = ["step", "perf/"]
        if not should_log(config, step):
            ignored += ["train/", "layers/"]
        if not config.tracking.block_stats:
            ignored.append("layers/")
        if not has_digest(config, step):
            ignored.append("state/")
        logged = self.rows.get(step, {})
        names = {name for name in names if not name.startswith(tuple(ignored)) and name not in logged}
        self.never_logged |= names - self.logged_names
        return sorted(names & self.logged_names)

    def differs_here(self, begin: int, until: int) -> str:
        """Why the bits of the steps after `begin` until `until` may be others here, in words; "" if they may not."""
        now = {"processes": num_processes(), "shards": 1}
        if is_on(os.environ, "ACCELERATE_USE_FSDP"):
            now["shards"] = int(os.environ.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", num_processes()))
        if num_processes() > 1:  # one alone takes as many threads as there were
            now["threads"] = torch.get_num_threads()
        now_on_gpu, whys = not uses_cpu(os.environ), []
        for then in map(self.computed, self.ends(begin, until)):
            on_gpu = then["threads"] is None
            if then["processes"] is None:
                pass  # an older version wrote neither down
            elif on_gpu != now_on_gpu:
                whys.append("a GPU then and a CPU now" if on_gpu else "a CPU then and a GPU now")
            elif on_gpu and not self.config.exact:
                whys.append("a GPU adds up in another order each time, but for exact: true")
            whys += [
                f"{then[n]} {n} then and {now[n]} now" for n in compare_summation_order(then, now, self.config.exact)
            ]
        return ", ".join(dict.fromkeys(whys))

    def other_code(self) -> str:
        """That other code than this trained it, in words; "" if that did."""
        now, until = provenance(), max([*self.logged_steps, *(m.step for m in self.manifests.values())], default=0)
        others = [then for then in lasting_starts(self.starts, until) if "code" in compare_facts(then, now)]
        names = " and ".join(dict.fromkeys(map(describe_code, others)))
        return f"Other code: {self.path} was trained by {names}, and this is {describe_code(now)}." if others else ""

    def checkpoint_before(self, step: int) -> Path | None:
        """The newest one that is whole and older than `step`."""
        for path, manifest in (self.manifests | self.origin).items():
            if manifest.step < step:
                with contextlib.suppress(InvalidCheckpoint):
                    validate(path)
                    return path
        return None

    def retrain(
        self, checkpoint: Path | None, until: int, folder: Path, changes: dict[str, Any] | None = None
    ) -> "Retrained":
        """Train from a checkpoint, or the beginning, until after step `until`, in a run of its own in `folder`.

        Where the run was stopped on the way and started again, so is this.

        Raises:
            Preempted: a signal asked to stop.
        """
        rows, texts = {}, {}
        for end in self.ends(read_manifest(checkpoint).step if checkpoint else 0, until):
            again = self._retrain(checkpoint, end, folder, changes or {})
            checkpoint, rows, texts = again.checkpoint, rows | again.rows, texts | again.texts
            if again.failure:
                break
        return replace(again, rows=rows, texts=texts)

    def _retrain(self, checkpoint: Path | None, until: int, folder: Path, changes: dict) -> "Retrained":
        config_then = self.config_then(until)
        settings = {name: getattr(config_then, name) for name in AS_THEN} | {
            "out_dir": str(folder),
            "name": f"until-{until}",
            "resume": "auto",
            "stop_after": until,
            "tracking": config_then.tracking,
            "tracking.tracker": "wandb",
            "tracking.wandb": "disabled",
            "tracking.log_every": 1,
            "check_replicas_every": 0,
            "checkpoint.every": 10**9,
            "checkpoint.keep_every": 0,
        }
        if checkpoint is not None:
            settings |= {"branch_from": str(checkpoint.resolve()), "init_from": None}
        config = replace_settings(self.config, settings | changes)
        then = self.computed(until)
        os.environ["ACCELERATE_MIXED_PRECISION"] = then["mixed_precision"] or "no"
        if then["threads"] and num_processes() == 1:
            os.environ["OMP_NUM_THREADS"] = f"{then['threads']:02}"  # a plain 1 would be taken for a launcher's
            torch.set_num_threads(then["threads"])
        failure = None
        with nested_training():
            try:
                train.main(config)
            except RunError as error:
                failure = error
        path = folder / config.name
        logged = (rows_of(path / "metrics.jsonl"), texts_of(path / "generations.jsonl")) if is_main_process() else None
        rows, texts = broadcast_from_main(logged)
        rows = {row["step"]: row for row in rows}
        if failure is None and until not in rows:
            raise RunError(f"training again stopped before step {until}")
        return Retrained(step_directory(path / "checkpoints", until), rows, texts, failure)


@dataclass
class Retrained:
    """What training a part of a run again gave."""

    checkpoint: Path
    """After its last step."""
    rows: dict[int, dict]
    """Of metrics.jsonl, one for each of its steps."""
    texts: dict[int, list[dict]]
    """Rows of generations.jsonl, by their step."""
    failure: RunError | None
    """Why it ended before its last step."""

    def difference(self, run: Run, why: str) -> str:
        """The first number or text that the run logged otherwise, or not, in words; "" if there is none.

        Where the bits may differ (`why`), only what differs by more than rounding counts.
        """
        for step, ours in self.rows.items():
            if missing := run.missing(step, ours):
                return f"metrics.jsonl has no {missing[0]} of step {step}"
            for name, theirs in run.rows.get(step, {}).items():
                again = ours.get(name, NOTHING)
                if name.startswith("perf/") or theirs == again:
                    continue
                # What is sampled may turn at a rounding.
                if why and (name.startswith(("state/", "generation/")) or is_near(theirs, again)):
                    continue
                return f"step {step}: {name} is {theirs} in the run, and {again} trained again"
            if not why and run.texts.get(step) != self.texts.get(step):
                return f"generations.jsonl has other texts of step {step} than training again writes"
        return ""


def is_near(one: Any, other: Any) -> bool:
    """Whether both are numbers, and the same but for rounding."""
    if not {type(one), type(other)} <= {int, float}:
        return False
    try:
        return math.isclose(one, other, rel_tol=ROUNDING)
    except OverflowError:  # an integer that is larger than any float
        return False


def outcome(run: Run, again: Retrained, why: str) -> str:
    """What comparing with the run's log gave, in words."""
    compared = sum("state/digest" in run.rows.get(step, {}) for step in again.rows)
    if difference := again.difference(run, why):
        return f"NOT as in the run: {difference}" + (f" ({why})" if why else "")
    if why:
        return f"as in the run but for rounding ({why})"
    return f"as in the run, by {compared} fingerprint(s)" if compared else "the run has logged nothing to compare"


def say(text: str) -> None:
    """Print once, at once."""
    if is_main_process():
        print(text, flush=True)


def audit(run: Run, count: int, folder: Path) -> None:
    """Train intervals between checkpoints again, and compare.

    Raises:
        RunError: something is not as training again gives it.
        Preempted: a signal asked to stop.
    """
    kept = sorted(run.manifests.items(), key=lambda item: item[1].step)
    begins = [*run.origin, None][:1] + [path for path, _ in kept]
    intervals = list(zip([run.begin, *(manifest.step for _, manifest in kept)], begins, kept, strict=False))
    if not intervals:
        raise ConfigError(f"audit: {run.path} has no checkpoint that can be read")
    last = (run.starts[-1].get("config") if run.starts else None) or {}
    changed = [key for key, value in complete_settings(last).items() if run.settings.get(key) != value] if last else []
    wrong = [f"config.yaml: {key} is not that of the last start" for key in changed[:1]]
    damaged = [path for path in checkpoints_in(run.path / "checkpoints") if path not in run.manifests]
    wrong += [f"{path}: its {MANIFEST} is missing or damaged" for path in damaged]
    neighbours = pairwise([run.begin, *run.logged_steps])
    added = [(step, last) for last, step in neighbours if not last < step <= run.config.steps]
    wrong += [f"metrics.jsonl: step {step} after step {last}, of {run.config.steps}" for step, last in added[:1]]
    for problem in wrong:
        say(f"FAIL  {problem}")
    failures = len(wrong)
    chosen = broadcast_from_main(random.sample(intervals, min(count, len(intervals))))
    for before, begin, (end, manifest) in sorted(chosen, key=lambda interval: interval[0]):
        why = run.differs_here(before, manifest.step)
        verdict, found = "PASS", f"but for rounding ({why})" if why else "bit for bit"
        if problem := saved_problem(run, end, manifest):
            verdict, found = "FAIL", problem
        elif begin is None and run.config.branch_from is not None:
            verdict, found = "SKIP", f"the checkpoint that it began from is gone: {run.config.branch_from}"
        elif problem := trained_problem(run, begin, before + 1, manifest, folder):
            verdict, found = "FAIL", problem
        failures += verdict == "FAIL"
        say(f"{verdict}  steps {before + 1} to {manifest.step}  {found}")
    saved, logged = kept[-1][1].step, max(run.logged_steps, default=0)
    if logged > saved:
        say(f"SKIP  steps {saved + 1} to {logged}  no checkpoint is after them")
    if run.never_logged:
        say(f"SKIP  {', '.join(sorted(run.never_logged))}  the run logged it at no step")
    if failures:
        raise RunError(f"{run.path} is not what its settings give: {failures} failure(s)")
    say(f"{run.path} is what its settings give, as far as it was trained again.")


def saved_problem(run: Run, checkpoint: Path, manifest: Manifest) -> str:
    """What of a checkpoint does not fit together, in words; "" if nothing."""
    try:
        validate(checkpoint)
    except InvalidCheckpoint as invalid:
        return str(invalid)
    if lines := differences(complete_settings(manifest.config), run.config):
        return f"its settings are not those of config.yaml: {lines[0]}"
    if changed := manifest.tokenizer and changed_files(run.path / "tokenizer", manifest.tokenizer):
        return f"{run.path / 'tokenizer'} is not what it was trained with ({changed})"
    row = run.rows.setdefault(manifest.step, {})
    for name in sorted((manifest.metrics.keys() | row.keys()) - {"step"}):
        logged, saved = row.get(name, NOTHING), manifest.metrics.get(name, NOTHING)
        if logged != saved:
            return f"of {name} at step {manifest.step} metrics.jsonl says {logged}, and the manifest {saved}"
    digest = str(digests(whole_tensors(checkpoint, manifest)))
    if digest != (logged := row.setdefault("state/digest", digest)):  # without one, training again has to give this
        return f"its tensors have the digest {digest}, metrics.jsonl says {logged}"
    return ""


def has_digest(config: TrainConfig, step: int) -> bool:
    """Return whether the fingerprint of the state is logged after so many steps."""
    saves = should_save(config, step)
    actions = should_log(config, step), should_evaluate(config, step), saves
    return any(actions) or should_compare_replicas(config, step, saves)


def trained_problem(run: Run, begin: Path | None, first: int, manifest: Manifest, folder: Path) -> str:
    """What training an interval again, from the checkpoint `begin`, gives otherwise, in words; "" if nothing."""
    last, digest = manifest.step, {"state/digest"} & manifest.metrics.keys()  # an older version logged none
    for before, end in pairwise([first - 1, *run.ends(first - 1, last)]):
        config = run.config_then(end)
        for step in range(before + 1, end + 1):
            needed = [*LOGGED] if should_log(config, step) else []
            needed += ["val/loss"] if should_evaluate(config, step) else []
            needed += digest if has_digest(config, step) else []
            if missing := [name for name in needed if name not in run.rows.get(step, {})]:
                return f"metrics.jsonl has no {missing[0]} of step {step}"
    if begin:
        try:
            validate(begin)
        except InvalidCheckpoint as invalid:  # a failure of this interval, and the others are still to be audited
            return f"what it begins from is damaged: {invalid}"
    again = run.retrain(begin, last, folder)
    return str(again.failure or again.difference(run, run.differs_here(first - 1, last)))
