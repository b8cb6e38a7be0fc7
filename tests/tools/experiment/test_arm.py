"""The identity of an arm: what its digest covers, and runs that are not of their arm."""

import json
import sys
from dataclasses import replace

import pytest

from config.errors import ConfigError
from tests.conftest import ROOT
from tests.tools.experiment.conftest import FAKE
from tools.experiment.arm import Arm
from tools.experiment.config_files import copy_config_files
from tools.jobs.launch import Launch

SETTINGS = {"name": "x", "steps": 4, "data.source": "stories"}


def test_edited_config_file_changes_no_run(run_experiment):
    config = run_experiment.root / "configs" / "lab.yaml"
    config.write_text('{"optimizer.lr": 1.0}')
    edit = f"""open({str(config)!r}, "w").write('{{"optimizer.lr": 3.0}}')\nsys.exit(state == "failed")"""
    (run_experiment.root / "train.py").write_text(FAKE.replace('sys.exit(state == "failed")', edit))
    found = run_experiment("--model.mlp relu2")
    assert config.read_text() == '{"optimizer.lr": 3.0}' and found["verdict"] == "better"
    trained = [json.loads(file.read_text()) for file in (run_experiment.lab / "runs").glob("*/config.yaml")]
    assert len(trained) == 6 and {settings["optimizer"]["lr"] for settings in trained} == {1.0}


def test_copy_config_files_keeps_names_and_other_words(tmp_path):
    (tmp_path / "lab.yaml").write_text("steps: 3")
    words = copy_config_files(["--config", str(tmp_path / "lab.yaml"), "--config=absent.yaml", "--x", "1"], tmp_path)
    assert (
        words[1].startswith(str(tmp_path))
        and words[1].endswith("/lab.yaml")
        and words[2:]
        == [
            "--config=absent.yaml",
            "--x",
            "1",
        ]
    )
    (tmp_path / "lab.yaml").write_text("steps: 4")
    assert open(words[1]).read() == "steps: 3"


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("config.yaml", "optimizer", {"lr": 3.0}),
        ("sessions.jsonl", "mixed_precision", "bf16"),
        ("sessions.jsonl", "processes", 2),
        ("sessions.jsonl", "code", "other"),
        ("sessions.jsonl", "shards", 2),
        ("config.yaml", "init_hash", "abc"),
    ],
)
@pytest.mark.parametrize("which", ["baseline", "candidate"])
def test_runs_of_other_arms_are_not_counted(which, file, name, value, run_experiment):
    found = run_experiment("--model.mlp relu2")
    changed = run_experiment.lab / "runs" / f"{found[which]}-1" / file
    changed.write_text(json.dumps(json.loads(changed.read_text()) | {name: value}))
    message = run_experiment("--model.mlp relu2", error=ConfigError)
    assert f"{found[which]}-1 is not a run of this arm" in message and f"{name}" in message


@pytest.mark.parametrize(("file", "name", "value"), [
    ("sessions.jsonl", "mixed_precision", "bf16"),
    ("sessions.jsonl", "processes", 2),
    ("config.yaml", "init_hash", "abc"),
])  # fmt: skip
def test_arms_trained_differently_are_refused(file, name, value, run_experiment):
    """The baseline is cached; since then the script of --launch, or the model that init_from names, has changed."""
    launch = f"bash {run_experiment.root / 'launch.sh'}"
    (run_experiment.root / "launch.sh").write_text(f'exec {sys.executable} "$@"')
    found = run_experiment("--model.mlp relu2", "--init_from", "name/on_the_hub", launch=launch)
    for run in (run_experiment.lab / "runs").glob(f"{found['baseline']}-*"):
        (run / file).write_text(json.dumps(json.loads((run / file).read_text()) | {name: value}))
    message = run_experiment("--optimizer.lr 1.1", "--init_from", "name/on_the_hub", launch=launch, error=ConfigError)
    assert f"were trained with different {name} {value} and " in message and "another --lab" in message


@pytest.mark.parametrize("content", [None, "", "{"])
def test_run_without_sessions_is_refused(content, run_experiment):
    found = run_experiment("--model.mlp relu2")
    sessions = run_experiment.lab / "runs" / f"{found['baseline']}-0" / "sessions.jsonl"
    sessions.unlink() if content is None else sessions.write_text(content)
    assert "cannot be read" in run_experiment("--model.mlp relu2", error=ConfigError)


@pytest.mark.parametrize("setting", ["init_from", "branch_from"])
@pytest.mark.parametrize("file", ["model.safetensors", "checkpoints/step-00000004/manifest.json", "manifest.json"])
def test_changed_initial_weights_are_another_arm(setting, file, run_experiment):
    weights = run_experiment.root / "base" / file
    weights.parent.mkdir(parents=True)
    weights.write_text("before")
    common = (f"--{setting}", str(run_experiment.root / "base"))
    before = run_experiment("--model.mlp relu2", *common)
    weights.write_text("after")
    after = run_experiment("--model.mlp relu2", *common)
    assert before["baseline"] != after["baseline"] and len(run_experiment.started()) >= 6


def test_digest_covers_launch(tmp_path):
    script = tmp_path / "launch.sh"
    script.write_text("fp32")
    launches = [Launch(), Launch(precision="bf16"), Launch(processes=2), Launch(("bash", str(script)), None, None)]
    digests = [Arm(ROOT, "", launch, (), SETTINGS, ROOT).digest for launch in launches]
    script.write_text("bf16")
    digests.append(Arm(ROOT, "", launches[-1], (), SETTINGS, ROOT).digest)
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("changes", [{"code_hash": "b"}, {"inputs": ("b",)}, {"settings": SETTINGS | {"steps": 5}}])
def test_digest_covers_code_inputs_and_settings(changes):
    arm = Arm(ROOT, "a", Launch(), (), SETTINGS, ROOT, ("a",))
    assert replace(arm, **changes).digest != arm.digest
    assert replace(arm, settings=SETTINGS | {"tracking.wandb": "online", "seed": 3}).digest == arm.digest
