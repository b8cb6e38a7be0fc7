"""Training waits at most `timeout_seconds` for loaders, saves and trackers."""

import os
import signal
import subprocess

import pytest

from tests.conftest import ROOT, TINY_STORIES, environment, metrics, train, train_command
from tests.runtime.distributed.test_signals import WAIT_SECONDS, children, start, status
from tests.support import forked

LONG = [*TINY_STORIES, *"--steps 20000 --checkpoint.every 100000 --evaluation.every 0 --data.num_workers 1".split()]
IN_A_FORK = """
import tempfile, time, train
from runtime.cli import scripts
{}
scripts.run_and_exit("train")
"""
# Both cache the folder that the forked process has chosen.
FORGETS_TMPDIR = "import multiprocessing; multiprocessing.current_process()._config.pop('tempdir', None)"
LOOKS_FOR_TMPDIR = IN_A_FORK.format(f"tempfile.tempdir = None; {FORGETS_TMPDIR}")
HANGING_SAVE = IN_A_FORK.format(
    "from trainer.checkpoint import tensor_files; tensor_files.write = lambda *_: time.sleep(600)"
)


@pytest.mark.slow
def test_data_workers_accept_long_tmpdir(runs, tmp_path):
    """A socket of torch in a long TMPDIR could not be opened."""
    (folder := tmp_path / ("long" * 25)).mkdir()
    arguments = [*TINY_STORIES, "--data.num_workers", "1", "--out_dir", str(runs), "--name", "run"]
    done = forked.run("-c", [LOOKS_FOR_TMPDIR, *arguments], 0, environment(TMPDIR=str(folder)))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_dead_data_worker_ends_the_run(processes, runs):
    launch = start(["train.py", *LONG, "--out_dir", runs, "--name", "run"], processes, runs / "run")
    os.kill(children(launch.processes[-1].pid)[0], signal.SIGKILL)
    assert launch.wait(WAIT_SECONDS) == 1, launch.output()
    # torch notices it in a signal handler ("killed by signal") or while it waits ("exited unexpectedly")
    assert "RuntimeError: DataLoader worker" in launch.output()[1]
    assert status(runs / "run")["state"] == "failed"


@pytest.mark.slow
@pytest.mark.linux_only
@pytest.mark.parametrize(("size", "code"), [("8k", 1), ("120k", 0)])
def test_full_shared_memory_is_reported(size, code, runs):
    """/dev/shm as in a container: too small for the semaphores of the queues, or just large enough for them."""
    command = train_command(*LONG, "--steps", "8", "--out_dir", runs, "--name", "run")
    mounted = f'mount -t tmpfs -o size={size} none /dev/shm || exit 99; exec "$@"'
    words = ["unshare", "--mount", "bash", "-c", mounted, "bash", *command]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip("this user may not mount")
    assert done.returncode == code, done.stderr
    if code:
        assert done.stderr.count("train.py: error: data.num_workers: 1 workers cannot start") == 1
        assert status(runs / "run")["state"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_hanging_save_ends_the_run(asynchronous, runs):
    arguments = [*TINY_STORIES, "--timeout_seconds", "1", "--checkpoint.on_failure", "continue", "--out_dir", str(runs)]
    arguments += ["--checkpoint.asynchronous", asynchronous, "--name", "run"]
    done = forked.run("-c", [HANGING_SAVE, *arguments], 0, environment())
    assert done.returncode == 1 and "train.py: error: a checkpoint was not written within 1 s" in done.stderr
    assert status(runs / "run")["state"] == "failed" and str(runs) in status(runs / "run")["reason"]


PRINTS_LIMIT = IN_A_FORK.format("""
def loader(*_, timeout, **__):
    raise SystemExit(f"the loader waits {timeout} s")
import data.loader
data.loader.DataLoader = loader
""")


def test_loader_gives_up_before_the_collectives(runs):
    """The process whose data hang names them; if all waited equally long, another might say that it lost this one."""
    arguments = [*TINY_STORIES, *"--timeout_seconds 30 --data.num_workers 1 --name run --out_dir".split(), str(runs)]
    done = forked.run("-c", [PRINTS_LIMIT, *arguments], 0, environment())
    assert "the loader waits 15.0 s" in done.stderr


HANGING_WANDB = """
import time
class Settings:
    def __init__(self, **_): pass
class init:
    def __init__(self, **_): pass
    def define_metric(self, *_, **__): pass
    def log(self, _): pass
    def finish(self, exit_code): time.sleep(600)
"""


@pytest.mark.slow
def test_hanging_tracker_does_not_delay_finished_run(runs, tmp_path):
    (tmp_path / "wandb.py").write_text(HANGING_WANDB)
    arguments = [*TINY_STORIES, "--tracking.wandb", "offline", "--timeout_seconds", 4, "--out_dir", runs]
    done = train(*arguments, "--name", "run", PYTHONPATH=str(tmp_path))
    assert "wandb has not finished after 3 s" in done.stdout and done.stdout.endswith("Training finished.\n")
    assert status(runs / "run")["state"] == "finished"


# One process hashes the checkpoint of a run that resumes


@pytest.mark.parametrize(("processes", "rank"), [(0, 0), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_signal_is_obeyed_while_a_checkpoint_is_hashed(processes, rank, runs):
    """On all processes, whichever gets the signal; the run itself is as before."""
    arguments = [*TINY_STORIES, "--out_dir", runs, "--name", "run"]
    train(*arguments, "--stop_after", 2, processes=processes, exit_code=1 if processes else 75)
    rows = metrics(runs / "run")
    done = train(*arguments, processes=processes, exit_code=1 if processes else 75, faults=f"stop_in_hash:{rank}:1")
    assert done.stderr.count("stopped before the first step, while files were read; run the same command again") == 1
    assert status(runs / "run")["state"] == "preempted" and status(runs / "run")["step"] == 2
    assert metrics(runs / "run") == rows and "[step" not in done.stdout
    assert "resumed at step 2" in train(*arguments, processes=processes).stdout


@pytest.mark.slow
def test_hashing_may_take_longer_than_timeout(runs):
    arguments = [*TINY_STORIES, "--out_dir", runs, "--name", "run", "--timeout_seconds", 10]
    train(*arguments, "--stop_after", 2, processes=2, exit_code=1)
    assert "resumed at step 2" in train(*arguments, processes=2, faults="slow_hash:0:15").stdout
