"""Damaged checkpoints are skipped by name, none is visible half-written, and rotation keeps the right ones."""

import errno
import json
import math
import os
import re
import shutil
import sys
import threading
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.numpy import save_file
from safetensors.torch import load_file

from model.config import GPTConfig
from model.gpt import GPTModel
from runtime.config.errors import ConfigError, RunError
from runtime.config.schema import CheckpointConfig, OptimizerConfig, TrainConfig
from runtime.distributed.state_hash import digest_tensors, state_digest
from runtime.files import hash_files, sha256
from tests.conftest import (
    TINY_STORIES,
    assert_same_bits,
    assert_same_run,
    metrics,
    rewind,
    tensors,
    train,
    train_state,
)
from trainer.checkpoint import tensor_files
from trainer.checkpoint.manifest import (
    MANIFEST,
    File,
    InvalidCheckpoint,
    Manifest,
    checkpoints_in,
    newest_valid,
    read_manifest,
    rotate,
    step_directory,
    validate,
)
from trainer.checkpoint.saver import SaveError, Saver
from trainer.optimizer import build_optimizer
from trainer.pretrained.load import find_checkpoint

STEPS = 4
SHORT = [*TINY_STORIES, "--steps", STEPS, "--checkpoint.every", 1, "--evaluation.every", 0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Directory of a finished run with the checkpoints of all its steps."""
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


def make_the_manifest_a_list(checkpoint):
    (checkpoint / MANIFEST).write_text("[]")


def nest_the_manifest(checkpoint):
    (checkpoint / MANIFEST).write_text('{"a":' * 10**5)


def remove_the_manifest(checkpoint):
    (checkpoint / MANIFEST).unlink()


DAMAGES = [
    (flip_a_bit, "checksum"),
    (truncate, "bytes instead of"),
    (remove_a_file, "missing"),
    (empty_the_manifest, "manifest"),
    (make_the_manifest_a_list, "a list instead of a JSON object"),
    (nest_the_manifest, "nested too deeply"),
    (remove_the_manifest, "manifest"),
]


@pytest.mark.parametrize("damage, reason", DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_damaged_checkpoint_is_skipped_and_named(run, damage, reason):
    newest = run / "checkpoints" / f"step-{STEPS:08d}"
    assert newest_valid(run / "checkpoints")[0] == newest
    damage(newest)
    with pytest.raises(InvalidCheckpoint, match="step-00000004") as error:
        validate(newest)
    assert reason in str(error.value)
    path, manifest, rejected = newest_valid(run / "checkpoints")
    assert (path.name, manifest.step, len(rejected)) == ("step-00000003", 3, 1)


def test_resume_uses_newest_valid_checkpoint(run, finished):
    flip_a_bit(run / "checkpoints" / "step-00000004")
    truncate(run / "checkpoints" / "step-00000003")
    (run / "checkpoints" / ".writing-step-00000005").mkdir()
    done = train(*SHORT, "--out_dir", run.parent, "--name", "run")
    assert "step-00000004" in done.stdout and "step-00000003" in done.stdout and "resumed at step 2" in done.stdout
    assert_same_run(run, finished, STEPS)
    assert not list((run / "checkpoints").glob(".*"))


def test_files_of_macos_beside_checkpoints_are_ignored(run, finished):
    """On a network disk macOS puts a file ._NAME beside each file and folder."""
    rewind(run, 3)
    for path in [*run.rglob("*"), *(run / "checkpoints" / name for name in (".writing-step-3", ".deleting-step-3"))]:
        path.with_name(f"._{path.name}").write_bytes(b"\0\5\x16\7")
    done = train(*SHORT, "--out_dir", run.parent, "--name", "run")
    assert "resumed at step 3" in done.stdout and "skipped" not in done.stdout
    assert_same_run(run, finished, STEPS)


@pytest.mark.parametrize("start", [None, 0, 1])
def test_resume_refuses_deleted_checkpoints(start, run):
    """Of a finished run; or a session has resumed from a checkpoint, or has begun to save step 2 after step 1."""
    shutil.rmtree(run / "checkpoints")
    if start is not None:
        (run / "status.json").write_text(json.dumps({"state": "running", "step": 2 - start}))
        with open(run / "sessions.jsonl", "a") as starts:
            starts.write(json.dumps({"step": start}) + "\n")
    for _ in range(2):
        done = train(*SHORT, "--out_dir", run.parent, "--name", "run", exit_code=2)
        assert "no valid checkpoint" in done.stderr and "--resume never" in done.stderr
    assert metrics(run)


def test_resume_refuses_run_without_valid_checkpoint(run):
    for checkpoint in (run / "checkpoints").iterdir():
        empty_the_manifest(checkpoint)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = train(*SHORT, "--out_dir", run.parent, "--name", "run", exit_code=2)
    assert "no valid checkpoint" in done.stderr and "--resume never" in done.stderr
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert {path.name for path in after if after[path] != before.get(path)} == {"status.json"}
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"]) == ("failed", STEPS) and "no valid checkpoint" in status["reason"]


@pytest.mark.slow
def test_checkpoint_loads_on_another_process_count(run):
    """Written by one process and read by two, then written by two and read by one."""
    rewind(run, 3)
    train(*SHORT, "--out_dir", run.parent, "--name", "run", processes=2)
    assert len(list((run / "checkpoints" / "step-00000004").glob("*.safetensors"))) == 2
    done = train(*SHORT, "--steps", 6, "--schedule.name", "constant", "--out_dir", run.parent, "--name", "longer",
                 "--branch_from", run / "checkpoints" / "step-00000004")  # fmt: skip
    assert "resumed at step 4" in done.stdout
    assert [row["step"] for row in metrics(run.parent / "longer")] == [5, 6]


def test_checkpoint_files_are_safetensors_with_documented_names(finished):
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


def write_checkpoint(directory, step, loss=None, num_samples=500):
    """Write a checkpoint without tensors whose loss was measured on `num_samples` sequences."""
    path = step_directory(directory, step)
    path.mkdir()
    save_file({}, path / "a.safetensors")
    file = File((path / "a.safetensors").stat().st_size, sha256(path / "a.safetensors"))
    metrics = {} if loss is None else {"val/loss": loss}
    config = {"evaluation": {"num_samples": num_samples}}
    Manifest(step, 0, (0, 0), metrics, config, "no", {"a.safetensors": file}, 1, 1, 1, {}).write(path)
    return path


def remaining_steps(directory):
    return sorted(int(path.name[-1]) for path in directory.iterdir())


def test_checkpoint_files_have_equal_permissions(finished):
    checkpoint = finished / "checkpoints" / "step-00000001"
    assert len({file.stat().st_mode for file in checkpoint.iterdir()}) == 1


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
def test_write_makes_no_copy_of_tensors(tmp_path):
    """A copy is one call during which no other Python code runs, so it would also stall training."""
    weights = {f"model.{i}": torch.ones(2**20) for i in range(32)}

    def resident_mib(name):
        return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 2**10

    tensor_files.write(tmp_path, {"model.0": weights["model.0"]}, None)  # imports what it needs
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_mib("VmRSS")
    tensor_files.write(tmp_path, weights, None)
    assert resident_mib("VmHWM") - before < 64, "MiB, of 128"


def build_trained(seed, steps, share_blocks=False):
    torch.manual_seed(seed)
    network = GPTModel(GPTConfig(vocab_size=16, d_model=8, n_heads=2, d_ff=16, n_layers=2, dropout=0.0))
    if share_blocks:
        network.blocks[1] = network.blocks[0]
    optimizer = build_optimizer(network, OptimizerConfig())
    train_on(network, optimizer, steps)
    return network, optimizer


def train_on(network, optimizer, steps):
    for tokens in torch.randint(16, (steps, 2, 8)):
        network(tokens, labels=tokens)[1].backward()
        optimizer.step()
        optimizer.zero_grad()


def test_training_continues_while_checkpoint_is_written(tmp_path, monkeypatch):
    may_write, write = threading.Event(), tensor_files.write

    def write_later(*arguments):
        assert may_write.wait(20), "training waits for the checkpoint"
        write(*arguments)

    monkeypatch.setattr(tensor_files, "write", write_later)
    state = build_trained(0, steps=2)
    config = TrainConfig(checkpoint=CheckpointConfig(keep=1))
    saver = Saver(tmp_path, config, Accelerator(cpu=True), lambda step: 0, lambda: None, lambda step: None)
    for step in (2, 3):
        saved = str(state_digest(*state))
        saver.save(step, train_state(*state), {})
        assert not saver.failed
        train_on(*state, 1)
        assert newest_valid(tmp_path)[0] != step_directory(tmp_path, step)
        may_write.set()
        saver.wait()
        may_write.clear()
        [file] = step_directory(tmp_path, step).glob("*.safetensors")
        assert str(digest_tensors(load_file(file))) == saved != str(state_digest(*state)), (
            "the state of its step, not of a later one"
        )
    assert remaining_steps(tmp_path) == [3]


def test_synchronous_save_never_outlasts_its_timeout(tmp_path, monkeypatch):
    """The thread would write tensors that training changes meanwhile."""
    may_write = threading.Event()
    monkeypatch.setattr(tensor_files, "write", lambda *_: may_write.wait(20))
    config = TrainConfig(checkpoint=CheckpointConfig(asynchronous=False, on_failure="continue"))
    saver = Saver(tmp_path, config, Accelerator(cpu=True), lambda step: 0, lambda: None, lambda step: None)
    saver.timeout_seconds = 0.01
    with pytest.raises(RunError, match="was not written within"):
        saver.save(1, train_state(*build_trained(0, steps=1)), {})
    may_write.set()


def test_checkpoint_is_saved_where_the_free_space_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 0))
    saver = Saver(tmp_path, TrainConfig(), Accelerator(cpu=True), lambda step: 0, lambda: None, lambda step: None)
    saver.save(1, train_state(*build_trained(0, steps=1)), {})
    saver.wait()
    assert remaining_steps(tmp_path) == [1]


def test_checkpoint_is_on_disk_before_it_is_visible(tmp_path, monkeypatch):
    """After a power failure a file that was not flushed may be empty, and a name that was not flushed may be gone."""
    flushed, fsync, rename = [], os.fsync, os.rename

    def record_fsync(descriptor):
        flushed.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def check_rename(source, target):
        paths = [source, *Path(source).iterdir()]
        assert all(path.stat().st_ino in flushed for path in paths) and len(paths) == 3
        flushed.clear()
        rename(source, target)

    monkeypatch.delattr("runtime.files.fcntl.F_FULLFSYNC", raising=False)  # macOS
    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", check_rename)
    saver = Saver(tmp_path, TrainConfig(), Accelerator(cpu=True), lambda step: 0, lambda: None, lambda step: None)
    saver.save(1, train_state(*build_trained(0, steps=1)), {})
    saver.wait()
    assert remaining_steps(tmp_path) == [1] and flushed == [tmp_path.stat().st_ino]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
def test_background_thread_has_lowest_priority(tmp_path):
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = priority()
    saver = Saver(tmp_path, TrainConfig(), Accelerator(cpu=True), lambda step: 0, lambda: None, lambda step: None)
    assert saver.executor.submit(priority).result() == 19
    assert priority() == before, "the thread that trains keeps its own"


def test_failed_save_hides_no_other_error(tmp_path, capsys):
    """The run ends with the error of the training, and the disk's is printed."""
    saver = Saver(tmp_path, TrainConfig(), Accelerator(cpu=True), lambda step: 0, lambda: None, lambda step: None)

    def fail() -> None:
        raise SaveError("cannot write the checkpoint")

    with pytest.raises(RunError, match="the loss is NaN"), saver:
        saver.pending = saver.executor.submit(fail)
        raise RunError("the loss is NaN")
    assert capsys.readouterr().err == "cannot write the checkpoint\n"


@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_failed_save_stops_run_unless_told_to_continue(on_failure, tmp_path, capsys):
    config = TrainConfig(checkpoint=CheckpointConfig(on_failure=on_failure))
    saver = Saver(tmp_path, config, Accelerator(cpu=True), lambda step: 0, lambda: None, lambda step: None)
    assert not saver.failed, "nothing is saved yet"
    saver.pending = Future()
    assert not saver.failed, "it is still written"
    saver.pending.set_exception(SaveError("the disk is full"))
    assert saver.failed == (on_failure == "stop")
    with pytest.raises(SaveError) if on_failure == "stop" else nullcontext():
        saver.wait()
    printed = "Training continues without a checkpoint: the disk is full\n"
    assert capsys.readouterr().err == ("" if on_failure == "stop" else printed)
    assert not saver.failed, "it is reported once"


@pytest.mark.parametrize("asynchronous", [True, False])
def test_last_checkpoint_must_be_written_even_to_continue(asynchronous, tmp_path, capsys, monkeypatch):
    """It is the result of the run, and neither a wait nor its evaluation hides that it is missing."""
    config = TrainConfig(checkpoint=CheckpointConfig(on_failure="continue", asynchronous=asynchronous))
    saver = Saver(tmp_path, config, Accelerator(cpu=True), lambda step: 0, lambda: None, lambda step: None)
    state = train_state(*build_trained(0, steps=1))
    full = OSError(errno.ENOSPC, "the disk is full")
    monkeypatch.setattr(tensor_files, "write", lambda *_: (_ for _ in ()).throw(full))
    saver.save(1, state, {}, evaluated=False)
    saver.add_evaluation(1, {"val/loss": 1.0})
    with pytest.raises(SaveError, match="cannot write the checkpoint"):
        saver.wait(must_succeed=True)
    assert "no valid manifest" not in capsys.readouterr().err
    monkeypatch.undo()
    saver.save(2, state, {})
    saver.wait(must_succeed=True)
    assert newest_valid(tmp_path)[1].step == 2


def test_shared_blocks_are_saved_and_restored(tmp_path):
    """A fork may use one block several times: each name has its tensor in the file, and the moments are stored once."""
    network, optimizer = build_trained(0, steps=2, share_blocks=True)
    tensor_files.write(tmp_path, tensor_files.state_tensors(network, optimizer), None)
    [file] = tmp_path.iterdir()
    stored = load_file(file)
    assert torch.equal(stored["model.blocks.1.mlp.up_proj.weight"], stored["model.blocks.0.mlp.up_proj.weight"])
    assert str(digest_tensors(stored)) == str(state_digest(network, optimizer))
    other = build_trained(1, steps=1, share_blocks=True)
    tensor_files.read(tmp_path, *other)
    assert other[0].blocks[1] is other[0].blocks[0]
    assert str(state_digest(*other)) == str(state_digest(network, optimizer))
    with pytest.raises(ConfigError, match="resume: .*gone cannot be read: FileNotFoundError"):
        tensor_files.read(tmp_path / "gone", *other)


def test_rotate_keeps_newest_and_best(tmp_path):
    for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 2.5)]:
        write_checkpoint(tmp_path, step, loss)
    (tmp_path / "step-00000006").mkdir()  # damaged; the newest valid checkpoint is step 5
    (tmp_path / "step-00000006" / MANIFEST).write_text('{"metrics": {}}')
    (write_checkpoint(tmp_path, 7, 0.5) / "a.safetensors").write_bytes(b"damaged")
    rotate(tmp_path, 5, CheckpointConfig(keep=2))
    assert remaining_steps(tmp_path) == [2, 4, 5, 6, 7], "step 7 counts neither among the newest nor as the best"
    rotate(tmp_path, 5, CheckpointConfig(keep=1, keep_every=4))
    assert remaining_steps(tmp_path) == [2, 4, 5, 6, 7], "keep_every keeps step 4"
    flip = tmp_path / "step-00000005" / "a.safetensors"
    flip.write_bytes(b"damaged")
    with pytest.raises(InvalidCheckpoint):
        rotate(tmp_path, 5, CheckpointConfig(keep=1))
    assert remaining_steps(tmp_path) == [2, 4, 5, 6, 7]


