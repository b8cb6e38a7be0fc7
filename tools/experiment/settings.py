"""Settings of tools.experiment; importable without torch."""

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from model.settings import NonNegativeInt, PositiveInt, Settings, Unused
from runtime.config.errors import ConfigError
from runtime.config.help import PASSED_ON

DEFAULT_CONFIG = Path(__file__).parents[2] / "configs" / "text_lab.yaml"
PER_RUN_OPTIONS = ("--seed", "--out_dir", "--resume", "--name")


class ReportConfig(Settings):
    """Prints the results of all experiments, and draws each race."""

    folder: str = "experiments"
    """The directory of experiments: one folder for each baseline, with its runs and results."""

    print_json: bool = Field(default=False, alias="json")
    """Print one JSON object instead of text."""


class IdeasConfig(ReportConfig):
    """Ideas, settings of all runs, and how runs are trained."""

    ideas_and_settings: Annotated[list[str], PASSED_ON] = []
    """Ideas, each in one argument; then settings of train.py for all runs. Without --config:
    configs/text_lab.yaml, whose text is prepared at the first use."""

    minutes: PositiveFloat | None = None
    """Time for this command: no run is started that would not end in time. null: no limit."""

    jobs: PositiveInt | None = None
    """Concurrent runs. null: one with launch, else one for each GPU, or for each core, 8 at most."""

    launch: str | None = None
    """Command that starts a run, such as "accelerate launch --config_file X". null: python."""

    equal: Literal["steps", "flops", "seconds"] = "steps"
    """What the baseline and a variant spend equally. steps: each trains the steps of its settings. flops, seconds: the
    steps and the schedule of a variant are scaled by its measured cost."""

    metric: str | None = None
    """A logged metric to compare, such as val/NAME; lower is better, and the code of a variant logs it itself. null:
    the excess loss of the test data, or the loss where the entropy of the data is unknown."""

    margin: PositiveFloat | None = None
    """Smallest gain of interest, as a fraction: an idea that certainly gains less is `no gain`. null: 0.05 of the
    excess loss, 0.015 of the loss where the entropy is unknown."""

    @property
    def ideas(self) -> list[str]:
        """The arguments before the first option; an idea that consists of settings has a space in it."""
        return self.ideas_and_settings[: self._num_ideas]

    @property
    def common(self) -> list[str]:
        """Settings of train.py for all runs.

        Raises:
            ConfigError: they have an option that is set for each run.
        """
        words = self.ideas_and_settings[self._num_ideas :]
        if wrong := [word for word in words if word.partition("=")[0] in PER_RUN_OPTIONS]:
            raise ConfigError(f"{wrong[0].removeprefix('--').partition('=')[0]}: is set for each run; leave it out")
        has_config = any(word.partition("=")[0] == "--config" for word in words)
        return words if has_config else ["--config", str(DEFAULT_CONFIG), *words]

    @property
    def _num_ideas(self) -> int:
        options = (i for i, word in enumerate(self.ideas_and_settings) if word.startswith("--") and " " not in word)
        return next(options, len(self.ideas_and_settings))


class TunedConfig(IdeasConfig):
    """Ideas that race with a setting of their own."""

    tune: str | None = None
    """A setting and factors on its value, such as optimizer.lr=0.5,1,2. First the baseline is trained with each, and
    one that is better joins it. Then each idea races with each factor, as arms of the same race. null: all have the
    value that they are given."""

    @property
    def grid(self) -> dict[str, list[float]]:
        """The setting to tune with its factors, of which 1 is the first; {} if there is none.

        Raises:
            ConfigError: `tune` has another form.
        """
        if self.tune is None:
            return {}
        name, _, words = self.tune.partition("=")
        try:
            factors = [float(word) for word in words.split(",")]
        except ValueError:
            factors = []
        if not name or len(factors) < 2 or not all(0 < factor < math.inf for factor in factors):
            form = "a setting and at least two positive factors, such as optimizer.lr=0.5,1,2"
            raise ConfigError(f"tune: {self.tune!r} must be {form}")
        return {name: list(dict.fromkeys([1.0, *factors]))}


class ExperimentConfig(TunedConfig):
    """Races ideas against the baseline; the best joins it, and the others race again on top.

    `python -m tools.experiment confirm` trains what a race found on new seeds, and `report` prints all results again;
    both have a --help of their own.
    """

    note: str | None = None
    """Why the idea may lower the loss, for the report, if the command has one idea. A patch has it in its first line,
    above its diff, and a branch in the subject of its last commit. null: nothing else."""

    runs: PositiveInt | None = None
    """Runs of the race, those of earlier commands included. null: 8 for each idea and 40 more, or as many as the
    minutes allow."""

    rounds: PositiveInt | None = None
    """Rounds. null: until a round finds nothing better."""

    max_parameters: PositiveFloat | None = None
    """Largest number of parameters, relative to the baseline: other ideas do not run. null: any."""

    max_flops: PositiveFloat | None = None
    """Largest number of FLOPs of a run, relative to the baseline: other ideas do not run. null: any."""

    max_seconds: PositiveFloat | None = None
    """Largest number of seconds of a run, relative to the baseline: an idea whose first two runs take more on average
    leaves the race. CPU seconds; on a GPU the time. null: any."""

    reach: bool | None = None
    """Train what a race found on other data, for twice the steps and with four times the parameters, and say where it
    is better as well. null: in the time that is left of --minutes when the race has ended."""

    other_data: Annotated[str | None, Unused("reach", False)] = None
    """Settings of the other data in one argument, such as "--data.source text --data.path corpora/mine". null: stories
    for a race on text, and the text of Python's library for others."""

    compute_multiplier: bool = False
    """Also train the baseline on shorter and longer budgets, and say how many times its steps it would need for the
    loss of what was found."""


class ConfirmConfig(IdeasConfig):
    """Trains what a race found, each of its steps, and all of it without each idea, on seeds that no race has used."""

    seeds: Annotated[int, Field(ge=2, lt=2**62)] = 8
    """Runs of each variant. Run the same command with a larger number to add seeds."""

    sizes: str = "1"
    """Factors on the parameters, such as 1,4, at which variants are compared, with tokens in proportion."""

    data_seed: NonNegativeInt | None = None
    """Seed of other data of the same kind, for generated data. null: the data of the race."""

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


class AgreementConfig(TunedConfig):
    """Compares the effects that a testbed finds with those that the field knows (benchmarks/known_effects.yaml)."""

    half: Literal["choose", "report"] = "choose"
    """Half of the list: choose, to choose between testbeds; report, for the agreement of the one that was chosen."""

    seeds: Annotated[int, Field(ge=2, lt=2**62)] = 4
    """Runs of each idea, besides those that tune it; the baseline has twice as many."""
