"""Losses of finished runs: as logged by trusted code, computed by tools/experiment/scorer.py for a candidate's code."""

import json
import math
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from config.errors import ConfigError, RunError
from run.directory import Run
from storage.files import write_atomically
from storage.json_objects import parse_object
from tools.experiment.arm import CANDIDATE, Arm, last_error, run_program
from tools.experiment.change import ROOT

# Settings that determine the sequences on which a run trains and is evaluated, with those of `data`.
BATCH_SETTINGS = {"seed", "steps", "global_batch_size", "micro_batch_size", "seq_len", "evaluation.num_samples"}
BATCH_SETTINGS |= {"schedule.batch_warmup_from", "schedule.batch_warmup_steps", "evaluation.micro_batch_size"}
# Settings that determine which tokens are predicted, together with those of `data`, except NOT_TARGET_SETTINGS.
TARGET_SETTINGS = {"seq_len", "evaluation.num_samples"}
NOT_TARGET_SETTINGS = {"data.num_workers", "data.num_samples"}
LOSS, EXCESS_LOSS = "val/loss", "val/excess_loss"


@dataclass(frozen=True)
class Score:
    """What a run is compared by."""

    loss: float = 0.0
    """Excess loss over the entropy of the data where that is known, otherwise the loss, in nats/token."""
    problem: str = ""
    """Why the loss is not credible; "" if it is."""


def score(baseline: Arm, runs: Iterable[tuple[Arm, Run]], metric: str | None = None) -> list[Score]:
    """Return the scores of finished runs.

    Args:
        baseline: the arm whose code judges.
        runs: runs that have completed all steps, each with its arm.
        metric: a logged metric instead of the loss; runs of code that is not trusted are judged as well.

    Raises:
        RunError: the code of an arm cannot load or evaluate a checkpoint.
    """
    runs = list(runs)
    files = {run: arm.lab / "scores" / f"{run.path.name}.json" for arm, run in runs if arm.is_judged}
    missing = [(arm, run) for arm, run in runs if run in files and not files[run].exists()]
    missing.sort(key=lambda pair: str(pair[0].code))  # each code is imported once
    for (_, run), answer in zip(missing, run_scorer(baseline, missing) if missing else [], strict=True):
        files[run].parent.mkdir(parents=True, exist_ok=True)
        write_atomically(files[run], json.dumps(answer))
    scores = []
    for _, run in runs:
        row = run.newest_metrics()
        loss, problem = row.get(metric) if metric else row.get(EXCESS_LOSS, row.get(LOSS)), ""
        if run in files:
            shutil.rmtree(run.checkpoints, ignore_errors=True)  # nothing else reads them
            answer = parse_object(files[run].read_bytes())
            loss, problem = loss if metric else answer["loss"], answer["problem"]
        scores.append(Score(problem=problem) if problem else as_score(loss, above_zero=metric is None))
    return scores


def as_score(loss: object, above_zero: bool) -> Score:
    """Return the score of a logged value; it is not credible unless it is a number, and positive with `above_zero`."""
    if not isinstance(loss, int | float):
        return Score(problem="its metric is not logged")
    if not math.isfinite(loss):
        return Score(problem=f"its metric is {loss}")
    if above_zero and loss <= 0:
        return Score(problem=f"its loss is below the entropy of the data, by {-loss:.4g} nats/token")
    return Score(float(loss))


def arm_losses(baseline: Arm, arm: Arm, runs: Iterable[Run], metric: str | None = None) -> tuple[list[float], str]:
    """Return the losses of finished runs of one arm, and the first problem of one; see `score`."""
    try:
        scores = score(baseline, [(arm, run) for run in runs], metric)
    except RunError as error:
        return [], str(error)
    return [one.loss for one in scores], next((one.problem for one in scores if one.problem), "")


def run_scorer(baseline: Arm, runs: list[tuple[Arm, Run]]) -> list[dict]:
    """Run tools/experiment/scorer.py; raise RunError if the code of an arm crashes in it."""
    requests = []
    for arm, run in runs:
        # The code of the arm writes into the run. There only the seed, and values that are null until a run starts, are
        # read.
        settings = {
            name: value if name == "seed" or arm.settings[name] is None else arm.settings[name]
            for name, value in run.settings.items()
            if name in baseline.settings and (name in BATCH_SETTINGS or name.startswith("data."))
        }
        sessions = [(each.step, arm.launch.processes or each.processes or 1) for each in run.sessions()]
        hashes = sorted(map(str, (arm.lab / "hashes").glob(f"{run.path.name}.*")))
        words = [*baseline.words, "--schedule.warmup_steps=0", "--schedule.decay_steps=null"]
        what = {"code": str(arm.code), "run": str(run.path), "words": words, "settings": settings}
        requests.append(what | {"hashes": hashes, "sessions": sessions})
    command = [sys.executable, "-m", "tools.experiment.scorer", str(baseline.code)]
    done = run_program(command, cwd=ROOT, input="\n".join(map(json.dumps, requests)))
    if done.returncode:
        raise RunError(f"its runs cannot be scored: {last_error(done, runs[0][0].code)}")
    return [parse_object(line) for line in done.stdout.splitlines()]


def check_settings(baseline: Arm, candidate: Arm) -> None:
    """Raise ConfigError if a candidate's code changes nothing, or its settings change which tokens are predicted."""
    if candidate.is_judged and candidate.digest == baseline.digest:
        raise ConfigError("changes neither code that trains nor a setting")
    for name, value in candidate.settings.items():
        is_target = name in TARGET_SETTINGS or (name.startswith("data.") and name not in NOT_TARGET_SETTINGS)
        if is_target and baseline.settings.get(name) != value:
            raise ConfigError(f"{name}: {value} changes which tokens are predicted; give it to all runs")


def failed_checks(arm: Arm) -> str:
    """Return the checks of verify.py that the code of an arm fails; "" if none. Code that is trusted passes."""
    if not arm.is_judged:
        return ""
    done = run_program([sys.executable, str(CANDIDATE), str(arm.code), "checks", *arm.words])
    if done.returncode:
        return f"verify.py crashes: {last_error(done, arm.code)}"
    return "; ".join(f"{name}: {figure}" for name, figure in parse_object(done.stdout.splitlines()[-1]).items())
