"""tools.compare: configurations over their seeds, which differences are noise, and what runs cost."""

import json
import re
import shutil
import statistics
import subprocess
import sys

import numpy as np
import pytest
import yaml

from runtime.cli import scripts
from runtime.config.errors import ConfigError
from runtime.config.parser import parse_tool
from tests.conftest import ROOT, TINY_STORIES, commands, python, thinned, train
from tools import compare, plot
from tools.compare import CompareConfig, ComparedRun, main, p_values_against_best

# Student's sleep data, with which the documentation of R's t.test shows Welch's test: p-value = 0.07939.
SLEEP = (
    [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0],
    [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4],
)


def fake_run(path, rows, branched_from=None, state="finished", seed=0, lr=0.001, starts=(), data=None, **settings):
    """Write a run of 30 steps of 4 x 16 tokens; `rows` are {step: row}, and `starts` the rows of sessions.jsonl."""
    settings = {"steps": 30, "global_batch_size": 4, "seq_len": 16, "seed": seed, **settings}
    settings |= {"data": {"seed": 0, **(data or {})}, "optimizer": {"lr": lr}}
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(settings))
    (path / "metrics.jsonl").write_text("".join(json.dumps({"step": s, **row}) + "\n" for s, row in rows.items()))
    (path / "status.json").write_text(json.dumps({"state": state, "step": max(rows, default=0), "reason": ""}))
    if branched_from:
        first, *others = starts or [{}]
        starts = [{**first, "step": branched_from["step"], "branched_from": branched_from}, *others]
    if starts:
        (path / "sessions.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    return path


def start(step=0, code="aaaaaaaaaaaa", precision="no", torch="2.13.0", **facts):
    """A row of sessions.jsonl."""
    return {"step": step, "code": code, "mixed_precision": precision, "torch": torch, **facts}


def rows_of(**curves):
    """{step: row} of curves such as val=[5.0, 4.0, 3.0] at steps 10, 20 and 30."""
    names = {"val": "val/loss", "train": "train/loss", "digest": "state/digest", "excess": "val/excess_loss"}
    length = max(map(len, curves.values()))
    return {
        10 * i + 10: {names[name]: values[i] for name, values in curves.items() if values[i] is not None}
        for i in range(length)
    }


def of_losses(tmp_path, name, losses, lr=0.001, **settings):
    """Write a finished run for each loss, each with its own seed and with settings that change no configuration."""
    return [
        fake_run(
            tmp_path / f"{name}-{seed}",
            rows_of(val=[9, 9, loss]),
            seed=seed,
            lr=lr,
            tracking={"log_every": seed + 1},
            **{"evaluation": {"every": seed + 1}, **settings},
        )
        for seed, loss in enumerate(losses)
    ]


def printed(capsys, *runs, **settings):
    main(CompareConfig(runs=[str(run) for run in runs], **{"out": None, **settings}))
    return capsys.readouterr().out


def table(text):
    """Rows of the printed table as dictionaries, by column title."""
    lines = text.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("configuration "))
    titles, *rows = [re.split(r" {2,}", line) for line in lines[begin:]]
    return [dict(zip(titles, row, strict=True)) for row in rows if len(row) == len(titles)]


# The table


def test_runs_are_grouped_over_their_seeds(tmp_path, capsys):
    good, same, bad = [1.0, 1.1, 1.2], [1.05, 1.15, 1.13], [2.0, 2.1, 2.3]
    runs = of_losses(tmp_path, "s", same, 0.2) + of_losses(tmp_path, "b", bad, 0.3)
    first, second, third = table(printed(capsys, *runs, *of_losses(tmp_path, "g", good, 0.1)))
    assert [row["configuration"] for row in (first, second, third)] == [f"optimizer.lr 0.{n}" for n in (1, 2, 3)]
    assert (first["seeds"], first["val/loss"], first["std"]) == ("3", "1.1000", f"{statistics.stdev(good):.4f}")
    assert (first["p"], first["tokens"]) == ("best", "-")
    assert float(third["p"]) < 0.05 < 0.5 < float(second["p"])


