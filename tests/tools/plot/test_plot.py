"""Figures are readable, have round ticks, and show what a run logged."""

import json
import math
import re
import shutil
import subprocess
import sys
from itertools import pairwise

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread

from config.errors import ConfigError
from run.metrics_log import read_rows
from tests.conftest import ROOT, TINY_STORIES, environment, python, train
from tests.support import forked
from tests.tools.test_compare import DOM
from tools.compare import report
from tools.compare.report import EXCESS_LOSS, Curves, save_figure, save_page
from tools.plot import command, style
from tools.plot import run_plots as plot
from tools.plot.settings import PlotConfig

TOKENS_PER_STEP, SECONDS_PER_STEP = 100, 2.0


@pytest.fixture
def run(tmp_path):
    """A run of 40 steps, twice as fast in its second half."""
    rows = []
    for step in range(10, 41, 10):
        seconds = SECONDS_PER_STEP if step <= 20 else SECONDS_PER_STEP / 2
        rows.append({"step": step, "train/loss": 40.0 / step, "train/tokens": step * TOKENS_PER_STEP})
        rows[-1] |= {"perf/tokens_per_second": TOKENS_PER_STEP / seconds, "val/loss": 41.0 / step, "val/entropy": 0.5}
    (tmp_path / "a_run").mkdir()
    (tmp_path / "a_run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "a_run"


@pytest.fixture
def drawn(monkeypatch):
    """The axes of all pictures that a test draws."""
    all_axes, new_figure = [], style.new_figure

    def remember(*size):
        figure = new_figure(*size)
        add_subplot = figure.add_subplot
        figure.add_subplot = lambda **options: all_axes.append(add_subplot(**options)) or all_axes[-1]
        return figure

    monkeypatch.setattr(plot, "new_figure", remember)
    return all_axes


def luminance(color):
    """Relative luminance as defined by WCAG 2.1."""
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_contrast_with_light_and_dark_background():
    page = report.PAGE.read_text()
    white, dark = re.findall(r"--paper: (#\w+)", page)
    inks = re.findall(r"--ink: (#\w+)", page)
    for color in style.COLORS:
        assert contrast(color, white) >= 3
        assert contrast(inks[1] if color == inks[0] else color, dark) >= 3


def test_run_styles_are_distinct_for_twenty_runs():
    styles = [style.run_style(index) for index in range(20)]
    looks = [(style["color"], style["linestyle"]) for style in styles]
    assert len(set(looks)) == 20
    assert all(a[0] != b[0] and a[1] != b[1] for a, b in pairwise(looks))


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.4, 6.0, ["0.5", "1", "2", "5"]),
        (0.9, 1200.0, ["1", "10", "100", "1,000"]),
        (2.5, 6.5, ["3", "4", "5", "6"]),
        (3.97, 4.04, ["3.98", "4", "4.02", "4.04"]),
        (0.002, 0.3, ["0.01", "0.1"]),
    ],
)
def test_logarithmic_axis_has_round_ticks(low, high, ticks):
    found = [style.format_number(tick) for tick in style.round_ticks(low, high)]
    assert set(ticks) <= set(found)
    assert not [number for number in found if len(number.strip("0.")) > 4], "3.981 is not a round number"


def test_loss_curve_has_legend_and_axis_labels(run, drawn):
    plot.save_loss_curve(run)
    (axes,) = drawn
    assert axes.get_legend_handles_labels()[1] == [
        "training (thin)",
        "validation (thick)",
        "entropy of the data = 0.5000",
    ]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("optimizer steps", "loss (nats/token)")
    training, validation = axes.get_lines()[:2]
    assert axes.get_title() == "a_run" and validation.get_linewidth() >= 2 * training.get_linewidth()


