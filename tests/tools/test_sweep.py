"""tools.sweep: the runs that it starts and their names, how it resumes, and what it refuses before any run."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from runtime.cli import scripts
from runtime.config.errors import ConfigError, RunError
from runtime.config.parser import parse_config, parse_tool
from tests.conftest import ROOT, TINY_STORIES, environment
from tests.support import forked
from tools.jobs import runner
from tools.sweep import SweepConfig, main, plan_sweep, split_values, write_run_config
from trainer.checkpoint.manifest import File, Manifest

# In place of train.py: writes the files of a run, and ends as `endings` names.
FAKE = """
import json, os, signal, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
import yaml
from runtime.config.parser import parse_config
from trainer.checkpoint.identity import code_hash
config = parse_config(sys.argv[2:])
data = config.data.replace(seed=config.data.seed or 0)
config = config.replace(global_batch_size=config.global_batch_size or 8, data=data)
run = Path(config.out_dir, config.name)
run.mkdir(parents=True, exist_ok=True)
with open(run.parent / "log", "a") as log:
    print(config.name, file=log)
ending = json.loads((run.parent / "endings").read_text()).get(config.name, ["finished", 0])
def end(state, code):
    if state:
        (run / "status.json").write_text(json.dumps(dict(state=state, step=config.steps, reason="")))
    os._exit(code)
settings = config.model_dump(mode="json")
(run / "config.yaml").write_text(yaml.safe_dump(settings))
(run / "metrics.jsonl").write_text(json.dumps({{"step": config.steps, "val/loss": config.optimizer.lr}}))
start = {{"step": 0, "mixed_precision": "no", "code": code_hash()}}
(run / "sessions.jsonl").write_text(json.dumps(start))
if ending[0] == "waits":
    signal.signal(signal.SIGTERM, lambda *_: end("preempted", 1))
    (run / "waiting").touch()
    time.sleep(120)
end(*ending)
"""


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Return a function that sweeps with fake runs in tmp_path/runs and returns the names of those started.

    `endings` has the state and exit code of each.
    """
    monkeypatch.setattr("tools.jobs.runner.subprocess", forked.SUBPROCESS)
    (tmp_path / "fake.py").write_text(FAKE.format(root=str(ROOT)))
    (tmp_path / "runs").mkdir()
    handlers = {number: signal.getsignal(number) for number in range(1, 16) if number not in (9,)}

    def run(*arguments, endings=None, error=None):
        (tmp_path / "runs" / "endings").write_text(json.dumps(endings or {}))
        log = tmp_path / "runs" / "log"
        log.unlink(missing_ok=True)
        words = [*map(str, [*TINY_STORIES, "--out_dir", tmp_path / "runs", *arguments])]
        config = SweepConfig(arguments=words, launch=f"{sys.executable} {tmp_path / 'fake.py'}")
        if error:
            with pytest.raises(error):
                main(config)
        else:
            main(config)
        return log.read_text().split() if log.exists() else []

    run.directory = tmp_path / "runs"
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_sweep_trains_and_names_every_combination(sweep, capsys):
    started = sweep("--optimizer.lr", "1e-2,1e-3", "--seed=0,1", "--steps", 4)
    assert started == [f"tiny_stories-lr_{lr}-seed_{seed}" for lr in (0.01, 0.001) for seed in (0, 1)]
    for name, lr, seed in [(started[0], 0.01, 0), (started[3], 0.001, 1)]:
        settings = yaml.safe_load((sweep.directory / name / "config.yaml").read_text())
        assert (settings["optimizer"]["lr"], settings["seed"], settings["steps"]) == (lr, seed, 4)
        assert settings["tracking"]["group"] == "tiny_stories", "not one group of W&B"
    shown = capsys.readouterr().out
    rows = [line for line in shown.splitlines() if line.startswith("tiny_stories-") and "finished" in line]
    assert [row.split(":")[0] for row in rows] == started
    configurations = [line.split()[1] for line in shown.splitlines() if line.startswith("optimizer.lr ")]
    assert configurations == ["0.001", "0.01"] and "Welch's t-test" in shown, "not sorted by the loss"


def test_sweep_resumes(sweep, capsys):
    names = [f"tiny_stories-seed_{seed}" for seed in range(3)]
    assert sweep("--seed", "0,1,2", endings={names[1]: ["preempted", 75]}, error=SystemExit) == names
    assert sweep("--seed", "0,1,2") == [names[1]]
    assert f"{names[0]}: finished before" in capsys.readouterr().out
    assert sweep("--seed", "0,1,2") == []
    assert sweep("--seed", "0,1,2,3") == ["tiny_stories-seed_3"]
    assert sweep("--seed", "0,1", "--steps", 20) == names[:2], "a run with more steps to do is taken for finished"
    assert sweep("--seed", "0,1", "--steps", 20, "--resume", "never") == names[:2]


