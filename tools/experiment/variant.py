"""Variants: the code and the settings that runs are trained with, and what they cost.

A recipe is the baseline: a commit, settings and a launch. Its variants have ideas on top, in their order.
"""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import yaml

from data.sampler import BatchSizes
from runtime.config.errors import ConfigError, RunError
from runtime.config.paths import expand_user_path
from runtime.config.schema import flat_settings
from runtime.config.yaml_files import read_yaml
from runtime.files import sha256 as hash_file
from runtime.files import write_once
from runtime.json_objects import parse_object
from tools.experiment import change, sandbox
from tools.experiment.change import Checkouts, Idea
from tools.jobs.launch import Launch
from tools.jobs.program import ask
from tools.jobs.runner import Job, raise_stopped
from tools.scale.recipe import LR_POWER
from trainer.checkpoint.identity import code_hash
from trainer.run.directory import Run

# Settings and sections in which the runs of one variant may differ.
PER_RUN_SETTINGS = {"name", "out_dir", "resume", "seed", "stop_after"}
PER_RUN_SECTIONS = {"tracking", "checkpoint"}
# Settings that decide which tokens are predicted, together with those of `data`, except NOT_TARGET_SETTINGS.
TARGET_SETTINGS = {"seq_len", "evaluation.num_samples"}
NOT_TARGET_SETTINGS = {"data.num_workers", "data.num_samples", "data.crops"}
ERROR = "train.py: error: "
WIDTH_STEP = 8  # a scaled model.d_ff is a multiple of this
PROGRAM = Path(__file__).with_name("variant_program.py")
MAX_CHECK_SECONDS = 600.0  # of one idea: it imports torch, and many may do so at once

T = TypeVar("T")
Answer = str | subprocess.CompletedProcess[str]
"""A line of JSON, or the process that ended without one."""


@dataclass(frozen=True)
class Variant:
    """Code, launch and settings of runs."""

    code: Path
    """Folder of train.py."""
    code_hash: str
    changes_code: bool
    """Whether the code is not that of the baseline."""
    launch: Launch
    given: dict[str, Any]
    """Settings that are given to train.py, by `section.name`; the others have the defaults of its code."""
    settings: dict[str, Any]
    """All settings, as its code resolves them."""
    parameters: int
    flops_per_token: float
    """Of the matrix products in a forward and backward of its model."""
    inputs: tuple[str, ...] = ()
    """Hashes of the corpora and of the initial weights."""
    warnings: tuple[str, ...] = ()
    """Checks of verify.py that its model fails or skips, and an estimate in place of counted FLOPs."""
    validation_rows: int | None = None
    """Of a text corpus: all sequences of its validation split."""
    code_name: str = ""
    """Names of the ideas that change the code, for messages."""

    def changed(self, settings: dict[str, Any]) -> "Variant":
        """Return the variant with other values of settings."""
        return replace(self, given=self.given | settings, settings=self.settings | settings)

    @property
    def steps(self) -> int:
        """Steps of a run."""
        return self.settings["steps"]

    @property
    def global_batch_size(self) -> int:
        """Sequences of a step after a batch-size warm-up; a null setting is one micro-batch for each process."""
        return self.settings["global_batch_size"] or self.settings["micro_batch_size"] * (self.launch.processes or 1)

    @property
    def tokens(self) -> int:
        """Tokens that the loader of the baseline delivers in a run, with padding."""
        sizes = BatchSizes.from_settings(self.settings | {"global_batch_size": self.global_batch_size})
        return sizes.tokens_before(self.steps, self.settings["seq_len"])

    @property
    def flops(self) -> float:
        """FLOPs of one forward and backward of these tokens; a second one is in the seconds of the runs alone."""
        return self.tokens * self.flops_per_token

    @property
    def needs_network(self) -> bool:
        """Whether a run may need a network, by which runs could exchange weights: for its launcher, W&B or the Hub."""
        names = [self.settings.get(name) for name in ("init_from", "teacher.path")]
        is_tracked = self.settings.get("tracking.wandb") != "disabled"
        return self.launch.command != (sys.executable,) or is_tracked or any(name is not None for name in names)

    @cached_property
    def digest(self) -> str:
        """Hash of the settings, code, launch, inputs and torch's version: equal digests train the same."""
        shared = {name: value for name, value in self.settings.items() if is_shared(name)}
        facts = [shared, self.code_hash, self.launch.identity, self.inputs, version("torch")]
        return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]

    def config_file(self, folder: Path) -> Path:
        """Write the settings that are given to train.py into the folder of an experiment; return the file."""
        content = yaml.safe_dump(self.given, sort_keys=False).encode()
        return write_once(folder / "configs" / f"{self.digest}.yaml", content)

    def hidden_folders(self, folder: Path) -> list[Path]:
        """Return the folders that its code must not see, with that of the experiment; [] if it has no sandbox."""
        if not (self.changes_code and sandbox.is_available()):
            return []
        return [folder, *hidden_checkouts(self.code)]

    def job(self, folder: Path, seed: int) -> Job:
        """Return the run with a seed, in the folder of an experiment."""
        run = Run(folder / "runs" / f"{self.digest}-{seed}")
        program = [str(PROGRAM), str(self.code), "train", str(delivered_file(run))]
        words = ["--config", str(self.config_file(folder)), "--seed", str(seed)]
        words += ["--name", run.path.name, "--out_dir", str(run.path.parent)]
        command = [*self.launch.command, *program, *words]
        if self.changes_code:  # what worker processes read would not be recorded
            command += ["--data.num_workers", "0"]
        if hidden := self.hidden_folders(folder):
            visible = [self.code, self.config_file(folder)]
            command = sandbox.command(command, hidden, visible, [run.path], network=self.needs_network)
        return Job(run, self.steps, tuple(command))


