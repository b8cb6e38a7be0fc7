"""fp16: the scale of the loss is a function of the state, so runs resume bit for bit."""

import torch

from tests.conftest import TINY_STORIES, train
from trainer.gradients import loss_scale

STEPS = 6
FP16 = {"ACCELERATE_MIXED_PRECISION": "fp16"}
RUN = [*TINY_STORIES, *f"--name run --steps {STEPS} --on_nonfinite skip --evaluation.every 0".split()]


def test_loss_scale_halves_and_doubles():
    assert [loss_scale("fp16", 3, skipped) for skipped in range(4)] == [2.0**16, 2.0**15, 2.0**14, 2.0**13]
    assert loss_scale("fp16", 1999, 0) == 2.0**16 and loss_scale("fp16", 2000, 0) == 2.0**17
    assert loss_scale("fp16", 2001, 1) == 2.0**16 and loss_scale("fp16", 200_000, 99) == 2.0**16
    assert loss_scale("bf16", 5000, 7) == loss_scale("no", 0, 0) == 1.0


def test_fp16_gradients_vanish_without_loss_scale():
    linear = torch.nn.Linear(4, 4)
    for scale, vanishes in ((1.0, True), (loss_scale("fp16", 0, 0), False)):
        with torch.autocast("cpu", torch.float16):
            loss = linear(torch.ones(1, 4)).float().sum() * 1e-9
        linear.zero_grad()
        (scale * loss).backward()
        linear.weight.grad /= scale
        assert bool((linear.weight.grad == 0).all()) == vanishes
    torch.testing.assert_close(linear.weight.grad, torch.full((4, 4), 1e-9), rtol=1e-2, atol=0)


def test_fp16_on_a_cpu_is_refused(runs):
    """tests/fake_cuda/test_gpu_scripts.py trains in fp16 on emulated GPUs."""
    done = train(*RUN, "--out_dir", runs, exit_code=2, ACCELERATE_MIXED_PRECISION="fp16")
    assert "mixed_precision: fp16 needs a GPU" in done.stderr and "use bf16 or no" in done.stderr and not runs.exists()
