"""fp16: the scale of the loss is a function of the state, so runs resume bit for bit."""

import shutil

import pytest
import torch

from tests.conftest import TINY_STORIES, assert_same_bits, metrics, rewind, tensors, train
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


def test_fp16_trains_skips_and_resumes_bitwise(runs):
    """Overflow in step 3, before the stop; autocast on the CPU supports float16, too."""
    done = train(*RUN, "--out_dir", runs, processes=2, faults="nan:1:3", **FP16)
    assert "precision: fp16, weights and sums of gradients in fp32\n" in done.stdout
    rows = metrics(runs / "run")
    assert [row["train/skipped"] for row in rows] == [0, 0, *[1] * 4]
    shutil.copytree(runs / "run", runs / "again" / "run")
    rewind(runs / "again" / "run", 4)
    train(*RUN, "--out_dir", runs / "again", processes=2, **FP16)
    assert metrics(runs / "again" / "run") == rows
    assert_same_bits(tensors(runs / "again" / "run", STEPS), tensors(runs / "run", STEPS))
    train(*RUN, "--out_dir", runs / "fp32", processes=2, faults="nan:1:3")
    for mine, other in zip(rows, metrics(runs / "fp32" / "run"), strict=True):
        if mine["step"] != 3:
            assert mine["train/loss"] == pytest.approx(other["train/loss"], rel=2e-3)
            assert mine["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=2e-2), "it is unscaled"
    assert mine["train/loss"] != other["train/loss"], "the run was not in fp16"


def test_fp16_without_skipping_is_refused(runs):
    done = train(*RUN, "--on_nonfinite", "stop", "--out_dir", runs, exit_code=2, **FP16)
    assert "fp16" in done.stderr and "set on_nonfinite: skip" in done.stderr and not runs.exists()
