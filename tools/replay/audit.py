"""The audit of a run, `tools.replay RUN --audit N`: retrain intervals between checkpoints and compare.

First the records are checked: what the run recorded twice must agree, and what follows from its settings must equal the
record. Records that cannot be recomputed are listed as not checked.
"""

import random
from collections.abc import Iterator
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

from checkpoint.identity import SUMMATION_ORDER
from checkpoint.manifest import (
    MANIFEST,
    InvalidCheckpoint,
    Manifest,
    checkpoints_in,
    readable_checkpoints,
    validate,
)
from checkpoint.provenance import network_size
from checkpoint.unshard import whole_tensors
from config.errors import ConfigError, RunError
from distributed.collectives import broadcast_from_main
from distributed.state_hash import digest_tensors
from run.resume import differing_settings
from run.stored_settings import complete_settings
from tools.replay.recorded_run import MISSING, RELATIVE_TOLERANCE, RecordedRun, logs_digest, print_on_main
from training.schedule import should_evaluate, should_log

METRICS_OF_EVERY_LOG = ("train/loss", "train/grad_norm", "train/lr")
NEVER_CHECKED = "perf/*, versions and git_commit in sessions.jsonl"


def audit(run: RecordedRun, count: int, folder: Path) -> None:
    """Check the records of a run, retrain `count` of its intervals between checkpoints, and compare.

    Raises:
        RunError: Retraining gives something else than the run or was impossible, or records contradict each other.
        ConfigError: The run has no checkpoint to audit.
        Preempted: A stop signal was received.
    """
    kept = sorted(run.manifests.items(), key=lambda item: item[1].step)
    # An interval: the step before it, the checkpoint of that step or None, and the checkpoint at its end.
    starts = [next(iter(run.branch_point), None), *(path for path, _ in kept)]
    intervals = list(zip([run.initial_step, *(manifest.step for _, manifest in kept)], starts, kept, strict=False))
    if not intervals:
        raise ConfigError(f"audit: {run.path} has no checkpoint that can be read")
    failures, num_passed, inexact = 0, 0, []
    for problem in record_problems(run):
        print_on_main(f"FAIL  {problem}")
        failures += 1
    chosen = broadcast_from_main(random.sample(intervals, min(count, len(intervals))))
    for begin, start, (checkpoint, manifest) in sorted(chosen, key=lambda interval: interval[0]):
        outcome, finding = audit_interval(run, start, begin, checkpoint, manifest, folder)
        failures += outcome == "FAIL"
        num_passed += outcome == "PASS"
        if outcome == "PASS" and (reason := run.why_inexact(begin, manifest.step)):
            inexact.append(reason)
        print_on_main(f"{outcome}  steps {begin + 1} to {manifest.step}  {finding}")
    for skipped in unchecked(run, kept[-1][1].step, inexact):
        print_on_main(f"SKIP  {skipped}")
    if failures:
        raise RunError(f"{run.path} does not match its settings: {failures} failure(s)")
    if not num_passed:
        raise RunError(f"{run.path}: no interval could be retrained; if the run is still training, audit it later")
    print_on_main(f"{run.path} matches its settings, as far as it was retrained.")


def audit_interval(
    run: RecordedRun, start: Path | None, begin: int, checkpoint: Path, manifest: Manifest, folder: Path
) -> tuple[str, str]:
    """Return PASS, FAIL or SKIP for the interval from step `begin` + 1 to a checkpoint, and the finding."""
    problem = checkpoint_problem(run, checkpoint, manifest)
    if not problem and start is None and run.config.branch_from is not None:
        return "SKIP", f"its initial checkpoint no longer exists: {run.config.branch_from}"
    if problem := problem or retraining_problem(run, start, begin, manifest, folder):
        removed = [path for path in (start, checkpoint) if path and not path.exists()]  # by train.py, if it is running
        return ("SKIP", f"{removed[0]} was removed while the run was audited") if removed else ("FAIL", problem)
    reason = run.why_inexact(begin, manifest.step)
    return "PASS", f"equal up to rounding ({reason})" if reason else "bitwise identical"


def unchecked(run: RecordedRun, last_saved: int, inexact: list[str]) -> Iterator[str]:
    """Describe what this audit did not check, a line each."""
    last_logged = max(run.logged_steps, default=0)
    if last_logged > last_saved:
        yield f"steps {last_saved + 1} to {last_logged}  not checked: no checkpoint follows them"
    if run.unlogged:
        yield f"{', '.join(sorted(run.unlogged))}  not checked: other code trained the run and did not log them"
    if run.other_code:
        yield "parameters and flops_per_token in sessions.jsonl  not checked: other code trained the run"
    if inexact:
        yield (
            f"digests, texts and differences below {RELATIVE_TOLERANCE:.1%} in {len(inexact)} interval(s)  "
            f"not checked: {', '.join(dict.fromkeys(inexact))}; sessions.jsonl alone records how the run was launched; "
            "to compare bits, launch the audit in the same way"
        )
    yield f"{NEVER_CHECKED}  not checked: retraining does not depend on them"