def test_rotate_reads_no_contents(tmp_path, monkeypatch):
    """The other processes wait for the main process, and have read their files back before."""
    for step in (1, 2):
        write_checkpoint(tmp_path, step)
    monkeypatch.setattr("trainer.checkpoint.manifest.hash_files", None)
    rotate(tmp_path, 2, CheckpointConfig(keep=1))
    assert remaining_steps(tmp_path) == [2]


def test_interrupted_deletion_leaves_no_damaged_checkpoint(tmp_path, monkeypatch):
    """It is no checkpoint any more before its first file is gone."""
    for step in range(1, 4):
        write_checkpoint(tmp_path, step, None)

    def delete_one_file(folder, ignore_errors):
        (Path(folder) / "a.safetensors").unlink()

    monkeypatch.setattr("trainer.checkpoint.manifest.shutil.rmtree", delete_one_file)
    rotate(tmp_path, 3, CheckpointConfig(keep=1))
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000003"]


def test_best_compares_only_equal_validation_sets(tmp_path, capsys):
    """The best checkpoint of each validation set is kept; "best" refers to the newest one's set."""
    losses = [(1, 0.5, 7), (2, 0.6, 7), (3, 2.0, 100), (4, 1.0, 100), (5, 1.5, 100), (6, None, 100)]
    (tmp_path / "checkpoints").mkdir()
    for step, loss, num_samples in losses:
        write_checkpoint(tmp_path / "checkpoints", step, loss, num_samples)
    assert find_checkpoint(tmp_path, "best")[1].step == 4
    other = step_directory(tmp_path / "checkpoints", 1)
    message = f"Checkpoint skipped: {other}: its loss was measured on another validation set\n"
    assert capsys.readouterr().err == message
    rotate(tmp_path / "checkpoints", 6, CheckpointConfig(keep=1))
    assert remaining_steps(tmp_path / "checkpoints") == [1, 4, 6]


