"""An arm of an experiment: code, launch and settings, and the runs that train them."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from checkpoint.identity import code_hash
from config.errors import ConfigError, RunError
from config.schema import flat_settings
from data.files import sha256 as hash_file
from run.directory import Run, surviving_sessions
from tools.experiment.config_files import copy_config_files
from tools.jobs.launch import Launch
from tools.jobs.runner import Job

# Settings and sections in which the runs of one arm may differ.
PER_RUN_SETTINGS = {"name", "out_dir", "resume", "seed", "stop_after"}
PER_RUN_SECTIONS = {"tracking", "checkpoint"}
# Facts of a session that all runs of an arm share.
SESSION_FACTS = ("mixed_precision", "processes", "shards", "code")
EXIT_REFUSED = 2  # train.py's exit code for wrong settings


class ArmFailed(Exception):
    """An arm cannot be trained or measured; the message says why."""


@dataclass(frozen=True)
class Arm:
    """Code, launch and settings that are trained with several seeds."""

    code: Path
    """Folder of train.py."""
    code_hash: str
    launch: Launch
    words: tuple[str, ...]
    """Command line without name, seed and output folder; its config files are copies, which edits do not reach."""
    settings: dict[str, Any]
    """Settings that the words resolve to in this code, by `section.name`."""
    runs: Path
    inputs: tuple[str, ...] = ()
    """Hashes of the corpora and of the initial weights."""
    first_seed: int = 0

    @classmethod
    def resolve(cls, code: Path, launch: Launch, words: list[str], runs: Path) -> "Arm":
        """Resolve the words to settings with the arm's own code.

        Raises:
            ConfigError: the code refuses the words.
            ArmFailed: the code crashes.
        """
        copies = runs.parent / "configs"
        words = copy_config_files(words, copies, code)
        done = subprocess.run(
            [sys.executable, str(code / "train.py"), *words, "--print_config"],
            capture_output=True,
            text=True,
            start_new_session=True,  # Ctrl-C is for tools.experiment to handle
        )
        if done.returncode:
            message = done.stderr.strip().removeprefix("train.py: error: ") or f"exit code {done.returncode}"
            message = re.sub(rf"{re.escape(str(copies))}/[0-9a-f]+/", "", message)
            if done.returncode == EXIT_REFUSED:
                raise ConfigError(message)
            raise ArmFailed(f"does not start: {message.splitlines()[-1]}{last_frame(message, code)}")
        settings = flat_settings(yaml.safe_load(done.stdout))
        if settings["name"] is None:  # as train.py derives it, from the last config file
            last = max(index for index, word in enumerate(words) if word.startswith("--config"))
            settings["name"] = Path(words[last].partition("=")[2] or words[last + 1]).stem
        return cls(code, code_hash(code), launch, tuple(words), settings, runs, input_hashes(settings))

    def changed(self, settings: dict[str, Any]) -> "Arm":
        """Return the arm with other values of settings."""
        written = {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}
        words = tuple(f"--{name}={value}" for name, value in written.items())
        return replace(self, words=self.words + words, settings=self.settings | settings)

    @property
    def compared_settings(self) -> dict[str, Any]:
        """Settings that every run of the arm shares."""
        return {name: value for name, value in self.settings.items() if is_shared(name)}

    @cached_property
    def digest(self) -> str:
        """Hash of the settings, code, launch and inputs, which differs between arms."""
        facts = [self.compared_settings, self.code_hash, self.launch.identity, self.inputs]
        return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """Prefix of the names of its runs."""
        return f"{self.settings['name']}-{self.digest}"

    @property
    def train_tokens(self) -> int:
        """Training tokens of its first run."""
        return int(self.job(0).run.newest_metrics()["train/tokens"])

    def job(self, index: int) -> Job:
        """Return the run with the seed `first_seed + index`."""
        seed = self.first_seed + index
        name = f"{self.name}-{seed}"
        own = ["--name", name, "--seed", str(seed), "--out_dir", str(self.runs)]
        command = (*self.launch.command, str(self.code / "train.py"), *self.words, *own)
        # The scorer evaluates the weights of the first run; of the others, only metrics are compared.
        return Job(Run(self.runs / name), self.settings["steps"], command, keep_checkpoints=index == 0)

    def losses(self, n: int, metric: str = "val/loss") -> list[float]:
        """Return a metric at the last step of the first n runs, all of them finished and checked.

        Raises:
            ConfigError: one of the runs is not of this arm.
            RunError: one lacks the metric.
        """
        self.check_runs(n)
        values = []
        for job in map(self.job, range(n)):
            row = job.run.newest_metrics()
            if row["step"] != job.steps or not isinstance(row.get(metric), float):
                raise RunError(f"{job.run.path} has no {metric} of its last step")
            values.append(row[metric])
        return values

    def check_runs(self, n: int) -> None:
        """Raise ConfigError unless the first n runs were trained as this arm describes, and all in the same way."""
        expected = {name: value for name, value in self.compared_settings.items() if value is not None}
        if self.settings.get("init_from"):  # the model's settings are copied from there
            expected = {name: value for name, value in expected.items() if not name.startswith("model.")}
        launch = {"mixed_precision": self.launch.precision, "processes": self.launch.processes}
        expected |= {name: value for name, value in launch.items() if value is not None}
        # Facts of the first run. Where the arm specifies nothing (an unknown precision), the others must equal it.
        shared: dict[str, Any] = {}
        for job in map(self.job, range(n)):
            for actual in identities(job.run.path, job.steps):
                shared = shared or actual
                wanted = shared | expected
                wrong = [
                    f"{name}: {actual.get(name)} there, {wanted.get(name)} in this arm"
                    for name in sorted(wanted.keys() | actual.keys())
                    if actual.get(name) != wanted.get(name)
                ]
                if wrong:
                    lines = "\n  ".join(wrong)
                    raise ConfigError(
                        f"{job.run.path} is not a run of this arm:\n  {lines}\nmove it away, or choose another --lab"
                    )

    def validation_text(self) -> str | None:
        """Return the hash of the text that it is evaluated on, independent of the tokenizer; None if unknown."""
        if self.settings["data.source"] != "text":
            return None
        from data.integrity import hash_validation_text  # imports pyarrow, which takes a while

        return hash_validation_text(corpora(self.settings))


def last_frame(text: str, code: Path) -> str:
    """Return the innermost frame of a traceback in the folder `code`, as " (model/gpt.py:12)"; "" if there is none."""
    frames = re.findall(r'File "(.+?)", line (\d+)', text)
    own = [(Path(file), line) for file, line in frames if Path(file).is_relative_to(code)]
    own = [(file.relative_to(code), line) for file, line in own if "site-packages" not in file.parts]
    return f" ({own[-1][0]}:{own[-1][1]})" if own else ""


def is_shared(name: str) -> bool:
    """Return whether all runs of an arm have the same value of a setting."""
    return name not in PER_RUN_SETTINGS and name.partition(".")[0] not in PER_RUN_SECTIONS


def corpora(settings: dict[str, Any]) -> list[Path]:
    """Return the folders of the corpora that settings name."""
    paths = settings.get("data.mix") or filter(None, [settings.get("data.path")])
    return [Path(path).expanduser() for path in paths]


def input_hashes(settings: dict[str, Any]) -> tuple[str, ...]:
    """Return hashes of the corpora, and of the weights and moments that init_from and branch_from name.

    A name on the Hub has no hash here; `Arm.check_runs` and `check_trained_alike` compare the hashes of the weights
    that the runs loaded.
    """
    hashes = [file_hash(corpus / "metadata.json") for corpus in corpora(settings)]
    for name in ("init_from", "branch_from"):
        if settings.get(name) and (folder := Path(settings[name]).expanduser()).is_dir():
            # A manifest has the checksums of its checkpoint; the folder of a model has none.
            files = sorted(folder.rglob("manifest.json")) or sorted(folder.glob("*.safetensors"))
            hashes += map(file_hash, [*files, folder / "config.json"])
    return tuple(hashes)


def file_hash(file: Path) -> str:
    """Return the SHA-256 of a file; "" if there is none."""
    return hash_file(file) if file.is_file() else ""


def identities(run: Path, steps: int) -> list[dict[str, Any]]:
    """Return the settings of a run and the facts of each session that trained it; raise ConfigError if unreadable."""
    files = run / "config.yaml", run / "sessions.jsonl"
    try:
        return _identities(*files, steps, tuple(file.stat().st_mtime_ns for file in files))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise ConfigError(f"{run}: config.yaml or sessions.jsonl cannot be read ({error}); move it away") from None


@cache
def _identities(config: Path, sessions: Path, steps: int, _modified: tuple[int, ...]) -> list[dict[str, Any]]:
    stored = flat_settings(yaml.safe_load(config.read_text()))
    settings = {name: value for name, value in stored.items() if is_shared(name)}
    rows = Run(config.parent).sessions()
    if not rows:
        raise ValueError("no session is recorded")
    parents = [row.branched_from.digest for row in rows if row.branched_from]
    shared = settings | {"branched": parents[:1]}
    return [shared | {name: getattr(row, name) for name in SESSION_FACTS} for row in surviving_sessions(rows, steps)]


def check_trained_alike(baseline: Arm, candidate: Arm) -> None:
    """Raise ConfigError if the first runs of two arms had another launch or, from one `init_from`, other weights.

    Digests of arms do not show what a script that launches runs does, nor which weights a name on the Hub stands for.
    """
    names = [name for name in SESSION_FACTS if name != "code"]
    names += ["init_hash"] if baseline.settings.get("init_from") == candidate.settings.get("init_from") else []
    ours, theirs = (identities(arm.job(0).run.path, arm.settings["steps"])[0] for arm in (baseline, candidate))
    if different := [name for name in names if ours.get(name) != theirs.get(name)]:
        values = ", ".join(f"{name} {ours.get(name)} and {theirs.get(name)}" for name in different)
        raise ConfigError(
            f"idea: {baseline.name} and {candidate.name} were trained with different {values}; name another --lab to "
            "train both alike"
        )


def changed_settings(baseline: Arm, candidate: Arm) -> dict[str, list[Any]]:
    """Return the resolved settings in which two arms differ, as [baseline, candidate]."""
    settings = baseline.compared_settings, candidate.compared_settings
    pairs = {name: [one.get(name) for one in settings] for name in sorted(settings[0].keys() | settings[1].keys())}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
