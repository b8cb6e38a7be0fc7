"""A screen of several ideas: what it finds, that it resumes and grows, and what it refuses."""

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from config.errors import ConfigError, RunError
from storage.files import lock
from tests.conftest import ROOT, environment
from tests.tools.experiment.conftest import fake_scorer
from tools.experiment import judge, screen
from tools.experiment.change import Checkouts
from tools.experiment.ideas import CONTROL
from tools.experiment.record import FAILED_TOGETHER, Record, ScreenRun

A, B, SHAM = "--model.effect_a 0.7", "--model.effect_b 1.4", "--model.sham 1"
STOP = "import signal, time\nif settings['seed'] == 5:\n    os.kill(os.getppid(), signal.SIGINT)\n    time.sleep(60)\n"


def by_idea(result, name="verdict"):
    return {idea["idea"]: idea[name] for idea in result["ideas"]}


def test_planted_effects_are_found(run_experiment):
    result = run_experiment(A, B, SHAM, "--model.big true", runs=30)
    verdicts = by_idea(result)
    assert verdicts == {A: "better", B: "worse", SHAM: "unknown", "--model.big true": "unknown", CONTROL: "worse"}
    assert result["runs"] == 30 == len(run_experiment.started()) and result["failed"] == 0
    first = result["ideas"][0]
    keys = {"idea", "effect", "low", "high", "p", "q", "verdict", "failed", "seconds", "parameters"}
    assert keys <= first.keys() and {"runs", "ideas"} <= result.keys()
    assert first["low"] < -0.3 < first["high"] < 0 and first["q"] < 0.05
    assert by_idea(result, "effect")[CONTROL] == pytest.approx(0.25, abs=0.02), "0.8 of the steps"
    assert by_idea(result, "parameters")["--model.big true"] == pytest.approx(1.5)
    assert by_idea(result, "equal_compute")[CONTROL]["effect"] == pytest.approx(0, abs=1e-3), "its gain per second"
    assert list(result["kinds"]) == ["names"]
    [picture] = run_experiment.lab.glob("screens/*/screen.png")
    assert picture.stat().st_size > 10_000
    seeds = [run["seed"] for run in run_experiment.record()["runs"]]
    assert seeds == [*range(30)] and run_experiment.on()[0] == []
    again = run_experiment(A, B, SHAM, "--model.big true", runs=30)
    assert again == result and not run_experiment.started()
    text = run_experiment(A, B, SHAM, "--model.big true", runs=30, json=False)
    assert "30 runs, 0 of them failed" in text and "Only the table of confirm is a result" in text


def test_stopped_screen_resumes(run_experiment):
    run_experiment.hook(STOP)
    run_experiment(A, B, runs=10, error=SystemExit)
    assert json.loads(run_experiment.printed[-1])["exit_code"] == 75
    before, on = run_experiment.record()["runs"], run_experiment.on()
    finished = {run["name"] for run in before if run["loss"] is not None}
    assert 4 <= len(finished) < len(before) < 10
    runs = run_experiment.lab / "runs"  # a run may finish while the screen stops, and is then scored later
    trained = {file.parent.name for file in runs.glob("*/status.json") if '"finished"' in file.read_text()}
    assert finished <= trained
    run_experiment.hook("")
    assert run_experiment(A, B, runs=10)["runs"] == 10
    assert run_experiment.on()[: len(on)] == on
    assert set(run_experiment.started()) == {run["name"] for run in run_experiment.record()["runs"]} - trained


def test_run_stopped_from_elsewhere_is_trained_again(run_experiment):
    run_experiment.hook("if settings['seed'] == 2:\n    sys.exit(75)")
    assert run_experiment(A, B, runs=6)["runs"] == 5
    run_experiment.hook("")
    assert run_experiment(A, B, runs=6)["runs"] == 6 and len(run_experiment.started()) == 1


def test_more_runs_are_added(run_experiment):
    run_experiment(A, B, runs=6)
    before = run_experiment.record()["runs"]
    run_experiment(A, B, runs=10)
    assert run_experiment.record()["runs"][:6] == before and len(run_experiment.started()) == 4


def test_ideas_join_a_running_screen(run_experiment):
    file = run_experiment.lab / "ideas.txt"
    file.write_text(f"{A}\n# a comment\n")
    run_experiment.hook(f"if settings['seed'] == 5:\n    print({B!r}, file=open({str(file)!r}, 'a'))")
    run_experiment(str(file), SHAM, runs=24)
    on = [index for index, run in enumerate(run_experiment.on()) if B in run]
    assert on and on[0] > 5
    run_experiment(str(file), SHAM, "--model.effect_c 0.9", runs=36)
    on = [index for index, run in enumerate(run_experiment.on()) if "--model.effect_c 0.9" in run]
    assert len(on) >= 3 and on[0] >= 24


