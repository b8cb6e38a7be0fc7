"""A damaged checkpoint is passed over by name, none is ever half there, and the right ones are kept."""

import json
import os
import shutil

import pytest

from config import CheckpointConfig
from tests.conftest import TINY_STORIES, assert_same_bits, metrics, tensors, train
from training.checkpoint import MANIFEST, InvalidCheckpoint, newest_valid, rotate, validate

STEPS = 4
SHORT = [*TINY_STORIES, "--steps", STEPS, "--evaluation.every", 0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a finished run with the checkpoints of all its steps."""
    out_dir = tmp_path_factory.mktemp("finished")
    train(*SHORT, "--out_dir", out_dir, "--name", "run")
    return out_dir / "run"


@pytest.fixture
def run(finished, runs):
    shutil.copytree(finished, runs / "run")
    return runs / "run"


def flip_a_bit(checkpoint):
    file = next(checkpoint.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def truncate(checkpoint):
    file = next(checkpoint.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 1)


def remove_a_file(checkpoint):
    next(checkpoint.glob("*.safetensors")).unlink()


def empty_the_manifest(checkpoint):
    (checkpoint / MANIFEST).write_text("")


def remove_the_manifest(checkpoint):
    (checkpoint / MANIFEST).unlink()


def plant_a_shard(checkpoint):
    shutil.copy(next(checkpoint.glob("*.safetensors")), checkpoint / "shard-00002-model-00001-of-00001.safetensors")


def point_outside(checkpoint):
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    (name, facts), *_ = manifest["files"].items()
    manifest["files"] = {f"../{checkpoint.name}/{name}": facts}
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


DAMAGES = [
    (flip_a_bit, "checksum"),
    (truncate, "bytes instead of"),
    (remove_a_file, "missing"),
    (empty_the_manifest, "manifest"),
    (remove_the_manifest, "manifest"),
    (plant_a_shard, "shard-00002"),
    (point_outside, "../step-00000004"),
]


@pytest.mark.parametrize("damage, reason", DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_a_damaged_checkpoint_is_passed_over_by_name(run, damage, reason):
    newest = run / "checkpoints" / f"step-{STEPS:08d}"
    assert newest_valid(run / "checkpoints")[0] == newest
    damage(newest)
    with pytest.raises(InvalidCheckpoint, match="step-00000004") as error:
        validate(newest)
    assert reason in str(error.value)
    path, manifest, rejected = newest_valid(run / "checkpoints")
    assert (path.name, manifest["step"], len(rejected)) == ("step-00000003", 3, 1)


def test_a_run_goes_on_from_the_newest_valid_one(run, finished):
    flip_a_bit(run / "checkpoints" / "step-00000004")
    truncate(run / "checkpoints" / "step-00000003")
    (run / "checkpoints" / ".writing-step-00000005").mkdir()
    done = train(*SHORT, "--out_dir", run.parent, "--name", "run")
    assert "step-00000004" in done.stdout and "step-00000003" in done.stdout and "resumed at step 2" in done.stdout
    assert_same_bits(tensors(run, STEPS), tensors(finished, STEPS))
    assert metrics(run) == metrics(finished)
    assert not list((run / "checkpoints").glob(".*"))


def test_no_valid_checkpoint_left_is_said_and_nothing_starts_from_scratch(run):
    for checkpoint in (run / "checkpoints").iterdir():
        empty_the_manifest(checkpoint)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = train(*SHORT, "--out_dir", run.parent, "--name", "run", exit_code=2)
    assert "no valid checkpoint" in done.stderr and "--resume never" in done.stderr
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_another_number_of_processes_reads_it(run):
    """Written by one process, read by two; and back, written by two and read by one."""
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    train(*SHORT, "--out_dir", run.parent, "--name", "run", processes=2)
    assert len(list((run / "checkpoints" / "step-00000004").glob("*.safetensors"))) == 2
    done = train(*SHORT, "--steps", 6, "--schedule.name", "constant", "--out_dir", run.parent, "--name", "longer",
                 "--resume", run / "checkpoints" / "step-00000004")  # fmt: skip
    assert "resumed at step 4" in done.stdout
    assert [row["step"] for row in metrics(run.parent / "longer")] == [5, 6]


def test_files_are_plain_safetensors_with_the_documented_names(finished):
    names = tensors(finished, STEPS)
    assert {name.split(".")[0] for name in names} == {"model", "optimizer"}
    weights = [name.removeprefix("model.") for name in names if name.startswith("model.")]
    assert "blocks.0.attention.q_proj.weight" in weights
    for weight in weights:
        assert names[f"optimizer.state.{weight}.exp_avg"].shape == names[f"model.{weight}"].shape
        assert names[f"optimizer.state.{weight}.step"] == STEPS
    assert {path.suffix for path in (finished / "checkpoints").rglob("*") if path.is_file()} == {
        ".safetensors",
        ".json",
    }


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 2.5)]:
        checkpoint = tmp_path / f"step-{step:08d}"
        checkpoint.mkdir()
        (checkpoint / "a.safetensors").write_bytes(b"")
        empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # SHA-256 of nothing
        manifest = {"format": 1, "step": step, "files": {"a.safetensors": {"bytes": 0, "sha256": empty}}}
        manifest["metrics"] = {} if loss is None else {"val/loss": loss}
        (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    (tmp_path / "step-00000006").mkdir()  # damaged: what was just written is the checkpoint of step 5
    (tmp_path / "step-00000006" / MANIFEST).write_text('{"metrics": {}}')
    rotate(tmp_path, 5, CheckpointConfig(keep=2))
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["2", "4", "5", "6"]
    rotate(tmp_path, 5, CheckpointConfig(keep=1, keep_every=4))
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["2", "4", "5", "6"], "the 4th is kept for good"
    flip = tmp_path / "step-00000005" / "a.safetensors"
    flip.write_bytes(b"damaged")
    with pytest.raises(InvalidCheckpoint):
        rotate(tmp_path, 5, CheckpointConfig(keep=1))
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["2", "4", "5", "6"]


def test_settings_that_change_the_trajectory_are_refused(run):
    before = (run / "config.yaml").read_text()
    arguments = [*SHORT, "--out_dir", run.parent, "--name", "run"]
    done = train(*arguments, "--optimizer.lr", 0.02, "--seed", 5, exit_code=2)
    assert "optimizer.lr: 0.01 there, 0.02 now" in done.stderr and "seed: 0 there, 5 now" in done.stderr
    assert "--resume never" in done.stderr
    done = train(*arguments, "--steps", 6, exit_code=2)  # the cosine would have been another
    assert "steps: 6 (before: 4)" in done.stderr and "learning rate" in done.stderr
    assert (run / "config.yaml").read_text() == before
    done = train(*arguments, exit_code=2, ACCELERATE_MIXED_PRECISION="bf16")
    assert "mixed_precision: bf16" in done.stderr and "trained with no" in done.stderr
    (run / "status.json").write_text('{"state": "running", "step": 4, "reason": ""}')  # killed just before the end
    (run / "loss.png").unlink()
    done = train(*arguments, "--checkpoint.keep", 3, "--tracking.log_every", 2)
    assert json.loads((run / "status.json").read_text())["state"] == "finished" and (run / "loss.png").exists()
    assert "complete: all 4 steps are done" in done.stdout and done.stdout.endswith("Training finished.\n")


def test_a_constant_schedule_may_be_extended_and_never_starts_afresh(runs):
    arguments = [*SHORT, "--schedule.name", "constant", "--out_dir", runs, "--name", "run"]
    train(*arguments, "--steps", 2)
    train(*arguments, "--steps", 4)
    extended, rows = tensors(runs / "run", 4), metrics(runs / "run")
    done = train(*arguments, "--steps", 4, "--resume", "never")
    assert f"moved to {runs / 'run.old-1'}" in done.stdout
    assert "resume: auto" in (runs / "run" / "config.yaml").read_text(), "the file starts nothing afresh again"
    assert_same_bits(tensors(runs / "run", 4), extended)
    assert metrics(runs / "run")[-1]["train/loss"] == rows[-1]["train/loss"]
    assert (runs / "run.old-1" / "checkpoints" / "step-00000004" / MANIFEST).exists()
