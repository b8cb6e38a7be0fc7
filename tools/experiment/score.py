"""The independent evaluation of both arms, and the metric by which they are comparable."""

import json
import math
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

from checkpoint.manifest import step_directory
from config.errors import ConfigError, RunError
from data.files import write_atomically
from data.json_objects import parse_object
from data.validation_bytes import cover_same_text
from tools.experiment.arm import Arm, ArmFailed, file_hash, last_frame
from tools.jobs.runner import Job

SCORER = Path(__file__).with_name("scorer.py")
LOSS, EXCESS_LOSS, BITS = "val/loss", "val/excess_loss", "val/bits_per_byte"
DATA_SETTINGS = {"seq_len", "evaluation.num_samples"}  # in addition to those of `data`
FLOAT32_TOLERANCE, HALF_TOLERANCE = 1e-4, 1e-2  # tolerances of logged losses, relative to the scorer's


def score_arm(arm: Arm) -> dict[str, Any]:
    """Return what tools/experiment/scorer.py measures of the arm's first run, and the metrics that the run logged.

    The result is kept outside the run's directory, with hashes of what it was computed from.

    Raises:
        RunError: the arm's code cannot load or evaluate its checkpoint.
    """
    job = arm.job(0)
    file, source = score_file(job), score_source(job)
    try:
        score = parse_object(file.read_bytes())
    except (OSError, ValueError):
        score = {}
    if score.get("source") != source:
        row = job.run.newest_metrics()
        logged = {metric: row.get(metric) for metric in (LOSS, EXCESS_LOSS, BITS)}
        score = {"source": source} | run_scorer(arm, "measure", str(job.run.path)) | logged
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(score), several_writers=True)
    return score


def score_file(job: Job) -> Path:
    """Return the file of a run's score: LAB/scores/RUN.json."""
    return job.run.path.parent.parent / "scores" / f"{job.run.path.name}.json"


def score_source(job: Job) -> dict[str, str]:
    """Return hashes of what a score is computed from: the last checkpoint, the metrics and the scorer."""
    checkpoint = step_directory(job.run.checkpoints, job.steps)
    return {
        "manifest": file_hash(checkpoint / "manifest.json"),
        "metrics": file_hash(job.run.path / "metrics.jsonl"),
        "scorer": sha256(SCORER.read_bytes()).hexdigest(),
    }


def check_targets(baseline: Arm, candidate: Arm) -> None:
    """Raise ConfigError before training if the arms predict different tokens, because their data settings differ.

    Whether other tokens of the same text cover all of it is checked after the first seed.
    """
    ours, theirs = (
        {name: value for name, value in arm.settings.items() if name.startswith("data.") or name in DATA_SETTINGS}
        for arm in (baseline, candidate)
    )
    if ours == theirs:
        return
    try:
        mine, other = (run_scorer(arm, "targets", *arm.words) for arm in (baseline, candidate))
    except RunError:  # so does the first run, with the reason
        return
    if mine["targets"] != other["targets"] and (reason := why_texts_incomparable(baseline, candidate)):
        changed = [name for name in theirs if ours.get(name) != theirs[name]]
        raise ConfigError(
            f"{', '.join(changed)}: the candidate predicts {other['num_targets']:,} tokens (hash {other['targets']}), "
            f"the baseline {mine['num_targets']:,} ({mine['targets']}); {reason}; give the setting to both arms, after "
            "the idea"
        )


def network_shape(arm: Arm) -> dict[str, Any]:
    """Return parameters and FLOPs per token of the arm's network, without training."""
    return run_scorer(arm, "shape", *arm.words)


def run_scorer(arm: Arm, command: str, *words: str) -> dict[str, Any]:
    """Run tools/experiment/scorer.py with the arm's code; raise RunError if it fails."""
    done = subprocess.run(
        [sys.executable, str(SCORER), str(arm.code), command, *words],
        capture_output=True,
        text=True,
        start_new_session=True,  # Ctrl-C is for tools.experiment to handle
    )
    if done.returncode:
        last = next(iter(done.stderr.strip().splitlines()[-1:]), f"exit code {done.returncode}")
        frame = last_frame(done.stderr, arm.code)
        raise RunError(f"{arm.code}: {SCORER.name} {command} fails with this code: {last}{frame}")
    return parse_object(done.stdout.splitlines()[-1])


