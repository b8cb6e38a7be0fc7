"""The learning rate is a function of the step: its shapes, and that the optimizer uses it."""

import math

import pytest
import torch

from config import OptimizerConfig, ScheduleConfig
from model.config import GPTConfig
from model.gpt import GPTModel
from training.optimizer import build_optimizer, set_lr
from training.schedule import lr_scale


def scales(steps=100, **settings):
    return [lr_scale(ScheduleConfig(**settings), step, steps) for step in range(steps)]


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_warms_up_linearly_to_the_peak(name):
    assert scales(name=name, warmup_steps=4)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_shapes_after_the_warm_up():
    assert set(scales(name="constant")) == {1.0}
    assert scales(name="linear")[50] == pytest.approx(0.5)
    assert scales(name="linear", min_lr_ratio=0.1)[50] == pytest.approx(0.55)
    assert scales(name="cosine", warmup_steps=20)[60] == pytest.approx(0.5)
    assert scales(name="cosine", warmup_steps=20)[40] == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert scales(name="wsd", warmup_steps=10)[10:81] == [1.0] * 71
    assert scales(name="wsd", warmup_steps=10)[90] == pytest.approx(0.5)
    for name in ("linear", "cosine", "wsd"):
        assert scales(name=name, decay_steps=40)[60:81:20] == pytest.approx([1.0, 0.5])


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
def test_falls_to_the_minimum_and_never_below(name):
    curve = scales(name=name, warmup_steps=10, min_lr_ratio=0.1)
    assert curve[9:] == sorted(curve[9:], reverse=True)
    assert 0.1 < curve[-1] < 0.15
    assert lr_scale(ScheduleConfig(name=name, min_lr_ratio=0.1), 100, 100) == pytest.approx(0.1)


def test_warm_up_may_fill_the_run():
    assert scales(steps=5, name="cosine", warmup_steps=5) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_only_matrices_decay():
    model = GPTModel(GPTConfig(vocab_size=11, d_model=8, n_heads=2, d_ff=16))
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.1, betas=(0.8, 0.9)))
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    every = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert every == {id(p) for p in model.parameters()}
    for name, parameter in model.named_parameters():
        assert (id(parameter) in decayed) == (not name.endswith("bias") and "norm" not in name), name
    assert all(group["betas"] == (0.8, 0.9) for group in optimizer.param_groups)


def test_set_lr_scales_the_learning_rate_of_every_group():
    """A fork may give each its own, as torch's optimizers let it."""
    optimizer = build_optimizer(torch.nn.Linear(2, 2), OptimizerConfig(lr=1.0))
    optimizer.param_groups[1]["lr"] = 0.5
    for scale in (0.25, 0.0, 0.5):
        set_lr(optimizer, scale)
        assert [group["lr"] for group in optimizer.param_groups] == [scale, 0.5 * scale]
