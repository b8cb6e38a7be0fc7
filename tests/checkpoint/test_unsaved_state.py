"""State that a checkpoint would lose is refused by name at the first save, since a resumed run would differ."""

import pytest
import torch

from checkpoint.unsaved_state import UnsavedState
from config.errors import ConfigError
from tests.conftest import ROOT, assert_same_bits, environment, tensors
from tests.support import forked
from training.schedule import SCHEDULES

RECIPE = ["--config", str(ROOT / "tests" / "support" / "tiny_random.yaml"), "--name", "run", "--checkpoint.keep", "9"]
REFUSED = {
    "number": "optimizer: CountingSGD keeps state['step'] of token_embedding.weight as int (1), and checkpoints "
    "contain only tensors",
    "optimizer attribute": "optimizer.count: training changed this attribute from 0 to 1",
    "parameter group": "optimizer.param_groups[0].count: training changed this attribute from 0 to 1",
    "model attribute": "model.num_calls: training changed this attribute from 0 to ",
    "model tensor": "model.ema: training changed this attribute from a tensor to a tensor",
}


def train(state, out_dir, *arguments, processes=0):
    words = [*RECIPE, "--out_dir", str(out_dir), *map(str, arguments)]
    return forked.run("tests/programs/stateful_train.py", words, processes, environment(STATE=state))


@pytest.mark.parametrize("state", REFUSED)
def test_unsaved_state_is_refused_at_first_save(state, runs):
    done = train(state, runs)
    assert done.returncode == 2, done.stdout + done.stderr
    assert REFUSED[state] in done.stderr and done.stderr.count("error:") == 1
    assert not list((runs / "run" / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_unsaved_state_is_refused_by_two_processes_once(runs):
    done = train("number", runs, processes=2)
    assert done.returncode != 0 and done.stderr.count(REFUSED["number"]) == 1, done.stderr


def test_state_in_tensors_resumes_bitwise(runs):
    """Private attributes may change, because they are not compared."""
    assert train("tensor", runs / "uninterrupted").returncode == 0
    for stop in (2, 4):
        done = train("tensor", runs / "resumed", "--stop_after", stop)
        assert done.returncode in (0, 75), done.stderr
    assert_same_bits(tensors(runs / "uninterrupted" / "run", 4), tensors(runs / "resumed" / "run", 4))


def test_scheduled_values_may_change(monkeypatch):
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1))
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    monkeypatch.setitem(SCHEDULES, "dropout", None)
    unsaved = UnsavedState(network, optimizer)
    network[1].p = 0.2
    optimizer.param_groups[0]["lr"] = 0.5
    unsaved.check()
    optimizer.param_groups[0]["momentum"] = 0.5
    with pytest.raises(ConfigError, match=r"optimizer.param_groups\[0\].momentum: training changed .* from 0 to 0.5"):
        unsaved.check()


def test_nan_and_nonpersistent_buffers_compare_by_value():
    network = torch.nn.Linear(2, 2)
    network.loss = float("nan")
    network.register_buffer("table", torch.ones(3), persistent=False)
    unsaved = UnsavedState(network, torch.optim.SGD(network.parameters(), lr=1.0))
    network.loss = float("nan")
    network.table = torch.ones(3)
    unsaved.check()
    network.table.add_(1)
    with pytest.raises(ConfigError, match="model.table: training changed this attribute from a tensor to a tensor"):
        unsaved.check()


CHANGES = {
    "number": (3, 4, "from 3 to 4"),
    "bool": (False, True, "from False to True"),
    "string": ("warmup", "decay", "from warmup to decay"),
    "list": ([], [2.5], r"from \[\] to \[2.5\]"),
    "item": ([1, torch.zeros(2)], [1, torch.ones(2)], "from"),
    "key": ({}, {"a": 1}, "from {} to {'a': 1}"),
    "value": ({"a": (1, 2)}, {"a": (1, 3)}, "from"),
    "type": (1, torch.ones(2), "from 1 to a tensor"),
    "dtype": (torch.ones(2), torch.ones(2).long(), "from a tensor"),
}


@pytest.mark.parametrize("owner", ["network", "optimizer"])
@pytest.mark.parametrize(("before", "after", "message"), CHANGES.values(), ids=CHANGES)
def test_changed_attribute_is_refused(before, after, message, owner):
    network = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    changed = network if owner == "network" else optimizer
    changed.own = before
    unsaved = UnsavedState(network, optimizer)
    unsaved.check()
    changed.own = after
    with pytest.raises(ConfigError, match=f"own: training changed this attribute {message}"):
        unsaved.check()


def test_changed_list_is_refused_in_place():
    network = torch.nn.Linear(2, 2)
    network.losses, network.counts = [], {"batches": torch.zeros(1)}
    unsaved = UnsavedState(network, torch.optim.SGD(network.parameters(), lr=1.0))
    network.counts["batches"] += 1
    with pytest.raises(ConfigError, match="model.counts"):
        unsaved.check()
    network.counts["batches"] -= 1
    network.losses.append(2.5)
    with pytest.raises(ConfigError, match="model.losses"):
        unsaved.check()


def test_attribute_filled_later_may_not_change():
    """A cache is filled once; a count that starts in training is state."""
    network = torch.nn.Linear(2, 2)
    network.cache = None
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    unsaved = UnsavedState(network, optimizer)
    network.cache = torch.ones(2)
    optimizer.param_groups[0]["count"] = 1
    unsaved.check()
    unsaved.check()
    optimizer.param_groups[0]["count"] += 1
    with pytest.raises(ConfigError, match=r"optimizer.param_groups\[0\].count: .* from 1 to 2"):
        unsaved.check()


def test_unwatched_attributes_may_change():
    """Modules in a list, such as a teacher that is loaded late, saved state, and the mode of the model."""
    network = torch.nn.Linear(2, 2)
    network.teacher = []
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0, momentum=0.9)
    unsaved = UnsavedState(network, optimizer)
    network.teacher.append(torch.nn.Linear(2, 2))
    network.eval()
    network(torch.ones(2)).sum().backward()
    optimizer.step()
    unsaved.check()
