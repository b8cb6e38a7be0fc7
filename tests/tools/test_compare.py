"""tools.compare: what differs between runs, which differences are noise, and the tree of branches."""

import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import warnings
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from cli import scripts
from tests.conftest import ROOT, TINY_STORIES, commands, python, train
from tools.compare.command import CompareConfig, main
from tools.compare.records import prediction_task, read_record, read_records
from tools.compare.report import Curves, save_figure, wrap_label
from tools.experiment.sequential_test import welch_p_value

# Student's sleep data, with which the documentation of R's t.test shows Welch's test: p-value = 0.07939.
SLEEP = (
    [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0],
    [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4],
)


def fake_run(path, rows, branched_from=None, state="finished", seed=0, lr=0.001, starts=(), **settings):
    """Write a run of 30 steps of 4 x 16 tokens; `rows` are {step: row}, and `starts` the rows of sessions.jsonl."""
    settings = {"steps": 30, "global_batch_size": 4, "seq_len": 16, "seed": seed, **settings}
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump({**settings, "data": {"seed": 0}, "optimizer": {"lr": lr}}))
    (path / "metrics.jsonl").write_text("".join(json.dumps({"step": s, **row}) + "\n" for s, row in rows.items()))
    (path / "status.json").write_text(json.dumps({"state": state, "step": max(rows, default=0), "reason": ""}))
    if branched_from:
        first, *others = starts or [{}]
        starts = [{**first, "step": branched_from["step"], "branched_from": branched_from}, *others]
    if starts:
        (path / "sessions.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    return path


def start(step=0, code="aaaaaaaaaaaa", precision="no", **facts):
    """A row of sessions.jsonl."""
    return {"step": step, "code": code, "mixed_precision": precision, "git_commit": "1234567890" * 4, **facts}


def rows_of(**curves):
    """{step: row} of curves such as val=[5.0, 4.0, 3.0] at steps 10, 20 and 30."""
    names = {"val": "val/loss", "train": "train/loss", "digest": "state/digest", "speed": "perf/tokens_per_second"}
    length = max(map(len, curves.values()))
    return {
        10 * i + 10: {names[name]: values[i] for name, values in curves.items() if values[i] is not None}
        for i in range(length)
    }


def printed(capsys, *runs, **settings):
    main(CompareConfig([str(run) for run in runs], **{"out": None, **settings}))
    return capsys.readouterr().out


def table(text, first="run"):
    """Rows of a printed table as dictionaries, by column title."""
    lines = text.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"{first} "))
    titles, *rows = [
        re.split(r" {2,}", line) for line in lines[begin : lines.index("", begin) if "" in lines[begin:] else None]
    ]
    return [dict(zip(titles, row, strict=False)) for row in rows if len(row) > 1]


def costs(text):
    """Rows of the printed table of costs."""
    return table(text[text.index("\n\nrun ", text.index("\n\nrun ") + 1) :])


# Runs beside each other


@pytest.fixture
def pair(tmp_path):
    a = rows_of(val=[5.0, 4.0, 3.5], train=[5.5, 4.5, 3.9], digest=["aa", "bb", "cc"], speed=[90.0, 1000.0, 110.0])
    b = rows_of(val=[5.0, 4.0, 2.5], train=[5.5, 4.5, 3.0], digest=["aa", "bx", "cx"], speed=[200.0, 210.0, 1.0])
    return fake_run(tmp_path / "a", a), fake_run(tmp_path / "b", b, lr=0.01)


def test_compare_shows_changed_settings_and_first_divergence(pair, capsys):
    shown = printed(capsys, *pair)
    assert "settings that differ:\n  optimizer.lr: 0.001 in a; 0.01 in b\n\n" in shown
    b, a = table(shown)
    assert (b["run"], b["val/loss"], b["train/loss"]) == ("b", "2.5000", "3.0000")
    assert (a["run"], a["best"], a["state"], a["step"]) == ("a", "3.5000", "finished", "30")
    assert [row["tokens/s"] for row in costs(shown)] == ["200", "110"]
    assert (b["digest diverges"], b["loss diverges"]) == ("20", "30") and "digest diverges" not in a


def test_identical_runs_never_diverge(pair, capsys, tmp_path):
    shutil.copytree(pair[0], tmp_path / "copy")
    shown = printed(capsys, pair[0], tmp_path / "copy")
    assert "settings that differ: none" in shown
    assert (table(shown)[1]["digest diverges"], table(shown)[1]["loss diverges"]) == ("never", "never")


def test_divergence_at_step_0_is_reported(tmp_path, capsys):
    """The evaluation before the first step differs where initial weights do."""
    runs = []
    for seed in (0, 1):
        rows = {0: {"val/loss": 5.0 + seed, "state/digest": f"start{seed}"}, 30: {"val/loss": 3.0, "state/digest": "e"}}
        runs.append(fake_run(tmp_path / f"seed-{seed}", rows, seed=seed))
    other = table(printed(capsys, *runs))[1]
    assert (other["digest diverges"], other["loss diverges"]) == ("0", "0")


def test_tokens_are_counted_to_a_loss(pair, capsys):
    """4 sequences of 16 tokens a step; without --loss to the lowest that both reached."""
    b, a = table(printed(capsys, *pair))
    assert b["tokens to 3.5000"] == a["tokens to 3.5000"] == f"{30 * 64:,d}"
    b, a = table(printed(capsys, *pair, loss=4.2))
    assert b["tokens to 4.2000"] == a["tokens to 4.2000"] == f"{20 * 64:,d}"
    b, a = table(printed(capsys, *pair, loss=3.0))
    assert (b["tokens to 3.0000"], a["tokens to 3.0000"]) == (f"{30 * 64:,d}", "-")


def test_tokens_are_summed_over_batch_warmup(tmp_path):
    """2, 4, 6 and then 8 sequences of 16 tokens, 3 steps each."""
    grows = {"batch_warmup_from": 2, "batch_warmup_steps": 9}
    run = fake_run(tmp_path / "grows", {}, global_batch_size=8, schedule=grows)
    sizes = [0, 2, 2, 2, 4, 4, 4, 6, 6, 6, 8, 8, 8]
    assert [read_record(run).tokens(step) for step in range(13)] == [16 * n for n in accumulate(sizes)]


