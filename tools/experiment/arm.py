"""Recipes, which ideas change, and arms: code, launch and settings that are trained with one seed or several."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from checkpoint.identity import code_hash
from config.errors import ConfigError, RunError
from config.paths import expand_user_path
from config.schema import flat_settings
from run.directory import Run
from storage.files import sha256 as hash_file
from storage.files import write_once
from tools.experiment import change
from tools.experiment.change import Checkouts, Idea
from tools.jobs.launch import Launch
from tools.jobs.runner import Job
from tools.scale.recipe import LR_POWER

# Settings and sections in which the runs of one arm may differ.
PER_RUN_SETTINGS = {"name", "out_dir", "resume", "seed", "stop_after"}
PER_RUN_SECTIONS = {"tracking", "checkpoint"}
EXIT_REFUSED = 2  # train.py's exit code for wrong settings
ERROR = "train.py: error: "
WIDTH_STEP = 8  # a scaled model.d_ff is a multiple of this
CANDIDATE = Path(__file__).with_name("candidate.py")


@dataclass(frozen=True)
class Recipe:
    """What the ideas of a lab change: a commit, settings, and the command that starts runs."""

    lab: Path
    commit: str | None
    """None outside of a git repository: the code is this folder."""
    words: list[str]
    """Settings of train.py for all runs."""
    launch: Launch
    checkouts: Checkouts
    config_files: dict[Path, str] = field(default_factory=dict)
    """Copy of each config file."""

    def arm(self, ideas: Iterable[Idea] = (), commit: str | None = None) -> "Arm":
        """Return the arm with some ideas on; its settings are resolved by its own code.

        Args:
            ideas: in the order in which they are merged.
            commit: a commit that has the patches of the ideas; by default one is made.

        Raises:
            ConfigError: the patches of the ideas conflict, or the code refuses the settings.
            RunError: the code crashes.
        """
        ideas = [*ideas]
        code = self.checkouts.folder(commit or change.merge(self.commit, ideas))
        words = self.copy_config_files([*self.words, *(word for idea in ideas for word in idea.settings)], code)
        done = run_program([sys.executable, str(code / "train.py"), *words, "--print_config"])
        if done.returncode == EXIT_REFUSED:
            message = done.stderr.strip().removeprefix(ERROR)
            raise ConfigError(re.sub(rf"{re.escape(str(self.lab / 'configs'))}/[0-9a-f]+/", "", message))
        if done.returncode:
            raise RunError(f"does not start: {last_error(done, code)}")
        settings = flat_settings(yaml.safe_load(done.stdout))
        if settings["name"] is None:  # as train.py derives it, from the last config file
            last = max(index for index, word in enumerate(words) if word.startswith("--config"))
            settings["name"] = Path(words[last].partition("=")[2] or words[last + 1]).stem
        is_judged = code != self.checkouts.folder(self.commit)
        inputs = input_hashes(settings)
        return Arm(code, code_hash(code), self.launch, tuple(words), settings, self.lab, inputs, is_judged)

    def copy_config_files(self, words: list[str], code: Path) -> list[str]:
        """Return the words with the paths of copies of the config files, so that edits reach no run.

        If the code has the file too, its version is copied.
        """

        def copy(name: str) -> str:
            file = Path(os.path.abspath(expand_user_path("config", name)))
            if file.is_relative_to(change.ROOT) and (own := code / file.relative_to(change.ROOT)).is_file():
                if own.read_bytes() != file.read_bytes() and code == self.checkouts.folder(self.commit):
                    print(f"{file}: its uncommitted changes are not in the baseline", file=sys.stderr)
                file = own
            if file not in self.config_files and file.is_file():
                content = file.read_bytes()  # train.py derives the name of a run from that of the file
                path = self.lab / "configs" / sha256(content).hexdigest()[:12] / file.name
                self.config_files[file] = str(write_once(path, content))
            return self.config_files.get(file, name)

        copied = []
        for before, word in pairwise(["", *words]):
            option, equals, value = word.partition("=")
            if before == "--config":
                word = copy(word)
            elif option == "--config" and equals:
                word = f"--config={copy(value)}"
            copied.append(word)
        return copied


@dataclass(frozen=True)
class Arm:
    """Code, launch and settings of runs in a lab."""

    code: Path
    """Folder of train.py."""
    code_hash: str
    launch: Launch
    words: tuple[str, ...]
    """Command line without name, seed and output folder; its config files are copies, which edits do not reach."""
    settings: dict[str, Any]
    """Settings that the words resolve to in this code, by `section.name`."""
    lab: Path
    inputs: tuple[str, ...] = ()
    """Hashes of the corpora and of the initial weights."""
    is_judged: bool = False
    """Whether the code is not trusted: tools/experiment/judge.py then computes the loss of its runs."""

    def changed(self, settings: dict[str, Any]) -> "Arm":
        """Return the arm with other values of settings."""
        written = {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}
        words = tuple(f"--{name}={value}" for name, value in written.items())
        return replace(self, words=(*self.words, *words), settings=self.settings | settings)

    @cached_property
    def digest(self) -> str:
        """Hash of the settings, code, launch and inputs, which differs between arms."""
        shared = {name: value for name, value in self.settings.items() if is_shared(name)}
        facts = [shared, self.code_hash, self.launch.identity, self.inputs]
        return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """Prefix of the names of its runs."""
        return f"{self.settings['name']}-{self.digest}"

    def job(self, seed: int) -> Job:
        """Return the run with a seed."""
        run = Run(self.lab / "runs" / f"{self.name}-{seed}")
        program = [str(self.code / "train.py")]
        if self.is_judged:
            hashes = self.lab / "hashes" / run.path.name
            program = [str(CANDIDATE), str(self.code), "train", str(hashes)]
        own = ["--name", run.path.name, "--seed", str(seed), "--out_dir", str(run.path.parent)]
        command = (*self.launch.command, *program, *self.words, *own)
        return Job(run, self.settings["steps"], command, keep_checkpoints=self.is_judged)


def run_program(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program on one thread, in a session of its own, because Ctrl-C is for tools.experiment to handle."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, start_new_session=True, **options)


def last_error(done: subprocess.CompletedProcess[str], code: Path) -> str:
    """Return the last line that a failed program printed, and its innermost frame in `code`, as (model/gpt.py:12)."""
    line = next(iter(done.stderr.strip().splitlines()[-1:]), f"exit code {done.returncode}").removeprefix(ERROR)
    frames = re.findall(r'File "(.+?)", line (\d+)', done.stderr)
    own = [(Path(file), line) for file, line in frames if Path(file).is_relative_to(code)]
    own = [(file.relative_to(code), line) for file, line in own if "site-packages" not in file.parts]
    return f"{line} ({own[-1][0]}:{own[-1][1]})" if own else line


def is_shared(name: str) -> bool:
    """Return whether all runs of an arm have the same value of a setting."""
    return name not in PER_RUN_SETTINGS and name.partition(".")[0] not in PER_RUN_SECTIONS


def input_hashes(settings: dict[str, Any]) -> tuple[str, ...]:
    """Return hashes of the corpora, and of the weights and moments that init_from, branch_from and teacher.path name.

    A name on the Hub has no hash here.
    """
    corpora = settings.get("data.mix") or filter(None, [settings.get("data.path")])
    hashes = [file_hash(Path(corpus).expanduser() / "metadata.json") for corpus in corpora]
    for name in ("init_from", "branch_from", "teacher.path"):
        if settings.get(name) and (folder := Path(settings[name]).expanduser()).is_dir():
            # A manifest has the checksums of its checkpoint; the folder of a model has none.
            files = sorted(folder.rglob("manifest.json")) or sorted(folder.glob("*.safetensors"))
            hashes += map(file_hash, [*files, folder / "config.json"])
    return tuple(hashes)


def file_hash(file: Path) -> str:
    """Return the SHA-256 of a file; "" if there is none."""
    return hash_file(file) if file.is_file() else ""


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
