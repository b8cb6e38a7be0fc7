"""Settings of tools.plot; importable without matplotlib."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class PlotConfig:
    """Plots runs: writes loss.png, excess.png, layers.png and evaluation.png into the directory of each."""

    runs: list[str]
    """Run directories, or folders of evaluate.py."""

    x: Literal["steps", "tokens", "flops", "seconds"] = "steps"
    """The x axis of loss.png: optimizer steps, training tokens, training FLOPs, or seconds of training."""
