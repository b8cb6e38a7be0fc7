"""What a trial of a CUDA graph accepts; tests/fake_cuda/test_graph_choice.py runs trials in child processes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from config.schema import TrainConfig
from training import graph_choice


class Graph:
    """Adds to the gradients of a linear layer: with and without a graph, in call number `call`."""

    def __init__(self, network, with_graph, without):
        self.network, self.with_graph, self.without, self.calls = network, with_graph, without, 0
        self.graph = None

    def compute(self, batch, error):
        loss = self.network(batch["x"]).square().sum()
        loss.backward()
        self.network.weight.grad[0, 0] += error
        return loss.detach(), {}

    def __call__(self, batch, num_targets, scale):
        return self.compute(batch, self.with_graph)

    def forward_backward(self, batch, num_targets, scale):
        self.calls += 1
        return self.compute(batch, self.without * self.calls)


def trial(with_graph=0.0, without=0.0, exact=False):
    """Return what the comparison says of a graph whose gradients have this error."""
    network = nn.Linear(3, 2)
    network.predicts_next_token = True
    state = SimpleNamespace(
        network=network,
        parameters=list(network.parameters()),
        graph=Graph(network, with_graph, without),
        config=TrainConfig(exact=exact),
        accelerator=SimpleNamespace(mixed_precision="no"),
        optimizer=torch.optim.AdamW(network.parameters()),
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
        result = graph_choice.choose_graph(config, accelerator, 0, lambda: None)
        assert result == ((True, "it works") if expected else (False, "")) and bool(asked) == expected
        assert graph_choice.choose_graph(config, accelerator, 1, lambda: None)[0] is (
            expected and settings.get("micro_batch_size") == 1
        )
