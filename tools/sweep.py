"""Train many runs: python -m tools.sweep --optimizer.lr 1e-3,3e-4 --seed 0,1,2 [settings of train.py].

Every setting with several values, separated by commas, is swept: each combination is a run, whose name ends in the
swept values. Rerun the same command to resume. The table of tools.compare is printed at the end.
"""

from dataclasses import replace
from typing import Annotated

from model.settings import PositiveInt, Settings
from runtime.config.help import PASSED_ON


class SweepConfig(Settings):
    """Trains a run for every combination of values of train.py's settings, as --optimizer.lr 1e-3,3e-4 --seed 0,1,2."""

    arguments: Annotated[list[str], PASSED_ON]
    """Settings of train.py; those to sweep have several values, separated by commas."""

    jobs: PositiveInt | None = None
    """Number of runs at once, each on a part of the cores or on its own GPU. null: one for each GPU, else one for each
    core, but not more than 8; with `launch` one."""

    launch: str | None = None
    """Command that starts a run, such as "accelerate launch --config_file X". null: python."""


if __name__ == "__main__":  # before anything slow is imported; it calls `main` below and never returns
    from runtime.cli.scripts import run_and_exit

    run_and_exit("tools.sweep", SweepConfig, needs_torch=False)

import itertools
import json
import re
import shlex
from collections import Counter
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from runtime.config.errors import ConfigError, RunError
from runtime.config.parser import parse_config
from runtime.config.schema import TrainConfig
from runtime.config.stored_settings import read_settings
from runtime.files import write_once
from tools import compare
from tools.jobs.launch import Launch
from tools.jobs.runner import Job, JobRunner, raise_stopped
from trainer.checkpoint.identity import code_hash, compare_facts, compare_versions
from trainer.run.directory import Run, surviving_sessions
from trainer.run.resume import check_resume, with_stored_model

TRAIN = str(Path(__file__).parents[1] / "train.py")
NAMING_SETTINGS = ("config", "name")  # settings that name the runs themselves when they are swept
OPENING_BRACKETS, CLOSING_BRACKETS = "[{(", "]})"
MAX_NAME_BYTES = 255 - len(".old-99")  # of a directory, with room for the suffix when it is moved aside


def main(config: SweepConfig) -> None:
    """Train the runs that are not finished, then compare all.

    Raises:
        ConfigError: a setting of one of the runs is wrong; none was started.
        RunError: a run has failed; the others were trained.
        SystemExit: with code 75 after a signal, or where a run was stopped; rerun the same command to resume.
    """
    launch = Launch.parse(config.launch)
    facts = {"mixed_precision": launch.precision, "torch": version("torch"), "code": code_hash()}
    runs = plan_sweep(config.arguments, facts)
    runner = JobRunner(config.jobs or (1 if config.launch else None))
    runner.code, runner.show_output = facts["code"], runner.max_running == 1
    wanted, outcomes, error = {}, {}, None
    for settings in runs:
        path = run_path(settings)
        if is_finished(settings) and launch.precision is not None:
            outcomes[path] = "finished before"
        else:
            command = (*launch.command, TRAIN, "--config", str(write_run_config(settings)))
            job = Job(Run(path), settings.steps, command)
            wanted[path] = replace(job, restart=job.is_finished())
    try:
        runner.train(wanted.values(), until_failure=False)
    except (SystemExit, RunError) as raised:
        error = raised
    outcomes |= {path: runner.outcomes.get(job, "not started") for path, job in wanted.items()}
    paths = [run_path(settings) for settings in runs]
    for path in paths:
        print(f"{path.name}: {outcomes[path]}")
    if not runner.signal and (trained := [str(path) for path in paths if (path / "config.yaml").exists()]):
        print()
        compare.main(compare.CompareConfig(runs=trained, out=None))
    if num_failed := [*outcomes.values()].count("failed"):
        raise RunError(f"{num_failed} of {len(runs)} runs failed; see their own messages")
    if error:
        raise error
    if "stopped" in outcomes.values():
        raise_stopped()


def plan_sweep(arguments: list[str], facts: dict[str, str | None]) -> list[TrainConfig]:
    """Return the resolved settings of every run of a sweep, each with a unique name.

    Args:
        arguments: settings of train.py, some with several values.
        facts: `mixed_precision`, `torch` and `code` of the runs.

    Raises:
        ConfigError: a combination is wrong, two runs have the same name, or an existing run has other settings, another
            precision or torch, or other code.
    """
    runs: dict[str, TrainConfig] = {}
    for combination, swept in combine(arguments):
        try:
            config = parse_config(combination)
            if not config.has_steps:
                raise ConfigError("epochs or tokens: tools.sweep needs the length of its runs as --steps")
        except SystemExit:
            raise ConfigError("arguments: --help and --print_config are options of train.py; leave them out") from None
        except ConfigError as error:
            raise ConfigError(f"{error}\n(in the combination {shlex.join(combination)})") from None
        group = config.name
        config = config.replace(name=f"{group}{''.join(name_suffixes(swept, config.flat()))}")
        if config.name != group and config.tracking.tracker == "wandb" and config.tracking.group is None:
            config = config.replace(**{"tracking.group": group})
        if config.name in runs:
            raise ConfigError(f"name: two runs of this sweep would be named {config.name!r}; give each value once")
        if len(str(config.name).encode()) > MAX_NAME_BYTES:
            raise ConfigError(f"name: {config.name!r} is too long for a directory; sweep over config files")
        runs[str(config.name)] = config
        stored = None if config.resume == "never" else read_settings(run_path(config) / "config.yaml")
        if stored:
            check_existing_run(config, stored, facts)
    return [*runs.values()]


