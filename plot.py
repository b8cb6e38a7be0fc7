"""Plots runs from their metrics.jsonl: python plot.py RUN... [--x tokens].

Writes into each run `loss.png`; `excess.png` if the run logged `val/excess_loss/KIND`; and `layers.png` if it logged
`tracking.block_stats`. compare.py plots several runs in one figure.
"""

from dataclasses import dataclass
from typing import Literal

from config.errors import ConfigError
from config.paths import expanded


@dataclass
class PlotConfig:
    """Plots runs: writes loss.png, excess.png and layers.png into the directory of each."""

    runs: list[str]
    """Run directories."""

    x: Literal["steps", "tokens", "flops", "seconds"] = "steps"
    """The x axis of loss.png: optimizer steps, training tokens, training FLOPs, or seconds of training."""


def main(config: PlotConfig) -> None:
    """Plot each run and print the paths of the figures.

    Raises:
        ConfigError: A path is not a run directory, or its figures cannot be written.
    """
    from plotting.run_plots import save_block_stats, save_excess_loss, save_loss_curve

    for run in config.runs:
        directory = expanded("runs", run)
        try:
            print(save_loss_curve(directory, x=config.x))
            for path in filter(None, (save_excess_loss(directory), save_block_stats(directory))):
                print(path)
        except OSError as error:
            raise ConfigError(f"runs: {run!r} cannot be plotted: {error}") from None


if __name__ == "__main__":
    from cli.scripts import run_and_exit

    run_and_exit("plot", PlotConfig, needs_torch=False)