@pytest.mark.parametrize("code", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_failed_run_does_not_stop_others(code, sweep, capsys):
    names = [f"tiny_stories-seed_{seed}" for seed in range(3)]
    assert sweep("--seed", "0,1,2", endings={names[0]: ["failed", code]}, error=RunError) == names
    shown = capsys.readouterr().out
    assert f"{names[0]}: failed" in shown and f"{names[2]}: finished" in shown and "val/loss" in shown
    assert sweep("--seed", "0,1,2") == names[:1], "the failed run is not tried again"


def test_stop_under_launcher_is_no_failure(sweep):
    """A launcher turns every exit code into 1."""
    with pytest.raises(SystemExit) as stop:
        sweep("--seed", "0,1", endings={"tiny_stories-seed_0": ["preempted", 1]})
    assert stop.value.code == 75


def test_old_status_is_not_taken_for_new(sweep, capsys):
    name = "tiny_stories-seed_0"
    sweep("--seed", "0,1", endings={name: ["preempted", 75]}, error=SystemExit)
    assert sweep("--seed", "0,1", endings={name: ["", 1]}, error=RunError)[0] == name
    assert f"{name}: failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--seed 0,1,x", "--seed x"),
        ("--optimizer.lr=1e-3,-1", "--optimizer.lr=-1"),
        ("--seed 0,1 --model.d_modl 3", "d_modl"),
        ("--micro_batch_size 1,4", "global_batch_size: 6 is not a multiple"),
        ("--optimizer.lr 1e-3,0.001", "would be named 'tiny_stories-lr_0.001'"),
        (f"--init_from {'a' * 250},{'b' * 250}", "is too long for a directory"),
        ("--seed 0,1 --print_config", "options of train.py"),
        ("--seed 0,", "--seed ''"),
    ],
)
def test_wrong_setting_is_refused_before_any_run(arguments, message, sweep, capfd):
    words = [*TINY_STORIES, "--out_dir", str(sweep.directory), *arguments.split()]
    with pytest.raises(ConfigError) as refused:
        main(SweepConfig(arguments=words))
    assert message in str(refused.value)
    assert not list(sweep.directory.iterdir())


def test_edited_config_file_changes_no_run(sweep, tmp_path, monkeypatch):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text((ROOT / "tests" / "support" / "tiny_stories.yaml").read_text())
    train = runner.JobRunner.train
    edited = recipe.read_text() + "\nstop_after: 1\nsteps: 99\n"
    monkeypatch.setattr(runner.JobRunner, "train", lambda *args, **kw: recipe.write_text(edited) and train(*args, **kw))
    for name in sweep("--config", recipe, "--seed", "0,1", "--steps", 4, "--optimizer.betas", "[0.8,0.9]"):
        settings = yaml.safe_load((sweep.directory / name / "config.yaml").read_text())
        assert (settings["steps"], settings["stop_after"], settings["optimizer"]["betas"]) == (4, None, [0.8, 0.9])


@pytest.mark.parametrize("given", [[], ["--model.dropout", "0.3"]])
def test_init_from_passes_only_given_model_settings(given, tmp_path):
    words = [*TINY_STORIES, "--init_from", "x", "--out_dir", str(tmp_path), *given]
    (config,) = plan_sweep(words, {})
    passed = parse_config(["--config", str(write_run_config(config))])
    assert passed.model.model_fields_set == config.model.model_fields_set
    assert passed.model_dump(mode="json") == config.model_dump(mode="json")


def test_out_dir_that_is_a_file_is_refused():
    (config,) = plan_sweep([*TINY_STORIES, "--out_dir", str(ROOT / "README.md")], {})
    with pytest.raises(ConfigError, match="README.md' cannot be written: .*; name another one"):
        write_run_config(config)