def check_existing_run(config: TrainConfig, stored: dict[str, Any], facts: dict[str, str | None]) -> None:
    """Raise ConfigError unless the existing run in the directory of a run of the sweep has its settings and code.

    Finished runs are not started, so train.py would not check them.
    """
    # Settings.
    run = Run(run_path(config))
    if config.init_from is not None:  # train.py copies the model's settings from there
        config = with_stored_model(config, stored)
    check_resume(run, config, next(iter(run.manifests().values()), None))

    # Launch, torch and code of the sessions that trained it.
    status = run.status()
    completed = status.step if status else 0
    trained = [session for session in surviving_sessions(run.sessions(), completed) if session.step < completed]
    different = [
        f"{name}: {getattr(session, name)} in the run, {facts[name]} now"
        for session in trained
        for name in compare_facts(vars(session), facts) + compare_versions(vars(session), facts)
    ]
    if different:
        lines = "\n  ".join(dict.fromkeys(different))
        raise ConfigError(
            f"{run.path} has a run of another launch, torch or code:\n  {lines}\nchoose another --name or --out_dir"
        )


def combine(arguments: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    """Return the command line of every run, and the value of each swept setting in it."""
    choices = []  # for each word, its alternatives: (word, swept setting or None, value)
    option = ""
    for word in arguments:
        if not word.startswith("--"):
            prefix, values = "", split_values(word)
        elif "=" in word:
            option, _, value = word.partition("=")
            prefix, values = f"{option}=", split_values(value)
        else:
            option, prefix, values = word, "", [word]
        swept = option.removeprefix("--") if len(values) > 1 else None
        choices.append([(prefix + value, swept, value) for value in values])
    return [
        ([word for word, _, _ in chosen], {swept: value for _, swept, value in chosen if swept})
        for chosen in itertools.product(*choices)
    ]


def split_values(text: str) -> list[str]:
    """Split at commas, except inside brackets, as in [0.9,0.95]."""
    depth, parts = 0, [""]
    for character in text:
        depth += (character in OPENING_BRACKETS) - (character in CLOSING_BRACKETS)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def name_suffixes(swept: dict[str, str], settings: dict[str, object]) -> list[str]:
    """Return a suffix for the name of a run for each swept setting, such as -lr_0.001."""
    names = [name for name in swept if name not in NAMING_SETTINGS]
    count = Counter(name.rpartition(".")[2] for name in names)
    suffixes = []
    for name in names:
        last_word = name.rpartition(".")[2]
        value = re.sub(r"[^\w.+-]+", "_", str(settings.get(name, swept[name]))).strip("_")
        suffixes.append(f"-{last_word if count[last_word] == 1 else name}_{value}")
    return suffixes


def run_path(config: TrainConfig) -> Path:
    return Path(config.out_dir).expanduser() / str(config.name)


def write_run_config(config: TrainConfig) -> Path:
    """Write the settings of a run into a file named by the hash of its content, and return its path.

    Editing config files during a sweep therefore changes no run. Model settings that init_from determines are left out.
    """
    settings = config.model_dump(mode="json")
    if config.init_from is not None:
        given = config.model.model_fields_set
        settings["model"] = {name: value for name, value in settings["model"].items() if name in given}
    content = yaml.safe_dump(settings, sort_keys=False).encode()
    folder = run_path(config).parent / "logs" / "configs"
    try:
        return write_once(folder / f"{sha256(content).hexdigest()[:12]}.yaml", content)
    except OSError as error:
        problem = f"out_dir: {config.out_dir!r} cannot be written: {error.strerror}"
        raise ConfigError(f"{problem}; name another one") from None


def is_finished(config: TrainConfig) -> bool:
    """Return whether a run has completed all its steps and need not be started.

    If its inputs or schedule have changed, or the corpus is another one, train.py is started, which resumes the run
    or refuses it.
    """
    path, now = run_path(config), config.flat()
    stored, completed = read_settings(path / "config.yaml"), Run(path).is_finished(config.steps)
    checked = ("data.path", "data.mix", "init_from", "branch_from", "teacher.path", "steps")
    if not completed or stored is None or any(stored[name] != now[name] for name in checked):
        return False
    corpora = [Path(corpus).expanduser() / "metadata.json" for corpus in config.data.corpora]
    try:
        hashes = [json.loads(corpus.read_text())["hash"] for corpus in corpora if corpus.exists()]
    except (OSError, ValueError, KeyError, TypeError):  # train.py says what is wrong with the corpus
        return False
    is_same_corpus = len(hashes) < len(corpora) or "+".join(hashes) == (stored["data.hash"] or "")
    return is_same_corpus and config.resume != "never"