def test_one_of_nearly_equal_configurations_is_best(tmp_path, capsys):
    runs = [run for n in range(1, 6) for run in of_losses(tmp_path, f"c{n}", [1.0, 1.1, 1.2 + 1e-9 * n], n / 10)]
    assert [row["p"] for row in table(printed(capsys, *runs))].count("best") == 1


def test_two_configurations_have_welchs_p(tmp_path, capsys):
    from scipy import stats  # takes a second, which other tests need not wait for

    good, bad = [1.0, 1.1, 1.2], [1.1, 1.3]
    shown = printed(capsys, *of_losses(tmp_path, "g", good, 0.1), *of_losses(tmp_path, "b", bad, 0.2))
    assert table(shown)[1]["p"] == f"{stats.ttest_ind(good, bad, equal_var=False).pvalue:.2g}"
    assert "Welch's t-test against the best of 2" in shown


def test_single_seeds_have_no_p(tmp_path, capsys):
    """A configuration of one seed is neither tested nor the best."""
    runs = of_losses(tmp_path, "one", [0.5], 0.1) + of_losses(tmp_path, "a", [1.0, 1.1], 0.2)
    assert "p: needs two configurations with at least two seeds" in (shown := printed(capsys, *runs))
    assert [(row["p"], row["std"] == "-") for row in table(shown)] == [("-", True), ("-", False)]
    runs += of_losses(tmp_path, "b", [2.0, 2.2], 0.3)
    assert [row["p"] == "best" for row in table(printed(capsys, *runs))] == [False, True, False]


def test_repeated_seed_counts_once_by_mean_loss(tmp_path, capsys):
    """Its losses differ by rounding, as with other numbers of threads."""
    losses = (("a", 1.0, 0), ("again", 1.2, 0), ("b", 2.1, 1))
    runs = [fake_run(tmp_path / name, rows_of(val=[9, 9, loss]), seed=seed) for name, loss, seed in losses]
    (row,) = table(printed(capsys, *runs))
    assert (row["seeds"], row["val/loss"]) == ("2", "1.6000")


@pytest.mark.parametrize("fact", [{"code": "bbbbbbbbbbbb"}, {"precision": "bf16"}, {"torch": "2.11.0"}], ids=str)
def test_other_code_precision_or_torch_is_another_configuration(fact, tmp_path, capsys):
    runs = of_losses(tmp_path, "main", [1.0, 1.1], starts=[start()])
    runs += of_losses(tmp_path, "branch", [2.0, 2.1], starts=[start(**fact)])
    name, value = {"precision": "mixed_precision"}.get([*fact][0], [*fact][0]), [*fact.values()][0]
    for order in (runs, runs[::-1]):
        first, second = table(printed(capsys, *order))
        assert (first["seeds"], second["seeds"], second["configuration"]) == ("2", "2", f"{name} {value}")


@pytest.mark.parametrize("fact", ["code", "torch", "mixed_precision"])
def test_run_resumed_under_another_fact_has_both(fact, tmp_path):
    def of(step, value):
        return start(step) | {fact: value}

    starts = {
        "a": [of(0, "a"), of(10, "a"), of(30, "b")],  # the last session found the run complete
        "a, b from step 21": [of(0, "a"), of(20, "b")],
        "a, b from step 11, a from step 21": [of(0, "a"), of(10, "b"), of(20, "a")],
        None: [],
    }
    for name, sessions in starts.items():
        run = fake_run(tmp_path / f"run {name}", rows_of(val=[3.0, 2.0, 1.0]), starts=sessions)
        assert ComparedRun(run).settings[fact] == name


