"""Figures are readable, have round ticks, and show what a run logged."""

import json
import math
from itertools import pairwise

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread

from data.synthetic.stories import get_story_generator
from runtime.config.errors import ConfigError
from tests.conftest import TINY_STORIES, environment, python, train
from tests.support import forked
from tools import plot

TOKENS_PER_STEP, SECONDS_PER_STEP = 100, 2.0
PNG = b"\x89PNG"


@pytest.fixture
def run(tmp_path):
    """A run of 40 steps, twice as fast in its second half."""
    rows = []
    for step in range(10, 41, 10):
        seconds = SECONDS_PER_STEP if step <= 20 else SECONDS_PER_STEP / 2
        rows.append({"step": step, "train/loss": 40.0 / step, "train/tokens": step * TOKENS_PER_STEP})
        rows[-1] |= {"perf/tokens_per_second": TOKENS_PER_STEP / seconds, "val/loss": 41.0 / step, "val/entropy": 0.5}
    return rows_of(tmp_path / "a_run", rows)


def rows_of(directory, rows):
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


@pytest.fixture
def figures(monkeypatch):
    """The figures that a test draws."""
    drawn, new_figure = [], plot.new_figure
    monkeypatch.setattr(plot, "new_figure", lambda *size: drawn.append(new_figure(*size)) or drawn[-1])
    return drawn


def luminance(color):
    """Relative luminance as defined by WCAG 2.1."""
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def test_run_styles_are_visible_and_distinct():
    assert all(1.05 / (luminance(color) + 0.05) >= 3 for color in (*plot.COLORS, *plot.KIND_COLORS))
    styles = [plot.run_style(index) for index in range(20)]
    looks = [(style["color"], style["linestyle"]) for style in styles]
    assert len(set(looks)) == 20
    assert all(a[0] != b[0] and a[1] != b[1] for a, b in pairwise(looks))


@pytest.mark.parametrize(
    ("losses", "ticks"),
    [
        ([0.43, 5.0], ["0.5", "1", "2", "5"]),
        ([1.2, 1100.0], ["10", "100", "1,000"]),
        ([2.5, 6.5], ["3", "4", "5", "6"]),
        ([3.97, 4.04], ["3.98", "4", "4.02", "4.04"]),
        ([0.0038, 5.1], ["0.01", "0.1", "1"]),
        ([10.8199, 10.8201], ["10.82"]),
        ([2.0, 5.0, math.inf], ["2", "3", "4", "5"]),
    ],
    ids=str,
)
def test_loss_axis_has_round_labels_without_overlap(losses, ticks):
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(losses)
    plot.style_loss_axes(axes)
    FigureCanvasAgg(figure).draw()
    low, high = axes.get_ylim()
    labels = [label for minor in (False, True) for label in axes.get_yticklabels(minor)]
    seen = [label for label in labels if low < label.get_position()[1] < high and label.get_text()]
    assert axes.get_yscale() == "log" and set(ticks) <= {label.get_text() for label in seen}
    assert len({label.get_text() for label in seen}) == len(seen) > 2
    assert high < 1.01 * low or all(len(label.get_text()) < 6 for label in seen), "3.981 is not a round number"
    boxes = sorted(label.get_window_extent().extents[[1, 3]].tolist() for label in seen)
    assert all(a[1] <= b[0] + 1 for a, b in pairwise(boxes))


def test_loss_curve_has_legend_and_axis_labels(run, figures):
    plot.save_loss_curve(run)
    (axes,) = figures[0].axes
    labels = ["training (thin)", "validation (thick)", "entropy of the data = 0.5000"]
    assert axes.get_legend_handles_labels()[1] == labels
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("optimizer steps", "loss (nats/token)")
    training, validation = axes.get_lines()[:2]
    assert axes.get_title() == "a_run" and validation.get_linewidth() >= 2 * training.get_linewidth()


