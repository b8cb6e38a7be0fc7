"""Results of a step: one message a step, read late, exact and the same on all processes."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from runtime.config.errors import RunError
from trainer.results import NonFiniteError, Results

CPU = torch.device("cpu")


def send(results, *outputs, num_targets=12, grad_norm=1.0, stop=False, step=1):
    """Send a step whose micro-batches have these losses, or pairs of a loss and auxiliary metrics."""
    outputs = [output if isinstance(output, tuple) else (output, {}) for output in outputs]
    outputs = [(torch.tensor(loss), auxiliary) for loss, auxiliary in outputs]
    results.start_gather(step, outputs, torch.tensor(num_targets), stop)
    results.add_grad_norm(torch.tensor(grad_norm))


def all_gather_as(rank):
    """Return an all-gather in which the other processes send zeros."""

    def all_gather(rows, row, async_op):
        for other, buffer in enumerate(rows):
            buffer.copy_(row) if other == rank else buffer.zero_()
        return SimpleNamespace(wait=lambda: None)

    return all_gather


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("losses", [[math.nan, 1.0], [1.0, math.inf], [1.0, 1.0]], ids=str)
def test_nan_loss_names_process_and_replay(rank, losses, monkeypatch):
    """Each of three processes has two micro-batches; without a bad loss any of them may have a bad gradient."""
    monkeypatch.setattr("trainer.results.dist.all_gather", all_gather_as(rank))
    results = Results(rank, 3, CPU, run_directory=Path("my runs/a"))
    send(results, *losses, grad_norm=0.0, step=3)
    results._pending[-1].rows[0, 1] = math.nan  # the norm is read from process 0
    suspects = [0, 1, 2] if losses == [1.0, 1.0] else [rank]
    with pytest.raises(NonFiniteError, match=r"^step 3: loss = ") as stopped:
        results.current()
    assert f" in micro-batches of process(es) {suspects};" in str(stopped.value)
    assert str(stopped.value).endswith("python -m tools.replay 'my runs/a' 3"), "quoted for a shell"


@pytest.mark.parametrize("rank", range(2))
def test_one_process_stops_all(rank, monkeypatch):
    monkeypatch.setattr("trainer.results.dist.all_gather", all_gather_as(rank))
    results = Results(rank, 2, CPU)
    for stop in (False, True):
        send(results, 1.0, stop=stop)
        assert results.current().stop == stop


@pytest.mark.parametrize(("objective", "metric"), [(math.nan, 2.0), (3.0, math.nan)])
def test_objective_decides_whether_a_step_is_finite(objective, metric):
    """A metric named loss replaces the objective in the log, not in this decision."""
    results = Results(0, 1, CPU, max_skipped_in_a_row=1)
    auxiliary = {"loss": (torch.tensor(metric), torch.tensor(1))}
    results.register_names(auxiliary)
    send(results, (objective, auxiliary))
    assert results.current().finite == math.isfinite(objective)
    assert results.current().means["loss"] == pytest.approx(metric, nan_ok=True)


def test_batch_without_targets_is_reported():
    results = Results(0, 1, CPU)
    send(results, math.nan, num_targets=0, grad_norm=math.nan)
    with pytest.raises(NonFiniteError, match="no target token in the global batch"):
        results.current()


def test_skipped_updates_are_counted_and_limited():
    results = Results(0, 1, CPU, max_skipped_in_a_row=2)
    results.skipped = (5, 0)  # from a checkpoint
    for loss, skipped in ((math.inf, (6, 1)), (1.0, (6, 0)), (math.nan, (7, 1)), (math.nan, (8, 2))):
        send(results, loss)
        assert results.current().finite == math.isfinite(loss) and results.skipped == skipped
    send(results, math.nan)
    with pytest.raises(NonFiniteError, match="3 times in a row, in micro-batches of process"):
        results.current()


class ForbidItemAssignment(TorchFunctionMode):
    """`tensor[0] = 1` copies from the CPU, which synchronises with a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func is not torch.Tensor.__setitem__ or isinstance(args[2], torch.Tensor)
        return func(*args, **(kwargs or {}))


def test_numbers_are_copied_without_synchronisation():
    results = Results(0, 1, CPU)
    results.register_names({"rows": (0, 0)})
    with ForbidItemAssignment():
        counter = torch.tensor(1.0, dtype=torch.float64)
        send(results, (1.5, {"rows": (counter, 2)}), stop=True, grad_norm=3.0)
        counter += 1  # a model may reuse its counters
    result = results.current()
    assert result.stop and result.means == {"loss": 1.5, "rows": 0.5} and result.grad_norm == 3.0


def test_auxiliary_metrics_keep_no_graph():
    """A model may report metrics that are not detached."""
    results, weight = Results(0, 1, CPU), torch.ones((), requires_grad=True)
    results.register_names({"rows": (0, 0)})
    send(results, (1.5, {"rows": (2 * weight, 2)}))
    assert not results._pending[-1].rows.requires_grad


def test_loss_is_sum_over_micro_batches():
    results = Results(0, 1, CPU)
    send(results, 1.5, 0.5)
    assert results.current().means["loss"] == 2.0


def test_results_are_read_one_step_late():
    results = Results(0, 1, CPU)
    send(results, 1.0, step=1)
    assert results.latest() is None
    send(results, 2.0, step=2)
    assert results.latest().means == {"loss": 1.0}
    assert results.current().means == {"loss": 2.0}


def test_request_to_stop_is_in_the_latest_and_in_the_current_result():
    for read in (Results.latest, Results.current):
        results = Results(0, 1, CPU)
        send(results, 1.0, step=1, stop=True)
        send(results, 2.0, step=2)
        assert read(results).stop
        assert results.current().means == {"loss": 2.0}


def test_current_result_is_returned_again():
    """With `on_nonfinite: skip` train_step reads it before the loop does."""
    results = Results(0, 1, CPU)
    send(results, 1.0)
    assert results.current() == results.latest() == results.current()


def test_counts_are_exact_beyond_float32():
    results = Results(0, 1, CPU)
    results.register_names({"rows": (0, 0)})
    send(results, (1.0, {"rows": (2**24 + 1, 1)}))
    assert results.current().means["rows"] == 2**24 + 1


def test_changed_or_reserved_names_are_refused(monkeypatch):
    results = Results(0, 2, CPU)
    monkeypatch.setattr("trainer.results.gather_object", lambda mine: [*mine, *mine])
    results.register_names({"z_loss": (0, 0)})
    with pytest.raises(RunError, match=r"\['z_loss'\] at first and \['balance'\] now"):
        results.start_gather(1, [(torch.tensor(1.0), {"balance": (0, 0)})], torch.tensor(12), False)
    with pytest.raises(RunError, match="reports grad_norm"):
        results.register_names({"grad_norm": (0, 0)})
    monkeypatch.setattr("trainer.results.gather_object", lambda mine: [*mine, ["balance"]])
    with pytest.raises(RunError, match=r"\[\['z_loss'\], \['balance'\]\]"):
        results.register_names({"z_loss": (0, 0)})
