"""Draws the loss curve of a run from its metrics.jsonl: python plot.py runs/stories [more runs]... writes loss.png."""

import sys
from pathlib import Path

from training.metrics_file import read_rows


def save_loss_curve(run_directory: Path) -> Path:
    """Write `<run_directory>/loss.png`: training and validation loss in nats a token, and the floor where it is known.

    Raises:
        OSError: there is no metrics.jsonl, or the picture cannot be written.
    """
    from matplotlib.figure import Figure  # without pyplot: no window system is asked for

    rows = list(read_rows(run_directory / "metrics.jsonl"))

    def curve(metric: str) -> tuple[list[int], list[float]]:
        points = [(row["step"], row[metric]) for row in rows if isinstance(row.get(metric), float)]
        return [step for step, _ in points], [value for _, value in points]

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*curve("train/loss"), color="tab:blue", alpha=0.5, linewidth=1, label="training")
    if (validation := curve("val/loss"))[0]:
        axes.plot(*validation, color="tab:orange", marker="o", markersize=3, label="validation")
    floors = curve("val/floor")[1]
    if floors:
        axes.axhline(floors[-1], color="black", linestyle="--", linewidth=1, label=f"floor = {floors[-1]:.4f}")
    lowest = min([*floors, *curve("train/loss")[1], *validation[1]], default=1.0)
    if lowest > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:.3g}")
        axes.yaxis.set_minor_formatter("{x:.3g}")
    axes.set(xlabel="optimizer step", ylabel="loss (nats a token)", title=run_directory.resolve().name)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(run_directory / "loss.png", dpi=150)
    return run_directory / "loss.png"


if __name__ == "__main__":
    for argument in sys.argv[1:] or sys.exit(__doc__):
        try:
            print(save_loss_curve(Path(argument)))
        except OSError as error:
            print(f"plot.py: error: {error}", file=sys.stderr)
            sys.exit(2)
