"""The figure of the excess loss by kind of token."""

import json

from matplotlib.image import imread

from tools.plot.run_plots import save_excess_loss


def rows_of(directory, rows):
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def row(step, loss, **kinds):
    excess = None if loss is None else loss - 0.5
    kinds = {f"val/excess_loss/{kind}": value for kind, value in kinds.items()}
    return {"step": step, "val/loss": loss, "val/entropy": 0.5, "val/excess_loss": excess} | kinds


def test_excess_loss_figure_needs_kinds(tmp_path):
    run = rows_of(
        tmp_path / "run", [row(1, 1.5, names=0.4, facts_from_1=0.6), row(2, 0.8, names=0.3, facts_from_1=0.0)]
    )
    assert imread(save_excess_loss(run)).std() > 0.05
    assert save_excess_loss(rows_of(tmp_path / "none", [row(1, 1.5)])) is None


def test_excess_loss_figure_omits_null_and_negative_values(tmp_path):
    """The loss on a small validation set may be below its expectation, and a run may end with NaN."""
    run = rows_of(
        tmp_path / "run", [row(1, 0.4, names=-0.1, facts_from_1=0.0), row(2, None, names=None, facts_from_1=None)]
    )
    assert save_excess_loss(run) is None
    run = rows_of(tmp_path / "two", [row(1, 0.7, names=0.3, plot=-0.1), row(2, None, names=None, plot=None)])
    assert save_excess_loss(run) == run / "excess.png"