def test_wrong_idea_blocks_no_other(run_experiment):
    file = run_experiment.lab / "ideas.txt"
    file.write_text(f"{A}\n")
    lines = f"--model.effect_nope 1\\n{B}"
    run_experiment.hook(f"if settings['seed'] == 3:\n    print('{lines}', file=open({str(file)!r}, 'a'))")
    run_experiment(str(file), SHAM, runs=24)
    assert any(B in run for run in run_experiment.on())
    told = [line for line in run_experiment.printed if "--model.effect_nope is not a setting" in line]
    assert len(told) == 1 and told[0].startswith("ignored: ")


def test_ideas_of_one_setting_are_never_on_together(run_experiment):
    other = "--model.effect_a 0.8"
    run_experiment(A, other, B, runs=20)
    runs = run_experiment.on()
    assert any(A in run for run in runs) and any(other in run for run in runs)
    assert not any({A, other} <= {*run} for run in runs)


def test_ideas_that_are_refused_together_are_kept_apart(run_experiment):
    """train.py refuses model.x with the sham."""
    x = "--model.x true"
    result = run_experiment(x, SHAM, A, runs=24)
    runs = run_experiment.on()
    assert result["runs"] == 24 and any(x in run for run in runs) and any(SHAM in run for run in runs)
    assert not any({x, SHAM} <= {*run} for run in runs)
    content = run_experiment.record()
    pairs = [{content["ideas"][key]["text"] for key in pair} for pair in content["exclusive"]]
    assert {x, SHAM} in pairs


def test_three_ideas_that_are_refused_together_stop_nothing(run_experiment):
    ideas = [f"--model.{name} true" for name in "xyz"]
    run_experiment(*ideas, runs=2)
    [file] = run_experiment.lab.glob("screens/*/screen.json")
    content = run_experiment.record()
    keys = [key for key, idea in content["ideas"].items() if idea["text"] in ideas]
    content["runs"].append({"seed": 2, "ideas": keys})
    file.write_text(json.dumps(content))
    assert run_experiment(*ideas, runs=3)["runs"] == 3
    assert len(run_experiment.on()[2]) == 2
    assert not any(set(pair) <= set(keys) for pair in run_experiment.record()["exclusive"])


def test_failing_idea_has_its_own_column(run_experiment):
    fails = "--model.fails true"
    result = run_experiment(A, fails, SHAM, runs=30)
    assert by_idea(result) == {A: "better", fails: "failed", SHAM: "unknown", CONTROL: "worse"}
    assert by_idea(result, "failed")[fails] == result["failed"] >= 5 and by_idea(result, "failed")[A] == 0
    text = run_experiment(A, fails, SHAM, runs=30, json=False)
    assert "failed: the loss is nan" in text
    assert not run_experiment.started(), "failed runs are trained again"


def test_minutes_start_no_run_that_would_end_late(run_experiment, monkeypatch):
    """By a clock on which each run takes a minute."""
    clock = SimpleNamespace(monotonic=lambda: 60 * len(run_experiment.started()))
    monkeypatch.setattr(screen, "time", clock)
    result = run_experiment(A, B, minutes=10, jobs=1)
    assert 8 <= result["runs"] <= 10
    assert 8 <= run_experiment(A, B, minutes=10, jobs=1)["runs"] - result["runs"] <= 10, "minutes are of a command"


def test_planned_rows_are_limited(run_experiment, monkeypatch):
    """Runs that take no time, or were finished before, must not lead to a design of millions of rows."""
    planned = []
    extend = screen.extend_design
    monkeypatch.setattr(screen, "extend_design", lambda *a, **k: planned.append(a[1]) or extend(*a, **k))
    start = time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: start + len(run_experiment.started()) * 1e-3)
    monkeypatch.setattr(screen, "time", clock)
    run_experiment.hook(STOP)
    run_experiment(A, B, minutes=600, error=SystemExit)
    assert max(planned) <= 20


def test_design_is_planned_once_if_nothing_changes(run_experiment, monkeypatch):
    planned, extend = [], screen.extend_design
    monkeypatch.setattr(screen, "extend_design", lambda *a, **k: planned.append(a[1]) or extend(*a, **k))
    run_experiment(A, B, runs=8)
    assert planned == [8]