def test_evaluation_that_ends_after_the_save_decides_the_best(tmp_path):
    state, config = build_trained(0, steps=1), TrainConfig(checkpoint=CheckpointConfig(keep=1))
    saver = Saver(tmp_path, config, Accelerator(cpu=True), lambda step: 0, lambda: None, lambda step: None)
    for step, loss, kept in ((1, 2.0, [1]), (2, 3.0, [1, 2]), (3, 1.0, [3])):
        saver.save(step, train_state(*state), {}, evaluated=False)
        saver.add_evaluation(step, {"val/loss": loss})
        saver.wait()
        assert remaining_steps(tmp_path) == kept


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_nonfinite_loss_is_never_best(loss, tmp_path):
    for step, value in [(1, 1.0), (2, loss), (3, 2.0), (4, loss)]:
        write_checkpoint(tmp_path, step, value)
    rotate(tmp_path, 4, CheckpointConfig(keep=1))
    assert remaining_steps(tmp_path) == [1, 4]


def test_steps_above_hundred_million_are_ordered(tmp_path):
    for step in (99_999_999, 100_000_000):
        write_checkpoint(tmp_path, step)
    assert newest_valid(tmp_path)[1].step == 100_000_000
    rotate(tmp_path, 100_000_000, CheckpointConfig(keep=1))
    assert [path.name for path in tmp_path.iterdir()] == ["step-100000000"]


