"""Arms derived from an arm: other budgets, other sizes, matched parameters, short runs for throughput."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.experiment import score
from tools.experiment.arm import Arm, ArmFailed, corpora
from tools.experiment.score import network_shape
from tools.scale.recipe import LR_POWER

WIDTH_STEP = 8  # a scaled or matched model.d_ff is a multiple of this
SHORT_RUN_LOGS = 8  # logged steps of a short run, so that its throughput is a median over several
PREVIEW_STEPS = 8
SEPARATE_SEEDS = 1000  # offset of the seeds of runs that must not share seeds with the comparison


def scale_steps(arm: Arm, factor: float) -> Arm:
    """Return the arm on `factor` times the steps, with a schedule of the same shape and samples in proportion."""
    changes = {}
    for name in ("steps", "schedule.warmup_steps", "schedule.decay_steps", "schedule.batch_warmup_steps"):
        if value := arm.settings.get(name):
            changes[name] = max(1, round(factor * value))
    if "schedule.decay_steps" in changes:  # each was rounded independently
        longest = changes["steps"] - changes.get("schedule.warmup_steps", 0)
        changes["schedule.decay_steps"] = max(1, min(changes["schedule.decay_steps"], longest))
    if arm.settings["data.source"] != "text":
        changes["data.num_samples"] = max(1, round(factor * arm.settings["data.num_samples"]))
    return arm.changed(changes) if factor != 1 else arm


def scale_parameters(arm: Arm, factor: float) -> Arm:
    """Return the arm with `factor` times the parameters in its blocks, and tokens in proportion.

    Width, feed-forward width and number of heads grow with the square root, so heads keep their size; depth stays, and
    the learning rate falls with the width as in tools/scale/recipe.py.
    """
    if factor == 1:
        return arm
    settings, widening = arm.settings, math.sqrt(factor)
    queries_per_key = settings["model.n_heads"] // (settings["model.n_kv_heads"] or settings["model.n_heads"])
    heads = queries_per_key * max(1, round(widening * settings["model.n_heads"] / queries_per_key))
    changes = {
        "model.n_heads": heads,
        "model.d_model": settings["model.d_model"] // settings["model.n_heads"] * heads,
        "model.d_ff": WIDTH_STEP * round(widening * settings["model.d_ff"] / WIDTH_STEP),
        "optimizer.lr": settings["optimizer.lr"] * widening**LR_POWER,
    }
    if settings["model.n_kv_heads"]:
        changes["model.n_kv_heads"] = heads // queries_per_key
    return scale_steps(arm.changed(changes), factor)


def match_width(arm: Arm, other: Arm, quantity: str) -> Arm:
    """Return the arm with the feed-forward width at which a quantity is nearest to that of another arm.

    The quantity is parameters or flops_per_token. Raise ArmFailed if there is no such width.
    """
    width, target = arm.settings["model.d_ff"], network_shape(other)[quantity]
    current = network_shape(arm)[quantity]
    wider = network_shape(arm.changed({"model.d_ff": width + WIDTH_STEP}))[quantity]
    slope = (wider - current) / WIDTH_STEP  # both quantities are linear in the width
    matching = WIDTH_STEP * round((width + (target - current) / slope) / WIDTH_STEP) if slope else 0
    if matching < WIDTH_STEP:
        raise ArmFailed(f"match: no model.d_ff gives the candidate the {target:,} {quantity} of the baseline")
    return arm.changed({"model.d_ff": matching})


def short_arm(arm: Arm, steps: int, runs: Path) -> Arm:
    """Return the arm on `steps` steps, with a schedule of the same shape and minimal evaluation."""
    changes = {
        "evaluation.every": steps,
        "evaluation.num_samples": max(2, len(corpora(arm.settings))),
        "evaluation.num_scored_generations": 0,
        "evaluation.num_logged_generations": 0,
        "tracking.log_every": max(1, steps // SHORT_RUN_LOGS),
        "tracking.wandb": "disabled",
    }
    return replace(scale_steps(arm, steps / arm.settings["steps"]).changed(changes), runs=runs)


def steps_in(arm: Arm, seconds: float) -> int:
    """Return how many steps take `seconds` at the throughput of the arm's first run, at most all of its steps."""
    throughput, steps = arm.job(0).run.tokens_per_second(), arm.settings["steps"]
    fitting = round(seconds * throughput * steps / arm.train_tokens) if math.isfinite(throughput) else 0
    return min(steps, max(SHORT_RUN_LOGS, fitting))


def preview_arm(arm: Arm, checks: str) -> dict[str, Any]:
    """Return the `preview` of tools/experiment/scorer.py for the arm; raise RunError if the scorer fails."""
    short = short_arm(arm, min(PREVIEW_STEPS, arm.settings["steps"]), arm.runs)
    short = short.changed({"evaluation.num_samples": arm.settings["evaluation.num_samples"]})  # all rows that may leak
    return score.run_scorer(short, "preview", checks, *short.words)


def use_separate_seeds_if_equal(candidate: Arm, baseline: Arm) -> Arm:
    """Return the candidate; in an A/A test with other seeds, because equal seeds would give identical runs."""
    is_equal = candidate.digest == baseline.digest
    return replace(candidate, first_seed=baseline.first_seed + SEPARATE_SEEDS) if is_equal else candidate


def with_tuning_seeds(arm: Arm) -> Arm:
    """Return an arm with the seeds that are reserved for tuning."""
    return replace(arm, first_seed=arm.first_seed + 2 * SEPARATE_SEEDS)
