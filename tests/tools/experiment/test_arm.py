"""Arms: what their digest covers, and larger and longer ones."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tools.experiment.arm import Arm, Recipe, scale_parameters, scale_steps
from tools.experiment.change import Checkouts
from tools.jobs.launch import Launch

SETTINGS = {"name": "x", "steps": 4, "data.source": "stories"}


def test_edited_config_files_reach_no_arm(tmp_path):
    """Nor with --config=FILE; a copy keeps the name of its file, from which train.py derives that of a run."""
    file = tmp_path / "lab.yaml"
    file.write_text("steps: 3")
    recipe = Recipe(tmp_path, None, [], Launch(), Checkouts())
    for given in (["--config", str(file)], [f"--config={file}"]):
        words = recipe.copy_config_files([*given, "--config=absent.yaml", "--x", "1"], ROOT)
        copy = Path(" ".join(words).removeprefix("--config").split(" --")[0].strip(" ="))
        assert copy.name == "lab.yaml" and copy != file and copy.read_text() == "steps: 3"
        assert words[-3:] == ["--config=absent.yaml", "--x", "1"]
        file.write_text("steps: 4")


@pytest.mark.parametrize("setting", ["init_from", "branch_from", "teacher.path"])
@pytest.mark.parametrize("file", ["model.safetensors", "checkpoints/step-00000004/manifest.json", "manifest.json"])
def test_changed_initial_weights_are_another_arm(setting, file, run_experiment):
    weights = run_experiment.root / "base" / file
    weights.parent.mkdir(parents=True)
    weights.write_text("before")
    common = (f"--{setting}", str(run_experiment.root / "base"))
    before = run_experiment("--model.effect_a 0.9", *common)
    weights.write_text("after")
    after = run_experiment("--model.effect_a 0.9", *common)
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


def make_arm(**changes):
    """Return an arm that is only used to derive others."""
    settings = {"steps": 400, "global_batch_size": 4, "data.source": "text", "optimizer.lr": 1.0}
    settings |= {"model.d_model": 64, "model.d_ff": 64, "model.n_heads": 4, "model.n_kv_heads": None}
    settings |= {"schedule.name": "wsd", "schedule.warmup_steps": 40, "schedule.decay_steps": None}
    return Arm(ROOT, "", Launch(), (), settings | changes, ROOT)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 2, 2), (12, 4, 2), (16, 4, 2), (4, None, 2), (4, 1, 4)])
def test_scale_parameters_keeps_queries_per_key(heads, kv_heads, size):
    larger = scale_parameters(make_arm(**{"model.n_heads": heads, "model.n_kv_heads": kv_heads}), size).settings
    kv = larger["model.n_kv_heads"]
    assert (kv is None) == (kv_heads is None) and larger["model.n_heads"] % (kv or 1) == 0
    assert kv is None or larger["model.n_heads"] // kv == heads // kv_heads
    assert larger["model.n_heads"] == pytest.approx(heads * size**0.5, abs=2)
    assert larger["model.d_model"] // larger["model.n_heads"] == 64 // heads
    assert larger["model.d_ff"] == pytest.approx(64 * size**0.5, abs=4) and larger["model.d_ff"] % 8 == 0
    assert larger["optimizer.lr"] == pytest.approx(1 / size**0.5), "inversely proportional to the width"


def test_scale_steps_scales_schedule_and_samples():
    stories = {"data.source": "stories", "data.num_samples": 1000, "schedule.decay_steps": 80}
    longer = scale_steps(make_arm(**stories), 2.5).settings
    changed = [longer[name] for name in ("steps", "schedule.warmup_steps", "schedule.decay_steps", "data.num_samples")]
    assert changed == [1000, 100, 200, 2500]
    assert "data.num_samples" not in scale_steps(make_arm(), 2.5).settings, "a text has as many as it has"


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
        of = scale_steps(arm, factor).settings
        assert of["steps"] == round(factor * arm.settings["steps"])
        assert of["schedule.warmup_steps"] + (of["schedule.decay_steps"] or 0) <= of["steps"], of
        assert (of.get("schedule.batch_warmup_steps") or 0) <= of["steps"]
