"""A stopped and resumed run equals the uninterrupted run bit for bit."""

import shutil

import pytest
import yaml

from tests.conftest import TINY_STORIES, assert_same_bits, metrics, rewind, tensors, train

STEPS = 8


@pytest.fixture(scope="module", params=[*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3])
def uninterrupted(request, tmp_path_factory):
    """(number of processes, directory of a finished run with the checkpoints of all steps)."""
    out_dir = tmp_path_factory.mktemp("uninterrupted")
    train(*TINY_STORIES, "--checkpoint.every", 1, "--out_dir", out_dir, "--name", "run", processes=request.param)
    return request.param, out_dir / "run"


def kill(finished, out_dir, step):
    """Copy a run as if it had been killed after the checkpoint of `step`, in the middle of writing a row."""
    run = shutil.copytree(finished, out_dir / "run")
    rewind(run, step)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "train/lo')
    return run


def test_resume_is_bitwise(uninterrupted, runs):
    """The stop is in the middle of an epoch, between two evaluations."""
    processes, finished = uninterrupted
    step = 5
    assert 20 % 6 and (step * 6) % 20  # neither epochs nor this stop are at a batch boundary
    run = kill(finished, runs, step)
    # Loading in a worker changes nothing: the loader has no state.
    done = train(*TINY_STORIES, "--out_dir", runs, "--name", "run", "--data.num_workers", 1, processes=processes)
    assert f"resumed at step {step} from" in done.stdout
    assert_same_bits(tensors(run, STEPS), tensors(finished, STEPS))
    assert metrics(run) == metrics(finished)
    assert [row["step"] for row in metrics(run)] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_resume_is_bitwise_after_every_step(uninterrupted, runs):
    processes, finished = uninterrupted
    for step in range(1, STEPS):
        run = kill(finished, runs / str(step), step)
        train(*TINY_STORIES, "--out_dir", runs / str(step), "--name", "run", processes=processes)
        assert_same_bits(tensors(run, STEPS), tensors(finished, STEPS))
        assert metrics(run) == metrics(finished)


def test_run_of_epochs_resumes_as_one_of_steps(runs):
    """The stored config has the steps, so the same command, and one with the steps, resume the run."""
    words = [*TINY_STORIES, "--out_dir", runs, "--schedule.warmup_steps", 1]
    train(*words, "--name", "steps", "--steps", 4)
    train(*words, "--name", "run", "--epochs", 1, "--stop_after", 2, exit_code=75)
    assert yaml.safe_load((runs / "run" / "config.yaml").read_text())["steps"] == 4
    done = train(*words, "--name", "run", "--epochs", 1)
    assert "resumed at step 2" in done.stdout and "epochs: 1.2 of 20 training sequences" in done.stdout
    assert_same_bits(tensors(runs / "run", 4), tensors(runs / "steps", 4))
