"""Draw the figures of runs and evaluations."""

import json
from pathlib import Path

from config.errors import ConfigError
from config.paths import expand_user_path
from tools.plot.run_plots import save_block_stats, save_excess_loss, save_loss_by_position, save_loss_curve
from tools.plot.settings import PlotConfig


def main(config: PlotConfig) -> None:
    """Draw the figures of each run and print their paths; raise ConfigError if a run cannot be plotted."""
    for run in config.runs:
        directory = expand_user_path("runs", run)
        try:
            for figure in filter(None, draw(directory, config.x)):
                print(figure)
        except (OSError, ValueError, TypeError, KeyError) as error:  # of a file that is missing or damaged
            raise ConfigError(f"runs: {run!r} cannot be plotted: {error}") from None


def draw(directory: Path, x: str) -> list[Path | None]:
    """Draw what a run or an evaluation logged; return the figures, None for one that has nothing to show."""
    figures: list[Path | None] = []
    if (evaluation := directory / "evaluation.json").exists():
        figures.append(save_loss_by_position(json.loads(evaluation.read_text()), directory / "evaluation.png"))
    if not figures or (directory / "metrics.jsonl").exists():
        figures += [save_loss_curve(directory, x=x), save_excess_loss(directory), save_block_stats(directory)]
    return figures