def test_picture_and_page_draw_configurations_alike(tmp_path, monkeypatch):
    """One configuration of three seeds and two of one seed; only the first has an excess loss."""
    figures = []
    monkeypatch.setattr(report, "new_figure", lambda *size: figures.append(style.new_figure(*size)) or figures[-1])
    configurations = [Curves(f"run {n}", {"val/loss": [[(1, 5.0 + n), (2, 1.0 + n)]]}) for n in range(2)]
    band = {"val/loss": [[(1, 4.0, 3.5, 4.5), (2, 0.7, 0.6, 0.8)]], "val/entropy": [[(2, 0.5)]]}
    configurations.append(Curves("mean (3 seeds)", band | {EXCESS_LOSS: [[(1, 3.5, 3.0, 4.0), (2, 0.2, 0.1, 0.3)]]}))
    save_figure("stories", configurations, tmp_path / "all.png", "tokens")
    save_page([("stories", configurations, [])], tmp_path / "all.html", "tokens")
    (losses, above), (key,) = figures[0].axes, figures[0].legends
    assert [text.get_text() for text in key.get_texts()] == [
        *(
            "run 0",
            "run 1",
            "mean (3 seeds)",
            "entropy of the data = 0.5000",
            "thick: validation",
            "band: min to max over seeds",
        ),
    ]
    colors, dashes = re.search(r"COLORS = (\[.*\]), DASHES = (\[.*\]);", (tmp_path / "all.html").read_text()).groups()
    for index, (of_key, line) in enumerate(zip(key.legend_handles[:3], losses.get_lines(), strict=False)):
        assert of_key.get_color() == line.get_color() == json.loads(colors)[index]
        assert list(line._unscaled_dash_pattern[1] or ()) == json.loads(dashes)[index]
    [shaded] = above.collections
    assert shaded.get_datalim(above.transData).intervaly.tolist() == [0.1, 4.0] and above.get_yscale() == "log"
    assert (
        above.get_lines()[0].get_color() == json.loads(colors)[2]
        and above.get_ylabel() == "excess validation loss (nats/token)"
    )
    assert losses.get_xlabel() == "training tokens" and "training tokens" in (tmp_path / "all.html").read_text()


PLAY = """
const labels = () => find("text").map((label) => label.textContent);
byId.log.checked = true; byId.log.onchange();
const wide = labels();
byId.metric.value = "train/loss"; byId.log.onchange();
console.log(JSON.stringify([wide, labels()]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="the page's script is run by node")
def test_page_shows_entropy_and_round_ticks(tmp_path):
    losses = {
        "val/loss": [[(1, 6.0), (9, 0.45)]],
        "val/entropy": [[(9, 0.4427)]],
        "train/loss": [[(1, 4.001), (9, 3.9)]],
    }
    save_page([("stories", [Curves("run", losses)], [])], tmp_path / "page.html")
    script = re.search(r"<script>(.*)</script>", (tmp_path / "page.html").read_text(), re.DOTALL)[1]
    (tmp_path / "page.js").write_text(DOM + script.replace('"use strict";', "") + PLAY)
    done = subprocess.run(["node", tmp_path / "page.js"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    wide, narrow = json.loads(done.stdout)
    assert {"0.5", "1", "2", "5", "entropy of the data = 0.4427", "optimizer steps", "val/loss (nats/token)"} <= set(
        wide
    )
    assert {"0.5", "1", "2"} <= set(narrow) and "3.981" not in wide + narrow


def test_step_to_x_converts_to_tokens_and_seconds(run, drawn):
    assert [style.step_to_x("steps", run)(step) for step in (5, 40)] == [5, 40]
    assert [style.step_to_x("tokens", run)(step) for step in (0, 5, 40)] == [0, 500, 4000]
    assert [style.step_to_x("seconds", run)(step) for step in (10, 20, 25, 40)] == [20, 40, 45, 60]
    plot.save_loss_curve(run, x="seconds")
    assert drawn[0].get_lines()[0].get_xdata().tolist() == [20, 40, 50, 60] and "seconds" in drawn[0].get_xlabel()
    (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    with pytest.raises(ConfigError, match="x: tokens"):
        style.step_to_x("tokens", run)


def test_step_to_x_skips_damaged_rows(run):
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 41, "train/tokens": null, "perf/tokens_per_second": 50.0}\n')
        file.write('{"step": 42, "train/tokens": 9, "perf/tokens_per_second": "fast"}\n')
    assert style.step_to_x("tokens", run)(40) == 4000


def test_flops_axis_reads_sessions(run):
    (run / "sessions.jsonl").write_text('{"step": 0, "flops_per_token": 6000}\n')
    assert style.step_to_x("flops", run)(10) == 10 * TOKENS_PER_STEP * 6000


def test_flops_axis_without_sessions_is_refused(run):
    with pytest.raises(ConfigError, match="x: flops: .*sessions.jsonl has no flops_per_token; use --x tokens"):
        style.step_to_x("flops", run)


def test_plot_ignores_backend_of_a_notebook(run):
    words = [sys.executable, "-m", "tools.plot", run, "--x", "tokens"]
    env = environment(MPLBACKEND="of a notebook")
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_only_new_figure_imports_matplotlib_first():
    """The backend is chosen at the first import of matplotlib, which must be the one in new_figure."""
    files = {file for pattern in ("*.py", "*/*.py", "tools/*/*.py") for file in ROOT.glob(pattern)}
    files -= {file for folder in ("tests", "examples") for file in (ROOT / folder).glob("*.py")}
    at_once = re.compile(
        r"^(?:import|from) matplotlib|^ +(?:import matplotlib\.|from matplotlib\.)(?:figure|pyplot)", re.M
    )
    found = {file.name for file in files if at_once.search(file.read_text())}
    assert len(files) > 50 and found == {"style.py"}


@pytest.mark.parametrize(
    ("arguments", "code", "error"), [("nowhere", 2, "nowhere"), ("", 2, "tools.plot: error: "), ("--help", 0, "")]
)
def test_plot_names_missing_run(arguments, code, error):
    done = forked.run("tools.plot", arguments.split(), 0, environment())
    assert done.returncode == code and error in done.stderr and "Traceback" not in done.stderr
    assert ("usage: tools.plot" in done.stdout) == (code == 0)


PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short run on stories with facts and block statistics, which was evaluated."""
    out_dir = tmp_path_factory.mktemp("trained")
    logged = "--steps 4 --evaluation.every 2 --data.facts 16 --tracking.block_stats true --name run --out_dir"
    train(*TINY_STORIES, *logged.split(), out_dir)
    python(f"python evaluate.py {out_dir / 'run'} --num_samples 4")
    return out_dir / "run"


