"""Trains many runs: python sweep.py --optimizer.lr 1e-3,3e-4 --seed 0,1,2 [train.py's settings].

Every setting that is given several values, with commas between, is swept: there is a run for each combination, named by
what differs. Started again, the sweep goes on where it was. It ends in the table of compare.py.
"""

import itertools
import re
import shlex
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jsonargparse.typing import PositiveInt

import compare
from checkpoint.identity import code_hash, compare_facts, lasting_starts
from checkpoint.manifest import readable_checkpoints
from config.errors import ConfigError, RunError
from config.parser import own_arguments_first, parse_config
from config.resolve import replace_settings, with_stored_model
from config.schema import TrainConfig, flat_settings
from jobs.runner import JobRunner, Stopped, Training, launched_precision, parse_launcher
from run.metrics_log import read_rows
from run.resume import check_resume, differing_settings
from run.status import read_status
from run.stored_settings import read_settings

TRAIN = str(Path(__file__).with_name("train.py"))
NAME_THEMSELVES = ("config", "name")  # settings that give the runs their names when swept
OPEN, CLOSE = "[{(", "]})"
NAME_BYTES = 255 - len(".old-99")  # which a file system takes, also of a run that is moved aside


@dataclass
class SweepConfig:
    """Trains a run for every combination of values of train.py's settings, as --optimizer.lr 1e-3,3e-4 --seed 0,1,2."""

    arguments: list[str]
    """Settings of train.py, those to sweep with several values and commas between."""

    jobs: PositiveInt | None = None
    """Runs at once, each with its share of the cores or a GPU of its own. null: one for each GPU, else one for each
    core, but not more than 8; with `launch` one."""

    launch: str | None = None
    """What starts a run, as "accelerate launch --config_file X". null: python."""


def main(config: SweepConfig) -> None:
    """Train what is not finished, then compare all.

    Raises:
        ConfigError: a setting of one of the runs is wrong; then none was started.
        RunError: a run has failed; the others were trained.
        SystemExit: with 75 after a signal, or where a run was stopped as asked: the same command goes on.
    """
    launch = parse_launcher(config.launch)
    now = {"mixed_precision": launched_precision(launch), "code": code_hash()}
    runs, changed = plan(config.arguments, now), None
    trainings = JobRunner(config.jobs or (1 if config.launch else None))
    trainings.code, trainings.show_output = now["code"], trainings.max_running == 1
    wanted, outcomes = {}, {}
    for arguments, settings in runs:
        path = directory(settings)
        training = Training(path, settings.steps, (*launch, TRAIN, *arguments))
        if is_finished(settings) and now["mixed_precision"] is not None:
            outcomes[path] = "finished before"
        else:
            wanted[path] = replace(training, restart=training.is_finished())
    try:
        trainings.train(wanted.values(), until_failure=False)
    except Stopped:  # which the outcomes say
        pass
    except RunError as error:
        changed = error
    outcomes |= {path: trainings.outcomes.get(training, "not started") for path, training in wanted.items()}
    for _, settings in runs:
        print(f"{settings.name}: {outcomes[directory(settings)]}")
    trained = [str(directory(settings)) for _, settings in runs if (directory(settings) / "config.yaml").exists()]
    if trained and not trainings.signal:
        print()
        compare.main(compare.CompareConfig(trained, out=None))
    if failed := [*outcomes.values()].count("failed"):
        raise RunError(f"{failed} of {len(runs)} runs failed; their own messages say why")
    if changed:
        raise changed
    if "stopped" in outcomes.values() or trainings.signal:
        print("stopped as asked; the same command goes on from there", file=sys.stderr)
        raise SystemExit(75)


def plan(arguments: list[str], now: dict[str, str | None]) -> list[tuple[list[str], TrainConfig]]:
    """Arguments and settings of every run, each with a name of its own; `now` are precision and code of the sweep.

    Raises:
        ConfigError: a combination is wrong, two have the same name, or a run of other settings, of another precision or
            of other code lies there.
    """
    runs: dict[str, tuple[list[str], TrainConfig]] = {}
    for combination, swept in combinations(arguments):
        try:
            settings = parse_config(combination)
        except SystemExit:
            raise ConfigError("arguments: --help and --print_config are train.py's own") from None
        except ConfigError as error:
            raise ConfigError(f"{error}\n(of {shlex.join(combination)})") from None
        common, tracking, grouped = settings.name, settings.tracking, []
        settings = replace(settings, name=common + "".join(endings(swept, flat_settings(asdict(settings)))))
        if settings.name != common and tracking.tracker == "wandb" and tracking.group is None:
            settings, grouped = replace_settings(settings, {"tracking.group": common}), ["--tracking.group", common]
        if settings.name in runs:
            raise ConfigError(f"name: two runs of this sweep would be called {settings.name!r}; give each value once")
        if len(settings.name.encode()) > NAME_BYTES:
            raise ConfigError(f"name: {settings.name!r} is longer than a directory's may be; sweep over config files")
        runs[settings.name] = [*combination, *grouped, "--name", settings.name], settings
        before = None if settings.resume == "never" else read_settings(directory(settings) / "config.yaml")
        if before:
            check_existing(settings, before, now)
    return list(runs.values())


