"""tools.experiment: verdicts on candidates whose effect is known, what it refuses, and that it resumes."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch.nn.functional as F
import yaml
from transformers.convert_slow_tokenizer import bytes_to_unicode

from checkpoint.identity import code_hash
from config.errors import ConfigError, RunError
from data.text import TextCorpus, TextDataset
from run.load import load_run
from tests.conftest import ROOT, environment, python
from tests.data.test_prepare import make, make_documents, write_jsonl
from tests.support import forked
from tests.tools.experiment.conftest import FAKE, fake_scorer
from tools.experiment import arm, change, experiment, log, score, variants
from tools.experiment.arm import Arm
from tools.experiment.experiment import main
from tools.experiment.result import format_multiplier, summarize, trend
from tools.experiment.sequential_test import MIN_SEEDS
from tools.experiment.settings import ExperimentConfig, ReportConfig
from tools.jobs import runner
from tools.jobs.launch import Launch


def test_reports_verdict_and_compute_multiplier(run_experiment):
    found = run_experiment("--model.mlp relu2", speedup=True)
    assert found["verdict"] == "better" and found["seeds"] == 3
    assert found["low"] < -10 < found["high"] < 0
    ratio, low, high = found["compute_multiplier"]
    assert low < 1 / 0.9 < high and ratio == pytest.approx(1 / 0.9, abs=0.01)
    assert found["time_multiplier"][0] == pytest.approx(ratio), "the arms are equally fast"
    assert found["cost"]["parameters"] == [1000, 1000] and found["cost"]["diff_lines"] == 0
    names = [name for name in run_experiment.started() if (run_experiment.lab / "runs" / name).exists()]
    assert len(names) == len(set(names)) == 6 + 8
    assert {name.rpartition("-")[0] for name in names} >= {found["baseline"], found["candidate"]}
    assert not list(run_experiment.lab.glob("speed-*"))


def test_reports_worse_candidate(run_experiment):
    found = run_experiment("--optimizer.lr 3.0")
    assert found["verdict"] == "worse" and found["difference"] == pytest.approx(12.8, abs=1.5)


def test_baseline_is_trained_once_for_all_candidates(run_experiment):
    run_experiment("--model.mlp relu2")
    found = run_experiment("--optimizer.lr 2.0")
    assert found["candidates_tried"] == 2
    assert all(name.startswith(found["candidate"]) for name in run_experiment.started())
    again = run_experiment("--optimizer.lr 2.0")
    assert log.without_volatile(again) == log.without_volatile(found) and not run_experiment.started()


def test_equal_arms_train_separate_seeds(run_experiment):
    found = run_experiment("--model.mlp gelu", margin=None)
    assert found["margin"] == 0.03, "of the excess loss"
    assert found["verdict"] == "no difference" and found["baseline"] == found["candidate"]
    seeds = [int(name.rpartition("-")[2]) for name in run_experiment.started()]
    assert sorted(seed // 1000 for seed in seeds) == [0] * found["seeds"] + [1] * found["seeds"]


def test_first_seed_repeats_on_other_seeds(run_experiment):
    run_experiment("--model.mlp relu2", first_seed=500)
    seeds = {int(name.rpartition("-")[2]) for name in run_experiment.started()}
    assert seeds == {500, 501, 502}


def test_raised_max_seeds_resumes(run_experiment):
    found = run_experiment("--optimizer.lr 1.1", max_seeds=4, jobs=1, margin=0.005, stop_early=False)
    assert found["verdict"] == "unknown" and found["seeds"] == 4 and found["more_seeds"] > 0
    assert len(run_experiment.started()) == 8
    more = run_experiment("--optimizer.lr 1.1", max_seeds=6, jobs=1, margin=0.005, stop_early=False)
    assert len(run_experiment.started()) == 4 and more["seeds"] == 6
    assert "more seeds of each arm would decide" in summarize(found)


@pytest.mark.parametrize("idea", ["--optimizer.lr 1.1", "--model.mlp relu2"])
def test_result_does_not_depend_on_concurrent_runs(idea, run_experiment):
    """Eight concurrent runs train seeds ahead of the one that decides."""
    one = run_experiment(idea, max_seeds=6, jobs=1, stop_early=False)
    shutil.rmtree(run_experiment.lab / "runs")
    eight = run_experiment(idea, max_seeds=6, jobs=8, stop_early=False)
    assert len(run_experiment.started()) > 6
    assert [one[name] for name in ("seeds", "difference", "high")] == [
        eight[name] for name in ("seeds", "difference", "high")
    ]


def test_unlikely_candidate_is_futile(run_experiment):
    found = run_experiment("--optimizer.lr 1.1", jobs=1)
    assert found["verdict"] == "futile" and MIN_SEEDS <= found["seeds"] < 12 and found["candidates_tried"] == 1
    assert "unlikely to be called better" in summarize(found)
    assert len(run_experiment.started()) == 2 * found["seeds"]


def test_much_worse_first_run_is_futile(run_experiment):
    run_experiment("--data.num_workers 0", max_seeds=4, jobs=2, margin=1e-9)
    found = run_experiment("--optimizer.lr 3.0", max_seeds=4, jobs=1)
    assert found["verdict"] == "futile" and len(run_experiment.started()) == 1
    assert "standard deviations over seeds above the mean of the baseline" in summarize(found)
    assert run_experiment("--optimizer.lr 3.0", max_seeds=4, jobs=1, stop_early=False)["verdict"] == "worse"


def test_shared_baseline_has_more_seeds(run_experiment):
    found = run_experiment("--model.mlp relu2", baseline_seeds=13)
    assert (found["verdict"], found["seeds"], found["baseline_seeds"]) == ("better", 3, 13)
    assert [len(losses) for losses in found["losses"]] == [13, 3] and len(run_experiment.started()) == 16
    message = run_experiment("--model.mlp relu2", baseline_seeds=12, error=ConfigError)
    assert message.startswith("baseline_seeds: 12 must be more than max_seeds, 12")


def test_diverging_candidate_is_failed_and_costs_one_run(run_experiment):
    found = run_experiment("--optimizer.lr 0", jobs=1)
    assert found["verdict"] == "failed" and "the loss is nan" in found["message"]
    assert f"; log: {run_experiment.lab}/runs/logs/{found['candidate']}-0.log" in found["message"]
    assert len(run_experiment.started()) == 2, "one of the baseline and one of the candidate"
    assert summarize(found).startswith("Failed: --optimizer.lr 0: does not train: ")
    assert [row["verdict"] for row in log.read_log(run_experiment.lab)] == ["failed"]


def test_refused_settings_are_no_verdict(run_experiment):
    assert "--model.mpl is not a setting" in run_experiment("--model.mpl relu2", error=ConfigError)
    assert not run_experiment.started() and not log.read_log(run_experiment.lab)


@pytest.mark.parametrize("words", [("--seed 7",), ("--optimizer.lr 2", "--seed", "7"), ("--out_dir=x",)])
def test_settings_of_single_runs_are_refused(words, run_experiment):
    assert "is set for each run" in run_experiment(*words, error=ConfigError)


def test_change_without_quotes_is_refused(run_experiment):
    assert "quote the idea" in run_experiment("--model.mlp", "relu2", error=ConfigError)


@pytest.mark.parametrize("words", [("--model.mlp relu2 --help",), ("--optimizer.lr 2", "--print_config")])
def test_printing_options_are_refused(words, run_experiment):
    assert "is an option of train.py" in run_experiment(*words, error=ConfigError)


def test_broken_baseline_is_an_error(run_experiment):
    assert "--x is not a setting" in run_experiment("--model.mlp relu2", "--x", "3", error=ConfigError)
    assert "the loss is nan" in run_experiment("--optimizer.lr 1", "--optimizer.lr", "0", error=RunError)
    assert "no val/loss" in run_experiment("--optimizer.lr 1", "--evaluation.every", "0", error=ConfigError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": "other"}, "not evaluated on the same validation set"),
        ({"entropy": 0.4}, "the entropy of the data is 0.5 for the baseline and 0.4"),
        ({"loss": 0.8}, "its code measures something else"),
    ],
)
def test_incomparable_arms_are_refused(changes, message, run_experiment, monkeypatch):
    def other(arm, *words):
        return fake_scorer(arm, *words) | (changes if arm.settings["model.mlp"] == "relu2" else {})

    monkeypatch.setattr(score, "run_scorer", other)
    assert message in run_experiment("--model.mlp relu2", error=ConfigError)
    assert not log.read_log(run_experiment.lab)


@pytest.fixture
def run_experiment_tokenizers(run_experiment, monkeypatch):
    """Tokens of the baseline's corpus have ten bytes, of the candidate's eleven: as many as the name has letters."""
    whole = ("--data.source", "text", "--evaluation.num_samples", "null")

    def compare_tokenizers(text="same", common=whole, error=None, speedup=False, **facts):
        def score_text(arm, what, *words):
            path = arm.settings["data.path"]
            found = {"targets": path, "entropy": None, "num_targets": 3300 // len(path), "num_bytes": 3300}
            return fake_scorer(arm, what, *words) | found | (facts if path == "of eleven ." else {})

        texts = {"of ten ...": "same", "of eleven .": text}
        monkeypatch.setattr(score, "run_scorer", score_text)
        monkeypatch.setattr(Arm, "validation_text", lambda arm: texts[arm.settings["data.path"]])
        monkeypatch.setattr(experiment, "THROUGHPUT_ROUNDS", 0)
        return run_experiment(
            "--data.path 'of eleven .'", "--data.path", "of ten ...", *common, error=error, speedup=speedup
        )

    return compare_tokenizers


def test_tokenizers_are_compared_by_bits_per_byte(run_experiment_tokenizers):
    """The losses are the same but for noise, 0.5 + 0.4 / steps; so the bits are ten elevenths, of more text."""
    found = run_experiment_tokenizers(speedup=True)
    assert (found["verdict"], found["metric"], found["entropy"]) == ("better", "val/bits_per_byte", None)
    assert found["difference"] == pytest.approx(100 * (10 / 11 - 1), abs=0.5)
    assert found["means"] == pytest.approx([0.09 / math.log(2), 0.9 / 11 / math.log(2)], rel=0.005)
    assert found["compute_multiplier"][0] == pytest.approx(0.4 / (0.9 * 10 / 11 - 0.5), rel=0.05)
    assert found["cost"]["bytes"] == [8000, 8800]
    summary = summarize(found)
    assert "changes val/bits_per_byte by -9." in summary and "+10.0% bytes of training text" in summary


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"text": "other"}, "the texts differ as well (hashes same and other)"),
        ({"text": None}, "the bytes of the text are unknown for the candidate"),
        ({"num_bytes": None}, "the bytes of the text are unknown for the candidate"),
        ({"num_bytes": 2000}, "the targets cover 3,300 bytes of it here and 2,000 there"),
        ({"common": ("--data.source", "text")}, "set evaluation.num_samples to null for both"),
        ({"common": ()}, "data.path: the candidate predicts 300 tokens"),
        ({"num_targets": 200}, "its code measures something else"),
    ],
    ids=str,
)
def test_incomparable_tokenizers_are_refused(facts, message, run_experiment_tokenizers, run_experiment):
    assert message in run_experiment_tokenizers(**facts, error=ConfigError)
    assert bool(run_experiment.started()) == bool(facts.keys() & {"num_bytes", "num_targets"}), "known before training"


def test_non_causal_candidate_fails(run_experiment, monkeypatch):
    monkeypatch.setattr(score, "run_scorer", lambda arm, *words: fake_scorer(arm, *words) | {"is_causal": False})
    found = run_experiment("--model.mlp relu2")
    assert found["verdict"] == "failed" and "later tokens" in found["message"]


def git_in(root):
    """Commit all files of a folder into a new repository; return a function that runs git there."""

    def git(*words):
        env = os.environ | change.AUTHOR
        return subprocess.run(["git", *words], cwd=root, env=env, check=True, capture_output=True, text=True).stdout

    git("init", "--quiet", "--initial-branch=main")
    git("add", ".")
    git("commit", "--quiet", "--message", "base")
    return git


def test_branch_is_trained_by_its_own_code(run_experiment):
    git = git_in(run_experiment.root)
    git("checkout", "--quiet", "-b", "better")
    (run_experiment.root / "train.py").write_text(FAKE.replace("EFFECT = 40", "EFFECT = 30"))
    found = run_experiment(".")
    assert found["verdict"] == "better" and found["difference"] == pytest.approx(-25, abs=2)
    git("commit", "--quiet", "--all", "--message", "an idea")
    again = run_experiment("better")
    assert (again["difference"], again["cost"]["diff_lines"]) == (found["difference"], 2)
    assert not run_experiment.started(), "runs of the same code and settings are trained again"
    assert "+EFFECT = 30" in open(again["diff"]).read()
    assert git("worktree", "list").count("\n") == 1
    assert run_experiment("better --optimizer.lr 9.0")["verdict"] == "worse", "settings of the candidate alone"


def test_data_changes_need_consent(run_experiment):
    git_in(run_experiment.root)
    (run_experiment.root / "train.py").write_text(
        FAKE.replace("* noise.gauss", "* random.Random(settings['seed']).gauss")
    )
    assert "changes train.py, which define the data" in run_experiment(".", error=ConfigError)
    assert not run_experiment.started()
    found = run_experiment(".", allow_data_changes=True)
    assert found["data_changes"] == ["train.py"] and "its losses may mean something else" in summarize(found)


def test_broken_guarantees_are_in_the_answer(run_experiment, monkeypatch):
    def broken(arm, command, *words):
        if command != "preview":
            return fake_scorer(arm, command, *words)
        failed = ["generation with a cache = without: 3.7e-02"] if words[0] == "verify" else []
        return {
            "digest": str(arm.settings) + arm.code_hash,
            "loss": 1.0,
            "rows": 1,
            "validation_rows": 0,
            "broken": failed,
        }

    monkeypatch.setattr(score, "run_scorer", broken)
    git_in(run_experiment.root)
    (run_experiment.root / "train.py").write_text(FAKE.replace("EFFECT = 40", "EFFECT = 30"))
    found = run_experiment(".")
    assert found["verdict"] == "better" and "checks of verify.py that fail: generation with a cache" in summarize(found)
    assert run_experiment("--model.mlp relu2")["verify"] is None

    def crash(arm, command, *words):
        if command == "preview":
            raise RunError("x")
        return fake_scorer(arm, command, *words)

    monkeypatch.setattr(score, "run_scorer", crash)
    assert "checks of verify.py that fail: not run: x" in summarize(run_experiment("."))
    assert run_experiment("--model.mlp relu2")["verify"] is None


def test_uncommitted_changes_are_in_neither_arm(run_experiment, monkeypatch):
    git_in(run_experiment.root)
    monkeypatch.setattr(experiment, "code_hash", lambda: code_hash(run_experiment.root))
    assert not run_experiment("--model.mlp relu2")["uncommitted"]
    config, code = run_experiment.root / "configs" / "lab.yaml", run_experiment.root / "train.py"
    config.write_text('{"optimizer.lr": 3.0}')
    found = run_experiment("--model.mlp relu2")
    assert found["uncommitted"] and not run_experiment.started()
    config.write_text("")
    code.write_text("1 / 0")
    found = run_experiment("--model.mlp relu2")
    assert found["uncommitted"] and found["verdict"] == "better" and not run_experiment.started()


def test_code_candidate_must_change_config_or_code(run_experiment):
    config, page = run_experiment.root / "configs" / "lab.yaml", run_experiment.root / "README.md"
    page.write_text("before")
    git = git_in(run_experiment.root)
    config.write_text('{"model.mlp": "relu2"}')
    for words in ((), ("--config", str(config)), (f"--config={config}",)):
        found = run_experiment(".", *words)
        assert found["verdict"] == "better" and found["baseline"] != found["candidate"], words
    git("commit", "--quiet", "--all", "--message", "relu2")
    page.write_text("after")
    assert "changes neither code that trains nor a setting" in run_experiment(".", error=ConfigError)


def test_budget_minutes_limits_started_runs(run_experiment, monkeypatch):
    found = run_experiment("--model.mlp relu2", budget_minutes=1e-9)
    assert found["verdict"] == "unknown" and not run_experiment.started() and found["finished_runs"] == [0, 0]
    assert "budget_minutes: the time is spent; 0 runs of the baseline" in summarize(found)
    assert len(log.read_log(run_experiment.lab)) == 1 and found["candidates_tried"] == 0
    begun = []
    monkeypatch.setattr(runner, "time", SimpleNamespace(**vars(time) | {"monotonic": lambda: len(begun)}))
    monkeypatch.setattr(experiment, "time", SimpleNamespace(monotonic=lambda: 0))
    start = runner.JobRunner._start
    monkeypatch.setattr(runner.JobRunner, "_start", lambda self, run: begun.append(run) or start(self, run))
    found = run_experiment("--model.mlp relu2", tune="optimizer.lr", budget_minutes=4 / 60)
    assert 4 <= len(begun) <= 5 and found["verdict"] == "unknown", "more than four of ten requested runs have started"


def test_budget_minutes_stops_runs_in_progress(run_experiment):
    (run_experiment.root / "train.py").write_text(FAKE.replace("state =", "import time\ntime.sleep(8)\nstate =", 1))
    assert run_experiment("--model.mlp relu2", budget_minutes=2 / 60)["finished_runs"] == [0, 0]


@pytest.mark.parametrize(("launch", "at_once"), [(None, 2), (sys.executable, 1)])
def test_launch_runs_one_at_a_time(launch, at_once, run_experiment, monkeypatch):
    monkeypatch.setattr(runner, "available_cores", lambda: 2)
    found = []
    monkeypatch.setattr(experiment.JobRunner, "train", lambda self, *_: found.append(self.max_running) or 1 / 0)
    run_experiment("--model.mlp relu2", jobs=None, launch=launch, error=ZeroDivisionError)
    assert found == [at_once]


@pytest.mark.parametrize(("jobs", "threads"), [(1, "8"), (3, "2"), (8, "1")])
def test_all_runs_have_the_same_threads(jobs, threads, run_experiment, monkeypatch):
    for module in (runner, experiment):
        monkeypatch.setattr(module, "available_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    source = FAKE.replace("EFFECT = 40", 'EFFECT = 40\nprint(os.environ.get("OMP_NUM_THREADS"), file=sys.stderr)')
    (run_experiment.root / "train.py").write_text(source)
    run_experiment("--model.mlp relu2", jobs=jobs, max_seeds=3)
    logs = [file.read_text().strip() for file in (run_experiment.lab / "runs" / "logs").glob("*.log")]
    assert len(logs) >= 6 and set(logs) == {threads}


@pytest.mark.parametrize(("load", "jobs", "words"), [(0.5, 1, None), (9.0, 1, "--jobs 4"), (9.0, 4, "load 9.0)")])
def test_busy_machine_is_reported(load, jobs, words, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0, 0))
    monkeypatch.setattr(experiment, "available_cores", lambda: 4)
    text = experiment.describe_load(SimpleNamespace(max_running=jobs, threads=4 // jobs))
    assert text.startswith(f"at most {jobs} run(s) at once, {4 // jobs} thread(s) each, on 4 core(s)")
    assert text.endswith(words) if words else "busy" not in text


def test_sizes_report_trend(run_experiment):
    found = run_experiment("--model.mlp relu2", sizes="1,4", speedup=True)
    assert [size["verdict"] for size in found["sizes"]] == ["better", "better"]
    assert found["trend"] == "does not change significantly"
    cost = run_experiment("--model.mlp relu2", sizes="4")["cost"]
    assert cost["tokens"][0] == 4 * found["cost"]["tokens"][0], "tokens are not those of the trained size"
    for wrong in ("1,x", "0.5", ""):
        assert "sizes: " in run_experiment("--model.mlp relu2", sizes=wrong, error=ConfigError)


def test_failure_at_larger_size_keeps_result(run_experiment, monkeypatch):
    fake = FAKE.replace("state = ", 'excess = math.nan if settings["model.d_model"] > 64 else excess\nstate = ', 1)
    (run_experiment.root / "train.py").write_text(fake)
    found = run_experiment("--model.mlp relu2", sizes="1,4")
    assert found["verdict"] == "better" and "no result for a larger model: " in summarize(found)
    assert found["cost"]["parameters"] == [1000, 1000] and log.read_log(run_experiment.lab)


def test_failed_throughput_measurement_keeps_result(run_experiment, monkeypatch):
    def speeds(*_):
        raise RunError("x")

    monkeypatch.setattr(experiment.Experiment, "measure_throughput", speeds)
    found = run_experiment("--model.mlp relu2", speedup=True)
    assert found["verdict"] == "better" and found["compute_multiplier"] and found["cost"]["relative_throughput"] is None


def make_arm(**changes):
    """Return an arm that is only used to derive others."""
    settings = {"steps": 400, "global_batch_size": 4, "data.source": "text", "optimizer.lr": 1.0}
    settings |= {"model.d_model": 64, "model.d_ff": 64, "model.n_heads": 4, "model.n_kv_heads": None}
    settings |= {"schedule.name": "wsd", "schedule.warmup_steps": 40, "schedule.decay_steps": None}
    return Arm(ROOT, "", Launch(), (), settings | changes, ROOT)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 2, 2), (12, 4, 2), (16, 4, 2), (4, None, 2), (4, 1, 4)])
def test_scale_parameters_keeps_queries_per_key(heads, kv_heads, size):
    larger = variants.scale_parameters(
        make_arm(**{"model.n_heads": heads, "model.n_kv_heads": kv_heads}), size
    ).settings
    kv = larger["model.n_kv_heads"]
    assert (kv is None) == (kv_heads is None) and larger["model.n_heads"] % (kv or 1) == 0
    assert kv is None or larger["model.n_heads"] // kv == heads // kv_heads
    assert larger["model.n_heads"] == pytest.approx(heads * size**0.5, abs=2)
    assert larger["model.d_model"] // larger["model.n_heads"] == 64 // heads
    assert larger["model.d_ff"] == pytest.approx(64 * size**0.5, abs=4) and larger["model.d_ff"] % 8 == 0
    assert larger["optimizer.lr"] == pytest.approx(1 / size**0.5), "inversely proportional to the width"


def test_scale_steps_scales_schedule_and_samples():
    stories = {"data.source": "stories", "data.num_samples": 1000, "schedule.decay_steps": 80}
    longer = variants.scale_steps(make_arm(**stories), 2.5).settings
    changed = [longer[name] for name in ("steps", "schedule.warmup_steps", "schedule.decay_steps", "data.num_samples")]
    assert changed == [1000, 100, 200, 2500]
    assert "data.num_samples" not in variants.scale_steps(make_arm(), 2.5).settings, "a text has as many as it has"


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule.decay_steps": 160},
        {"schedule.name": "constant", "schedule.decay_steps": 200},
        {"schedule.batch_warmup_from": 1, "schedule.batch_warmup_steps": 200},
        {"schedule.name": "linear", "steps": 600, "schedule.warmup_steps": 100, "schedule.decay_steps": 500},
        {"schedule.name": "linear", "global_batch_size": None, "data.source": "random", "data.num_samples": 9},
    ],
)
def test_scale_steps_keeps_schedules_valid(changes):
    arm = make_arm(**changes)
    for factor in (0.5, 0.5**0.5, 2):
        of = variants.scale_steps(arm, factor).settings
        assert of["steps"] == round(factor * arm.settings["steps"])
        assert of["schedule.warmup_steps"] + (of["schedule.decay_steps"] or 0) <= of["steps"], of
        assert (of.get("schedule.batch_warmup_steps") or 0) <= of["steps"]


def test_trend_compares_first_and_last_size():
    small = {"compute_multiplier": [1.1, 1.08, 1.12], "difference": 0, "low": 0, "high": 0}
    assert trend([small, small | {"compute_multiplier": [1.3, 1.25, 1.35]}]) == "grows"
    assert trend([small, small | {"compute_multiplier": [1.01, 0.99, 1.03]}]) == "shrinks"
    assert trend([{"difference": -9, "low": -10, "high": -8}, {"difference": -2, "low": -3, "high": -1}]) == "shrinks"


def test_tune_searches_both_arms_on_separate_seeds(run_experiment):
    found = run_experiment("--model.mlp relu2", "--optimizer.lr", "0.5", tune="optimizer.lr")
    assert found["verdict"] == "better" and found["difference"] == pytest.approx(-10, abs=1)
    assert found["tuned"] == [1.0, 1.0], "at which the loss is least"
    resolved = found["candidate_settings"]
    assert (resolved["optimizer.lr"], resolved["model.mlp"], resolved["steps"]) == (1.0, "relu2", 100)
    names = run_experiment.started()
    assert len(names) == 2 * 5 * 2 + 2 * found["seeds"]
    assert {int(name.rpartition("-")[2]) for name in names[:20]} == {2000, 2001}
    assert "tune: 'model.mlp' is 'gelu'" in run_experiment(
        "--tracking.log_every 2", tune="model.mlp", error=ConfigError
    )
    words = "--tracking.log_every 2", "--schedule.warmup_steps", "0"
    assert "is 0; name a setting" in run_experiment(*words, tune="schedule.warmup_steps", error=ConfigError)
    found = run_experiment("--model.mlp relu2", tune="schedule.warmup_steps")
    assert all(isinstance(value, int) for value in found["tuned"])
    assert log.count_candidates(run_experiment.lab, found["untuned_baseline"]) == 1 and found[
        "untuned_baseline"
    ].startswith("lab-")


def test_broken_candidate_costs_one_run_before_tuning(run_experiment):
    (run_experiment.root / "train.py").write_text(
        FAKE.replace("excess *= 1", '1 / (settings["model.mlp"] != "relu2")\nexcess *= 1')
    )
    found = run_experiment("--model.mlp relu2", tune="optimizer.lr", jobs=1)
    assert (
        found["verdict"] == "failed" and "ZeroDivisionError" in found["message"] and len(run_experiment.started()) == 2
    )


def test_match_narrows_feed_forward(run_experiment):
    run_experiment("--model.mlp swiglu --model.d_ff 128", match="parameters")
    name = next(name for name in run_experiment.started())
    logged = (run_experiment.lab / "runs" / "logs" / f"{name}.log").exists()
    shape = log.read_log(run_experiment.lab)[0]
    assert logged and shape["verdict"] in ("unknown", "no difference", "futile")
    narrow = variants.match_width(
        Arm(ROOT, "", Launch(), (), {"model.d_ff": 128, "model.mlp": "swiglu"}, ROOT),
        Arm(ROOT, "", Launch(), (), {"model.d_ff": 64, "model.mlp": "gelu"}, ROOT),
        "parameters",
    )
    assert narrow.settings["model.d_ff"] == 40 and narrow.words == ("--model.d_ff=40",)


def test_report_starts_with_result(run_experiment):
    shown = run_experiment("--model.mlp relu2", json=False, speedup=True).splitlines()
    begin = next(index for index, line in enumerate(shown) if line.startswith("Better: "))
    assert re.match(r"Better: --model.mlp relu2 changes val/excess_loss by -\d+.\d% \(95%: ", shown[begin])
    assert "; compute multiplier 1.1" in shown[begin] and "; time multiplier 1.1" in shown[begin]
    assert any(line.startswith("neither arm is tuned: --tune optimizer.lr") for line in shown)
    table = [line.split()[0] for line in shown[begin + 2 :] if line][:8]
    assert table[:4] == ["baseline", "val/excess_loss", "std", "parameters"]
    assert "valid under any stopping rule" in shown[-2] and "1 candidate(s) were compared" in shown[-1]


def test_report_command_prints_table(tmp_path):
    row = {
        "idea": "--seed 7",
        "baseline": "lab-1",
        "candidate": "lab-2",
        "verdict": "better",
        "seeds": 3,
        "margin": 0.03,
    }
    row |= {"difference": -2.0, "low": -3.0, "high": -1.0, "compute_multiplier": [1.1, 1.0, 1.2]}
    (tmp_path / "log.jsonl").write_text(json.dumps(row) + "\n")
    shown = python(f"python -m tools.experiment report --lab {tmp_path}").stdout
    assert "| `--seed 7` | lab-1 | -2.0% | -3.0% to -1.0% | 1.10 (1.00 to 1.20) | 3% | 3 | better |" in shown
    assert (tmp_path / "report.png").exists()


def test_format_multiplier_marks_bounds():
    assert format_multiplier([2.0, 1.4, 2.0]) == "over 2.00 (95%: 1.40 to over 2.00)"
    assert format_multiplier([0.5, 0.5, 0.6], [0.4, 0.3, 0.7]) == "under 0.40 (95%: under 0.30 to 0.70)"


@pytest.mark.slow
def test_report_and_log_after_several_experiments(run_experiment):
    log.main(ReportConfig(lab=str(run_experiment.lab)))  # without experiments
    for text in ("--optimizer.lr 3.0", "--model.mlp relu2", "--optimizer.lr 0", "--model.mlp gelu"):
        run_experiment(text, margin=0.02)
    (run_experiment.lab / "log.jsonl").open("a").write('{"half a li')
    log.main(ReportConfig(lab=str(run_experiment.lab)))
    before = len(log.read_log(run_experiment.lab))
    run_experiment("--optimizer.lr 9.0", margin=0.02)
    assert len(log.read_log(run_experiment.lab)) == before + 1, "the row after an incomplete line is lost"
    run_experiment("--optimizer.lr 9.0", margin=0.02, speedup=True)
    assert "compute_multiplier" in log.read_log(run_experiment.lab)[-1], "new results of the same runs are lost"
    lines = (run_experiment.lab / "log.jsonl").read_text()
    run_experiment("--optimizer.lr 9.0", margin=0.02, speedup=True)
    assert (run_experiment.lab / "log.jsonl").read_text() == lines, "the same row is logged twice"
    table = (run_experiment.lab / "report.md").read_text().splitlines()[2:]
    assert [line.split("|")[1].strip(" `") for line in table][::3] == ["--model.mlp relu2", "--optimizer.lr 0"]
    assert (run_experiment.lab / "report.png").stat().st_size > 10_000


REAL = """
steps: 6
global_batch_size: 4
micro_batch_size: 4
seq_len: 128
model: {n_layers: 1, d_model: 16, n_heads: 2, d_ff: 32, dropout: 0.0}
data: {source: stories, num_samples: 24}
optimizer: {lr: 0.01}
checkpoint: {every: 1000}
evaluation: {every: 1000, num_samples: 20, micro_batch_size: 20, num_scored_generations: 0, num_logged_generations: 0}
tracking: {wandb: disabled, log_every: 2}
"""


def run_in_a_fork(command, **_):
    """Run a command in a fork, in place of subprocess.run."""
    return forked.run(command[1], command[2:], 0, dict(os.environ))


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Return a tiny recipe; train.py and tools/experiment/scorer.py are the real ones, in forks."""
    monkeypatch.setattr(runner, "subprocess", forked.SUBPROCESS)
    for module in (arm, score):
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=run_in_a_fork))
    handlers = {number: signal.getsignal(number) for number in range(1, 16) if number != 9}
    (tmp_path / "tiny.yaml").write_text(REAL)
    yield tmp_path / "tiny.yaml"
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_real_runs_detect_planted_defect(tiny, tmp_path, capsys):
    """A learning rate of nearly nothing."""
    words = ["--optimizer.lr 1e-6", "--config", str(tiny)]
    main(ExperimentConfig(arguments=words, lab=str(tmp_path / "lab"), speedup=False, json=True))
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "worse" and found["seeds"] == 3
    parameters, flops = found["cost"]["parameters"], found["cost"]["flops_per_token"]
    assert parameters[0] == parameters[1] > 10_000 and flops[0] > 6 * 2 * 16 * 16
    run = tmp_path / "lab" / "runs" / f"{found['candidate']}-0"
    (start,) = map(json.loads, (run / "sessions.jsonl").read_text().splitlines())
    assert (start["parameters"], start["flops_per_token"]) == (parameters[1], flops[1]), (
        "sizes differ from those at the start"
    )
    measured = json.loads((tmp_path / "lab" / "scores" / f"{run.name}.json").read_text())
    assert measured["loss"] == pytest.approx(measured["val/loss"], rel=1e-5) and measured["is_causal"]
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["val/entropy"] == measured["entropy"]
    with_checkpoints = {folder.parent.name for folder in run.parent.glob("*/checkpoints")}
    assert with_checkpoints == {f"{found[which]}-0" for which in ("baseline", "candidate")}