def test_best_loss_uses_the_last_validation_set_only(tmp_path, capsys):
    """Losses on ten sequences and on a hundred are not compared."""
    few, many = ({"evaluation": {"num_samples": n}} for n in (10, 100))
    starts = [start(config=few), start(20, config=many)]
    run = fake_run(tmp_path / "run", rows_of(val=[1.0, 2.0, 3.0]), starts=starts, **many)
    shown = table(printed(capsys, run, loss=2.5))[0]
    assert (shown["best"], shown["tokens to 2.5000"]) == ("3.0000", "-")
    begin = {"run": str(run), "step": 10, "digest": None}
    branch = fake_run(tmp_path / "branch", rows_of(val=[0, 3.5, 4.0]), begin, starts=[start(config=many)], **many)
    assert {row["run"]: row["best"] for row in table(printed(capsys, run, branch))} == {
        "run": "3.0000",
        "branch": "3.5000",
    }
    plain = fake_run(tmp_path / "plain", rows_of(val=[1.0, 2.0, 3.0]), starts=[start(config=many)], **many)
    begin = {"run": str(plain), "step": 10, "digest": None}
    easier = fake_run(tmp_path / "easier", rows_of(val=[0, 4.0, 3.5]), begin, starts=[start(config=few)], **few)
    assert {row["run"]: row["best"] for row in table(printed(capsys, plain, easier))} == {
        "plain": "1.0000",
        "easier": "3.5000",
    }


def test_many_runs_are_sorted_by_loss(tmp_path, capsys):
    losses = {f"r{i}": (i * 37 % 50) / 10 + 1 for i in range(50)}
    runs = [fake_run(tmp_path / name, rows_of(val=[9, 8, loss]), lr=loss) for name, loss in losses.items()]
    diverged = fake_run(tmp_path / "diverged", rows_of(val=[9, None, None], train=[9, None, None]), state="failed")
    shown = table(printed(capsys, diverged, *runs))
    assert [row["run"] for row in shown[:50]] == sorted(losses, key=losses.get)
    assert all(float(row["optimizer.lr"]) == losses[row["run"]] for row in shown[:50])
    assert shown[50]["run"] == "diverged" and shown[50]["state"] == "failed"


