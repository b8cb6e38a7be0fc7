"""The recipe for a buffer that counts of all processes update: the same on one and two processes and after a resume."""

import pytest
import torch

from tests.conftest import TINY_STORIES, environment, tensors
from tests.support import forked

pytestmark = pytest.mark.slow


def run(out_dir, name, processes, *words):
    """Run the fork, and return its exit code and the biases of all blocks after step 4."""
    words = [*TINY_STORIES, "--steps", "4", "--exact", "true", "--out_dir", str(out_dir), "--name", name, *words]
    done = forked.run("tests/programs/balanced_train.py", words, processes, environment())
    assert done.returncode == 0 or "--stop_after" in words, done.stdout + done.stderr
    if not (out_dir / name / "checkpoints" / "step-00000004").exists():
        return None
    return torch.stack([tensor for key, tensor in tensors(out_dir / name, 4).items() if key.endswith("router.bias")])


def test_bias_is_the_same_on_two_processes_and_after_a_resume(runs):
    one, two = run(runs, "one", 0), run(runs, "two", 2)
    assert run(runs, "resumed", 2, "--stop_after", "2") is None
    resumed = run(runs, "resumed", 2)
    assert torch.equal(one, two) and torch.equal(two, resumed)
    steps = torch.round(one / 0.001)
    assert steps.abs().max() <= 4 and len(steps.unique()) > 1 and torch.allclose(steps * 0.001, one)


def test_verify_passes_with_balanced_experts(runs):
    """Also where it trains as one process inside of two."""
    words = [*TINY_STORIES, "--out_dir", str(runs), "--verify_steps", "4", "--model.dropout", "0"]
    done = forked.run("tests/programs/balanced_train.py", words, 2, environment())
    results = {
        line[6:50].strip(): line[:4] for line in done.stdout.splitlines() if line[:4] in ("PASS", "FAIL", "SKIP")
    }
    trained = ["gradient = hand-written all-reduce", "N processes = 1 process x N accumulation", "resuming is bitwise"]
    assert {results[name] for name in [*trained, "exact = bits of 1 process"]} == {"PASS"}, done.stdout
