"""State that a checkpoint would lose: a save refuses numbers in optimizer.state, and verify.py finds any other."""

import re

import pytest

from tests.conftest import ROOT, environment
from tests.support import forked

RECIPE = ["--config", str(ROOT / "tests" / "support" / "tiny_random.yaml"), "--name", "run"]
LOST = {
    "optimizer attribute": "optimizer.count",
    "parameter group": "optimizer.param_groups[0].count",
    "model attribute": "model.num_calls",
    "model tensor": "model.ema",
    "non-persistent buffer": "model.table",
}


def run(state, out_dir, *arguments, processes=0):
    words = [*RECIPE, "--out_dir", str(out_dir), *arguments]
    return forked.run("tests/programs/stateful_train.py", words, processes, environment(STATE=state))


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_save_refuses_numbers_in_optimizer_state(processes, runs):
    done = run("number", runs, processes=processes)
    assert done.returncode == (1 if processes else 2), done.stdout + done.stderr
    assert done.stderr.count("error:") == 1
    assert "optimizer: CountingSGD keeps state['last'], state['step'] as numbers or objects" in done.stderr
    assert not list((runs / "run" / "checkpoints").glob("step-*"))


def test_verify_names_state_that_a_resume_loses(runs):
    done = run(",".join(LOST), runs, "--verify_steps", "4")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "differ after 4 steps; the first one is model.token_embedding.weight; checkpoints" in done.stdout
    [named] = re.findall("attributes with another value after the resume: (.*)", done.stdout)
    assert sorted(named.split(", ")) == sorted(LOST.values())


def test_verify_passes_if_state_is_in_tensors(runs):
    done = run("tensor,tensor of the first parameter", runs, "--verify_steps", "4")
    assert done.returncode == 0, done.stdout + done.stderr