@pytest.mark.slow
def test_real_tokenizers_of_one_text(tmp_path, monkeypatch, capsys):
    """Of bytes and of pairs of them; the numbers that decide are held against those of a model that is read by hand."""
    text = write_jsonl(tmp_path / "text.jsonl", make_documents(600))
    for name, tokenizer in (("bytes", "byte"), ("pairs", "train:400")):
        make(text, tmp_path / name, tokenizer, validation="hash:0.3")
    monkeypatch.setattr(runner, "subprocess", forked.SUBPROCESS)
    for module in (arm, score):
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=run_in_a_fork))
    handlers = {number: signal.getsignal(number) for number in range(1, 16) if number != 9}
    recipe = yaml.safe_load(REAL) | {"seq_len": 32, "data": {"source": "text", "path": str(tmp_path / "bytes")}}
    recipe["evaluation"]["num_samples"] = None
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    words = [f"--data.path {tmp_path / 'pairs'}", "--config", str(tmp_path / "tiny.yaml")]
    main(ExperimentConfig(arguments=words, lab=str(tmp_path / "lab"), speedup=False, json=True))
    for number, handler in handlers.items():
        signal.signal(number, handler)
    found = json.loads(capsys.readouterr().out)
    assert found["metric"] == "val/bits_per_byte" and found["verdict"] != "failed"
    for which, name in (("baseline", "bytes"), ("candidate", "pairs")):
        run = tmp_path / "lab" / "runs" / f"{found[which]}-0"
        corpus = TextCorpus(str(tmp_path / name))
        dataset = TextDataset(corpus, "validation", 32, "concat")
        model, nats, text = load_run(run).model, 0.0, b""
        byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
        for index in range(len(dataset)):
            ids = dataset[index]["input_ids"]
            nats += F.cross_entropy(model(ids[None])[0][0, :-1], ids[1:], reduction="sum").item()
            targets = (token for token in ids[1:].tolist() if token != corpus.end_of_text)
            text += bytes(byte_of[letter] for token in targets for letter in corpus.tokenizer.id_to_token(token))
        measured = json.loads((tmp_path / "lab" / "scores" / f"{run.name}.json").read_text())
        assert measured["num_bytes"] == len(text)
        assert measured["val/bits_per_byte"] == pytest.approx(nats / math.log(2) / len(text), rel=1e-5)


