"""What a trial of a CUDA graph accepts; tests/fake_cuda/test_graph_choice.py runs trials in child processes."""

import random
import time
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from runtime.config.schema import TrainConfig
from trainer import graph_choice


class Graph:
    """Adds to the gradients of a linear layer: with and without a graph, in call number `call`."""

    def __init__(self, network, with_graph, without, draw):
        self.network, self.with_graph, self.without, self.calls = network, with_graph, without, 0
        self.graph, self.draw, self.captured = None, draw, network.weight.data

    def compute(self, batch, error):
        loss = self.network(batch["x"]).square().sum()
        loss.backward()
        self.network.weight.grad[0, 0] += error
        return loss.detach(), {}

    def __call__(self, batch, num_targets, scale):
        """Compute with the memory that the weight had at first."""
        weight = self.network.weight
        now, weight.data = weight.data, self.captured
        result = self.compute(batch, self.with_graph)
        weight.data = now
        return result

    def forward_backward(self, batch, num_targets, scale):
        self.calls += 1
        self.draw()
        return self.compute(batch, self.without * self.calls)


class Model(nn.Linear):
    """Evaluates at most so many rows."""

    predicts_next_token = True
    max_rows = 100

    def forward(self, x, labels=None, num_items_in_batch=None):
        if torch.is_grad_enabled():
            return super().forward(x)
        assert not self.training
        if len(x) > self.max_rows:
            raise torch.OutOfMemoryError("CUDA out of memory")


class ReplacesMemory(torch.optim.AdamW):
    def step(self):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data.clone()


def trial(with_graph=0.0, without=0.0, exact=False, draw=lambda: None, optimizer=torch.optim.AdamW, **settings):
    """Return what the comparison says of a graph whose gradients have this error."""
    network = Model(3, 2)
    state = SimpleNamespace(
        network=network,
        model=network,
        parameters=list(network.parameters()),
        graph=Graph(network, with_graph, without, draw),
        config=TrainConfig().replace(exact=exact, micro_batch_size=4, **settings),
        accelerator=SimpleNamespace(mixed_precision="no"),
        optimizer=optimizer(network.parameters()),
        seed_micro_batch=lambda **_: None,
    )
    batches = [{"x": torch.randn(4, 3), "labels": torch.ones(4, 3, dtype=torch.long)} for _ in range(2)]
    return graph_choice.compare(state, batches)


@pytest.mark.parametrize("exact", [False, True])
def test_equal_bits_are_accepted(exact):
    assert trial(exact=exact) == (True, "its gradients have the same bits as without it")


def test_graph_may_differ_as_computations_without_it():
    """The first call without a graph allocates; calls 2 to 4 are at most 0.2 apart."""
    assert trial(with_graph=0.5, without=0.1) == (True, "its gradients scatter like those without it")
    works, reason = trial(with_graph=0.7, without=0.1)
    assert not works and reason.startswith("the gradient of weight differs by 5.0e-01 from"), reason
    assert reason.endswith(", without a graph by 2.0e-01 at most")


@pytest.mark.parametrize("error", [1e-3, float("nan")])
def test_graph_with_error_is_refused(error):
    assert not trial(with_graph=error)[0]


def test_exact_accepts_no_difference():
    assert not trial(with_graph=0.2, without=0.1, exact=True)[0]


@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: torch.rand(1)])
def test_random_numbers_of_host_are_refused(draw):
    """A graph would repeat them. A draw that changes the gradients makes them scatter, so that any graph agrees."""
    works, reason = trial(draw=draw)
    assert not works and reason.startswith("the forward draws random numbers on the host"), reason


def test_optimizer_that_replaces_memory_of_weights_is_refused():
    works, reason = trial(optimizer=ReplacesMemory)
    assert not works and reason.startswith("the loss differs by"), reason


def test_evaluation_must_fit_beside_graph():
    """A run that never evaluates needs no memory for it."""
    assert trial(**{"evaluation.every": 1, "evaluation.micro_batch_size": 100})[0]
    assert trial(**{"evaluation.every": 0, "evaluation.micro_batch_size": 101})[0]
    with pytest.raises(torch.OutOfMemoryError):
        trial(**{"evaluation.every": 1, "evaluation.micro_batch_size": 101})


def test_child_that_cannot_start_is_no_error():
    works, reason = graph_choice.try_in_child(lambda: None, never, 1.0)
    assert not works and reason.startswith("the child process cannot start: Can't "), reason


@pytest.mark.slow
def test_child_that_has_a_result_ends_by_itself(tmp_path):
    """A child that is killed leaves semaphores, which Python reports when the run ends."""
    file = tmp_path / "finalized"
    assert graph_choice.try_in_child(partial(fail_and_finalize, file), never, 200.0) == (False, "no graph")
    assert file.exists()


def fail_and_finalize(file: Path):
    Finalize(None, lambda: (time.sleep(2), file.touch()), exitpriority=1)
    raise RuntimeError("no graph")


def test_trial_ends_where_child_cannot_be_killed(monkeypatch):
    """As a process that waits for a broken driver."""
    process = graph_choice.multiprocessing.get_context("spawn").Process
    monkeypatch.setattr(graph_choice, "MAX_SECONDS_TO_END", 0.1)
    kill = process.kill
    monkeypatch.setattr(process, "kill", lambda child: children.append(child))
    children = []
    assert graph_choice.try_in_child(sleep_for_ever, never, 0.1) == (False, "the trial took more than 0.1 s")
    assert children[0].is_alive()
    kill(children[0])
    children[0].join()


def test_signal_ends_trial():
    """A launcher kills its processes 30 seconds after the signal, and the run has to save before."""
    assert graph_choice.try_in_child(sleep_for_ever, lambda: True, 1000.0) == (False, "the run is asked to stop")


def sleep_for_ever():
    time.sleep(1000)


def never():
    return False


@pytest.mark.parametrize(
    "settings, tried",
    [
        ({}, True),
        ({"steps": 1_999}, False),
        ({"steps": 1_999, "micro_batch_size": 1}, True),
        ({"activation_checkpointing": True}, False),
        ({"cuda_graph": False}, False),
        ({"model.n_layers": 12, "model.d_model": 768, "model.d_ff": 3072}, False),
    ],
)
def test_only_long_runs_of_small_models_are_tried(settings, tried, monkeypatch):
    asked = []
    monkeypatch.setattr(graph_choice, "try_in_child", lambda *_: asked.append(1) or (True, "it works"))
    base = {"steps": 2_000, "micro_batch_size": 2, "global_batch_size": 2, "model.vocab_size": 64}
    config = TrainConfig().replace(**base | settings)
    for device, sharding, expected in (("cuda", "NO", tried), ("cpu", "NO", False), ("cuda", "FSDP", False)):
        accelerator = SimpleNamespace(
            device=torch.device(device), distributed_type=sharding, num_processes=1, is_main_process=True
        )
        asked.clear()
        result = graph_choice.choose_graph(config, accelerator, 0, lambda: None, never)
        assert result == ((True, "it works") if expected else (False, "")) and bool(asked) == expected
        assert graph_choice.choose_graph(config, accelerator, 1, lambda: None, never)[0] is (
            expected and settings.get("micro_batch_size") == 1
        )