def test_x_axis_of_tokens_flops_and_seconds(run, figures):
    assert plot.step_to_x("steps", run)([5, 40]).tolist() == [5, 40]
    assert plot.step_to_x("tokens", run)([0, 5, 40]).tolist() == [0, 500, 4000]
    assert plot.step_to_x("seconds", run)([10, 20, 25, 40]).tolist() == [20, 40, 45, 60]
    plot.save_loss_curve(run, x="seconds")
    (axes,) = figures[0].axes
    assert axes.get_lines()[0].get_xdata().tolist() == [20, 40, 50, 60] and "seconds" in axes.get_xlabel()
    with pytest.raises(ConfigError, match="x: flops: .*sessions.jsonl has no flops_per_token; use --x tokens"):
        plot.step_to_x("flops", run)
    (run / "sessions.jsonl").write_text('{"step": 0, "flops_per_token": 6000}\n')
    assert plot.step_to_x("flops", run)(10) == 10 * TOKENS_PER_STEP * 6000
    (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    with pytest.raises(ConfigError, match="x: tokens"):
        plot.step_to_x("tokens", run)


def test_damaged_rows_are_skipped(run):
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 41, "train/tokens": null, "perf/tokens_per_second": 50.0}\n{"train/loss": 9}\n[[[\n')
        file.write(b'{"step": 42, "train/tokens": 9, "perf/tokens_per_second": "fast", "train/loss": "x"}\n{"step": 3,')
    assert plot.step_to_x("tokens", run)(40) == 4000
    assert plot.save_loss_curve(run).read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("arguments", "code", "error"), [("nowhere", 2, "nowhere"), ("", 2, "tools.plot: error: "), ("--help", 0, "")]
)
def test_plot_names_missing_run(arguments, code, error):
    done = forked.run("tools.plot", arguments.split(), 0, environment())
    assert done.returncode == code and error in done.stderr and "Traceback" not in done.stderr
    assert ("usage: tools.plot" in done.stdout) == (code == 0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short run on stories with facts and block statistics, which was evaluated."""
    out_dir = tmp_path_factory.mktemp("trained")
    logged = "--steps 4 --evaluation.every 2 --data.facts 16 --tracking.block_stats true --name run --out_dir"
    train(*TINY_STORIES, *logged.split(), out_dir)
    python(f"python evaluate.py {out_dir / 'run'} --num_samples 4")
    return out_dir / "run"


@pytest.mark.slow
def test_plot_draws_all_that_a_run_logged(trained):
    assert not list(trained.glob("*.png")), "only tools.plot draws"
    printed = python(f"python -m tools.plot {trained} --x tokens").stdout
    for name in ("loss", "excess", "layers", "evaluation"):
        assert f"{trained / name}.png\n" in printed and (trained / f"{name}.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    "content", ["[", "{}", '{"loss_by_position": 1}', '{"loss_by_position": [1], "val/loss": "x"}']
)
def test_plot_refuses_damaged_evaluation(content, tmp_path):
    (tmp_path / "evaluation.json").write_text(content)
    with pytest.raises(ConfigError, match="runs: .* cannot be plotted: "):
        plot.main(plot.PlotConfig(runs=[str(tmp_path)]))


def test_loss_curve_shows_single_point(tmp_path):
    image = imread(plot.save_loss_curve(rows_of(tmp_path / "run", [{"step": 10, "train/loss": 2.0}])))
    below_the_legend = image[len(image) // 4 :, :, :3]
    assert (below_the_legend.max(2) - below_the_legend.min(2)).max() > 0.2, "the point is not visible"


@pytest.mark.parametrize("name", ["a$x^$b", "\udcff", "x" * 200])
def test_loss_curve_accepts_any_run_name(name, tmp_path):
    run = rows_of(tmp_path / name, [{"step": 1, "train/loss": 2.5}])
    assert plot.save_loss_curve(run).read_bytes().startswith(PNG)


@pytest.mark.parametrize(("steps", "blocks"), [((10, 20), 1), ((10,), 2), ((10,), 1)])
def test_figure_shows_single_block_or_step(steps, blocks, tmp_path):
    rows = [{"step": step, **{f"layers/update_ratio/{block}": 0.1 for block in range(blocks)}} for step in steps]
    image = imread(plot.save_block_stats(rows_of(tmp_path / "run", rows)))
    assert image[len(image) // 2, len(image[0]) // 3, :3].min() < 0.9, "the middle of the figure is empty"


def excess_row(step, loss, **kinds):
    excess = None if loss is None else loss - 0.5
    kinds = {f"val/excess_loss/{kind}": value for kind, value in kinds.items()}
    return {"step": step, "val/loss": loss, "val/entropy": 0.5, "val/excess_loss": excess} | kinds


def legend_of(drawn):
    """Labels and styles of a figure's curves, as its legend lists them."""
    [axes] = drawn.axes
    handles, labels = axes.get_legend_handles_labels()
    return labels, [(handle.get_color(), handle.get_linestyle(), handle.get_marker()) for handle in handles]


def test_excess_loss_figure_has_a_colour_for_each_kind_in_a_fixed_order(tmp_path, figures):
    kinds = get_story_generator(facts=4096).kinds
    rows = [excess_row(step, 1.0, **{kind: step / (1 + len(kind)) for kind in kinds}) for step in (1, 2)]
    plot.save_excess_loss(rows_of(tmp_path / "run", rows))
    labels, styles = legend_of(figures[0])
    assert labels == ["all", *(kind.replace("_", " ") for kind in kinds)]
    assert labels[-4:] == ["facts from 1", "facts from 10", "facts from 100", "facts from 1000"]
    colors = [color for color, *_ in styles]
    assert len(set(colors)) == len(colors) == 10


def test_loss_by_position_is_smoothed_over_a_logarithm():
    """The mean of the positions from two thirds to three halves of each; a position without targets is left out."""
    losses = [5.0, math.nan, 1.0, 3.0, 8.0, 2.0]
    expected = [5.0, math.nan, 2.0, (1 + 3 + 8 + 2) / 4, (3 + 8 + 2) / 3, (3 + 8 + 2) / 3]
    assert plot.smooth_over_lengths(losses) == pytest.approx(expected, nan_ok=True)
    saw = [0.0, 2.0] * 200
    assert max(abs(plot.smooth_over_lengths(saw)[20:] - 1)) < 0.1


def test_excess_loss_figure_needs_kinds_with_positive_values(tmp_path):
    """The loss on a small validation set may be below its expectation, and a run may end with NaN."""
    for number, (rows, is_drawn) in enumerate(
        [
            ([excess_row(1, 1.5, names=0.4, facts_from_1=0.6), excess_row(2, 0.8, names=0.3, facts_from_1=0.0)], True),
            ([excess_row(1, 1.5)], False),
            ([excess_row(1, 0.4, names=-0.1), excess_row(2, None, names=None)], False),
            ([excess_row(1, 0.7, names=0.3, plot=-0.1), excess_row(2, None, names=None, plot=None)], True),
        ]
    ):
        picture = plot.save_excess_loss(rows_of(tmp_path / f"run-{number}", rows))
        assert (picture is not None and imread(picture).std() > 0.05) == is_drawn