def check_existing(settings: TrainConfig, before: dict[str, Any], now: dict[str, str | None]) -> None:
    """Refuse a run that lies where one of the sweep is to be, with the settings `before`, unless it is that one.

    What is finished is not started, and so would not be refused by train.py.

    Raises:
        ConfigError: it is another run, or has gone another way.
    """
    path = directory(settings)
    if settings.init_from is not None:  # whose model train.py takes over at the start
        settings = with_stored_model(settings, before)
    if different := differing_settings(before, settings) + differing_facts(path, now):
        raise ConfigError(
            f"{path} holds a run with other settings:\n  "
            + "\n  ".join(different)
            + "\nchoose another --name or --out_dir for the sweep"
        )
    if checkpoints := readable_checkpoints(path / "checkpoints"):
        newest = next(iter(checkpoints))
        check_resume(settings, newest, checkpoints[newest])


def differing_facts(path: Path, now: dict[str, str | None]) -> list[str]:
    """What besides its settings makes the run at `path` another one than those that the sweep would start, a line each.

    Raises:
        ConfigError: it cannot be read.
    """
    status = read_status(path / "status.json")
    done = status.step if status else 0
    try:
        starts = list(read_rows(path / "sessions.jsonl")) if (path / "sessions.jsonl").exists() else []
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    trained = [start for start in lasting_starts(starts, done) if start["step"] < done]
    lines = [f"{name}: {then[name]} there, {now[name]} now" for then in trained for name in compare_facts(then, now)]
    return list(dict.fromkeys(lines))


def combinations(arguments: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    """The arguments of every run, and which value each swept setting has there."""
    choices = []  # of each word: what may stand there, and which value of which swept setting that is
    option = ""
    for word in arguments:
        if not word.startswith("--"):
            begin, values = "", split(word)
        elif "=" in word:
            option, _, value = word.partition("=")
            begin, values = f"{option}=", split(value)
        else:
            option, begin, values = word, "", [word]
        swept = option.removeprefix("--") if len(values) > 1 else None
        choices.append([(begin + value, swept, value) for value in values])
    return [
        ([word for word, _, _ in chosen], {swept: value for _, swept, value in chosen if swept})
        for chosen in itertools.product(*choices)
    ]


def split(value: str) -> list[str]:
    """The values between commas, but for commas inside brackets, as in [0.9,0.95]."""
    depth, parts = 0, [""]
    for character in value:
        depth += (character in OPEN) - (character in CLOSE)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def endings(swept: dict[str, str], settings: dict[str, object]) -> list[str]:
    """What the name of a run ends with: each swept setting and its value, as -lr_0.001."""
    names = [name for name in swept if name not in NAME_THEMSELVES]
    count = Counter(name.rpartition(".")[2] for name in names)
    ends = []
    for name in names:
        last_word = name.rpartition(".")[2]
        value = str(settings.get(name, swept[name]))
        as_file_name = re.sub(r"[^\w.+-]+", "_", value).strip("_")
        ends.append(f"-{last_word if count[last_word] == 1 else name}_{as_file_name}")
    return ends


def directory(settings: TrainConfig) -> Path:
    """Where a run lies."""
    return Path(settings.out_dir).expanduser() / settings.name


def is_finished(settings: TrainConfig) -> bool:
    """Whether all steps of a run are done, so that there is nothing to start.

    Where what it reads lies at another place now, or was made anew there, train.py is asked, which knows whether it is
    the same.
    """
    path, now = directory(settings), flat_settings(asdict(settings))
    status, before = read_status(path / "status.json"), read_settings(path / "config.yaml")
    done = status is not None and status.state == "finished" and status.step >= settings.steps
    there = before is not None and all(before[name] == now[name] for name in ("data.path", "data.mix", "init_from"))
    if not (done and there):
        return False
    corpora = [Path(corpus).expanduser() / "metadata.json" for corpus in settings.data.corpora]
    made = [corpus.stat().st_mtime for corpus in corpora if corpus.exists()]
    return max(made, default=0) <= (path / "status.json").stat().st_mtime and settings.resume != "never"


if __name__ == "__main__":
    from cli.scripts import run_and_exit

    sys.argv[1:] = own_arguments_first(sys.argv[1:], SweepConfig)
    run_and_exit("sweep", SweepConfig, needs_torch=False)
