"""The settings of tools.replay, importable without torch."""

from dataclasses import dataclass, field

from config.parser import POSITIONAL
from model.field_types import NonNegativeInt, PositiveInt


@dataclass
class ReplayConfig:
    """Replays a step of a run, or audits a run."""

    run: str
    """The run directory."""

    step: PositiveInt | None = field(default=None, metadata=POSITIONAL)
    """The step to replay and show: its sequences, the loss of each, and the update of every block."""

    save_to: str | None = None
    """Instead of showing the step, save the checkpoint after it to this new folder."""

    audit: NonNegativeInt = 0
    """Instead of showing a step, retrain this many intervals between checkpoints, drawn at random, and compare
    everything that the run logged and saved. All intervals if there are fewer."""

    num_sequences: PositiveInt = 8
    """Number of sequences of the step to show, highest loss first."""

    arithmetic: bool = True
    """Compare the loss and the gradient norm of the step in fp32 and bf16, eager and compiled."""

    profile: str | None = None
    """Write a Chrome trace of the step to this folder."""