def command(tmp_path, idea, *words):
    (tmp_path / "tiny.yaml").write_text(REAL)
    common = ["--config", tmp_path / "tiny.yaml", "--lab", tmp_path / "lab", "--speedup", "false", "--json"]
    return list(
        map(str, [sys.executable, "-m", "tools.experiment", idea, *common, *words])
    )  # words override the recipe


@pytest.mark.slow
def test_non_causal_commit_fails(tmp_path):
    """A clone with a commit that adds the next token to each: the best loss of all, and no candidate."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], check=True)
    source = clone / "model" / "gpt.py"
    text = source.read_text()
    line = "x_BTC = self.token_embedding(input_ids)"
    assert text.count(line) == 1
    source.write_text(text.replace(line, line + " + self.token_embedding(input_ids.roll(-1, 1))"))
    env = environment(**change.AUTHOR)
    subprocess.run(["git", "commit", "--quiet", "--all", "--message", "x"], cwd=clone, env=env, check=True)
    done = subprocess.run(command(tmp_path, "HEAD"), cwd=clone, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["verdict"] == "failed" and "later tokens" in found["message"]
    listed = subprocess.run(["git", "worktree", "list"], cwd=clone, capture_output=True, text=True).stdout
    assert listed.count("\n") == 1


@pytest.mark.slow
def test_ctrl_c_then_same_command_resumes(tmp_path):
    """Runs are long enough to be interrupted after their first logged step."""
    words = command(tmp_path, "--optimizer.lr 1e-6", "--steps", "400", "--jobs", "2")
    process = subprocess.Popen(words, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)
    runs = tmp_path / "lab" / "runs"
    # The file is empty until a step is logged; stopped before its first step, a run would have nothing to resume.
    while not any(rows.read_text() for rows in runs.glob("*/metrics.jsonl")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 75 and "rerun the same command to resume" in stderr
    assert not (tmp_path / "lab" / "log.jsonl").exists()
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["verdict"] == "worse", done.stderr
    resumed = [len(starts.read_text().splitlines()) for starts in runs.glob("*/sessions.jsonl")]
    assert 2 in resumed, "the interrupted run was not resumed"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("no-such-branch", 2, "idea: 'no-such-branch' is not a git branch"),
        ("'--optimizer.lr 3' --config nowhere.yaml", 2, "nowhere.yaml"),
        ("'--optimizer.lr 3' --max_seeds 0", 2, "max_seeds: 0 must be a positive integer"),
        ("--max_seeds 3", 2, "arguments"),
    ],
)
def test_wrong_arguments_give_one_message(words, code, message, tmp_path):
    done = forked.run("tools.experiment", [*shlex.split(words), "--lab", str(tmp_path / "lab")], 0, environment())
    assert done.returncode == code and message in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "lab").exists()
