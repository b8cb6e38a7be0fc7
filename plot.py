"""Plot runs from their metrics.jsonl: python plot.py RUN... [--x tokens].

It writes loss.png into each run, excess.png if the run logged `val/excess_loss/KIND`, and layers.png if it logged
`layers/NAME/BLOCK` (tracking.block_stats). compare.py plots several runs in one figure.
"""

if __name__ == "__main__":  # before anything slow is imported; it calls `main` below and never returns
    from cli.scripts import run_and_exit
    from run.settings import PlotConfig

    run_and_exit("plot", PlotConfig, needs_torch=False)

from config.errors import ConfigError
from config.paths import expand_user_path
from plotting.run_plots import save_block_stats, save_excess_loss, save_loss_curve
from run.settings import PlotConfig


def main(config: PlotConfig) -> None:
    """Plot each run and print the paths of the figures; raise ConfigError if a run cannot be plotted."""
    for run in config.runs:
        directory = expand_user_path("runs", run)
        try:
            print(save_loss_curve(directory, x=config.x))
            for path in filter(None, (save_excess_loss(directory), save_block_stats(directory))):
                print(path)
        except OSError as error:
            raise ConfigError(f"runs: {run!r} cannot be plotted: {error}") from None
