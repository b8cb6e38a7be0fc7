"""Settings of plot.py; importable without torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class PlotConfig:
    """Plots runs: writes loss.png, excess.png and layers.png into the directory of each."""

    runs: list[str]
    """Run directories."""

    x: Literal["steps", "tokens", "flops", "seconds"] = "steps"
    """The x axis of loss.png: optimizer steps, training tokens, training FLOPs, or seconds of training."""