@pytest.mark.parametrize("missing", ["step", "skipped", "metrics", "config", "files", "mixed_precision"])
def test_manifest_with_missing_key_is_invalid(missing, tmp_path):
    older, newest = write_checkpoint(tmp_path, 4), write_checkpoint(tmp_path, 5)
    facts = {key: value for key, value in json.loads((older / MANIFEST).read_text()).items() if key != missing}
    (older / MANIFEST).write_text(json.dumps(facts))
    with pytest.raises(InvalidCheckpoint, match="step-00000004"):
        validate(older)
    rotate(tmp_path, 5, CheckpointConfig(keep=1))
    assert remaining_steps(tmp_path) == [4, 5], "damaged checkpoints are kept for inspection"
    assert newest_valid(tmp_path)[0] == newest


def test_manifest_step_must_match_directory(tmp_path):
    write_checkpoint(tmp_path, 4)
    os.rename(tmp_path / "step-00000004", tmp_path / "step-00000005")
    assert "it is for step 4" in newest_valid(tmp_path)[2][0]


def test_checkpoint_with_read_error_is_skipped(tmp_path, monkeypatch):
    older, newest = write_checkpoint(tmp_path, 4), write_checkpoint(tmp_path, 5)

    def broken(paths, *arguments):
        if paths[0].parent == newest:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(paths[0]))
        return hash_files(paths, *arguments)

    monkeypatch.setattr("trainer.checkpoint.manifest.hash_files", broken)
    path, _, rejected = newest_valid(tmp_path)
    assert path == older and "Input/output error" in rejected[0] and "step-00000005" in rejected[0]