def test_unreadable_runs_are_skipped_with_one_line(pair, capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.yaml").write_text("steps: [")
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "config.yaml").touch()
    (tmp_path / "edited").mkdir()
    (tmp_path / "edited" / "config.yaml").write_text("{global_batch_size: 4, data: {seed: 0}, seq_len: long}")
    shutil.copytree(pair[0], tmp_path / "unread")
    (tmp_path / "unread" / "metrics.jsonl").unlink()
    (tmp_path / "unread" / "metrics.jsonl").mkdir()
    shown = printed(capsys, *(tmp_path / name for name in ("empty", "damaged", "blank", "edited", "unread")), *pair)
    for name, problem in {
        "unread/metrics.jsonl": "cannot be read: ",
        "damaged/config.yaml": "is damaged (",
        "blank/config.yaml": "is damaged (it is empty)\n",
        "edited/config.yaml": "is damaged (seq_len: long must be a positive integer)\n",
    }.items():
        assert f"skipped: {tmp_path / name} {problem}" in shown
    assert f"skipped: '{tmp_path / 'empty'}' is not the directory of a run: it has no config.yaml\n" in shown
    assert [row["run"] for row in table(shown)] == ["b", "a"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: runs"),
        (["{tmp}/nowhere"], "nowhere' does not exist"),
        (["{tmp}"], "none of these is the directory of a run"),
        (["{tmp}/a", "--loss", "-1"], "loss"),
        (["{tmp}/a", "--lss", "1"], "lss"),
        (["{tmp}/a", "--out", "{tmp}/a/config.yaml/x"], "out: '"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, pair, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tools.compare", *(word.format(tmp=tmp_path) for word in arguments)])
    streams = sys.stdout, sys.stderr
    assert scripts.run_script("tools.compare", CompareConfig, needs_torch=False, module="tools.compare.command") == 2
    sys.stdout, sys.stderr = streams
    error = capsys.readouterr().err
    assert error.startswith("tools.compare: error: ") and message in error and "Traceback" not in error


def test_compare_and_sweep_import_no_torch():
    code = "import sys; from config.parser import parse_tool; from tools.compare import command as compare\n"
    code += "import tools.sweep.command; parse_tool(compare.CompareConfig, 'tools.compare', ['a']); "
    subprocess.run([sys.executable, "-c", code + "sys.exit('torch' in sys.modules)"], cwd=ROOT, check=True)


# Noise


def of_no_configuration(seed):
    return {"tracking": {"log_every": seed + 1}, "evaluation": {"every": seed + 1, "num_logged_generations": seed}}


def configuration(tmp_path, name, losses, lr):
    return [
        fake_run(tmp_path / f"{name}{seed}", rows_of(val=[9, 9, loss]), seed=seed, lr=lr, **of_no_configuration(seed))
        for seed, loss in enumerate(losses)
    ]


def test_welch_p_value_matches_known_values():
    assert welch_p_value(*SLEEP) == pytest.approx(0.07939, abs=5e-6)
    assert (
        welch_p_value([1.0], [2.0, 3.0]) is None
        and welch_p_value([1.0, 1.0], [1.0, 1.0]) == 1
        and welch_p_value([1, 1], [2, 2]) == 0
        and welch_p_value([1.0, 3.0], [2.0, 4.0]) == pytest.approx(1 - 1 / math.sqrt(5))
    )
    # For two samples of two with equal variance there are 2 degrees of freedom, and the tail has a closed form.
    t = 1 / math.sqrt(0.02 / 2 + 0.02 / 2)
    assert welch_p_value([1.0, 1.2], [2.0, 2.2]) == pytest.approx(1 - t / math.sqrt(t * t + 2), rel=1e-9)


def test_scipy_is_imported_for_verdicts_only(pair):
    """The import takes longer than the rest of tools.compare, which never needs torch."""
    code = "import sys; from tools.compare import command; command.main(command.CompareConfig(sys.argv[1:], out=None))"
    code += "; sys.exit(any(name in sys.modules for name in ('scipy', 'torch')))"
    subprocess.run([sys.executable, "-c", code, *pair], cwd=ROOT, check=True, capture_output=True)


def test_configuration_table_groups_seeds_and_tests_significance(tmp_path, capsys):
    good, same, bad = [1.0, 1.1, 1.2], [1.05, 1.15, 1.13], [2.0, 2.1, 2.3]
    runs = (
        configuration(tmp_path, "g", good, 0.1)
        + configuration(tmp_path, "s", same, 0.2)
        + configuration(tmp_path, "b", bad, 0.3)
    )
    first, second, third = table(printed(capsys, *runs), "configuration")
    assert first["configuration"] == "optimizer.lr 0.1" and "p" not in first
    assert first["seeds"] == "3" and first["val/loss"] == "1.1000"
    assert first["std"] == f"{statistics.stdev(good):.4f}"
    p = min(1.0, 2 * welch_p_value(good, same))
    assert (second["configuration"], second["p"], second["verdict"]) == (
        "optimizer.lr 0.2",
        f"{p:.2g}",
        "not significant",
    )
    assert (third["p"], third["verdict"]) == (f"{2 * welch_p_value(good, bad):.2g}", "significant")
    assert third["above best"] == f"{statistics.fmean(bad) - 1.1:.4f}"


def test_configuration_of_one_seed_has_no_verdict(tmp_path, capsys):
    good, bad = [1.0, 1.1, 1.2], [2.0, 2.1, 2.3]
    runs = (
        configuration(tmp_path, "g", good, 0.1)
        + configuration(tmp_path, "one", [1.5], 0.2)
        + configuration(tmp_path, "b", bad, 0.3)
    )
    shown = printed(capsys, *runs)
    assert (
        table(shown, "configuration")[2]["p"] == f"{welch_p_value(good, bad):.2g}"
        and "Bonferroni-corrected for 1 comparison" in shown
    )


def test_repeated_run_is_no_second_seed(tmp_path, capsys):
    runs = configuration(tmp_path, "g", [1.0], 0.1) + configuration(tmp_path, "b", [2.0, 2.1], 0.3)
    shutil.copytree(runs[0], tmp_path / "again")
    shown = printed(capsys, *runs, tmp_path / "again")
    first, second = table(shown, "configuration")
    assert (first["seeds"], first["std"]) == ("1", "-")
    assert second["p"] == "-" and "needs a second seed of" in shown


@pytest.mark.parametrize("fact", ["code", "precision"])
def test_other_code_or_precision_is_another_configuration(fact, tmp_path, capsys):
    """Two seeds each, in both orders."""
    runs, other = [], {"code": "bbbbbbbbbbbb", "precision": "bf16"}[fact]
    for name, facts, losses in (("main", {}, [1.0, 1.1]), ("branch", {fact: other}, [2.0, 2.1])):
        for seed, loss in enumerate(losses):
            rows = rows_of(val=[9, 9, loss])
            runs.append(fake_run(tmp_path / f"{name}-{seed}", rows, seed=seed, starts=[start(**facts)]))
    for order in (runs, runs[::-1]):
        shown = printed(capsys, *order)
        main_, branch = table(shown, "configuration")
        assert (main_["val/loss"], branch["val/loss"], branch["above best"]) == ("1.0500", "2.0500", "1.0000")
        name = {"code": "code", "precision": "mixed_precision"}[fact]
        assert branch["configuration"] == f"{name} {other}" and f"{other} in branch-" in shown
    assert ("bbbbbbbbbbbb (commit 12345678)" in shown) == (fact == "code")


def test_run_resumed_under_other_code_lists_both(tmp_path, capsys):
    starts = {
        "whole": [start()],
        "again": [start(), start(10), start(30, code="bbbbbbbbbbbb")],  # the last session found the run complete
        "both": [start(), start(20, code="bbbbbbbbbbbb")],
        "old": [],
    }
    rows = rows_of(val=[3.0, 2.0, 1.0])
    runs = [
        fake_run(tmp_path / name, rows, seed=seed, starts=rows_) for seed, (name, rows_) in enumerate(starts.items())
    ]
    printed_codes = {record.label: record.settings["code"] for record in read_records(runs)[0]}
    both = "aaaaaaaaaaaa, bbbbbbbbbbbb from step 21"
    assert printed_codes == {"whole": "a" * 12, "again": "a" * 12, "both": both, "old": None}
    assert sorted(row["seeds"] for row in table(printed(capsys, *runs), "configuration")) == ["1", "1", "2"]


def test_repeated_seed_counts_once_by_mean_loss(tmp_path, capsys):
    """Its losses differ by rounding, as with other numbers of threads."""
    runs = [fake_run(tmp_path / name, rows_of(val=[9, 9, x]), seed=s) for name, x, s in
            (("a", 1.0, 0), ("again", 1.2, 0), ("b", 2.1, 1))]  # fmt: skip
    for order in (runs, runs[::-1]):
        (configuration_,) = table(printed(capsys, *order), "configuration")
        assert (configuration_["seeds"], configuration_["val/loss"]) == ("2", "1.6000")


def test_configuration_label_omits_ignored_settings(tmp_path, capsys):
    runs = [fake_run(tmp_path / f"r{i}", rows_of(val=[9, 9, 1 + i]), seed=i % 2, lr=10.0 ** -(i // 2), compile=i > 1,
                     checkpoint={"every": 1 + i}) for i in range(4)]  # fmt: skip
    shown = printed(capsys, *runs)
    assert "  compile: " in shown and "  checkpoint.every: " in shown
    assert [row["configuration"] for row in table(shown, "configuration")] == ["optimizer.lr 1.0", "optimizer.lr 0.1"]


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        ({"steps": 20}, "for different numbers of steps"),
        ({"evaluation": {"num_samples": 9}}, "(evaluation.num_samples)"),
    ],
)
def test_configurations_measured_differently_get_a_warning(settings, warning, tmp_path, capsys):
    runs = configuration(tmp_path, "g", [1.0, 1.1], 0.1)
    runs += [fake_run(tmp_path / f"o{i}", rows_of(val=[9, 2 + i / 10, 2]), seed=i, lr=0.1, **settings) for i in (0, 1)]
    shown = printed(capsys, *runs)
    assert [row["seeds"] for row in table(shown, "configuration")] == ["2", "2"]
    assert (
        [line for line in shown.splitlines() if line.startswith("warning: ")]
        == [line for line in shown.splitlines() if warning in line and line.startswith("warning: ")]
        != []
    )


def test_losses_on_more_samples_are_of_another_configuration(tmp_path, capsys):
    runs = configuration(tmp_path, "g", [1.0, 1.1], 0.1)
    runs.append(fake_run(tmp_path / "more", rows_of(val=[9, 9, 1.2]), seed=2, lr=0.1, evaluation={"num_samples": 9}))
    assert [row["seeds"] for row in table(printed(capsys, *runs), "configuration")] == ["2", "1"]


def test_significance_needs_two_seeds(pair, capsys):
    assert "significance needs at least two" in printed(capsys, *pair)


@pytest.mark.parametrize("seed", [9, 1], ids=["own seed", "seed of a finished run"])
def test_unfinished_run_is_not_counted_as_seed(seed, tmp_path, capsys):
    runs = configuration(tmp_path, "g", [1.0, 1.1], 0.1)
    runs.append(fake_run(tmp_path / "half", rows_of(val=[0.5]), seed=seed, lr=0.1, state="running"))
    shown = printed(capsys, *runs)
    assert (table(shown, "configuration")[0]["seeds"], table(shown, "configuration")[0]["val/loss"]) == ("2", "1.0500")
    assert "left out, without a validation loss after the last step: half" in shown


@pytest.mark.parametrize(("best", "other", "whose"), [(1, 2, "the best"), (2, 1, "this configuration"), (1, 1, "both")])
def test_verdict_names_configuration_that_needs_seed(best, other, whose, tmp_path, capsys):
    losses = {"a": [1.0, 1.1][:best], "b": [2.0, 2.1][:other], "c": [3.0, 3.1]}
    runs = [
        run for n, (name, values) in enumerate(losses.items()) for run in configuration(tmp_path, name, values, 0.1 + n)
    ]
    assert table(printed(capsys, *runs), "configuration")[1]["verdict"] == f"needs a second seed of {whose}"


def test_configuration_with_many_settings_has_its_runs_name(tmp_path, capsys):
    many = {f"model_{n}": n for n in range(7)}
    runs = [fake_run(tmp_path / f"plain-seed_{n}", rows_of(val=[9, 9, 1 + n / 9]), seed=n) for n in range(2)]
    runs += [fake_run(tmp_path / f"deep-{n}", rows_of(val=[9, 9, 3 + n / 9]), seed=n, **many) for n in range(2)]
    assert [row["configuration"] for row in table(printed(capsys, *runs), "configuration")] == ["plain", "deep"]


# Runs of different data


def of_text(path, corpus, losses, seed=0, text="ffff", num_samples=None, num_bytes=16406, **settings):
    """Write a run on a corpus named after its tokens; its bits per byte are a quarter of its losses."""
    rows = {
        step: {**row, "val/bits_per_byte": row["val/loss"] / 4, "val/bytes": num_bytes}
        for step, row in rows_of(val=losses).items()
    }
    settings |= {"evaluation": {"num_samples": num_samples}}
    run = fake_run(path, rows, seed=seed, starts=[start(validation_text=text)], **settings)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"] |= {"source": "text", "path": corpus, "hash": f"{corpus}00000000"}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    return run


def test_runs_on_different_data_have_separate_tables(pair, tmp_path, capsys, page_alone):
    worlds = [fake_run(tmp_path / f"facts{n}", rows_of(val=[8.0, 7.0, 0.5])) for n in (64, 128)]
    for run, number in zip(worlds, (64, 128), strict=True):
        config = yaml.safe_load((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(yaml.safe_dump(config | {"data": {"seed": 0, "facts": number}}))
    others = [of_text(tmp_path / f"t{n}", "bytes", [9.0, 8.0, 7.0 + n], seed=n) for n in range(2)]
    shown = printed(capsys, *pair, *worlds, *others, out=str(tmp_path / "all"))
    _, stories, world, _, text = re.split(r"\n\n\d\. ", shown)
    assert stories.startswith("stories: 2 runs\n") and [row["run"] for row in table(stories)] == ["b", "a"]
    assert "tokens to 3.5000" in stories and "optimizer.lr: 0.001 in a; 0.01 in b\n" in stories
    assert world.startswith("stories of 64 facts (zipf 1.3): 1 run\n")
    assert [row["run"] for row in table(world)] == ["facts64"]
    assert text.startswith("text of bytes (hash bytes000): 2 runs\nsettings that differ:\n  seed: ")
    assert [row["run"] for row in table(text)] == ["t0", "t1"] and "tokens to 8.0000" in text
    titles = [group["title"] for group in page_groups(tmp_path / "all.html")]
    assert [(tmp_path / f"all-{n}.png").read_text() for n in (1, 2, 3, 4)] == titles
    worlds = [f"stories of {number} facts (zipf 1.3)" for number in (64, 128)]
    assert titles == ["stories", *worlds, "text of bytes (hash bytes000)"]


def test_mixture_of_other_weights_is_other_data(tmp_path, capsys):
    runs = [of_text(tmp_path / f"m{n}", "hash", [3, 2, 1.0]) for n in range(3)]
    for run, share in zip(runs, (1, 2, 2), strict=True):
        config = yaml.safe_load((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(
            yaml.safe_dump(config | {"data": config["data"] | {"mix": {"c": 1, "d": share}}})
        )
    assert (
        "predict 2 kinds of data" in (shown := printed(capsys, *runs))
        and "text of c x 1, d x 2 (hash hash0000): 2" in shown
    )


def test_moved_text_is_the_same_task():
    def task(hash, path):
        settings = {"data.source": "text", "data.hash": hash, "data.path": path}
        return prediction_task(SimpleNamespace(settings=settings))

    assert task("a", "here") == task("a", "there") != task("b", "there")


def test_branch_on_other_data_shows_no_effect(family, capsys):
    for run in family[1:3]:
        config = yaml.safe_load((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(yaml.safe_dump(config | {"data": {"seed": 0, "facts": 64}}))
    effects = [line.partition("): ")[2][:4] for line in tree(printed(capsys, *family))]
    assert effects == ["", "", "", "", "-0.1"]


def test_tokenizers_are_compared_by_bits_per_byte(tmp_path, capsys):
    losses = {"bytes": [1.0, 1.1, 1.2], "words": [4.0, 4.2, 4.1]}
    runs = [of_text(tmp_path / f"{corpus}-{n}", corpus, [9, 8, loss], n) for corpus in losses
            for n, loss in enumerate(losses[corpus])]  # fmt: skip
    for other in ({"text": "eeee"}, {"text": None}, {"num_samples": 9}):
        name = "-".join(map(str, *other.items()))
        runs.append(of_text(tmp_path / name, f"{name}corpus", [9, 8, 0.1], **other))
    runs.insert(0, of_text(tmp_path / "older", "bytes", [9, 8, 1.1], 1, text=None))  # records no hash of the text
    shown = printed(capsys, *runs)
    across = shown.partition("The same text encoded by several tokenizers:\n")[2]
    first, second = table(across, "configuration")
    assert (first["configuration"], first["val/bits_per_byte"]) == ("text of bytes (hash bytes000)", f"{1.1 / 4:.4f}")
    assert (second["configuration"], second["above best"]) == ("text of words (hash words000)", f"{3.0 / 4:.4f}")
    quarters = [[loss / 4 for loss in values] for values in losses.values()]
    assert (
        second["p"] == f"{welch_p_value(*quarters):.2g}"
        and "left out, evaluated on another part of the text: " in across
    )


@pytest.mark.parametrize(("num_bytes", "is_compared"), [(2159, False), (16300, True)])
def test_tokenizers_are_compared_on_equal_bytes_only(num_bytes, is_compared, tmp_path, capsys):
    """A run that was evaluated on a seventh of the text is not ranked beside one that was evaluated on all of it."""
    runs = [of_text(tmp_path / f"bytes-{n}", "bytes", [9, 8, 1.0 + n / 10], n) for n in range(2)]
    runs += [of_text(tmp_path / f"words-{n}", "words", [9, 8, 2.0 + n / 10], n, num_bytes=num_bytes) for n in range(2)]
    assert ("several tokenizers" in printed(capsys, *runs)) == is_compared


def test_tokenizer_table_names_run_of_other_bytes(tmp_path, capsys):
    sizes = {"bytes": 16406, "words": 16300, "other": 2159}
    runs = [of_text(tmp_path / name, name, [9, 8, 1.0], num_bytes=size) for name, size in sizes.items()]
    across = printed(capsys, *runs).partition("several tokenizers:\n")[2]
    assert len(table(across, "configuration")) == 2
    assert "left out, evaluated on another part of the text: other\n" in across


def test_tokenizers_of_unfinished_runs_are_not_compared(tmp_path, capsys):
    runs = [of_text(tmp_path / corpus, corpus, [9, 8]) for corpus in ("bytes", "words")]
    assert "several tokenizers" not in printed(capsys, *runs)


def test_single_seeds_measured_differently_get_a_warning(tmp_path, capsys):
    runs = [fake_run(tmp_path / f"l{n}", rows_of(val=[3, 2, 1.0 + n]), seq_len=n) for n in (16, 32)]
    shown = printed(capsys, *runs)
    assert "warning: these losses are not measured on the same sequences (seq_len)" in shown
    assert "No configuration has finished with two seeds" in shown


def test_out_may_be_a_folder(pair, capsys, tmp_path, page_alone, monkeypatch):
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    for out, place in ((".", "."), ("..", ".."), ("../below/", "."), ("new/one", "new")):
        name = "one" if place == "new" else "compare"
        assert f"{name}.html" in printed(capsys, *pair, out=out)
        assert (Path(place) / f"{name}.html").exists(), out


# What runs cost


def test_cost_table_shows_tokens_flops_and_seconds(tmp_path, capsys):
    """100 tokens per step; twice as fast after step 10, with an evaluation in between."""

    def log(step, speed, memory):
        return {"train/tokens": 100 * step, "perf/tokens_per_second": speed, "perf/peak_memory_bytes": memory}

    size = {"parameters": 12345, "flops_per_token": 6000}
    rows = {10: log(10, 50.0, 2e6), 15: {"val/loss": 4.0}, 20: log(20, 100.0, 9e6), 30: log(30, 100.0, 7e6)}
    run = fake_run(tmp_path / "run", rows, starts=[start(**size)], seq_len=25)
    begun = {"run": str(run), "step": 20, "digest": None}
    branch = fake_run(tmp_path / "branch", {30: log(30, 25.0, 1e6)}, begun, starts=[start(**size)], seq_len=25)
    old = fake_run(tmp_path / "old", rows_of(val=[3, 2, 1.0]))
    found = {row["run"]: [*row.values()][1:] for row in costs(printed(capsys, run, branch, old))}
    assert found["run"] == ["12,345", "3,000", "1.8e+07", "40.0", "100", "9 MB"]
    # Its log line is the first, of 3,000 tokens at 25 a second, and a third of these are its own.
    assert found["branch"] == ["12,345", "3,000", "1.8e+07", f"{20 + 10 + 40:.1f}", "25", "1 MB"]
    assert found["old"] == ["-", f"{30 * 64:,d}", "-", "-", "-", "-"]


@pytest.mark.parametrize(("x", "places"), [("tokens", [1000, 3000]), ("flops", [6e6, 18e6]), ("seconds", [15, 45])])
def test_curves_over_cost_show_mean_and_range(x, places, tmp_path, capsys, page_alone):
    """Two seeds, the second half as fast, and a third that diverged at step 20 and is drawn separately."""
    runs = []
    for seed, (speed, losses) in enumerate([(100, [4.0, None, 1.0]), (50, [5.0, None, 3.0]), (50, [9.0, None, None])]):
        rows = rows_of(val=losses, train=[1.0, 2.0, 3.0])
        for step, row in rows.items():
            row |= {"train/tokens": 100 * step, "perf/tokens_per_second": speed}
        facts = {"step": 0, "flops_per_token": 6000}
        runs.append(fake_run(tmp_path / f"seed-{seed}", rows, starts=[facts], seed=seed, state="failed"))
    other = {1: {"train/loss": 1.0, "train/tokens": 100, "perf/tokens_per_second": 1.0}}
    runs.append(fake_run(tmp_path / "other", other, lr=0.5, starts=[{"step": 0, "flops_per_token": 6000}]))
    bare = fake_run(tmp_path / "bare", rows_of(val=[3, 2, 1]), lr=0.7)
    assert f"not plotted, because they did not log {x}: bare\n" in printed(
        capsys, *runs, bare, x=x, out=str(tmp_path / "all")
    )
    assert page_groups(tmp_path / "all.html")[0]["curves"][-1] == ["optimizer.lr 0.7", {}]
    label, metrics = page_groups(tmp_path / "all.html")[0]["curves"][0]
    assert label == "optimizer.lr 0.001 (3 seeds)" and len(metrics["train/loss"]) == 2
    mean, diverged = metrics["val/loss"]
    assert mean == [[places[0], 4.5, 4.0, 5.0], [places[1], 2.0, 1.0, 3.0]] and len(diverged) == 1


# Branches


@pytest.fixture
def family(tmp_path):
    """A run, three branches from its step 10, and one branch from step 20 of one of these."""
    root = tmp_path / "root"
    fake_run(root, rows_of(val=[5, 4, 3], digest=["d10", "d20", "d30"]))

    def branch(name, of, step, digest, curve, **settings):
        begin = {"run": str(tmp_path / of), "step": step, "digest": digest}
        rows = {
            s: row for s, row in rows_of(val=curve, digest=[f"{name}{s}" for s in (10, 20, 30)]).items() if s > step
        }
        return fake_run(tmp_path / name, rows, begin, **settings)

    return [
        root,
        branch("faster", "root", 10, "d10", [0, 3.5, 2.0], lr=0.01),
        branch("other_seed", "root", 10, "d10", [0, 4.1, 3.2], seed=1),
        branch("third_seed", "root", 10, "d10", [0, 4.1, 2.9], seed=2),
        branch("twig", "faster", 20, "faster20", [0, 0, 1.5], lr=0.1),
    ]


def tree(shown):
    return shown.partition("branches:\n")[2].splitlines()


def test_branches_print_as_tree_with_effects(family, capsys):
    noise = statistics.stdev([3.0, 3.2, 2.9])
    assert tree(printed(capsys, *family)) == [
        "root: val/loss 3.0000",
        f"├─ step 10: faster (optimizer.lr 0.001 -> 0.01): -1 at step 30, std over 3 seeds {noise:.4g}",
        "│  └─ step 20: twig (optimizer.lr 0.01 -> 0.1): -0.5 at step 30",
        f"├─ step 10: other_seed (seed 0 -> 1): +0.2 at step 30, std over 3 seeds {noise:.4g}",
        f"└─ step 10: third_seed (seed 0 -> 2): -0.1 at step 30, std over 3 seeds {noise:.4g}",
    ]


def test_history_shared_by_branches_is_counted_once(family, capsys, tmp_path, page_alone):
    shown = table(printed(capsys, *family, out=str(tmp_path / "new" / "picture"), loss=4.5))
    parts = {row["run"]: row.get("digest diverges") for row in shown}
    assert parts == {"root": None, "faster": "20", "other_seed": "20", "third_seed": "20", "twig": "20"}
    assert {row["tokens to 4.5000"] for row in shown} == {f"{20 * 64:,d}"}
    curves = page_data(tmp_path / "new" / "picture.html")
    root, faster = curves["optimizer.lr 0.001"], curves["optimizer.lr 0.01, from step 10"]
    assert root["val/loss"] == [[10, 5.0], [20, 4.0], [30, 3.0]]
    assert faster["val/loss"] == [[10, 5.0], [20, 3.5], [30, 2.0]], "its own points and the one where it branched off"
    assert curves["optimizer.lr 0.1, from step 20"]["val/loss"] == [[20, 3.5], [30, 1.5]]
    seeds = curves["optimizer.lr 0.001, from step 10 (2 seeds)"]["val/loss"]
    assert [point[:2] for point in seeds] == [[10, 5.0], [20, 4.1], [30, pytest.approx(3.05)]]
    assert seeds[-1][2:] == [2.9, 3.2]


def test_renamed_parent_is_found_by_its_digest(family, capsys):
    moved = family[0].rename(family[0].with_name("moved"))
    assert tree(printed(capsys, moved, *family[1:]))[0] == "moved: val/loss 3.0000"
    fake_run(family[0], rows_of(val=[5, 4, 3], digest=["e10", "e20", "e30"]))
    records, _ = read_records([family[0], moved, family[1]])
    assert records[2].parent.path == moved, "not the other run that now has the name"


def test_branch_tokens_include_those_of_its_parent(family, capsys, tmp_path):
    begun = {"run": str(tmp_path / "root"), "step": 10, "digest": "d10"}
    rows = rows_of(val=[0, 3.5, 2.0], digest=["d10", "wide20", "wide30"])
    wide = fake_run(tmp_path / "wide", rows, begun, global_batch_size=16)
    tokens = {row["run"]: row["tokens to 2.0000"] for row in table(printed(capsys, *family, wide, loss=2.0))}
    assert tokens["faster"] == f"{30 * 4 * 16:,d}" and tokens["wide"] == f"{(10 * 4 + 20 * 16) * 16:,d}"


def test_branch_is_no_seed_of_its_parents_configuration(family, capsys):
    rows = table(printed(capsys, *family), "configuration")
    seeds = {(row["val/loss"], row["configuration"].rpartition("from step ")[2]): row["seeds"] for row in rows}
    assert seeds[f"{statistics.fmean([3.2, 2.9]):.4f}", "10"] == "2" and [*seeds.values()] == ["1", "1", "1", "2"]


@pytest.mark.parametrize("fact", [{"code": "bbbbbbbbbbbb"}, {"precision": "bf16"}], ids=str)
def test_branch_with_other_code_is_no_noise(fact, tmp_path, capsys):
    """Later changes of the parent do not count."""
    root = fake_run(tmp_path / "root", rows_of(val=[5, 4, 3]), starts=[start(code="old"), start(10)])
    begin, rows = {"run": str(root), "step": 10, "digest": None}, rows_of(val=[0, 4, 2])
    plain = fake_run(tmp_path / "plain", rows, begin, starts=[start()], seed=1)
    other = fake_run(tmp_path / "other", rows, begin, starts=[start(**fact)], seed=2)
    shown = tree(printed(capsys, root, plain, other))
    name, value = {"code": "code", "precision": "mixed_precision"}[[*fact][0]], [*fact.values()][0]
    assert f"{name} " in shown[1] and f"-> {value})" in shown[1] and "std over 2 seeds" in shown[1]
    assert "plain (seed 0 -> 1)" in shown[2]


def test_branch_without_parent_prints_its_origin(family, capsys):
    assert tree(printed(capsys, family[1]))[0] == f"faster, from step 10 of {family[0]}, which is not compared"


@pytest.fixture
def two_parents(tmp_path):
    """A run that was started afresh with another seed, which moved it aside, and a branch of each with one seed."""
    parents, branches = [], []
    for seed, (name, loss) in enumerate([("base.old-1", 3.0), ("base", 3.1)]):
        rows = rows_of(val=[5, 4, loss], digest=[f"{seed}d10", f"{seed}d20", f"{seed}d30"])
        parents.append(fake_run(tmp_path / name, rows, seed=seed))
        begin = {"run": str(tmp_path / "base"), "step": 10, "digest": f"{seed}d10"}
        rows = rows_of(val=[None, 3.5, 2.0 + loss], digest=[None, f"{seed}b20", f"{seed}b30"])
        branches.append(fake_run(tmp_path / f"branch-{seed}", rows, begin, seed=7, lr=0.1))
    return parents, branches


def test_branches_of_two_parents_are_two_seeds(two_parents, capsys, tmp_path, page_alone):
    parents, branches = two_parents
    (row,) = table(printed(capsys, *branches, out=str(tmp_path / "picture")), "configuration")
    assert (row["seeds"], row["val/loss"]) == ("2", "5.0500")
    [(label, metrics)] = page_groups(tmp_path / "picture.html")[0]["curves"]
    assert "(2 seeds)" in label
    assert metrics["val/loss"][0][-1] == [30, pytest.approx(5.05), 5.0, 5.1]


def test_branch_configurations_ignore_order_of_runs(two_parents, capsys):
    """Whether the parents are compared too, and in which order runs are named, changes no configuration."""
    parents, branches = two_parents
    for runs in (branches, branches[::-1], [*parents, *branches], [parents[1], *branches], [*branches, parents[0]]):
        rows = table(printed(capsys, *runs), "configuration")
        assert [row["seeds"] for row in rows if "from step 10" in row["configuration"] or len(rows) == 1] == ["2"], runs


def test_branches_of_retrained_parent_are_two_configurations(two_parents):
    """The run that was started afresh has another learning rate, so its branch is another configuration."""
    parents, branches = two_parents
    config = yaml.safe_load((parents[1] / "config.yaml").read_text())
    (parents[1] / "config.yaml").write_text(yaml.safe_dump(config | {"optimizer": {"lr": 0.5}}))
    for runs in (branches, branches[::-1], [*parents, *branches], [parents[1], *branches[::-1]]):
        records = {record.label: record for record in read_records(runs)[0]}
        assert records["branch-0"].configuration() != records["branch-1"].configuration()


def test_parent_is_the_recorded_one_among_equals(tmp_path):
    """A run that was started afresh has the same state after step 10, whatever the order in which runs are named."""
    rows = rows_of(val=[5, 4, 3], digest=["d10", "d20", "d30"])
    old, base = (fake_run(tmp_path / name, rows, lr=lr) for name, lr in (("base.old-1", 0.1), ("base", 0.5)))
    branch = fake_run(
        tmp_path / "branch", rows_of(val=[None, 4, 3]), {"run": str(base), "step": 10, "digest": "d10"}, seed=1
    )
    for runs in ([old, base, branch], [base, old, branch], [branch], [old, branch]):
        record = read_records(runs)[0][-1]
        assert record.parent_on_disk.path == base, runs


def test_repeated_branch_with_parents_seed_adds_none(family):
    begin = {"run": str(family[0]), "step": 10, "digest": "d10"}
    again = fake_run(family[0].with_name("again"), rows_of(val=[None, 4.0, 3.0]), begin)
    records = read_records([family[0], again])[0]
    assert records[1].seeds() == records[0].seeds()


@pytest.mark.slow
def test_branches_of_real_runs(runs, capsys):
    configuration = [*TINY_STORIES, "--out_dir", runs]
    train(*configuration, "--name", "base")
    begin = ["--branch_from", runs / "base" / "checkpoints" / "step-00000004"]
    train(*configuration, *begin, "--name", "smaller", "--optimizer.weight_decay", 0.5)
    train(*configuration, *begin, "--name", "seed", "--seed", 1)
    rows = [json.loads(line) for line in (runs / "base" / "metrics.jsonl").read_text().splitlines()]
    begun = json.loads((runs / "seed" / "sessions.jsonl").read_text())
    digest = next(row["state/digest"] for row in rows if row["step"] == 4)
    assert begun["branched_from"] == {"run": str((runs / "base").resolve()), "step": 4, "digest": digest}
    assert "branched_from" not in json.loads((runs / "base" / "sessions.jsonl").read_text())
    shown = printed(capsys, runs / "base", runs / "seed", runs / "smaller")
    root, seed, smaller = tree(shown)
    assert root.startswith("base: ") and "seed (seed 0 -> 1): " in seed
    assert re.search(
        r"smaller \(optimizer.weight_decay 0.1 -> 0.5\): [+-][\d.e-]+ at step 8, std over 2 seeds [\d.]+", smaller
    )
    assert {row["digest diverges"] for row in table(shown) if row["run"] != "base"} == {"5"}
    # Started again, a branch resumes from its own checkpoints and is not a branch of itself.
    train(*configuration, *begin, "--name", "seed", "--seed", 1)
    assert len(read_records([runs / "base", runs / "seed"])[0][1].rows) == 4
    # Nor is a run whose checkpoints are in another directory.
    shutil.move(runs / "base" / "checkpoints", runs / "elsewhere")
    (runs / "base" / "checkpoints").symlink_to(runs / "elsewhere")
    shutil.rmtree(runs / "elsewhere" / "step-00000008")
    train(*configuration, "--name", "base")
    starts = (runs / "base" / "sessions.jsonl").read_text().splitlines()
    assert len(starts) == 2 and "branched_from" not in json.loads(starts[1])


# docs/comparing.md


PAGE = (ROOT / "docs" / "comparing.md").read_text()
COMMANDS = commands(PAGE)


@pytest.mark.slow
def test_commands_of_comparing_page_work(runs):
    """With one seed per sweep, and a small run to branch from."""
    train(*TINY_STORIES, "--out_dir", runs, "--name", "stories")
    outputs = []
    for command in COMMANDS:
        command = (
            command.replace("--seed 0,1 ", "").replace(" runs/", f" {runs}/").replace("step-00001000", "step-00000004")
        )
        if "train.py" in command:
            command = command.replace("train.py", f"train.py --config {TINY_STORIES[1]} --out_dir {runs}")
        if "tools.compare" in command:
            command = command.replace(f"{runs}/lr/*", " ".join(map(str, sorted((runs / "lr").iterdir()))))
            command += f" --out {runs / 'picture'}"
        outputs.append(python(command).stdout)
    assert len(outputs) == 5
    for shown in outputs[:2]:
        assert "\n  optimizer.lr: " in shown and "tiny_stories-lr_0.001" in shown
    assert "lower (optimizer.lr 0.01 -> 0.0005): " in outputs[4] and "other_seed (seed 0 -> 1): " in outputs[4]


# Pictures


def page_data(page: Path):
    """Metrics of the first group of a page, by configuration, for configurations drawn as one line."""
    curves = page_groups(page)[0]["curves"]
    return {name: {metric: lines[0] for metric, lines in metrics.items()} for name, metrics in curves}


@pytest.fixture
def page_alone(monkeypatch):
    """Write a file instead of drawing the picture, which takes longest."""
    monkeypatch.setattr("tools.compare.command.save_figure", lambda title, curves, path, x: path.write_text(title))


def page_groups(page: Path):
    """Curves and tables of a page, by kind of data."""
    return json.loads(re.search(r"const groups = (.*);\n", page.read_text())[1])


def test_picture_and_self_contained_page_are_written(pair, capsys, tmp_path):
    printed(capsys, *pair, out=str(tmp_path / "both"))
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "both.html").read_text()
    assert not re.search(r"(src|href)=|@import|fetch\(", page) and page.count("http") == 1, "only the namespace of SVG"
    assert page_data(tmp_path / "both.html")["b"]["val/loss"] == [[10, 5.0], [20, 4.0], [30, 2.5]]


def test_special_characters_in_names_are_escaped(tmp_path, capsys):
    names = ["__proto__", "</script><b>", "_$\\frac", "\u2028'\"`${x}"]
    tails = [name.replace("/", "\u2215") for name in names]
    runs = [fake_run(tmp_path / name, rows_of(val=[3.0, 2.0, 1.0]), lr=0.1**n) for n, name in enumerate(tails)]
    labels = [read_records([run])[0][0].label for run in runs]
    printed(capsys, *runs, out=str(tmp_path / "all"))
    page = (tmp_path / "all.html").read_text()
    assert page.count("<b>") == 0 and list(page_data(tmp_path / "all.html")) == labels


DOM = """
const made = [];
function node(kind) {
  const self = { kind, attributes: {}, children: [], style: {}, classList: { toggle() {} },
    setAttribute(name, value) { self.attributes[name] = value; },
    appendChild(child) { self.children.push(child); if (self.kind === "select") self.value ??= child.value; },
    replaceChildren() { self.children = []; }, setPointerCapture() {},
    getBoundingClientRect: () => ({ width: 920, height: 450, left: 0, top: 0 }) };
  return self;
}
const byId = { plot: node("svg"), metric: node("select"), log: node("input"), tip: node("div"),
  reset: node("button"), legend: node("div"), group: node("select"), tables: node("div") };
globalThis.document = { getElementById: (id) => byId[id], createElement: node };
document.createElementNS = (_, kind) => node(kind);
globalThis.window = {}; globalThis.innerWidth = 1000;
const all = (from) => from.children.flatMap((child) => [child, ...all(child)]);
const find = (kind) => all(byId.plot).filter((one) => one.kind === kind);
"""
PLAY = """
const mouse = (x, y) => ({ clientX: x, clientY: y, pointerId: 1 });
const lines = () => find("polyline").map((line) => line.attributes.points);
const [first] = lines(), [x, y] = first.split(" ")[1].split(",").map(Number);
byId.plot.onpointermove(mouse(x + 3, y + 3));
const out = { metric: byId.metric.value, lines: lines().length, tip: byId.tip.textContent };
byId.plot.onpointerdown(mouse(80, 10)); byId.plot.onpointerup(mouse(480, 410)); // left half, all heights
out.zoomed = lines()[0].split(" ").map((p) => Number(p.split(",")[0]));
byId.plot.ondblclick(); out.back = lines()[0] === first;
byId.legend.children[0].onclick(); out.left = lines().length;
const labels = () => find("text").map((label) => label.textContent);
byId.metric.value = "train/loss"; byId.log.onchange(); out.long = labels();
for (let n = 0; n < 3; n++) { byId.plot.onpointerdown(mouse(460, 110)); byId.plot.onpointerup(mouse(500, 310)); }
out.many = labels();
for (let n = 0; n < 20; n++) { byId.plot.onpointerdown(mouse(460, 110)); byId.plot.onpointerup(mouse(500, 310)); }
out.deepest = labels();
const words = (cell) => (cell.textContent ?? "") + cell.children.map(words).join("");
out.rows = all(byId.tables).filter((one) => one.kind === "tr").map((row) => row.children.map(words));
out.swatches = all(byId.tables).filter((one) => one.kind === "line").map((line) => line.attributes.stroke);
out.keys = all(byId.legend).filter((one) => one.kind === "line").map((line) => line.attributes.stroke);
byId.group.value = 1; byId.group.onchange();
out.other = [words(byId.legend), byId.metric.value, !!byId.log.checked, find("polygon").length];
byId.metric.value = "val/excess_loss"; byId.metric.onchange();
out.above = [byId.log.checked, ...lines().map((line) => line.split(" ").length), find("polygon").length];
console.log(JSON.stringify(out));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="the page's script is run by node")
def test_page_script_hovers_and_zooms(pair, capsys, tmp_path, page_alone):
    """In a minimal DOM with a plot of 800 x 400 units."""
    fake_run(tmp_path / "c", {step: {"train/loss": step * 1e6} for step in (1000, 100_000)}, lr=0.1)
    excess = {10: 2.0, 30: 1.0}
    rows = {step: {"val/loss": 1.0 + e, "val/entropy": 1.0, "val/excess_loss": e} for step, e in excess.items()}
    worlds = [fake_run(tmp_path / f"w{seed}", rows, seed=seed, lr=0.1) for seed in range(2)]
    for run in worlds:
        config = yaml.safe_load((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(yaml.safe_dump(config | {"data": {"seed": 0, "facts": 64}}))
    printed(capsys, *pair, tmp_path / "c", *worlds, out=str(tmp_path / "both"))
    script = re.search(r"<script>(.*)</script>", (tmp_path / "both.html").read_text(), re.DOTALL)[1]
    (tmp_path / "page.js").write_text(DOM + script.replace('"use strict";', "") + PLAY)
    done = subprocess.run(["node", tmp_path / "page.js"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert (seen["metric"], seen["lines"], seen["left"], seen["back"]) == ("val/loss", 2, 1, True)
    assert seen["tip"] == "a: val/loss = 4 at step 20"
    assert seen["zoomed"] == [80, 880, 1680], "steps 10 to 20 fill what was 10 to 30"
    assert "4e+10" in seen["long"], "no wider than the margin"
    assert len(seen["many"]) == len(set(seen["many"])) > 10, "neighbouring labels differ"
    assert len(seen["deepest"]) < 40, "zooming stops where numbers cannot differ"
    assert [row[0] for row in seen["rows"]] == ["run", "b", "a", "c", "run", "b", "a", "c"]
    assert seen["rows"][1][-1] == "30" and seen["keys"] == seen["swatches"][1::-1] + seen["swatches"][2:3]
    assert seen["other"] == ["w (2 seeds)", "val/loss", False, 1]
    assert seen["above"] == [True, 2, 1]


def test_downsampled_curve_keeps_its_spikes(tmp_path, capsys, page_alone):
    """Long curves are thinned out; counts are not rounded."""
    rows = {step: {"train/loss": 9.0 if step == 2504 else 3.0, "train/tokens": step * 123457} for step in range(5000)}
    printed(capsys, fake_run(tmp_path / "long", rows), out=str(tmp_path / "page"))
    curves = page_data(tmp_path / "page.html")["long"]
    assert [2504, 9.0] in curves["train/loss"] and len(curves["train/loss"]) < 1500
    assert curves["train/tokens"][-1] == [4999, 4999 * 123457]


def test_long_legend_leaves_room_for_curves(tmp_path):
    names = ["x" * 200 + end for end in ("seed_0", "seed_1")]
    curves = [Curves(name, {"train/loss": [[(1, 5.0), (2, 4.0)]]}) for name in names]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns where a legend leaves no room
        save_figure("stories", curves, tmp_path / "picture.png")


def test_wrapped_labels_keep_names_distinct():
    names = [f"steps 400, model.position {one}, data.num_samples 6400 (3 seeds)" for one in ("rope", "learned")]
    rows = [wrap_label(name, 35, 3).split("\n") for name in names]
    assert [" ".join(lines) for lines in rows] == names and max(map(len, rows[0])) <= 35
    long = " ".join(f"setting{i} {i}," for i in range(20))
    first, *_, last = lines = wrap_label(long, 35, 3).split("\n")
    assert len(lines) == 3 and max(map(len, lines)) <= 35 and first[-1] == "…" and last.endswith("19,")
    assert "\n" not in wrap_label(names[0], 35, 1)