def test_plot_draws_all_that_a_run_logged(trained):
    assert not list(trained.glob("*.png")), "only tools.plot draws"
    printed = python(f"python -m tools.plot {trained}").stdout
    for name in ("loss", "excess", "layers", "evaluation"):
        assert f"{trained / name}.png\n" in printed and (trained / f"{name}.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    "content", ["[", "{}", '{"loss_by_position": 1}', '{"loss_by_position": [1], "val/loss": "x"}']
)
def test_plot_refuses_damaged_evaluation(content, tmp_path):
    (tmp_path / "evaluation.json").write_text(content)
    with pytest.raises(ConfigError, match="runs: .* cannot be plotted: "):
        command.main(PlotConfig([str(tmp_path)]))


@pytest.mark.parametrize(
    "losses", [[5.1, 0.0038], [5.0, 0.43], [11.0, 1.2], [6.5, 6.2], [10.8201, 10.8199], [5.0, 2.0, math.inf]]
)
def test_loss_axis_labels_are_distinct_without_overlap(losses):
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(losses)
    style.style_loss_axes(axes, losses)
    FigureCanvasAgg(figure).draw()
    low, high = axes.get_ylim()
    labels = [label for minor in (False, True) for label in axes.get_yticklabels(minor)]
    seen = [label for label in labels if low < label.get_position()[1] < high and label.get_text()]
    boxes = sorted(label.get_window_extent().extents[[1, 3]].tolist() for label in seen)
    assert len(boxes) > 2 and all(a[1] <= b[0] + 1 for a, b in pairwise(boxes))
    assert len({label.get_text() for label in seen}) == len(seen)


def test_loss_curve_shows_single_point(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 10, "train/loss": 2.0}\n')
    image = imread(plot.save_loss_curve(tmp_path))
    below_the_legend = image[len(image) // 4 :, :, :3]
    assert (below_the_legend.max(2) - below_the_legend.min(2)).max() > 0.2, "the point is not visible"


def test_loss_curve_skips_damaged_rows(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 1, "train/loss": 2.5}\n{"train/loss": 9}\n[[[\n{"step": 2, "train/loss": "x"}\n{"step": 3, "train/lo'
    )
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]
    assert plot.save_loss_curve(tmp_path).read_bytes().startswith(PNG)


def test_loss_curve_accepts_mathtext_in_run_name(tmp_path):
    for name in ("a$x^$b", "\udcff"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.5}\n')
        assert plot.save_loss_curve(tmp_path / name).read_bytes().startswith(PNG)


@pytest.mark.parametrize(("steps", "blocks"), [((10, 20), 1), ((10,), 2), ((10,), 1)])
def test_figure_shows_single_block_or_step(steps, blocks, tmp_path):
    rows = [{"step": step, **{f"layers/update_ratio/{block}": 0.1 for block in range(blocks)}} for step in steps]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    image = imread(plot.save_block_stats(tmp_path))
    assert image[len(image) // 2, len(image[0]) // 3, :3].min() < 0.9, "the middle of the figure is empty"