def choose_metric(baseline: Arm, candidate: Arm) -> str:
    """Return the metric by which two arms are comparable.

    It is the excess loss, or the loss where the entropy of the data is unknown, if both predict the same tokens; and
    bits per byte if they differ only in the tokenizer of the same text.

    Raises:
        ConfigError: they are not evaluated on the same validation set in the same way.
        ArmFailed: the candidate's logits depend on the tokens that they predict.
    """
    scores = {"baseline": score_arm(baseline), "candidate": score_arm(candidate)}
    ours, theirs = scores.values()
    if theirs["is_causal"] is False:
        raise ArmFailed("the logits of the candidate depend on later tokens, which it is to predict")
    metric = LOSS if ours["targets"] == theirs["targets"] else BITS
    if metric == BITS and (reason := why_bits_incomparable(baseline, candidate)):
        raise ConfigError(
            "idea: the arms are not evaluated on the same validation set: the baseline predicts "
            f"{ours['num_targets']:,} tokens (hash {ours['targets']}), the candidate {theirs['num_targets']:,} "
            f"({theirs['targets']}); {reason}"
        )
    if ours["entropy"] != theirs["entropy"]:
        entropies = f"{ours['entropy']} for the baseline and {theirs['entropy']} for the candidate"
        raise ConfigError(f"idea: the entropy of the data is {entropies}, so their excess losses are not comparable")
    if metric == LOSS and ours["entropy"] is not None:
        metric = EXCESS_LOSS
    float32 = baseline.launch.precision == candidate.launch.precision == "no"
    tolerance = FLOAT32_TOLERANCE if float32 else HALF_TOLERANCE
    for name, score in scores.items():
        check_logged(name, LOSS, score[LOSS], score["loss"], tolerance * abs(score["loss"]))
        if metric == EXCESS_LOSS:
            excess = score["loss"] - score["entropy"]
            check_logged(name, EXCESS_LOSS, score[EXCESS_LOSS], excess, tolerance * abs(score["loss"]))
        if metric == BITS:
            bits = score["loss"] * score["num_targets"] / score["num_bytes"] / math.log(2)
            check_logged(name, BITS, score[BITS], bits, tolerance * abs(bits))
    return metric


def check_metric(metric: str, *arms: Arm) -> str:
    """Return the metric of `--metric`; raise ConfigError unless the first run of each arm logs it at its end."""
    for arm in arms:
        row = arm.job(0).run.newest_metrics()
        if not isinstance(row.get(metric), float):
            logged = ", ".join(sorted(name for name in row if name.startswith("val/")))
            raise ConfigError(f"metric: {metric!r} is not logged by {arm.name}; it logs {logged}")
    return metric


def check_logged(name: str, metric: str, logged: Any, measured: float, tolerance: float) -> None:
    """Raise ConfigError unless a logged value is the one that the scorer measures, within a tolerance."""
    if not isinstance(logged, float) or not abs(logged - measured) <= tolerance:
        raise ConfigError(
            f"idea: the {metric} of the {name} is {logged}, but {measured:.6f} computed from its logits: its code "
            "measures something else"
        )


def why_texts_incomparable(baseline: Arm, candidate: Arm) -> str:
    """Return why two arms with other targets cannot be compared by bits per byte, as far as known before training."""
    arms = baseline, candidate
    if any(arm.settings["data.source"] != "text" for arm in arms):
        return "settings of data or evaluation differ, so their losses are not comparable"
    ours, theirs = (arm.validation_text() for arm in arms)
    if None in (ours, theirs):
        return unknown_bytes(ours, theirs)
    if ours != theirs:
        return f"the texts differ as well (hashes {str(ours)[:8]} and {str(theirs)[:8]})"
    if any(arm.settings["evaluation.num_samples"] is not None for arm in arms):
        return "the text is the same, but only all of it is comparable: set evaluation.num_samples to null for both"
    return ""


def why_bits_incomparable(baseline: Arm, candidate: Arm) -> str:
    """Return why two arms cannot be compared by bits per byte; "" if they can."""
    if reason := why_texts_incomparable(baseline, candidate):
        return reason
    ours, theirs = (score_arm(arm)["num_bytes"] for arm in (baseline, candidate))
    if None in (ours, theirs):
        return unknown_bytes(ours, theirs)
    if not cover_same_text(ours, theirs):
        return f"the text is the same, but the targets cover {ours:,} bytes of it here and {theirs:,} there"
    return ""


def unknown_bytes(ours: object, theirs: object) -> str:
    """Return the message that something about the bytes of a text is None for the baseline, the candidate or both."""
    unknown = [name for name, value in (("baseline", ours), ("candidate", theirs)) if value is None]
    return (
        "two tokenizers of one text are compared by bits per byte, but the bytes of the text are unknown for the "
        f"{' and the '.join(unknown)}: its tokenizer is not byte-level, or its corpus has no hash of the text"
    )
