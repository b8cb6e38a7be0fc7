"""Faults during training: the run ends with the bits of an undisturbed one, or with a message that names the cause."""

import json
import os
import pickle
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from runtime.files import sha256
from tests.conftest import TINY_STORIES, assert_same_bits, assert_same_run, metrics, rewind, tensors, thinned, train
from trainer.checkpoint.manifest import File, newest_valid, read_manifest

STEPS = 8
TINY = [*TINY_STORIES, "--checkpoint.every", 1, "--name", "run"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Directory of an undisturbed run on two processes."""
    out_dir = tmp_path_factory.mktemp("undisturbed")
    train(*TINY, "--out_dir", out_dir, processes=2)
    return out_dir / "run"


def status(run):
    return json.loads((run / "status.json").read_text())


def assert_ends_like(run, undisturbed):
    assert_same_run(run, undisturbed, STEPS)
    assert status(run) == {"state": "finished", "step": STEPS, "reason": "", "kind": None}


@pytest.mark.slow  # tests/runtime/distributed/test_signals.py also covers a restart by the launcher
def test_launcher_restarts_killed_processes(runs, undisturbed):
    done = train(*TINY, "--out_dir", runs, processes=2, max_restarts=1, faults="kill:1:3")
    assert done.stdout.count("resumed at step") == 1, done.stdout
    assert "lost the others in" in done.stderr
    assert_ends_like(runs / "run", undisturbed)


def test_killed_process_is_recorded_by_the_others(runs):
    train(*TINY, "--out_dir", runs, processes=2, exit_code=1, faults="kill:1:3")
    found = status(runs / "run")
    assert (found["state"], found["kind"]) == ("failed", "lost_process"), found


@pytest.mark.parametrize(
    ("kind", "rank"), [("kill_before_rename", 0), pytest.param("kill_after_shards", 1, marks=pytest.mark.slow)]
)
def test_killed_save_leaves_no_checkpoint(kind, rank, runs, undisturbed):
    """One process is killed while writing or before the rename; the next start resumes."""
    train(*TINY, "--out_dir", runs, processes=2, exit_code=1, faults=f"{kind}:{rank}:6")
    saved = newest_valid(runs / "run" / "checkpoints")[1].step
    assert saved in (4, 5), "the interrupted save is of this step or the previous one"
    done = train(*TINY, "--out_dir", runs, processes=2)
    assert f"resumed at step {saved}" in done.stdout
    assert_ends_like(runs / "run", undisturbed)


@pytest.mark.slow
def test_hanging_process_is_detected_within_timeout(runs, undisturbed):
    """It ignores even the launcher's SIGTERM; the launcher kills it after 30 s."""
    arguments = [*TINY, "--out_dir", runs, "--timeout_seconds", 15]
    done = train(*arguments, processes=2, max_restarts=1, faults="hang:1:4")
    error = next(line for line in done.stderr.splitlines() if "train.py: error: process 0 lost the others in" in line)
    assert "all_reduce.wait()" in error, "the line in which the other process waited"
    assert "Timed out waiting 15000ms" in error or "Application timeout caused pair closure" in error
    assert_ends_like(runs / "run", undisturbed)


@pytest.mark.slow
def test_asynchronous_save_equals_synchronous_save(runs, undisturbed):
    train(*TINY, "--out_dir", runs, "--checkpoint.asynchronous", "false", processes=2)
    for step in range(1, STEPS + 1):
        assert_same_bits(tensors(runs / "run", step), tensors(undisturbed, step))
    assert_ends_like(runs / "run", undisturbed)


@pytest.fixture
def small_disk(tmp_path):
    """A function that mounts a file system of a given size in bytes, or resizes it when called again."""
    directory = tmp_path / "disk"
    directory.mkdir()

    def resize(num_bytes):
        remount = "remount," if os.path.ismount(directory) else ""
        command = ["mount", "-t", "tmpfs", "-o", f"{remount}size={num_bytes}", "tmpfs", directory]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no small file system can be mounted here: {error}")
        return directory

    yield resize
    if os.path.ismount(directory):
        subprocess.run(["umount", directory], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("lie", [{}, {"LIE_ABOUT_FREE_SPACE": "1"}], ids=str)
def test_full_disk_stops_run_and_keeps_checkpoints(lie, small_disk, undisturbed):
    """The check before writing finds it or, where the reported free space is wrong, the write itself."""
    disk = small_disk(1_000_000 if lie else 2_100_000)
    arguments = [*TINY, "--out_dir", disk]
    done = train(*arguments, processes=2, exit_code=1, faults="none:0:0", **lie)
    assert done.stderr.count("train.py: error: cannot write the checkpoint") == 1, done.stderr
    reason = (
        r"step-\d+: .*No space left on device" if lie else r"step-\d+: [\d.]+ MB are needed, but [\d.]+ MB are free\. "
    )
    assert re.search(reason, done.stderr), done.stderr
    assert "Older checkpoints are untouched; free the disk or choose another out_dir, and start again" in done.stderr
    assert 'Traceback (most recent call last):\n  File "/' not in done.stderr.partition("train.py: error")[0]
    for needed, free in re.findall(r"([\d.]+) MB are needed, but ([\d.]+) MB are free", done.stderr):
        assert float(needed) >= float(free)
    run = disk / "run"
    assert status(run)["state"] == "failed" and "cannot write the checkpoint" in status(run)["reason"]
    path, manifest, rejected = newest_valid(run / "checkpoints")
    assert 1 <= manifest.step < STEPS and not rejected
    assert not list((run / "checkpoints").glob(".*"))
    small_disk(50_000_000)
    done = train(*arguments, processes=2)
    assert f"resumed at step {manifest.step}" in done.stdout
    assert_ends_like(run, undisturbed)


@pytest.mark.slow
def test_on_failure_continue_survives_full_disk(small_disk, undisturbed):
    disk = small_disk(3_000_000)
    (disk / "ballast").write_bytes(bytes(1_800_000))
    arguments = [*TINY, "--out_dir", disk, "--checkpoint.on_failure", "continue", "--checkpoint.keep", 1]
    done = train(*arguments, "--checkpoint.asynchronous", "false", processes=2, exit_code=1)
    assert "Training continues without a checkpoint: cannot write the checkpoint" in done.stderr
    assert status(disk / "run")["state"] == "failed", "the last checkpoint is the result of the run"
    done = train(*arguments, processes=2, faults="free:0:6", BALLAST=str(disk / "ballast"))
    assert "Training continues without a checkpoint: cannot write the checkpoint" in done.stderr
    assert_ends_like(disk / "run", undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_run_recovers_from_completely_full_disk(asynchronous, small_disk, undisturbed):
    """Not even a second copy of status.json fits; once space is free, the run resumes."""
    disk = small_disk(3_000_000)
    arguments = [*TINY, "--out_dir", disk, "--checkpoint.on_failure", "continue", "--checkpoint.keep", 1]
    arguments += ["--checkpoint.asynchronous", asynchronous]
    ballast = str(disk / "ballast")
    done = train(*arguments, processes=2, exit_code=1, faults="fill:0:4", BALLAST=ballast, LIE_ABOUT_FREE_SPACE="1")
    assert done.stderr.count("train.py: error: cannot write the checkpoint") == 1, done.stderr
    assert "Traceback" not in done.stderr
    path, manifest, rejected = newest_valid(disk / "run" / "checkpoints")
    found = status(disk / "run")
    assert "cannot write the checkpoint" in found.pop("reason")
    assert found == {"state": "failed", "step": manifest.step, "kind": "disk_full"}
    assert manifest.step in (2, 3) and not rejected
    (disk / "ballast").unlink()
    shutil.rmtree(disk / "run")
    done = train(*arguments, processes=2, exit_code=0, faults="fill:0:3,6", BALLAST=ballast)
    messages = [line for line in done.stderr.splitlines() if "Training continues without a checkpoint" in line]
    assert messages and len(messages) == len(set(messages)) and "Traceback" not in done.stderr, (
        "each message is printed by one process only"
    )
    assert_ends_like(disk / "run", undisturbed)


@pytest.mark.parametrize("on_failure", thinned(["continue", "stop"], 2))
def test_deleted_run_directory_is_reported_once(on_failure, runs):
    arguments = [*TINY, "--out_dir", runs, "--checkpoint.on_failure", on_failure]
    done = train(*arguments, exit_code=1, faults="gone:0:4", RUN=str(runs / "run"))
    assert done.stderr.count("train.py: error:") == 1, done.stderr
    error = next(line for line in done.stderr.splitlines() if line.startswith("train.py: error:"))
    assert "cannot write the checkpoint" in error and "The directory of the run is gone" in error
    assert "Traceback" not in done.stderr and not [*(runs / "run").rglob("step-*")], (
        "no partial run directory is created"
    )


def test_read_only_out_dir_is_refused(small_disk):
    disk = small_disk(3_000_000)
    train(*TINY, "--steps", 2, "--out_dir", disk)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    done = train(*TINY, "--steps", 2, "--out_dir", disk, exit_code=2)
    assert "out_dir" in done.stderr and "Read-only file system" in done.stderr and "Traceback" not in done.stderr


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_hostile_checkpoint_runs_no_code(runs, undisturbed, tmp_path):
    marker = tmp_path / "code_was_run"
    payload = pickle.dumps(Malicious(marker))
    run = shutil.copytree(undisturbed, runs / "run")
    rewind(run, STEPS - 1)
    newest = run / "checkpoints" / f"step-{STEPS - 1:08d}"
    for name in (".metadata", "random_states_0.pkl", "optimizer.bin", "model.pt", "shard-00003.pickle"):
        (newest / name).write_bytes(payload)
    train(*TINY, "--out_dir", runs)  # one process reads a checkpoint of two
    assert not marker.exists() and status(run)["state"] == "finished"

    rewind(run, STEPS - 1)
    victim = sorted(newest.glob("*.safetensors"))[0]
    victim.write_bytes(payload)
    manifest = read_manifest(newest)
    replace(manifest, files=manifest.files | {victim.name: File(len(payload), sha256(victim))}).write(newest)
    done = train(*TINY, "--out_dir", runs, exit_code=2)
    assert f"{newest} cannot be read: SafetensorError" in done.stderr and not marker.exists()
    pickle.loads(payload)
    assert marker.exists(), "the payload works"


SKIP = [*TINY, "--on_nonfinite", "skip", "--evaluation.every", 0]


def test_nonfinite_update_is_skipped_on_all_processes(runs):
    done = train(*SKIP, "--out_dir", runs, processes=2, faults="nan:1:3,4")
    run = runs / "run"
    assert "skipped = 2" in done.stdout
    rows = metrics(run)
    assert [row["train/skipped"] for row in rows] == [0, 0, 1, 2, 2, 2, 2, 2]
    assert [row["step"] for row in rows if row["train/loss"] is None] == [3, 4]
    for step in (3, 4):
        assert_same_bits(tensors(run, step), tensors(run, 2))
    after = tensors(run, STEPS)
    assert after["optimizer.state.lm_head.weight.step"] == STEPS - 2

    rewind(run, 4)  # the number of skipped updates is resumed state
    train(*SKIP, "--out_dir", runs, processes=2)
    assert_same_bits(tensors(run, STEPS), after)
    assert metrics(run) == rows


@pytest.mark.slow
def test_save_before_first_update_resumes_bitwise(runs):
    """No moments exist yet, and none may be created: torch creates them by a step, which AdamW would count."""
    nan = {"processes": 2, "faults": "nan:1:1,2"}
    train(*SKIP, "--out_dir", runs, **nan)
    train(*SKIP, "--out_dir", runs / "unsaved", "--checkpoint.every", STEPS, **nan)
    run = runs / "run"
    after = tensors(run, STEPS)
    assert_same_bits(after, tensors(runs / "unsaved" / "run", STEPS))
    assert all(name.startswith("model.") for name in tensors(run, 2))
    rewind(run, 2)
    train(*SKIP, "--out_dir", runs, processes=2)
    assert_same_bits(tensors(run, STEPS), after)


@pytest.mark.slow
def test_max_skipped_in_a_row_counts_across_restarts(runs):
    arguments = [*SKIP, "--out_dir", runs, "--max_skipped_in_a_row", 1]
    for steps_with_nan in ("2,4,5", "5"):  # step 2 alone is within the limit
        done = train(*arguments, processes=2, exit_code=1, faults=f"nan:1:{steps_with_nan}")
        assert (
            "step 5: loss = nan, gradient norm = nan, 2 times in a row, in micro-batches of process(es) [1]"
            in done.stderr
        )
        assert status(runs / "run")["kind"] == "non_finite"
        assert newest_valid(runs / "run" / "checkpoints")[1].step == 4


def test_diverged_replicas_stop_run(runs):
    """One bit of one weight of process 1 flips in step 3; replicas are compared every second step."""
    arguments = [*TINY, "--out_dir", runs, "--check_replicas_every", 2, "--checkpoint.every", 100]
    arguments += ["--tracking.log_every", 100]  # a logged step compares them too
    done = train(*arguments, processes=3, exit_code=1, faults="flip:1:3")
    error = next(line for line in done.stderr.splitlines() if "train.py: error" in line)
    assert "step 4: the state differs between processes, in 1 of " in error
    assert "first in model.blocks.1.mlp.down_proj.weight: process(es) [1] from process(es) [0, 2]" in error
    assert status(runs / "run")["state"] == "failed" and not list((runs / "run" / "checkpoints").iterdir())


def test_signal_does_not_save_diverged_replicas(runs):
    done = train(
        *TINY, "--out_dir", runs, "--checkpoint.every", 100, processes=2, exit_code=1, faults="flip_and_stop:1:3"
    )
    assert "step 3: the state differs between processes" in done.stderr
    assert not list((runs / "run" / "checkpoints").iterdir())


@pytest.mark.slow
def test_diverged_replicas_are_not_saved(runs):
    done = train(*TINY, "--out_dir", runs, processes=2, exit_code=1, faults="flip:1:2")
    assert "step 2: the state differs" in done.stderr
    assert [path.name for path in (runs / "run" / "checkpoints").iterdir()] == ["step-00000001"]
