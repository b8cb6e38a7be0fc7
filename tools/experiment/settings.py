"""Settings of tools.experiment; importable without torch."""

import math
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveFloat

from config.errors import ConfigError
from config.help import PASSED_ON
from model.settings import NonNegativeInt, PositiveInt, Settings

DEFAULT_CONFIG = Path(__file__).parents[2] / "configs" / "lab.yaml"
PER_RUN_OPTIONS = ("--seed", "--out_dir", "--resume", "--name")
SCREEN_ONLY = {"runs", "max_parameters", "max_flops"}
ONE_IDEA_ONLY = {"max_seeds", "metric", "margin", "tune", "speedup", "sizes"}


class ReportConfig(Settings):
    """Prints the results of a lab, and draws each screen in LAB/screens."""

    lab: str = "lab"
    """The directory of runs and results."""

    print_json: bool = Field(default=False, alias="json")
    """Print one JSON object instead of text."""


class IdeasConfig(ReportConfig):
    """Ideas, settings of all runs, and how runs are trained."""

    arguments: Annotated[list[str], PASSED_ON] = []
    """Ideas, each in one argument; then settings of train.py for all runs. Without --config: configs/lab.yaml."""

    jobs: PositiveInt | None = None
    """Concurrent runs. null: one with launch, else one for each GPU, or for each core, 8 at most."""

    launch: str | None = None
    """Command that starts a run, such as "accelerate launch --config_file X". null: python."""

    sizes: str = "1"
    """One idea, or confirm: factors on the parameters, such as 1,4, at which arms are compared, with tokens in
    proportion."""

    @property
    def ideas(self) -> list[str]:
        """The arguments before the first option; an idea that consists of settings has a space in it."""
        return self.arguments[: self._num_ideas]

    @property
    def common(self) -> list[str]:
        """Settings of train.py for all runs.

        Raises:
            ConfigError: they have an option that is set for each run.
        """
        words = self.arguments[self._num_ideas :]
        if wrong := [word for word in words if word.partition("=")[0] in PER_RUN_OPTIONS]:
            raise ConfigError(f"{wrong[0].removeprefix('--')}: is set for each run; leave it out")
        has_config = any(word.partition("=")[0] == "--config" for word in words)
        return words if has_config else ["--config", str(DEFAULT_CONFIG), *words]

    @property
    def _num_ideas(self) -> int:
        options = (i for i, word in enumerate(self.arguments) if word.startswith("--") and " " not in word)
        return next(options, len(self.arguments))

    @property
    def factors(self) -> list[float]:
        """The sizes as numbers; raise ConfigError if one is not a number of at least 1."""
        try:
            sizes = [float(word) for word in self.sizes.split(",")]
        except ValueError:
            sizes = []
        if not sizes or not all(1 <= size < math.inf for size in sizes):
            raise ConfigError(f"sizes: {self.sizes!r} must be numbers of at least 1, separated by commas, such as 1,4")
        return sorted(set(sizes))


class ExperimentConfig(IdeasConfig):
    """Screens ideas, or compares one idea with the baseline."""

    runs: PositiveInt | None = None
    """Several ideas: runs of the screen, those of earlier commands included. null: 4 for each idea and 8 more, or as
    many as the minutes allow."""

    minutes: PositiveFloat | None = None
    """Time for this command. Several ideas: no run is started that would not end in time. One idea: runs in progress
    save and stop."""

    max_parameters: PositiveFloat | None = None
    """Several ideas: largest number of parameters, relative to the baseline. null: any."""

    max_flops: PositiveFloat | None = None
    """Several ideas: largest number of FLOPs per token, relative to the baseline. null: any."""

    max_seeds: Annotated[int, Field(ge=3, lt=2**63)] = 12
    """One idea: maximum number of runs of each arm. Rerun the same command with a larger number to add seeds."""

    metric: str | None = None
    """One idea: the logged metric to compare, such as val/NAME; lower is better. null: the excess loss, or the loss
    where the entropy of the data is unknown."""

    margin: PositiveFloat = 0.03
    """One idea: equivalence margin, as a fraction. An interval within it is no difference."""

    tune: str | None = None
    """One idea: a setting, such as optimizer.lr, of which each arm gets the best of five values, on separate seeds."""

    speedup: bool = True
    """One idea: estimate the compute multiplier, by training the baseline on shorter and longer budgets."""


class ConfirmConfig(IdeasConfig):
    """Compares accepted ideas together, alone and all but one with the baseline, on seeds that no screen has used."""

    seeds: Annotated[int, Field(ge=3, lt=2**63)] = 8
    """Runs of each arm."""

    data_seed: NonNegativeInt | None = None
    """Seed of other data of the same kind, for generated data. null: the data of the screen."""
