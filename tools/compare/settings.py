"""Settings of tools.compare; importable without torch."""

from dataclasses import dataclass
from typing import Literal

from model.field_types import PositiveFloat


@dataclass
class CompareConfig:
    """Compares runs: settings, divergence, losses, costs, and significant differences between configurations."""

    runs: list[str]
    """Run directories. Divergence is measured from the first one that predicts the same data."""

    loss: PositiveFloat | None = None
    """The validation loss to count training tokens to. null: the lowest that every finished run reached."""

    x: Literal["steps", "tokens", "flops", "seconds"] = "steps"
    """The x axis of the curves: optimizer steps, training tokens, training FLOPs, or seconds of training."""

    out: str | None = "compare"
    """Path of the curves: OUT.png, or for several kinds of data OUT-1.png, OUT-2.png, ...; and OUT.html, an
    interactive page with the tables. null: write neither."""
