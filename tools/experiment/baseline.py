"""The baseline of an experiment: its settings, the folder of all experiments with it, and the margin of its loss."""

import json
import math
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from runtime.config.errors import ConfigError
from runtime.config.paths import expand_user_path
from runtime.files import lock, open_no_link, write_atomically
from runtime.json_objects import parse_object
from tools.experiment.change import Idea
from tools.experiment.corpus import check_same_corpora, prepare_library
from tools.experiment.record import RECORD_VERSION
from tools.experiment.settings import IdeasConfig
from tools.experiment.variant import Recipe, Variant, corpus_hashes

# Somewhat more than the scatter of seeds that we measured, so that a default budget decides an idea without effect.
MARGIN_OF_EXCESS_LOSS, MARGIN_OF_LOSS = 0.05, 0.015


def with_base(recipe: Recipe, arguments: Sequence[str], ideas: Mapping[str, Idea]) -> Recipe:
    """Return the recipe with the commit that a branch is based on, if that is the only argument."""
    only = ideas.get(arguments[0]) if len(arguments) == 1 else None
    return replace(recipe, commit=only.base) if only and only.base else recipe


def resolve_baseline(recipe: Recipe) -> tuple[Variant, Recipe]:
    """Return the baseline, and the recipe with the settings that an experiment adds to all runs.

    Of a text corpus, half of the validation sequences are withheld from all runs, for the evaluator.
    """
    prepare_library(recipe)
    print("checking the baseline and the ideas ...", file=sys.stderr)  # which imports torch, so it takes seconds
    baseline = recipe.variant()
    if not baseline.settings["evaluation.every"]:
        raise ConfigError("evaluation.every: 0, but an experiment evaluates its runs; set it, such as to their steps")
    if baseline.validation_rows is not None:
        half = baseline.validation_rows // 2
        if not half:
            raise ConfigError("data: the validation set has fewer than two sequences; prepare a larger one")
        num_samples = min(baseline.settings["evaluation.num_samples"] or half, half)
        recipe = replace(recipe, settings=(*recipe.settings, ("evaluation.num_samples", num_samples)))
        baseline = recipe.variant()
    return baseline, recipe


def experiment_folder(config: IdeasConfig, recipe: Recipe, baseline: Variant) -> Path:
    """Return the folder of all experiments with a baseline: named for its config file and a hash of what it is."""
    files = [after for word, after in zip(recipe.words, recipe.words[1:], strict=False) if word == "--config"]
    files += [word.partition("=")[2] for word in recipe.words if word.startswith("--config=")]
    kind = "" if config.equal == "steps" else f"-{config.equal}"
    kind += "" if config.metric is None else "-" + re.sub(r"\W+", "_", config.metric)
    return expand_user_path("folder", config.folder) / f"{Path(files[-1]).stem}-{baseline.digest}{kind}"


def baseline_margin(config: IdeasConfig, baseline: Variant) -> float:
    """Return the margin as a log ratio."""
    has_entropy = baseline.settings["data.source"] in ("stories", "random") and config.metric is None
    return math.log1p(config.margin or (MARGIN_OF_EXCESS_LOSS if has_entropy else MARGIN_OF_LOSS))


def open_experiment(folder: Path, recipe: Recipe, baseline: Variant, name: str) -> int:
    """Lock the folder of an experiment for `name`, a race or another command; return the seed of its test data.

    It is locked until the checkouts are removed.
    """
    identity = {"baseline": recipe.name, "data": corpus_hashes(baseline.settings)}
    check_same_corpora(folder, identity)
    folder.mkdir(parents=True, exist_ok=True)
    opened = open(folder / ".lock", "a", opener=open_no_link)  # noqa: SIM115 - closed with the checkouts
    locked = recipe.checkouts.enter_context(opened)
    if not lock(locked):
        remedy = "to add ideas, write patches into a folder that it was given"
        raise ConfigError(f"folder: another process runs {folder}; {remedy}")
    locked.truncate(0)
    locked.write(name)
    locked.flush()
    file = folder / "experiment.json"
    if not file.exists():
        secret = {"test_seed": secrets.randbits(62), "key": secrets.token_hex(16)}
        write_atomically(file, json.dumps({"version": RECORD_VERSION} | identity | secret) + "\n")
    return parse_object(file.read_bytes())["test_seed"]