def test_existing_run_with_other_settings_is_refused(sweep):
    sweep("--seed", "0,1")
    assert sweep("--seed", "0,1", "--model.dropout", 0.2, error=ConfigError) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "there"), [("mixed_precision", "bf16"), ("torch", "2.11.0"), ("code", "0123456789ab")]
)
def test_sweep_refuses_run_of_other_precision_torch_or_code(name, there, sweep):
    names = sweep("--seed", "0,1")
    starts = sweep.directory / names[1] / "sessions.jsonl"
    starts.write_text(json.dumps({**json.loads(starts.read_text()), name: there}))
    with pytest.raises(
        ConfigError, match=f"{names[1]} has a run of another launch, torch or code:\n  {name}: {there} in the run, "
    ):
        main(SweepConfig(arguments=[*TINY_STORIES, "--out_dir", str(sweep.directory), "--seed", "0,1"]))
    assert sweep("--seed", "0,1", "--resume", "never") == names
    starts.write_text('{"step": 0}')
    assert sweep("--seed", "0,1") == [], "an older version wrote neither down"
    starts.write_text(json.dumps({"step": 0, name: there}))
    (starts.parent / "status.json").write_text('{"state": "failed", "step": 0, "reason": ""}')
    assert sweep("--seed", "0,1") == names[1:], "what has trained nothing is no other run"


def test_changed_code_ends_sweep(sweep, monkeypatch, capsys):
    hashes = iter(["a", "b", "b"])
    monkeypatch.setattr("tools.sweep.code_hash", lambda: "a")
    monkeypatch.setattr("tools.jobs.runner.code_hash", lambda: next(hashes))
    assert sweep("--seed", "0,1,2", error=RunError) == ["tiny_stories-seed_0"]
    assert "tiny_stories-seed_1: not started" in capsys.readouterr().out


def test_sweep_with_init_from_resumes(sweep):
    """Settings that train.py copies from the initial model are in config.yaml alone."""
    start = "--init_from", "weights", "--seed", "0,1"
    names = sweep(*start)
    for name in names:
        config = sweep.directory / name / "config.yaml"
        settings = yaml.safe_load(config.read_text())
        settings["model"]["norm"], settings["init_hash"] = "rmsnorm", "abc"
        config.write_text(yaml.safe_dump(settings))
    assert sweep(*start) == []
    assert sweep(*start, "--model.dropout", 0.2, error=ConfigError) == []


@pytest.mark.slow
def test_moved_or_other_corpus_starts_runs_again(sweep, tmp_path):
    """Hashes are compared, not times: the clock may have been set back."""
    common = "--config", ROOT / "configs" / "shakespeare_cpu.yaml", "--seed", "0,1"
    one = tmp_path / "one"
    names = sweep(*common, "--data.path", one)
    for name in names:
        config = sweep.directory / name / "config.yaml"
        config.write_text(config.read_text().replace("hash: null", "hash: abc", 1))
    assert sweep(*common, "--data.path", one) == []
    one.mkdir()
    (one / "metadata.json").write_text('{"hash": "abc"}')
    os.utime(one / "metadata.json", (2**32, 2**32))
    assert sweep(*common, "--data.path", one) == [], "the same corpus, copied or prepared again"
    (one / "metadata.json").write_text('{"hash": "def"}')
    os.utime(one / "metadata.json", (1e9, 1e9))
    assert sweep(*common, "--data.path", one) == names, "another corpus"
    for name in names:
        config = sweep.directory / name / "config.yaml"
        config.write_text(config.read_text().replace("hash: null", "hash: abc", 1))
    assert sweep(*common, "--data.path", "two") == names


def test_other_number_of_steps_starts_runs_again(sweep):
    """Only train.py can compare the learning rates, and without checkpoints it refuses to resume."""
    common = "--name", "run", "--branch_from", "one"
    assert sweep(*common) == ["run"]
    assert sweep(*common) == []
    assert sweep(*common, "--steps", 4) == ["run"]
    for changed in [("--branch_from", "other"), ("--schedule.name", "linear")]:
        assert sweep(*common, *changed, error=ConfigError) == []


@pytest.mark.slow
def test_finished_run_of_other_schedule_is_refused(sweep):
    for schedule in ("cosine", "constant"):
        common = "--name", schedule, "--seed", "0,1", "--schedule.name", schedule
        names = sweep(*common, "--steps", 8)
        settings = yaml.safe_load((sweep.directory / names[1] / "config.yaml").read_text())
        checkpoint = sweep.directory / names[1] / "checkpoints" / "step-00000008"
        checkpoint.mkdir(parents=True)
        Manifest(8, 0, (0, 0), {}, settings, "no", {"weights.safetensors": File(0, "")}, 1, 1, 1, {}).write(checkpoint)
        assert sweep(*common, "--steps", 8) == []
        assert sweep(*common, "--steps", 4, error=ConfigError) == [], "fewer steps than completed"
        assert sweep(*common, "--steps", 8, "--schedule.name", "linear", error=ConfigError) == []
        assert sweep(*common, "--steps", 4, "--resume", "never") == names