def test_second_process_is_refused(run_experiment):
    run_experiment(A, B, runs=2)
    before = run_experiment.record()
    [file] = run_experiment.lab.glob("screens/*/.lock")
    with open(file, "w") as other:
        assert lock(other)
        assert "another process runs" in run_experiment(A, SHAM, runs=4, error=ConfigError)
    assert not run_experiment.started() and run_experiment.record() == before


@pytest.mark.parametrize(
    ("idea", "message"),
    [
        ("--model.effect_nope 1", "--model.effect_nope is not a setting"),
        ("--data.path x", "changes which tokens are predicted"),
        ("--seq_len 16", "changes which tokens are predicted"),
        ("--seed 3", "is set for each run"),
        ("--model.effect_a 2 --resume=never", "is set for each run"),
        ("--model.effect_a 2 --print_config", "or prints something"),
        ("nowhere.patch", "is not the root of a git repository"),
        ("", "is empty"),
    ],
)
def test_wrong_ideas_are_refused_before_training(idea, message, run_experiment):
    assert message in run_experiment(A, idea, runs=4, error=ConfigError)
    assert not run_experiment.started()
    printed = json.loads(run_experiment.printed[-1])
    assert printed["exit_code"] == 2 and message in printed["message"] and printed["verdict"] is None


def test_settings_without_quotes_are_refused(run_experiment):
    assert "quote settings" in run_experiment("--model.effect_a", "0.7", error=ConfigError)


def test_ideas_above_a_limit_are_never_on(run_experiment):
    big = "--model.big true"
    result = run_experiment(A, big, runs=12, max_parameters=1.2)
    [blocked] = result["cannot_be_on"]
    assert blocked["idea"] == big and "1.500 times the parameters" in blocked["message"]
    assert not any(big in run for run in run_experiment.on())
    assert not run_experiment(A, big, runs=14, max_parameters=1.6)["cannot_be_on"], "it is checked again"
    shutil.rmtree(run_experiment.lab / "screens")
    assert run_experiment(A, big, runs=2, max_flops=1.2)["cannot_be_on"]


def test_patches_with_settings_are_merged_once(run_experiment, write_patch, monkeypatch):
    commits, folder = set(), Checkouts.folder
    monkeypatch.setattr(Checkouts, "folder", lambda self, commit: commits.add(commit) or folder(self, commit))
    one, two = write_patch.setting("one", 1, 0.7), write_patch.setting("two", 2, 1.4)
    result = run_experiment(str(write_patch.folder), runs=20)
    assert by_idea(result) == {one: "better", two: "worse", CONTROL: "worse"}
    assert any({one, two} <= {*run} for run in run_experiment.on())
    assert len(commits) == 4, "the head, each patch alone, and both"
    assert len(run_experiment.started()) == 20 + 2, "short runs of the head and of the merged code"


def test_unreadable_patch_in_a_folder_is_ignored(run_experiment, write_patch):
    """Nor does it stop the same command later."""
    good = str(Path(write_patch.setting("new", 1, 0.7)).rename(write_patch.folder / "a good one.patch"))
    (write_patch.folder / "quote.patch").write_text("Settings: --model.sham 1  # Adam's\n" + Path(good).read_text())
    (write_patch.folder / "stale.patch").write_text(Path(good).read_text().replace("-#", "-what is not there"))
    for runs in (12, 24):
        result = run_experiment(str(write_patch.folder), runs=runs)
    assert by_idea(result) == {shlex.quote(good): "better", CONTROL: "worse"}