def test_label_omits_settings_that_change_nothing(tmp_path, capsys):
    runs = [
        fake_run(tmp_path / f"r{i}", rows_of(val=[9, 9, 1 + i]), seed=i % 2, lr=10.0 ** -(i // 2), compile=i > 1)
        for i in range(4)
    ]
    assert [row["configuration"] for row in table(printed(capsys, *runs))] == ["optimizer.lr 1.0", "optimizer.lr 0.1"]


def test_configuration_with_many_settings_has_its_runs_name(tmp_path, capsys):
    runs = of_losses(tmp_path, "plain-seed", [1.0, 1.1])
    runs += of_losses(tmp_path, "deep", [3.0, 3.1], **{f"model_{n}": n for n in range(7)})
    assert [row["configuration"] for row in table(printed(capsys, *runs))] == ["plain", "deep"]


def test_unfinished_run_is_left_out_and_named(tmp_path, capsys):
    runs = of_losses(tmp_path, "g", [1.0, 1.1])
    runs.append(fake_run(tmp_path / "half", rows_of(val=[0.5, 0.4]), seed=1, state="running"))
    shown = printed(capsys, *runs)
    assert [(row["seeds"], row["val/loss"]) for row in table(shown)] == [("2", "1.0500")]
    assert "left out: half (running, step 20 of 30, val/loss 0.4000)\n" in shown
    diverged = fake_run(tmp_path / "nan", {10: {"val/loss": None}, 30: {"train/loss": None}}, state="failed")
    assert printed(capsys, diverged) == "left out: nan (failed, step 30 of 30, val/loss -)\n"


def test_unreadable_runs_are_skipped_with_one_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.yaml").write_text("steps: [")
    runs = of_losses(tmp_path, "g", [1.0, 1.1])
    shutil.copytree(runs[0], tmp_path / "unread")
    (tmp_path / "unread" / "metrics.jsonl").unlink()
    (tmp_path / "unread" / "metrics.jsonl").mkdir()
    shown = printed(capsys, *(tmp_path / name for name in ("empty", "damaged", "unread", "nowhere")), *runs)
    assert f"skipped: run: {tmp_path / 'unread'}/metrics.jsonl cannot be read: " in shown
    assert f"skipped: {tmp_path / 'damaged'}/config.yaml is damaged (" in shown
    for name in ("empty", "nowhere"):
        assert f"skipped: run: '{tmp_path / name}' is not the directory of a run: it has no config.yaml\n" in shown
    assert [row["seeds"] for row in table(shown)] == ["2"]


def test_output_of_a_sweep_is_no_run(tmp_path, capsys):
    """`tools.compare runs/lr/*` names its folder, too."""
    (tmp_path / "logs").mkdir()
    shown = printed(capsys, tmp_path / "logs", *of_losses(tmp_path, "g", [1.0, 1.1]))
    assert "skipped" not in shown and [row["seeds"] for row in table(shown)] == ["2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{tmp}", "none of these is the directory of a run"),
        ("{tmp}/g-0 --out {tmp}/g-0/config.yaml/x", "cannot be written"),
        ("{tmp}/g-0 --x tokens --out {tmp}/x.png", "g-0 did not log it; use --x steps"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, tmp_path, monkeypatch, capsys):
    of_losses(tmp_path, "g", [1.0])
    monkeypatch.setattr(sys, "argv", ["tools.compare", *arguments.format(tmp=tmp_path).split()])
    streams = sys.stdout, sys.stderr
    assert scripts.run_script("tools.compare", CompareConfig, needs_torch=False) == 2
    sys.stdout, sys.stderr = streams
    error = capsys.readouterr().err
    assert error.startswith("tools.compare: error: ") and message in error and "Traceback" not in error


def test_compare_imports_neither_torch_nor_scipy(tmp_path):
    code = "import sys; from tools.compare import CompareConfig, main; main(CompareConfig(runs=sys.argv[1:], out=None))"
    code += "; sys.exit(any(name in sys.modules for name in ('scipy', 'torch', 'matplotlib')))"
    runs = of_losses(tmp_path, "a", [1.0], 0.1) + of_losses(tmp_path, "b", [2.0], 0.2)
    subprocess.run([sys.executable, "-c", code, *runs], cwd=ROOT, check=True, capture_output=True)


# p-values


def test_p_values_of_known_samples():
    assert p_values_against_best([*SLEEP]) == [1.0, pytest.approx(0.07939, abs=5e-6)]
    assert p_values_against_best([[1.0], [2.0, 3.0]]) == [None, None]
    assert p_values_against_best([[1.0, 1.0], [1.0, 1.0]]) == [1, 1]
    assert p_values_against_best([[1.0, 1.0], [2.0, 2.0]]) == [1, 0]
    best, equal, other = p_values_against_best([[1.0, 1.0], [1.0, 1.0], [2.0, 2.1]])
    assert best == equal == 1 and other < 0.1


def random_tables(num_tables, num_configurations, num_seeds, spread):
    """Normal losses [tables, configurations, seeds] of equal means, whose deviations rise to `spread`."""
    losses = np.random.default_rng(1).standard_normal((num_tables, num_configurations, num_seeds))
    return losses * np.geomspace(1, spread, num_configurations)[:, None]


def has_significant(losses):
    """Whether a table has a p-value below 0.05; none is smaller than that of Welch's test, which takes less time."""
    counts = np.full(*losses.shape)
    if compare.welch_p_values(losses.mean(axis=1), losses.var(axis=1, ddof=1) / counts, counts).min() >= 0.05:
        return False
    return min(p_values_against_best(losses.tolist())) < 0.05


@pytest.mark.parametrize("spread", thinned([10, 1], 2), ids="deviations up to {}".format)
@pytest.mark.parametrize(
    ("num_tables", "num_configurations", "num_seeds"),
    [(1000, 3, 3), (250, 10, 5), pytest.param(150, 20, 10, marks=pytest.mark.slow)],
)
def test_tables_of_nothing_are_rarely_significant(num_tables, num_configurations, num_seeds, spread, monkeypatch):
    """5% of the tables have a p-value below 0.05, although the best is chosen by its losses."""
    monkeypatch.setattr(compare, "NUM_SIMULATIONS", 1000)
    tables = random_tables(num_tables, num_configurations, num_seeds, spread)
    deviation = (0.05 * 0.95 / num_tables) ** 0.5
    assert sum(map(has_significant, tables)) / num_tables < 0.05 + 2 * deviation


@pytest.mark.parametrize(("num_configurations", "num_seeds", "effect"), [(10, 5, 4), (20, 10, 3), (3, 3, 6)])
def test_real_effect_is_found(num_configurations, num_seeds, effect, monkeypatch):
    """One configuration is better by some standard deviations; the others are found to be worse."""
    monkeypatch.setattr(compare, "NUM_SIMULATIONS", 999)
    tables = random_tables(50, num_configurations, num_seeds, 1)
    tables[:, 0] -= effect
    p_values = np.array([p_values_against_best(losses.tolist()) for losses in tables])
    assert (p_values[:, 0] == 1).all() and (p_values[:, 1:] < 0.05).mean() > 0.8


# Runs of different data


@pytest.mark.parametrize(
    "settings",
    [
        {"seq_len": 32},
        {"evaluation": {"num_samples": 9}},
        {"data": {"facts": 64}},
        {"data": {"source": "text", "path": "x", "hash": "y", "mix": {"c": 1, "d": 2}}},
    ],
    ids=str,
)
def test_losses_on_other_data_are_not_compared(settings, tmp_path, capsys):
    mixture = {"source": "text", "path": "x", "hash": "y", "mix": {"c": 1, "d": 1}}
    runs = of_losses(tmp_path, "a", [1.0, 1.1], data=mixture if "mix" in settings.get("data", {}) else None)
    shown = printed(capsys, *of_losses(tmp_path, "b", [2.0, 2.1], **settings), *runs)
    assert shown.startswith("The validation losses are not comparable, because they are of different data (")
    assert "significant" not in shown and [row["p"] for row in table(shown)] == ["-", "-"]
    assert [row["val/loss"] for row in table(shown)] == ["2.0500", "1.0500"], "in the order of the command line"


def test_moved_text_is_the_same_data(tmp_path, capsys):
    runs = [
        run
        for folder, loss in (("here", 1.0), ("there", 2.0))
        for run in of_losses(tmp_path, folder, [loss, loss + 0.1], loss, data={"source": "text", "mix": {folder: 1}})
    ]
    assert "not comparable" not in printed(capsys, *runs)


def of_text(tmp_path, corpus, losses, text="ffff", num_bytes=16406, **settings):
    """Write runs on a corpus named after its tokens; their bits per byte are a quarter of their losses."""
    data = {"source": "text", "path": corpus, "hash": f"{corpus}00000000"}
    runs = []
    for seed, loss in enumerate(losses):
        rows = {30: {"val/loss": loss, "val/bits_per_byte": loss / 4, "val/bytes": num_bytes}}
        starts = [start(validation_text=text)]
        runs.append(fake_run(tmp_path / f"{corpus}-{seed}", rows, seed=seed, starts=starts, data=data, **settings))
    return runs


def test_tokenizers_are_compared_by_bits_per_byte(tmp_path, capsys):
    from scipy import stats

    losses = {"bytes": [4.0, 4.2, 4.1], "words": [1.0, 1.1, 1.2]}
    whole = {"evaluation": {"num_samples": None}}
    runs = [run for corpus in losses for run in of_text(tmp_path, corpus, losses[corpus], num_bytes=16300, **whole)]
    shown = printed(capsys, *runs)
    assert shown.startswith("One text as different tokens (data.hash): runs are compared by bits per byte.\n")
    first, second = table(shown)
    assert (first["configuration"], first["val/bits_per_byte"]) == ("data.hash words00000000", f"{1.1 / 4:.4f}")
    assert second["p"] == f"{stats.ttest_ind(*losses.values(), equal_var=False).pvalue:.2g}"


@pytest.mark.parametrize(
    "other", [{"text": "eeee"}, {"text": None}, {"num_bytes": 2159}, {"evaluation": {"num_samples": 9}}], ids=str
)
def test_tokenizers_are_compared_on_equal_text_only(other, tmp_path, capsys):
    """A run that was evaluated on a seventh of the text is not compared with one that was evaluated on all of it."""
    runs = of_text(tmp_path, "bytes", [1.0, 1.1], evaluation={"num_samples": None})
    runs += of_text(tmp_path, "words", [4.0, 4.1], **{"evaluation": {"num_samples": None}, **other})
    shown = printed(capsys, *runs)
    assert "not comparable" in shown and "significant" not in shown


def test_unknown_sizes_of_text_are_not_equal(tmp_path, capsys):
    whole = {"evaluation": {"num_samples": None}, "num_bytes": None}
    runs = [run for corpus in ("bytes", "words") for run in of_text(tmp_path, corpus, [1.0, 1.1], **whole)]
    assert "not comparable" in printed(capsys, *runs)


@pytest.mark.parametrize(
    ("seeds", "others", "comparable"), [([0, 0], [1, 1], False), ([0, 1], [0, 0], False), ([0, 1], [1, 0], True)]
)
def test_configurations_need_the_same_data_seeds(seeds, others, comparable, tmp_path, capsys):
    runs = []
    for name, lr, loss, data_seeds in (("a", 0.1, 1.0, seeds), ("b", 0.2, 2.0, others)):
        for seed, data_seed in enumerate(data_seeds):
            rows = rows_of(val=[9, 9, loss + 0.1 * seed])
            runs.append(fake_run(tmp_path / f"{name}{seed}", rows, seed=seed, lr=lr, data={"seed": data_seed}))
    shown = printed(capsys, *runs)
    assert ("of different data (data.seed)" not in shown) == comparable == ("significant" in shown)


@pytest.mark.parametrize(
    ("others", "different"),
    [({"path": "b.npy"}, "data.path"), ({"width": 3}, "data.width"), ({"num_workers": 2, "num_samples": 7}, "")],
)
def test_all_settings_of_another_source_select_its_data(others, different, tmp_path, capsys):
    """A source of a fork may read any of them."""
    data = {"source": "own", "path": "a.npy", "hash": None}
    runs = of_losses(tmp_path, "a", [1.0, 1.1], 0.1, data=data)
    runs += of_losses(tmp_path, "b", [2.0, 2.1], 0.2, data=data | others)
    shown = printed(capsys, *runs)
    assert (f"of different data ({different})" in shown) == bool(different) == ("significant" not in shown)


def test_path_of_another_source_with_a_hash_may_change(tmp_path, capsys):
    data = {"source": "own", "path": "a.npy", "hash": "ab"}
    runs = of_losses(tmp_path, "a", [1.0, 1.1], 0.1, data=data)
    runs += of_losses(tmp_path, "b", [2.0, 2.1], 0.2, data=data | {"path": "b.npy"})
    assert "significant" in printed(capsys, *runs)


# Branches


def log(step, tokens, speed=100.0, **values):
    return {"train/tokens": tokens, "perf/tokens_per_second": speed, "val/loss": 100 / step, **values}


@pytest.fixture
def family(tmp_path):
    """A run of 64 tokens a step, and branches of 256 from its step 10, one with another seed and one with other lr."""
    size = {"flops_per_token": 6000}
    rows = {step: log(step, 64 * step, **{"state/digest": f"d{step}"}) for step in (10, 20, 30)}
    root = fake_run(tmp_path / "root", rows, starts=[start(**size)])
    begin = {"run": str(root), "step": 10, "digest": "d10", "tokens": 640}

    def branch(name, **settings):
        rows = {step: log(step, 640 + 256 * (step - 10), 50.0) for step in (20, 30)}
        return fake_run(tmp_path / name, rows, begin, starts=[start(**size)], global_batch_size=16, **settings)

    return [root, branch("wide"), branch("wide-1", seed=1), branch("warm", lr=0.1)]


def test_cost_of_branch_includes_its_parents(family, capsys):
    rows = {row["configuration"].partition(", ")[2]: row for row in table(printed(capsys, *family))}
    tokens, seconds = 10 * 64 + 20 * 256, 10 * 64 / 100 + 20 * 256 / 50
    row = rows["optimizer.lr 0.001, from step 10"]
    assert row["tokens"] == f"{tokens:,d}" and row["FLOPs"] == f"{tokens * 6000:.3g}"
    assert row["hours"] == f"{seconds / 3600:.3g}" and row["seeds"] == "2"
    assert rows["optimizer.lr 0.1, from step 10"]["seeds"] == rows["optimizer.lr 0.001"]["seeds"] == "1"


def test_branches_of_two_parents_are_two_seeds(tmp_path):
    """If the parents differ in their seeds alone; a parent that is gone stands for itself."""
    branches = []
    for seed, lr in ((0, 0.1), (1, 0.1), (2, 0.5)):
        root = fake_run(tmp_path / f"root{seed}", rows_of(digest=[f"{seed}d10"]), seed=seed, lr=lr)
        begin = {"run": str(root), "step": 10, "digest": f"{seed}d10"}
        branches.append(fake_run(tmp_path / f"branch{seed}", rows_of(val=[None, 4, 3.0]), begin))
    one, two, other = map(ComparedRun, branches)
    assert one.configuration() == two.configuration() != other.configuration()
    assert one.seeds() != two.seeds()
    (tmp_path / "root1").rename(tmp_path / "moved")
    moved = ComparedRun(branches[1])
    assert moved.parent is None and moved.configuration() != one.configuration()


def test_run_that_was_trained_again_is_no_parent(family):
    rows = {10: {"state/digest": "other"}}
    shutil.rmtree(family[0])
    fake_run(family[0], rows)
    assert ComparedRun(family[1]).parent is None


@pytest.mark.slow
def test_branches_of_real_runs(runs, capsys):
    configuration = [*TINY_STORIES, "--out_dir", runs]
    train(*configuration, "--name", "base")
    begin = ["--branch_from", runs / "base" / "checkpoints" / "step-00000004"]
    train(*configuration, *begin, "--name", "smaller", "--optimizer.weight_decay", 0.5)
    train(*configuration, *begin, "--name", "seed", "--seed", 1)
    found = {
        row["configuration"]: row for row in table(printed(capsys, *(runs / n for n in ("base", "smaller", "seed"))))
    }
    decay = "optimizer.weight_decay"
    assert {*found} == {f"{decay} 0.1", f"{decay} 0.1, from step 4", f"{decay} 0.5, from step 4"}
    assert len({row["tokens"] for row in found.values()}) == 1
    # Started again, a branch resumes from its own checkpoints and is not a branch of itself.
    train(*configuration, *begin, "--name", "seed", "--seed", 1)
    assert [*ComparedRun(runs / "seed").rows] == [5, 6, 7, 8]


# The picture


@pytest.fixture
def figures(monkeypatch):
    """The figures that a test draws."""
    drawn, new_figure = [], plot.new_figure
    monkeypatch.setattr(plot, "new_figure", lambda *size: drawn.append(new_figure(*size)) or drawn[-1])
    return drawn


@pytest.mark.parametrize(("x", "places"), [("steps", [10, 30]), ("tokens", [1000, 3000]), ("seconds", [15, 45])])
def test_curves_show_mean_and_range_over_seeds(x, places, tmp_path, capsys, figures):
    """Two seeds, the second half as fast, and a third that diverged at step 20 and is drawn separately."""
    runs = []
    for seed, (speed, losses) in enumerate([(100, [4.0, None, 1.0]), (50, [5.0, None, 3.0]), (50, [9.0, None, None])]):
        rows = rows_of(val=losses, train=[1.0, 2.0, 3.0])
        for step, row in rows.items():
            row |= {"train/tokens": 100 * step, "perf/tokens_per_second": speed}
        runs.append(fake_run(tmp_path / f"seed-{seed}", rows, seed=seed, state="failed"))
    shown = printed(capsys, *runs, x=x, out=str(tmp_path / "new" / "all.png"))
    assert f"curves: {tmp_path}/new/all.png\n" in shown
    assert (tmp_path / "new" / "all.png").read_bytes().startswith(b"\x89PNG")
    training, validation = figures[0].axes
    mean, diverged = validation.get_lines()
    assert mean.get_xdata().tolist() == places and mean.get_ydata().tolist() == [4.5, 2.0]
    assert diverged.get_ydata().tolist() == [9.0] and diverged.get_color() == mean.get_color()
    [band] = validation.collections
    assert band.get_datalim(validation.transData).intervaly.tolist() == [1.0, 5.0]
    assert training.get_xlabel() == plot.X_AXES[x] and len(training.get_lines()) == 2


def test_picture_shows_excess_loss_where_it_is_known(tmp_path, capsys, figures):
    runs = [
        fake_run(tmp_path / name, rows_of(val=[5, 4, 3.0], train=[5, 4, 3.0], excess=[2.0, 1.0, 0.5]), lr=lr)
        for name, lr in (("a$_", 0.1), ("x" * 200, 0.2))
    ]
    printed(capsys, *runs, out=str(tmp_path / "a.png"))
    assert figures[0].axes[1].get_ylabel() == "excess validation loss (nats/token)"
    assert figures[0].axes[1].get_lines()[0].get_ydata().tolist() == [2.0, 1.0, 0.5]
    printed(capsys, *runs, *of_losses(tmp_path, "without", [1.0]), out=str(tmp_path / "b.png"))
    assert figures[1].axes[1].get_ylabel() == "validation loss (nats/token)"
    assert len(figures[1].legends[0].get_texts()) == 3


# docs/comparing.md


@pytest.mark.slow
def test_commands_of_comparing_page_work(runs):
    """With one seed per sweep, and a small run to branch from."""
    train(*TINY_STORIES, "--out_dir", runs, "--name", "stories")
    outputs = []
    for command in commands((ROOT / "docs" / "comparing.md").read_text()):
        command = command.replace("--seed 0,1 ", "").replace(" runs/", f" {runs}/")
        command = command.replace("step-00001000", "step-00000004")
        if "--branch_from" in command:
            command = command.replace("tools.sweep", f"tools.sweep --config {TINY_STORIES[1]} --out_dir {runs}")
        if "tools.compare" in command:
            pattern = command.split()[-1]
            found = sorted(map(str, runs.glob(pattern.removeprefix(f"{runs}/"))))
            command = command.replace(pattern, " ".join(found))
            command += f" --out {runs / 'picture'}"
        outputs.append(python(command).stdout)
    assert len(outputs) == 4
    for shown in outputs[:2]:
        assert "\noptimizer.lr 0.01 " in shown
    for shown in outputs[2:]:
        assert "\noptimizer.lr 0.0005, from step 4 " in shown


def test_no_run_is_refused():
    with pytest.raises(ConfigError, match=r"^runs: missing; name at least one$"):
        parse_tool(CompareConfig, "tool.py", [])
