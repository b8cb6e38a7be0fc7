"""The picture of a screen shows what its result says."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from tools.experiment.analysis import analyze
from tools.experiment.design import extend_design
from tools.experiment.picture import draw


@pytest.mark.parametrize("num_ideas", [2, 8, 40])
def test_picture_sorts_and_marks_ideas(num_ideas, tmp_path, monkeypatch):
    figures, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), savefig(self, *a, **k)))
    rows = extend_design(np.zeros((0, num_ideas), bool), 3 * num_ideas + 24)
    losses = rows[:, 1] * np.log(0.7) + np.random.default_rng(0).normal(0, 0.05, len(rows))
    if num_ideas > 2:
        losses[rows[:, 2]] = np.nan
    names = [
        "sham: nothing",
        "a/b/better.patch --model.x 1",
        *(f"--model.option_{i} {'x' * i}" for i in range(2, num_ideas)),
    ]
    screen = analyze(names, rows, losses, {"parameters": 1 + rows[:, 1] / 10})
    draw(screen.to_json(), tmp_path / "screen.png")
    axes, costs = figures[0].axes
    labels = axes.get_yticklabels()
    assert (tmp_path / "screen.png").stat().st_size > 10_000 and len(labels) == num_ideas
    assert labels[0].get_text() == "better.patch --model.x 1"
    assert [label.get_style() == "italic" for label in labels] == ["sham" in label.get_text() for label in labels]
    header, best, *_ = (label.get_text() for label in costs.get_yticklabels())
    assert header.split() == ["effect", "failed", "seconds", "params", "FLOPs"]
    assert best.split() == [f"{100 * screen.ideas[1].effect:+.1f}%", "1.10"]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["better", "unknown", *["failed"] * (num_ideas > 2)]


def test_picture_without_effects(tmp_path):
    draw(analyze(["one", "two"], np.zeros((1, 2), bool), np.zeros(1)).to_json(), tmp_path / "screen.svg")
    assert "two" in (tmp_path / "screen.svg").read_text()