def test_killed_run_blames_no_idea(run_experiment):
    (run_experiment.lab / "hook.py").write_text("import signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    run_experiment(A, B, runs=4)
    assert not any(run["failure"] for run in run_experiment.record()["runs"])
    (run_experiment.lab / "hook.py").unlink()
    assert run_experiment(A, B, runs=4)["failed"] == 0 and len(run_experiment.started()) == 4


def test_patch_of_a_config_file(run_experiment, write_patch):
    git, config = write_patch.git, run_experiment.root / "configs" / "lab.yaml"
    config.write_text('{"optimizer.lr": 1.0}\n')
    git("commit", "--quiet", "--all", "--message", "a config")
    config.write_text('{"optimizer.lr": 3.0}\n')
    patch = write_patch.folder / "lr.patch"
    patch.write_text(git("diff"))
    git("checkout", "--quiet", ".")
    assert by_idea(run_experiment(str(patch), SHAM, runs=24))[str(patch)] == "worse"


def test_patches_that_conflict_are_kept_apart(run_experiment, write_patch):
    one = write_patch("one.patch", "EFFECT = 40", "EFFECT = 28")
    two = write_patch("two.patch", "EFFECT = 40", "EFFECT = 56")
    three = write_patch.setting("three", 1, 0.9)
    result = run_experiment(str(write_patch.folder), runs=24)
    assert by_idea(result) == {one: "better", two: "worse", three: "better", CONTROL: "worse"}
    assert not any({one, two} <= {*run} for run in run_experiment.on())
    assert any({one, three} <= {*run} for run in run_experiment.on())


def test_ideas_that_fail_together_are_kept_apart(run_experiment, monkeypatch):
    """Neither is to blame, and their runs are in no column."""
    run_experiment(A, B, SHAM, runs=6)
    content = run_experiment.record()
    keys = {idea["text"]: key for key, idea in content["ideas"].items()}
    for seed in range(6, 6 + FAILED_TOGETHER):
        on = [keys[text] for text in ([A, B, SHAM] if seed == 6 else [A, B])]
        content["runs"].append({"seed": seed, "ideas": on, "name": "x", "failure": "does not fit"})
    [file] = run_experiment.lab.glob("screens/*/screen.json")
    file.write_text(json.dumps(content))
    apart, extend = [], screen.extend_design
    monkeypatch.setattr(screen, "extend_design", lambda *a, **k: apart.append(k["exclusive"]) or extend(*a, **k))
    result = run_experiment(A, B, SHAM, runs=40)
    assert apart and all((0, 1) in pairs for pairs in apart)
    assert not any({A, B} <= {*run} for run in run_experiment.on()[9:])
    assert result["fail_together"] == [[A, B]] and result["failed"] == 0 and result["runs"] == 37
    assert by_idea(result)[A] == "better" and by_idea(result)[B] == "worse"
    assert "fail together, and are kept apart: " in run_experiment(A, B, SHAM, runs=40, json=False)
    content["runs"][2] |= {"ideas": [keys[A]], "loss": None, "failure": "alone"}
    assert Record(runs=[ScreenRun(**run) for run in content["runs"]]).failing_pairs() == []


def test_runs_share_code_although_patches_conflict(run_experiment, write_patch, monkeypatch):
    """`other` conflicts with `one`: a run has the code of all patches without the one or without the other."""
    lines = {"one": 1, "other": 1, "two": 2, "three": 3}
    commits, folder = set(), Checkouts.folder
    monkeypatch.setattr(Checkouts, "folder", lambda self, commit: commits.add(commit) or folder(self, commit))
    texts = [write_patch.setting(name, line, 0.9) for name, line in lines.items()]
    run_experiment.hook(STOP)
    run_experiment(*texts, runs=24, error=SystemExit)
    stopped = {run["seed"]: run["name"] for run in run_experiment.record()["runs"] if run["loss"] is None}
    run_experiment.hook("")
    run_experiment(*texts, runs=24)
    resumed = {run["seed"]: run["name"] for run in run_experiment.record()["runs"]}
    assert stopped and stopped.items() <= resumed.items(), "after a stop a run has another code"
    assert len(commits) == 1 + 4 + 2, "the head, each patch alone, and the two"


def test_patch_that_changes_the_default_is_never_on(run_experiment, write_patch):
    good, bad = write_patch.setting("good", 1, 0.7), write_patch.setting("bad", 2, 0.7, default="0.95")
    result = run_experiment(str(write_patch.folder), runs=12)
    [blocked] = result["cannot_be_on"]
    assert blocked["idea"] == bad and "must change nothing by default" in blocked["message"]
    assert any(good in run for run in run_experiment.on()) and not any(bad in run for run in run_experiment.on())


@pytest.mark.slow
@pytest.mark.parametrize("default", ["1.0", "0.95"])
def test_patch_joins_while_others_train(default, run_experiment, write_patch):
    """It is checked by short runs, and the runs in progress go on."""
    aside = run_experiment.lab / "aside"
    aside.mkdir()
    write_patch.setting("one", 1, 0.7)
    joins = write_patch.setting("two", 2, 1.4, default=default, folder=aside)
    code = f"import shutil\nif settings['seed'] == 3 and settings['steps'] >= 80:\n    shutil.copy2({joins!r}, "
    run_experiment.hook(f"{code}{str(write_patch.folder)!r})\nimport time\ntime.sleep(0.2)")
    result = run_experiment(str(write_patch.folder), SHAM, runs=24)
    assert result["runs"] == 24 and result["failed"] == 0
    names = [
        name for name in run_experiment.started() if name in {run["name"] for run in run_experiment.record()["runs"]}
    ]
    assert len(names) == len(set(names)) == 24, "a run was started again"
    own = str(write_patch.folder / "two.patch")
    assert any(own in run for run in run_experiment.on()) == (default == "1.0")
    assert [blocked["idea"] for blocked in result["cannot_be_on"]] == [own] * (default != "1.0")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("# 1\n", "# 1\nseed = 3\n", "changes the data, the evaluation or the seeds in "),
        ("# 1\n", "# 1\nBROKEN = 1\n", "cache: 3.7e-02"),
        ("# 1\n", "# 1\n1 / 0\n", "ZeroDivisionError: division by zero (train.py:"),
    ],
)
def test_wrong_patches(before, after, message, run_experiment, write_patch):
    patch = write_patch("wrong.patch", before, after)
    if "seed" in after:
        assert message in run_experiment(A, patch, runs=4, error=ConfigError)
        assert not run_experiment.started()
    else:
        [blocked] = run_experiment(A, patch, runs=4)["cannot_be_on"]
        assert blocked["idea"] == patch and message in blocked["message"]


