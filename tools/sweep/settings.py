"""Settings of tools.sweep; importable without torch."""

from dataclasses import dataclass, field

from config.parser import PASSED_ON
from model.field_types import PositiveInt


@dataclass
class SweepConfig:
    """Trains a run for every combination of values of train.py's settings, as --optimizer.lr 1e-3,3e-4 --seed 0,1,2."""

    arguments: list[str] = field(metadata=PASSED_ON)
    """Settings of train.py; those to sweep have several values, separated by commas."""

    jobs: PositiveInt | None = None
    """Number of runs at once, each on a part of the cores or on its own GPU. null: one for each GPU, else one for each
    core, but not more than 8; with `launch` one."""

    launch: str | None = None
    """Command that starts a run, such as "accelerate launch --config_file X". null: python."""
