"""Settings of tools.scale; importable without torch."""

from typing import Annotated, Literal

from pydantic import PositiveFloat

from model.settings import NonNegativeInt, PositiveInt, Settings, Unused

NO_DEPTH = Unused("depth", None)
NO_LAW = Unused("law", False)
NO_RUNS = Unused("law", False, also=Unused("widths", False))


class ScaleConfig(Settings):
    """Prints the recipe of a depth, or measures how the loss falls with size and data."""

    depth: PositiveInt | None = None
    """Number of layers, from which the whole recipe follows; it is printed as a config file. 12 is the 124M class."""

    tokens_per_parameter: Annotated[PositiveFloat, NO_DEPTH] = 20.0
    """Training tokens per non-embedding parameter."""

    family: Annotated[Literal["qwen3", "llama", "gpt2"], NO_DEPTH] = "qwen3"
    """The family of models."""

    optimizer: Annotated[Literal["muon", "adamw"], NO_DEPTH] = "muon"
    """The optimizer."""

    corpus: Annotated[str | None, NO_DEPTH] = None
    """A corpus prepared by data.prepare. null: stories with facts."""

    law: bool = False
    """Train the ladder, fit the law, predict a larger run and train it."""

    widths: bool = False
    """Train each width of the ladder and twice the largest, for the shortest budget, at learning rates around the
    rule's."""

    sizes: Annotated[str, NO_RUNS] = "16,32,64"
    """Widths of the models, multiples of 16."""

    budgets: Annotated[str, NO_RUNS] = "400,800,1600,3200"
    """Training steps of 16 stories."""

    seeds: Annotated[PositiveInt, NO_LAW] = 2
    """Number of seeds for each size and budget."""

    first_seed: Annotated[NonNegativeInt, NO_LAW] = 0
    """The first of these seeds, and the seed of the predicted run."""

    jobs: Annotated[PositiveInt | None, NO_RUNS] = None
    """Number of runs at once. null: one with launch, else one per GPU, or per core up to 8."""

    out_dir: Annotated[str, NO_RUNS] = "runs/law"
    """Folder for runs, results and figures."""

    launch: Annotated[str | None, NO_RUNS] = None
    """Command that starts a run, such as "accelerate launch --config_file X". null: python."""

    arguments: Annotated[str, NO_RUNS] = ""
    """Settings of train.py for all runs."""
