"""Settings of tools.research; importable without torch."""

import json
from functools import partial
from typing import Annotated

from pydantic import Field, PositiveFloat

from config.errors import ConfigError
from config.help import PASSED_ON, POSITIONAL
from model.settings import NonNegativeInt, PositiveInt, Settings
from tools.experiment.settings import DEFAULT_CONFIG, parse_tool_with_json


class ChainConfig(Settings):
    """Settings of all commands."""

    lab: str = "lab"
    """The directory of the ledger, runs and diffs of one chain."""

    jobs: PositiveInt | None = None
    """Concurrent runs. null: one for each GPU, or for each core up to 8."""

    print_json: bool = Field(default=False, alias="json")
    """Print one JSON object instead of text."""


class StartConfig(ChainConfig):
    """Starts a chain: creates its branch, trains the baseline and prints which effects can be detected."""

    config: str = str(DEFAULT_CONFIG)
    """The recipe, a config file that git tracks."""

    branch: str | None = None
    """The branch of the chain. null: research/ and the name of the recipe."""

    seeds: PositiveInt = 16
    """Runs of the baseline, now and after every accepted idea."""

    strict: bool = False
    """Control the probability of any false acceptance, instead of the false discovery rate."""

    note: str | None = None
    """Text for the ledger."""


class TryConfig(ChainConfig):
    """Tests an idea against the head of the chain."""

    idea: Annotated[list[str], PASSED_ON]
    """In one argument: settings, or a git branch or commit, a patch file, or . for the working tree, then settings.
    For `combine`: numbers of ideas."""

    note: str | None = None
    """Text for the ledger, such as the reason for the idea."""

    max_seeds: PositiveInt = 12
    """Maximum number of runs of the candidate. A larger number resumes the test of an idea whose status is unknown."""

    budget_minutes: PositiveFloat | None = None
    """Minutes after which the runs in progress save and stop. null: only max_seeds limits the runs."""

    allow_data_changes: bool = False
    """Allow the code to change the data, the evaluation or the seeding; the losses may then mean something else."""


class CombineConfig(TryConfig):
    """Tests several ideas together, named by their numbers, against the head of the chain."""


class DropConfig(ChainConfig):
    """Rejects an idea, and removes it from the working tree if it is there unchanged; its diff stays in the lab."""

    id: Annotated[NonNegativeInt, POSITIONAL]
    """Number of the idea."""


class KeepConfig(DropConfig):
    """Accepts an idea: commits it to the branch, and trains the new baseline on seeds that no selection has used."""

    unproven: bool = False
    """Accept the idea although it is not better; the ledger records this."""


class ConfirmConfig(ChainConfig):
    """Compares the head with the start, and with each accepted idea left out, on seeds that are reserved for this."""

    seeds: PositiveInt = 12
    """Runs of each arm; all of them are trained, so the differences are unbiased."""

    sizes: str = "1"
    """Factors on the parameters, such as 1,4."""

    data_seed: NonNegativeInt | None = None
    """Another data.seed, to compare on other training and validation data. null: none."""

    corpus: str | None = None
    """Settings of a second corpus in one argument, such as "--data.facts 256". null: none."""

    leave_one_out: bool = True
    """Also compare the head with the head without each accepted idea."""


class LogConfig(ChainConfig):
    """Prints the ideas in chronological order, and draws the chain in LAB/chain.png."""


COMMANDS: dict[str, type[ChainConfig]] = {
    "start": StartConfig,
    "try": TryConfig,
    "keep": KeepConfig,
    "drop": DropConfig,
    "combine": CombineConfig,
    "confirm": ConfirmConfig,
    "log": LogConfig,
}


def print_error(message: str) -> None:
    """Print the one JSON object of a command that failed."""
    print(json.dumps({"status": "error", "message": message}))


# The parser and the module of each command, as cli.scripts.run_script takes them.
PARSERS = {
    name: (
        partial(parse_tool_with_json, settings, "tools.research", print_error=print_error),
        "tools.research.commands",
    )
    for name, settings in COMMANDS.items()
}


def refuse_command(args: list[str]) -> None:
    """Print help and exit if help is requested, else raise ConfigError, because no command is given."""
    commands = f"{', '.join(COMMANDS)}; COMMAND --help lists its settings"
    if args[:1] in (["-h"], ["--help"]):
        print(f"usage: tools.research COMMAND [settings]\n\nCommands: {commands}.")
        raise SystemExit(0)
    raise ConfigError(f"command: {next(iter(args), '')!r} must be one of {commands}")
