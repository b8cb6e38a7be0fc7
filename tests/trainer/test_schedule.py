"""Schedules are functions of the step, and training, replay and verification use the same ones."""

import math

import pytest
import torch

from model.config import GPTConfig
from model.gpt import GPTModel
from runtime.config.schema import CheckpointConfig, OptimizerConfig, ScheduleConfig, TrackingConfig, TrainConfig
from tests.conftest import TINY_STORIES, environment, metrics, train
from tests.support import forked
from trainer.optimizer import apply_schedules, build_optimizer
from trainer.schedule import SCHEDULES, due_after, is_due, lr_scale, scheduled_value


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


@pytest.mark.parametrize(
    ("every", "due"), [(0, []), (1, [*range(8)]), (3, [0, 3, 6, 7]), (6, [0, 6, 7]), (7, [7]), (100, [7])]
)
def test_actions_follow_every_nth_and_the_last_step(every, due):
    config = TrainConfig(steps=7, check_replicas_every=every, tracking=TrackingConfig(log_every=max(1, every)))
    assert [step for step in range(8) if is_due(every, config, step)] == due
    assert [step for step in range(8) if due_after(step, config).compare] == due
    assert [step for step in range(8) if due_after(step, config).log] == (due or [*range(8)])


def test_stop_after_saves_unless_the_run_is_complete():
    for stop_after, expected in ((4, [4]), (7, []), (9, [])):
        config = TrainConfig(steps=7, stop_after=stop_after, checkpoint=CheckpointConfig(every=100))
        due = [due_after(step, config) for step in range(8)]
        assert [step for step in range(8) if due[step].stop] == expected
        assert [step for step in range(8) if due[step].save] == [*expected, 7]


def test_warm_up_may_fill_the_run():
    assert scales(steps=5, name="cosine", warmup_steps=5) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_weight_decay_applies_to_matrices_only():
    model = GPTModel(GPTConfig(vocab_size=11, d_model=8, n_heads=2, d_ff=16))
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.1, betas=(0.8, 0.9)))
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    every = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert every == {id(p) for p in model.parameters()}
    for name, parameter in model.named_parameters():
        assert (id(parameter) in decayed) == (not name.endswith("bias") and "norm" not in name), name
    assert all(group["betas"] == (0.8, 0.9) for group in optimizer.param_groups)


def test_schedule_scales_learning_rate_of_every_group():
    """A fork may give each parameter group its own learning rate."""
    network = torch.nn.Linear(2, 2)
    optimizer = build_optimizer(network, OptimizerConfig(lr=1.0))
    optimizer.param_groups[1]["lr"] = 0.5
    config = TrainConfig(steps=4, schedule=ScheduleConfig(name="linear"))
    for step, scale in ((2, 0.5), (0, 1.0), (3, 0.25)):
        apply_schedules(optimizer, network, config, step)
        assert [group["lr"] for group in optimizer.param_groups] == [scale, 0.5 * scale]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_added_schedule_is_one_function(name, monkeypatch):
    """A fork adds a function; parameters without weight decay stay without."""
    monkeypatch.setitem(SCHEDULES, "weight_decay", lambda built_with, config, step: built_with * step / config.steps)
    monkeypatch.setitem(SCHEDULES, "betas", lambda built_with, config, step: (0.1 * step, built_with[1]))
    monkeypatch.setitem(SCHEDULES, "dropout", lambda built_with, config, step: built_with * step)
    monkeypatch.setitem(SCHEDULES, "grad_clip", lambda built_with, config, step: built_with + step)
    model = GPTConfig(vocab_size=11, d_model=8, n_heads=2, d_ff=16, dropout=0.2)
    optimizer = OptimizerConfig(name=name, weight_decay=0.4, grad_clip=1.0)
    config = TrainConfig(steps=4, optimizer=optimizer, schedule=ScheduleConfig(name="constant"), model=model)
    network = GPTModel(model)
    groups = (optimizer := build_optimizer(network, config.optimizer)).param_groups
    for step in (3, 1):
        apply_schedules(optimizer, network, config, step)
        assert [group["weight_decay"] for group in groups] == [0.1 * step] * (len(groups) - 1) + [0.0]
        assert {group["betas"] for group in groups} == {(0.1 * step, 0.95)}
        rates = {getattr(module, "p", getattr(module, "dropout", None)) for module in network.modules()}
        assert {rate for rate in rates if isinstance(rate, float)} == {0.2 * step}
        assert scheduled_value("grad_clip", config.optimizer.grad_clip, config, step) == 1.0 + step


def test_schedule_sets_model_setting_that_a_module_reads(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "rope_theta", lambda largest, config, step: largest * step / config.steps)
    model = GPTConfig(vocab_size=11, d_model=8, n_heads=2, d_ff=16, rope_theta=8.0)
    network, config = GPTModel(model), TrainConfig(steps=4, model=model)
    optimizer = build_optimizer(network, config.optimizer)
    with pytest.raises(ValueError, match="model.rope_theta is scheduled, but no module has an attribute 'rope_theta'"):
        apply_schedules(optimizer, network, config, 1)
    vars(network)["rope_theta"] = vars(network.blocks[1])["rope_theta"] = model.rope_theta
    for step in (3, 1):
        apply_schedules(optimizer, network, config, step)
        assert (network.rope_theta, network.blocks[1].rope_theta) == (2.0 * step, 2.0 * step)
        assert model.rope_theta == 8.0 and "rope_theta" not in vars(network.blocks[0])


FORK = """
import sys
from trainer.schedule import SCHEDULES
SCHEDULES |= {"dropout": lambda rate, config, step: rate * (1 + step % 2)}
SCHEDULES |= {"grad_clip": lambda norm, config, step: norm / (1 + step)}
import runpy
del sys.argv[0]
run = runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module
run(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_forked_schedule_is_trained_and_verified(runs):
    """The reference loop uses the scheduled clipping and dropout."""
    recipe = [*TINY_STORIES, "--optimizer.grad_clip", "0.3", "--out_dir", str(runs), "--name", "run"]
    for script in ("train.py", "verify.py"):
        done = forked.run("-c", [FORK, script, *recipe], 0, environment())
        assert done.returncode == 0, done
    train(*recipe, "--name", "other")
    losses = [metrics(runs / name)[3]["train/loss"] for name in ("run", "other")]
    assert losses[0] != pytest.approx(losses[1], abs=1e-4)