@pytest.mark.slow
def test_extended_constant_schedule_equals_fresh_run(runs):
    arguments = [*SHORT, "--schedule.name", "constant", "--out_dir", runs, "--name", "run"]
    train(*arguments, "--steps", 2)
    train(*arguments, "--steps", 4)
    extended, rows = tensors(runs / "run", 4), metrics(runs / "run")
    done = train(*arguments, "--steps", 4, "--resume", "never")
    assert f"moved to {runs / 'run.old-1'}" in done.stdout
    assert "resume: auto" in (runs / "run" / "config.yaml").read_text(), "config.yaml does not keep --resume never"
    assert_same_bits(tensors(runs / "run", 4), extended)
    assert metrics(runs / "run")[-1]["train/loss"] == rows[-1]["train/loss"]
    assert (runs / "run.old-1" / "checkpoints" / "step-00000004" / MANIFEST).exists()


EDITS = {"tokens": ("12", "13"), "skipped": ("0", "1"), "threads": ("1", "2"), "val/loss": ("1.5", "1.4")}


@pytest.mark.parametrize("name", EDITS)
def test_one_changed_digit_of_a_manifest_is_found(name, tmp_path):
    """Every fact decides something: what is resumed, which checkpoint is the best, which bits are expected."""
    facts = {"config": {}, "mixed_precision": "no", "files": {}, "processes": 1, "shards": 1, "provenance": {}}
    manifest = Manifest(step=1, tokens=12, skipped=(0, 0), metrics={"val/loss": 1.5}, threads=1, **facts)
    manifest.write(tmp_path)
    assert read_manifest(tmp_path) == manifest
    before, after = EDITS[name]
    text = (tmp_path / MANIFEST).read_text()
    begin = text.index(f'"{name}"')
    (tmp_path / MANIFEST).write_text(text[:begin] + text[begin:].replace(before, after, 1))
    with pytest.raises(InvalidCheckpoint, match="its content does not match its digest"):
        read_manifest(tmp_path)


def test_manifest_of_an_earlier_version_has_no_digest(tmp_path):
    path = write_checkpoint(tmp_path, 1)
    facts = json.loads((path / MANIFEST).read_text())
    assert facts.pop("digest")
    (path / MANIFEST).write_text(json.dumps(facts))
    assert validate(path).step == 1
