"""Step metrics: one message a step, read late, exact and the same on all processes."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from config.errors import RunError
from training.metrics import MetricsQueue, NonFiniteError

CPU = torch.device("cpu")


def dispatched(metrics, *outputs, num_targets=12, denominator=12.0, grad_norm=1.0, stop=False, step=1):
    """Dispatch a step whose micro-batches have these (loss, auxiliary metrics); returns its number of targets."""
    outputs = [output if isinstance(output, tuple) else (output, {}) for output in outputs]
    outputs = [(torch.tensor(loss), auxiliary) for loss, auxiliary in outputs]
    pending = metrics.dispatch(step, outputs, torch.tensor(num_targets), denominator, stop)
    targets = pending.wait_for_num_targets()
    pending.copy_to_host(torch.tensor(grad_norm))
    return targets.item()


def test_nan_loss_names_process_and_samples(monkeypatch):
    monkeypatch.setattr("training.metrics.dist.all_reduce", lambda sent, async_op: SimpleNamespace(wait=lambda: None))
    batches = SimpleNamespace(indices=lambda step: [*range(8)])
    metrics = MetricsQueue(batches, 2, CPU, rank=1, num_processes=2, run_directory=Path("my runs/a"))
    dispatched(metrics, 1.0, math.nan, grad_norm=math.nan)
    with pytest.raises(NonFiniteError, match=r"of process\(es\) \[1\] with the training samples \[6, 7\]") as stopped:
        metrics.read(wait=True)
    assert str(stopped.value).endswith("python -m tools.replay 'my runs/a' 1"), "quoted for a shell"


def test_batch_without_targets_is_reported():
    metrics = MetricsQueue(SimpleNamespace(indices=lambda step: [7, 8]), 2, CPU)
    dispatched(metrics, 0.0, num_targets=0, grad_norm=math.nan)
    with pytest.raises(NonFiniteError, match=r"no target token in the global batch.*\[7, 8\]"):
        metrics.read(wait=True)


class ForbidItemAssignment(TorchFunctionMode):
    """`tensor[0] = 1` copies from the CPU, which synchronises with a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func is not torch.Tensor.__setitem__ or isinstance(args[2], torch.Tensor)
        return func(*args, **(kwargs or {}))


def test_dispatch_copies_numbers_without_synchronisation():
    metrics = MetricsQueue(None, 1, CPU)
    metrics.register_names({"rows": (0, 0)})
    with ForbidItemAssignment():
        counter = torch.tensor(1.0, dtype=torch.float64)
        assert dispatched(metrics, (1.5, {"rows": (counter, 2)}), stop=True, grad_norm=3.0) == 12
        counter += 1  # a model may reuse its counters
    result = metrics.read(wait=True)
    assert result.stop and result.means == {"loss": 1.5, "rows": 0.5} and result.grad_norm == 3.0


def test_loss_is_normalised_by_targets():
    metrics = MetricsQueue(None, 1, CPU)
    dispatched(metrics, 1.5, 0.5, num_targets=3, denominator=12.0)
    assert metrics.read(wait=True).means["loss"] == (1.5 + 0.5) * 12 / 3


def test_metrics_are_read_one_step_late():
    metrics = MetricsQueue(None, 1, CPU)
    dispatched(metrics, 1.0, step=1)
    assert metrics.read() is None
    dispatched(metrics, 2.0, step=2)
    assert metrics.read().means == {"loss": 1.0}
    assert metrics.read(wait=True).means == {"loss": 2.0}


def test_stop_is_read_at_once_when_seen():
    metrics = MetricsQueue(None, 1, CPU)
    dispatched(metrics, 1.0, step=1, stop=True)
    dispatched(metrics, 2.0, step=2)
    result = metrics.read()
    assert result.means == {"loss": 2.0} and result.stop, "the run stops after the step that was just dispatched"


def test_counts_are_exact_beyond_float32():
    metrics = MetricsQueue(None, 1, CPU)
    metrics.register_names({"rows": (0, 0)})
    assert dispatched(metrics, (1.0, {"rows": (2**24 + 1, 1)}), num_targets=2**24 + 1) == 2**24 + 1
    assert metrics.read(wait=True).means["rows"] == 2**24 + 1


def test_changed_or_reserved_names_are_refused(monkeypatch):
    metrics = MetricsQueue(None, 1, CPU, num_processes=2)
    monkeypatch.setattr("training.metrics.gather_object", lambda mine: [*mine, *mine])
    metrics.register_names({"z_loss": (0, 0)})
    with pytest.raises(RunError, match=r"\['z_loss'\] at first and \['balance'\] now"):
        metrics.dispatch(1, [(torch.tensor(1.0), {"balance": (0, 0)})], torch.tensor(1), 1.0)
    with pytest.raises(RunError, match="reports grad_norm"):
        metrics.register_names({"grad_norm": (0, 0)})
    monkeypatch.setattr("training.metrics.gather_object", lambda mine: [*mine, ["balance"]])
    with pytest.raises(RunError, match=r"\[\['z_loss'\], \['balance'\]\]"):
        metrics.register_names({"z_loss": (0, 0)})
