"""Settings of tools.scale; importable without torch."""

from typing import Literal

from pydantic import PositiveFloat

from model.settings import NonNegativeInt, PositiveInt, Settings


class ScaleConfig(Settings):
    """Prints the recipe of a depth, or measures how the loss falls with size and data."""

    depth: PositiveInt | None = None
    """Number of layers, from which the whole recipe follows; it is printed as a config file. 12 is the 124M class."""

    tokens_per_parameter: PositiveFloat = 20.0
    """depth: training tokens per non-embedding parameter."""

    family: Literal["qwen3", "llama", "gpt2"] = "qwen3"
    """depth: the family of models."""

    optimizer: Literal["muon", "adamw"] = "muon"
    """depth: the optimizer."""

    corpus: str | None = None
    """depth: a corpus prepared by data.prepare. null: stories with facts."""

    law: bool = False
    """Train the ladder, fit the law, predict a larger run and train it."""

    widths: bool = False
    """Train each width of the ladder and twice the largest, for the shortest budget, at learning rates around the
    rule's."""

    sizes: str = "16,32,64"
    """law and widths: widths of the models, multiples of 16."""

    budgets: str = "400,800,1600,3200"
    """law and widths: training steps of 16 stories."""

    seeds: PositiveInt = 2
    """law: number of seeds for each size and budget."""

    first_seed: NonNegativeInt = 0
    """law: the first of these seeds, and the seed of the predicted run."""

    jobs: PositiveInt | None = None
    """Number of runs at once. null: one with launch, else one per GPU, or per core up to 8."""

    out_dir: str = "runs/law"
    """Folder for runs, results and figures."""

    launch: str | None = None
    """Command that starts a run, such as "accelerate launch --config_file X". null: python."""

    arguments: str = ""
    """law and widths: settings of train.py for all runs."""