def record_problems(run: RecordedRun) -> Iterator[str]:
    """Describe contradictions between config.yaml, sessions.jsonl, metrics.jsonl and the manifests, a line each."""
    last = complete_settings(run.sessions[-1].config or {}) if run.sessions else {}
    if changed := [name for name, value in last.items() if run.settings.get(name) != value]:
        yield f"config.yaml: {changed[0]} differs from the last session in sessions.jsonl"
    listed = checkpoints_in(run.path / "checkpoints")
    readable = readable_checkpoints(run.path / "checkpoints")  # read again: train.py may have saved more since
    for path in listed:
        if path not in readable and path.exists():
            yield f"{path}: its {MANIFEST} is missing or damaged"
    for before, step in pairwise([run.initial_step or -1, *run.logged_steps]):
        if not before < step <= run.config.steps:
            yield f"metrics.jsonl: step {step} after step {before}, of {run.config.steps}"
            break
    yield from session_problems(run)


def session_problems(run: RecordedRun) -> Iterator[str]:
    """Describe contradictions between sessions.jsonl, the settings and the manifests, a line each."""
    if not run.sessions:
        yield "sessions.jsonl: it is missing or empty, and every run has one"
        return
    if (step := run.sessions[0].step) != run.initial_step:
        yield f"sessions.jsonl: the first session starts after step {step}, and the run after step {run.initial_step}"
    size = {} if run.other_code else network_size(run.config)
    for session in run.sessions:
        where = f"sessions.jsonl: the session from step {session.step}"
        for name, value in size.items():
            if getattr(session, name) != value:
                yield f"{where} has {name} {getattr(session, name)}, and config.yaml gives {value}"
        if lines := differing_settings(complete_settings(session.config or {}), run.config):
            yield f"{where} has other settings than config.yaml: {lines[0]}"
        if (patch := session.uncommitted_changes) and not is_patch_intact(run.path / patch):
            yield f"{where} names {patch}, which is missing or has other content"
    yield from manifest_contradictions(run)


def manifest_contradictions(run: RecordedRun) -> Iterator[str]:
    """Describe contradictions between the manifests and sessions.jsonl, a line each."""
    for path, manifest in run.manifests.items():
        saved = {name: getattr(manifest, name) for name in ("mixed_precision", *SUMMATION_ORDER)} | manifest.provenance
        saved.pop("git_commit", None)  # session and saver read it at different times
        session = run.session_at(manifest.step)
        for name, value in saved.items():
            if (recorded := getattr(session, name, value)) != value:
                yield f"sessions.jsonl: {name} is {recorded}, and {value} in {path / MANIFEST}"


def is_patch_intact(file: Path) -> bool:
    """Return whether a patch of uncommitted changes has the hash in its name, code-HASH.diff."""
    try:
        return file.stem.removeprefix("code-") == sha256(file.read_bytes().removesuffix(b"\n")).hexdigest()[:8]
    except OSError:
        return False


def checkpoint_problem(run: RecordedRun, checkpoint: Path, manifest: Manifest) -> str:
    """Describe the first contradiction between a checkpoint and its manifest, settings or log; "" if there is none."""
    try:
        validate(checkpoint)
    except InvalidCheckpoint as invalid:
        return str(invalid)
    if lines := differing_settings(complete_settings(manifest.config), run.config):
        return f"its settings differ from config.yaml: {lines[0]}"
    row = run.rows.get(manifest.step, {})
    for name in sorted((manifest.metrics.keys() | row.keys()) - {"step"}):
        logged, saved = row.get(name, MISSING), manifest.metrics.get(name, MISSING)
        if logged != saved:
            return f"{name} at step {manifest.step} is {logged} in metrics.jsonl, and {saved} in the manifest"
    digest = str(digest_tensors(whole_tensors(checkpoint, manifest)))
    if digest != (logged := row.get("state/digest", MISSING)):
        return f"its tensors have the digest {digest}, and metrics.jsonl has {logged}"
    return ""


def retraining_problem(run: RecordedRun, start: Path | None, begin: int, manifest: Manifest, folder: Path) -> str:
    """Retrain the steps from `begin` + 1 to a checkpoint and describe the first difference; "" if there is none."""
    last = manifest.step
    for before, end in pairwise([begin, *run.session_ends(begin, last)]):
        config = run.config_at(end)
        for step in range(before + 1, end + 1):
            needed = [*METRICS_OF_EVERY_LOG] if should_log(config, step) else []
            needed += ["val/loss"] if should_evaluate(config, step) else []
            needed += ["state/digest"] if logs_digest(config, step) else []
            if missing := [name for name in needed if name not in run.rows.get(step, {})]:
                return f"metrics.jsonl has no {missing[0]} at step {step}"
    if start:
        try:
            validate(start)
        except InvalidCheckpoint as invalid:  # fails this interval only
            return f"the checkpoint before it is damaged: {invalid}"
    retrained = run.retrain(start, last, folder)
    return str(retrained.failure or retrained.difference(run, run.why_inexact(begin, last)))