def test_crash_in_the_scorer_fails_one_run(run_experiment, write_patch, monkeypatch):
    """Runs are scored together, and one by one if that fails."""
    together = []

    def crash(baseline, runs):
        together.append(len(runs))
        if len(runs) > 1 or len([size for size in together if size == 1]) == 1:
            raise RunError("its runs cannot be scored")
        return fake_scorer(baseline, runs)

    monkeypatch.setattr(judge, "run_scorer", crash)
    write_patch.setting("one", 1, 0.7)
    result = run_experiment(str(write_patch.folder), SHAM, runs=16)
    assert max(together) > 1 and result["failed"] == 1 and result["runs"] == 16


def test_problem_found_by_the_judge_is_a_failure(run_experiment, write_patch, monkeypatch):
    def judge_runs(baseline, runs):
        cheats = [arm.settings.get("model.effect_one") == 0.1 for arm, _ in runs]
        problems = [{"problem": "depends on later tokens" if cheat else ""} for cheat in cheats]
        return [answer | problem for answer, problem in zip(fake_scorer(baseline, runs), problems, strict=True)]

    monkeypatch.setattr(judge, "run_scorer", judge_runs)
    patch = write_patch.setting("one", 1, 0.1)
    result = run_experiment(patch, SHAM, A, runs=24)
    assert by_idea(result)[patch] == "failed" and by_idea(result)[A] == "better"


def test_damaged_record_is_refused(run_experiment):
    run_experiment(A, B, runs=2)
    [file] = run_experiment.lab.glob("screens/*/screen.json")
    file.write_text("{")
    assert "cannot be read" in run_experiment(A, B, runs=2, error=ConfigError)


RECIPE = """
steps: 40
global_batch_size: 8
micro_batch_size: 8
seq_len: 128
model: {n_layers: 1, d_model: 16, n_heads: 2, d_ff: 32, dropout: 0.0}
data: {source: stories, num_samples: 400, num_workers: 0}
optimizer: {lr: 0.02}
schedule: {warmup_steps: 4}
checkpoint: {every: 1000}
evaluation: {every: 1000, num_samples: 40, micro_batch_size: 40, num_scored_generations: 0, num_logged_generations: 0}
tracking: {wandb: disabled, log_every: 10}
"""


@pytest.mark.slow
def test_real_training_detects_planted_defects(tmp_path):
    """A control, a learning rate of a tenth and a sham, with a patch that is switched by a setting and judged."""
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    slow, sham = "--optimizer.lr 0.002", "--data.num_workers 0"
    patch = f"{ROOT / 'docs' / 'patches' / 'loss_z.patch'} --model.z_loss 1e-4"
    words = ["--lab", tmp_path / "lab", "--runs", 20, "--json", "true", "--config", tmp_path / "tiny.yaml"]
    command = [sys.executable, "-m", "tools.experiment", slow, sham, patch, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    verdicts = by_idea(result)
    assert verdicts[slow] == "worse" and verdicts[sham] != "better", result
    assert by_idea(result, "low")[CONTROL] > 0, "its q needs more than 20 runs"
    assert verdicts[patch] in ("unknown", "worse", "better") and result["failed"] == 0
    assert by_idea(result, "parameters")[sham] == 1 and result["kinds"]
    assert "on: the baseline" in done.stderr and not [*(tmp_path / "lab" / "runs").glob("*/checkpoints/*")]