def delivered_file(run: Run) -> Path:
    """Return the path, without the rank, of what variant_program.py records of a run: see `train` there."""
    return run.path / "delivered"


def hidden_checkouts(code: Path) -> list[Path]:
    """Return the folder of all checkouts, if that is where this code is."""
    return [] if code == change.ROOT else [code.parent]


# Resolving settings


@dataclass(frozen=True)
class Recipe:
    """The baseline of an experiment."""

    commit: str | None
    """None outside of a git repository: the code is this folder."""
    words: list[str]
    """Settings of train.py for all runs."""
    launch: Launch
    checkouts: Checkouts
    settings: tuple[tuple[str, Any], ...] = ()
    """Settings that follow the words."""
    data: dict[str, Any] | None = None
    """Settings of other data, in place of those of `data` that are given; None: these."""
    config_files: dict[Path, str] = field(default_factory=dict)
    """Content of each config file, which is read once, so that edits during an experiment reach no run."""
    is_stopped: Callable[[], bool] = lambda: False
    """Whether a stop signal was received."""
    experiments: Path | None = None
    """The directory of experiments, which the code of ideas must not see: they have the seeds of test data."""

    @property
    def name(self) -> str:
        """The commit and the settings of all runs, for a reader."""
        return f"{(self.commit or 'this folder')[:12]} {' '.join(self.words)}"

    def until_stopped(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items, each of which takes about a second of work; after a stop signal raise SystemExit."""
        for item in items:
            if self.is_stopped():
                raise_stopped()
            yield item

    def variants(self, stacks: Iterable[Sequence[Idea]]) -> list["Variant | ConfigError | RunError"]:
        """Return the variant with each sequence of ideas, or why there is none.

        ConfigError: the ideas conflict, or the code refuses the settings. RunError: the code crashes. All variants of
        one code are resolved by one process. A stop signal raises SystemExit.
        """
        stacks = [tuple(stack) for stack in stacks]
        found: dict[int, Variant | ConfigError | RunError] = {}
        requests: dict[Path, dict[int, dict[str, Any]]] = {}
        for index, stack in self.until_stopped(enumerate(stacks)):
            try:
                code = self.checkouts.folder(change.merge(self.commit, stack))
                given = given_settings(self.words, code, self.config_files)
                for idea in stack:
                    given |= given_settings(idea.settings, code, self.config_files)
                    given |= {name: scaled(name, given, factor) for name, factor in idea.factors.items()}
                if self.data is not None:
                    given = {name: value for name, value in given.items() if not name.startswith("data.")} | self.data
                given |= dict(self.settings)
                requests.setdefault(code, {})[index] = given
            except Exception as error:
                found[index] = start_error(error)
        num_checked = len(found)

        def say_checked(index: int) -> None:
            nonlocal num_checked
            if stacks[index]:
                num_checked += 1
                name = " + ".join(idea.name for idea in stacks[index])
                total = sum(map(bool, stacks))
                print(f"checked{f' {num_checked} / {total}' if total > 1 else ''}: {name}", file=sys.stderr)

        with ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as pool:
            for resolved in pool.map(lambda code: self._resolve(code, requests[code], say_checked), requests):
                found |= resolved
        if self.is_stopped():
            raise_stopped()
        for index, stack in enumerate(stacks):
            if isinstance(variant := found[index], Variant):
                name = " + ".join(filter(None, (idea.code_name for idea in stack)))
                found[index] = replace(variant, code_name=name)
        return [found[index] for index in range(len(stacks))]

    def variant(self) -> Variant:
        """Return the baseline; raise the errors of `variants`."""
        [variant] = self.variants([()])
        if isinstance(variant, Exception):
            raise variant
        return variant

    def _resolve(
        self, code: Path, requests: dict[int, dict[str, Any]], say_checked: Callable[[int], None]
    ) -> dict[int, "Variant | ConfigError | RunError"]:
        """Resolve settings by the code in a folder."""
        baseline = self.checkouts.folder(self.commit)
        command = [sys.executable, str(PROGRAM), str(code), "resolve", str(baseline)]
        if code != baseline and sandbox.is_available():
            files = self.experiments.glob("*/experiment.json") if self.experiments else ()
            hidden = [*hidden_checkouts(code), *(file.parent for file in files)]
            command = sandbox.command(command, hidden, [code, baseline])
        # A killed program leaves its temporary files in the folder of the checkouts, which is removed.
        answers = ask(
            command,
            [json.dumps(given) for given in requests.values()],
            self.is_stopped,
            lambda number: say_checked(list(requests)[number]),
            max_silence=lambda: MAX_CHECK_SECONDS,
            TMPDIR=str(self.checkouts.parent),
        )
        try:
            own_hash = code_hash(code)
        except Exception as error:
            return dict.fromkeys(requests, start_error(error))
        return {
            index: self._variant(answer, code, own_hash, code != baseline, given)
            for answer, (index, given) in zip(answers, requests.items(), strict=False)  # fewer after a stop signal
        }

    def _variant(
        self, answer: Answer, code: Path, own_hash: str, changes_code: bool, given: dict[str, Any]
    ) -> "Variant | ConfigError | RunError":
        """Return the variant that its code describes."""
        if not isinstance(answer, str):
            return RunError(f"does not start: {last_error(answer, code)}")
        try:
            facts = parse_object(answer)
            if "refused" in facts:
                return ConfigError(facts["refused"])
            if "crash" in facts:
                return RunError(f"does not start: {facts['crash']}")
            settings, warnings = facts["settings"], tuple(facts["warnings"])
            cost, inputs = (facts["parameters"], facts["flops_per_token"]), input_hashes(settings)
            own = own_hash, changes_code, self.launch, given, settings, *cost, inputs, warnings
            variant = Variant(code, *own, facts["validation_rows"])
            if not (variant.parameters > 0 and 0 < variant.flops < math.inf and variant.digest):
                return RunError(f"does not start: {variant.parameters} parameters, {variant.flops} FLOPs")
            return variant
        except Exception as error:  # whatever the code answers
            return start_error(error)


def given_settings(words: Sequence[str], code: Path, config_files: dict[Path, str]) -> dict[str, Any]:
    """Return the settings that a command line of train.py gives, by `section.name`; later ones win.

    The file of a --config in this repository is that of `code`, so that uncommitted edits of it reach no run. What is
    read is added to `config_files`.
    """
    given: dict[str, Any] = {}
    words = list(words)
    while words:
        option, equals, value = words.pop(0).partition("=")
        if not option.startswith("--"):
            raise ConfigError(f"{option}: not an option; settings are given as --section.setting VALUE")
        if not equals:
            if not words:
                raise ConfigError(f"{option.removeprefix('--')}: has no value")
            value = words.pop(0)
        if option == "--config":
            given |= read_config(value, code, config_files)
        else:
            given[option.removeprefix("--")] = read_yaml(value) if value[:1] in ("[", "{") else parse_null(value)
    return given


def scaled(name: str, given: dict[str, Any], factor: float) -> float:
    """Return a factor times the value that a setting is given; raise ConfigError if it is given no number."""
    try:
        return float(f"{factor * float(given[name]):.6g}")
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"tune: {name}: {given.get(name)} is no number; give all runs one") from None


def parse_null(value: str) -> str | None:
    """Return None for null; other values stay text, which the code of the variant parses."""
    return None if value == "null" else value


def read_config(name: str, code: Path, config_files: dict[Path, str]) -> dict[str, Any]:
    """Return the settings of a config file by `section.name`."""
    file = Path(os.path.abspath(expand_user_path("config", name)))
    is_in_code = code != change.ROOT and file.is_relative_to(change.ROOT)
    is_first = file not in config_files
    try:
        if is_first:
            config_files[file] = file.read_text()
        text = config_files[file]
        if is_in_code and (of_code := code / file.relative_to(change.ROOT)).is_file():
            text = of_code.read_text()
            if is_first and text != config_files[file]:
                print(f"{name}: its uncommitted changes are in no run, except in those of the idea .", file=sys.stderr)
        settings = read_yaml(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {name}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"config: {name}: no line has the form `setting: value`")
    return flat_settings(settings)


def last_error(done: subprocess.CompletedProcess[str], code: Path) -> str:
    """Return the last line that a failed program printed, and its innermost frame in `code`, as (model/gpt.py:12)."""
    line = next(iter(done.stderr.strip().splitlines()[-1:]), f"exit code {done.returncode}").removeprefix(ERROR)
    frames = re.findall(r'File "(.+?)", line (\d+)', done.stderr)
    in_code = [(Path(file), line) for file, line in frames if Path(file).is_relative_to(code)]
    in_code = [(file.relative_to(code), line) for file, line in in_code if "site-packages" not in file.parts]
    return f"{line} ({in_code[-1][0]}:{in_code[-1][1]})" if in_code else line


def start_error(error: Exception) -> ConfigError | RunError:
    """Return the error of a variant that could not be resolved: whatever its code or files cause, others race on."""
    if isinstance(error, ConfigError):
        return error
    return RunError(f"does not start: {describe_error(error)}")


def describe_error(error: BaseException) -> str:
    """Return an error that the code or the files of an idea have caused, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def is_shared(name: str) -> bool:
    """Return whether all runs of a variant have the same value of a setting."""
    return name not in PER_RUN_SETTINGS and name.partition(".")[0] not in PER_RUN_SECTIONS


def input_hashes(settings: dict[str, Any]) -> tuple[str, ...]:
    """Return hashes of the corpora, and of the weights and moments that init_from, branch_from and teacher.path name.

    A name on the Hub has no hash here.
    """
    hashes = [*corpus_hashes(settings).values()]
    for name in ("init_from", "branch_from", "teacher.path"):
        if settings.get(name) and (folder := Path(settings[name]).expanduser()).is_dir():
            # A manifest has the checksums of its checkpoint; the folder of a model has none.
            files = sorted(folder.rglob("manifest.json")) or sorted(folder.glob("*.safetensors"))
            hashes += map(file_hash, [*files, folder / "config.json"])
    return tuple(hashes)


def corpus_hashes(settings: dict[str, Any]) -> dict[str, str]:
    """Return the hash of the content of each corpus by its path, "" if there is none; {} for generated data."""
    corpora = settings.get("data.mix") or filter(None, [settings.get("data.path")])
    files = {str(corpus): Path(corpus).expanduser() / "metadata.json" for corpus in corpora}
    return {name: parse_object(file.read_bytes())["hash"] if file.is_file() else "" for name, file in files.items()}


def file_hash(file: Path) -> str:
    """Return the SHA-256 of a file; "" if there is none."""
    return hash_file(file) if file.is_file() else ""


def check_targets(baseline: Variant, variant: Variant) -> None:
    """Raise ConfigError if the settings of a variant change which tokens are predicted."""
    for name, value in variant.settings.items():
        is_target = name in TARGET_SETTINGS or (name.startswith("data.") and name not in NOT_TARGET_SETTINGS)
        if is_target and baseline.settings.get(name) != value:
            raise ConfigError(f"{name}: {value} changes which tokens are predicted; give it to all runs")


# Scaling


def scale_steps(variant: Variant, factor: float) -> Variant:
    """Return the variant on `factor` times the steps, with a schedule of the same shape and samples in proportion."""
    changes = {}
    for name in ("steps", "schedule.warmup_steps", "schedule.decay_steps", "schedule.batch_warmup_steps"):
        if value := variant.settings.get(name):
            changes[name] = max(1, round(factor * value))
    if "schedule.decay_steps" in changes:  # each was rounded independently
        longest = changes["steps"] - changes.get("schedule.warmup_steps", 0)
        changes["schedule.decay_steps"] = max(1, min(changes["schedule.decay_steps"], longest))
    if variant.settings["data.source"] != "text":
        changes["data.num_samples"] = max(1, round(factor * variant.settings["data.num_samples"]))
    return variant.changed(changes) if factor != 1 else variant


def scale_parameters(variant: Variant, factor: float, baseline: Variant) -> Variant:
    """Return the variant with `factor` times the parameters in its blocks, and tokens in proportion.

    Width, feed-forward width and number of heads grow with the square root, so heads keep their size; depth stays, and
    the learning rate falls with the width as in tools/scale/recipe.py. Heads are whole, so the width grows by somewhat
    more or less than the square root. It grows as that of the baseline, or the idea would be compared with another
    width.

    Raises:
        ConfigError: the heads of the variant would not be whole.
    """
    if factor == 1:
        return variant
    settings, widening = variant.settings, math.sqrt(factor)
    changes = {
        "model.d_ff": WIDTH_STEP * round(widening * settings["model.d_ff"] / WIDTH_STEP),
        "optimizer.lr": settings["optimizer.lr"] * widening**LR_POWER,
    }
    for name, growth in growth_of_width(baseline, widening).items():
        if value := settings[name]:
            if (growth * value).denominator != 1:
                raise ConfigError(
                    f"{name}: {value} cannot grow {float(growth):.4g} times, as the width of the baseline does at "
                    f"{factor:g} times the parameters; a square number of times, such as 4, suits all ideas"
                )
            changes[name] = int(growth * value)
    larger = replace(variant.changed(changes), flops_per_token=factor * variant.flops_per_token)
    return scale_steps(larger, factor)


def growth_of_width(baseline: Variant, widening: float) -> dict[str, Fraction]:
    """Return by how much the width and the heads of all variants grow, where those of the baseline stay whole."""
    settings = baseline.settings
    heads, width = settings["model.n_heads"], settings["model.d_model"]
    queries_per_key = heads // (settings["model.n_kv_heads"] or heads)
    larger = queries_per_key * max(1, round(widening * heads / queries_per_key))
    of_heads = Fraction(larger, heads)
    # The width is no multiple of the heads if model.head_dim is given.
    of_width = Fraction(width // heads * larger, width)
    return {"model.d_model": of_width, "model.n_heads": of_heads, "model.n_kv_heads": of_heads}