@pytest.mark.parametrize("launch", ["nonsense --x", "' '", "'"])
def test_unknown_launcher_is_refused(launch, sweep):
    with pytest.raises(ConfigError, match="launch: "):
        main(SweepConfig(arguments=["--seed", "0,1"], launch=launch))


def test_split_values_keeps_brackets():
    assert split_values("1e-3,3e-4") == ["1e-3", "3e-4"]
    assert split_values("[0.9,0.95],[0.9,0.99]") == ["[0.9,0.95]", "[0.9,0.99]"]
    assert split_values("{a: 1, b: [2, 3]}") == ["{a: 1, b: [2, 3]}"]
    betas = plan_sweep([*TINY_STORIES, "--optimizer.betas", "[0.9,0.95],[0.9,0.99]"], {})
    assert [settings.optimizer.betas for settings in betas] == [(0.9, 0.95), (0.9, 0.99)]
    assert [settings.name for settings in betas] == ["tiny_stories-betas_0.9_0.95", "tiny_stories-betas_0.9_0.99"]


def test_names_are_unambiguous():
    runs = plan_sweep([*TINY_STORIES, "--seed", "0,1", "--data.seed", "2,3"], {})
    assert runs[0].name == "tiny_stories-seed_0-data.seed_2"
    recipes = ",".join(str(ROOT / "configs" / f"{name}.yaml") for name in ("stories", "random_tokens"))
    assert [settings.name for settings in plan_sweep(["--config", recipes], {})] == ["stories", "random_tokens"]


def test_own_options_may_be_anywhere(monkeypatch, capsys):
    words = ["--seed", "0,1", "--launch", "accelerate launch --cpu", "--name", "x"]
    expected = SweepConfig(arguments=["--seed", "0,1", "--name", "x"], launch="accelerate launch --cpu")
    assert parse_tool(SweepConfig, "tools.sweep", words) == expected
    words = ["--name", "", "--launch", "", "--seed", "0,1", ""]
    expected = SweepConfig(arguments=["--name", "", "--seed", "0,1", ""], launch="")
    assert parse_tool(SweepConfig, "tools.sweep", words) == expected
    monkeypatch.setattr(sys, "argv", ["tools.sweep", "--seed", "0,x", "--launch=python"])
    streams = sys.stdout, sys.stderr
    assert scripts.run_script("tools.sweep", SweepConfig, needs_torch=False) == 2
    sys.stdout, sys.stderr = streams
    assert "tools.sweep: error: " in capsys.readouterr().err


def test_signal_stops_run_and_sweep(sweep, tmp_path):
    """The signal is sent to the process of the sweep alone."""
    (sweep.directory / "endings").write_text(json.dumps({"tiny_stories-seed_0": ["waits"]}))
    command = [sys.executable, "-m", "tools.sweep", *TINY_STORIES, "--out_dir", sweep.directory, "--seed", "0,1"]
    command += ["--launch", f"{sys.executable} {tmp_path / 'fake.py'}"]
    process = subprocess.Popen(list(map(str, command)), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    while not (sweep.directory / "tiny_stories-seed_0" / "waiting").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    shown, _ = process.communicate(timeout=300)
    assert process.returncode == 75
    assert "seed_0: stopped" in shown and "seed_1: not started" in shown
    assert (sweep.directory / "log").read_text().split() == ["tiny_stories-seed_0"]


@pytest.mark.slow
@pytest.mark.parametrize("learning_rate", [0.001, 1e-05, 3.1622776601683795e-05])
def test_wandb_agent_command_is_valid(learning_rate, tmp_path):
    """The agent's own functions put the command of configs/wandb_sweep.yaml together; a fake python takes it."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    agent = yaml.safe_load((ROOT / "configs" / "wandb_sweep.yaml").read_text())
    assert set(agent["parameters"]) == {"optimizer.lr", "seed"}
    arguments = {"optimizer.lr": {"value": learning_rate}, "seed": {"value": 2}}
    macros = create_sweep_command_args({"args": arguments})
    words = [macros.get(word[2:-1], [word]) for word in create_sweep_command(agent["command"])]
    (tmp_path / "python").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "python").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [word for several in words for word in several],
        cwd=ROOT,
        env={"PATH": path, "WANDB_RUN_ID": "k3v9x"},
        capture_output=True,
        text=True,
        check=True,
    )
    script, *passed = done.stdout.splitlines()
    config = parse_config(passed)
    assert script == "train.py" and f"--optimizer.lr={learning_rate}" in passed
    assert (config.optimizer.lr, config.seed, config.name) == (learning_rate, 2, "sweep-k3v9x")
    assert config.tracking.wandb == "online" and config.tracking.project is None  # so it is that of the sweep
