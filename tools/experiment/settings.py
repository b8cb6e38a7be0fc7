"""Settings of tools.experiment; importable without torch."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from config.errors import ConfigError
from config.help import PASSED_ON
from config.parser import parse_tool
from model.settings import NonNegativeInt, PositiveInt, Settings

DEFAULT_CONFIG = Path(__file__).parents[2] / "configs" / "lab.yaml"

PER_RUN_OPTIONS = ("--seed", "--out_dir", "--resume")
PRINTING_OPTIONS = ("-h", "--help", "--print_config")


class ExperimentConfig(Settings):
    """Tests whether a change is better than the baseline, by how much and at what cost."""

    arguments: Annotated[list[str], PASSED_ON]
    """The change in one argument; then settings of train.py for both arms. Without --config: configs/lab.yaml."""

    max_seeds: PositiveInt = 12
    """Maximum number of runs of each arm. Rerun the same command with a larger number to add seeds."""

    baseline_seeds: PositiveInt | None = None
    """Number of baseline runs, if more than max_seeds: trained once and shared by many candidates, they estimate the
    mean of the baseline more precisely. null: as many as of the candidate."""

    first_seed: NonNegativeInt = 0
    """Seed of the first run of each arm. Another one repeats an experiment on other seeds."""

    budget_minutes: PositiveFloat | None = None
    """Minutes after which the runs in progress save and stop. null: only max_seeds limits the runs."""

    metric: str | None = None
    """The logged metric to compare, such as an auxiliary metric val/NAME; lower is better. null: the excess loss, the
    loss where the entropy of the data is unknown, or bits per byte where only the tokenizers differ."""

    margin: PositiveFloat | None = None
    """Equivalence margin, as a fraction of the baseline's mean. null: 0.003 of a loss, 0.03 of an excess loss or of
    another metric."""

    jobs: PositiveInt | None = None
    """Concurrent runs. null: one with launch, else one for each GPU, or for each core up to 8."""

    speedup: bool = True
    """Estimate the compute multiplier, by training the baseline on shorter and longer budgets, and measure the
    throughput of both arms in interleaved runs."""

    sizes: str = "1"
    """Factors on the parameters, such as 1,4: the experiment is repeated with larger models, and tokens in
    proportion."""

    tune: str | None = None
    """A setting to tune, such as optimizer.lr: each arm gets the best of five values, searched on separate seeds."""

    match: Literal["parameters", "flops"] | None = None
    """Narrow or widen the feed-forward layers of the candidate until its parameters or FLOPs match the baseline's."""

    onto: str | None = None
    """A commit, such as HEAD, to which the code of the change is applied first. null: the commit on which it is
    based."""

    note: str | None = None
    """Text for the log, such as the reason for the change."""

    lab: str = "lab"
    """The directory of runs, diffs and the log."""

    launch: str | None = None
    """Command that starts a run, such as "accelerate launch --config_file X". null: python."""

    stop_early: bool = True
    """Stop before max_seeds if the candidate trains the same weights in a preview of a few steps, or is unlikely to be
    better: its first run is six standard deviations worse, or the probability of being called better by max_seeds is
    below a tenth."""

    allow_data_changes: bool = False
    """Allow the code to change the data, the evaluation or the seeding; the losses may then mean something else."""

    print_json: bool = Field(default=False, alias="json")
    """Print one JSON object instead of text."""


def parse_experiment(args: list[str]) -> ExperimentConfig:
    """Parse the command line of tools.experiment, as `parse_tool_with_json`."""
    return parse_tool_with_json(ExperimentConfig, "tools.experiment", args, lambda message: print_error("", message, 2))


def parse_tool_with_json(settings: type, program: str, args: list[str], print_error: Callable[[str], None]) -> Any:
    """Parse the command line of a program that has the setting `json`; if given, pass errors to `print_error`, too."""
    try:
        return parse_tool(settings, program, args)
    except ConfigError as error:
        if "--json" in args or "--json=true" in args:
            print_error(str(error))
        raise


def print_error(idea: str, message: str, exit_code: int) -> None:
    """Print the one JSON object of an experiment without a result."""
    print(json.dumps({"idea": idea, "verdict": None, "exit_code": exit_code, "message": message}))


class ReportConfig(Settings):
    """Prints all experiments as a table, which is also written to LAB/report.md, and draws them in LAB/report.png."""

    lab: str = "lab"
    """The directory of the log."""


def refuse_options(words: list[str]) -> None:
    """Raise ConfigError for options of train.py that are set for each run, or that print instead of training."""
    for word in words:
        option = word.partition("=")[0]
        if option in PER_RUN_OPTIONS:
            name = option.removeprefix("--")
            raise ConfigError(f"{name}: is set for each run; leave it out (tools.experiment: --first_seed)")
        if option in PRINTING_OPTIONS:
            raise ConfigError(f"arguments: {option} is an option of train.py; leave it out")


def parse_sizes(text: str) -> list[float]:
    """Parse factors on the parameters; raise ConfigError if one is not a number of at least 1."""
    try:
        sizes = [float(word) for word in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(1 <= size < math.inf for size in sizes):
        raise ConfigError(f"sizes: {text!r} must be numbers of at least 1, separated by commas, such as 1,4")
    return sorted(set(sizes))
