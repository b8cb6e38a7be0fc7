"""Batches and processes may use different parameters; gradients are summed, bitwise the same on all processes."""

import os

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.conftest import TINY_STORIES, environment, metrics, tensors
from tests.support import forked
from tests.support.forked import server
from trainer.gradients import connect_parameters, fill_missing_gradients, first_backward

# Which of the experts every process uses: in the first backward, which is discarded, and in the steps after it.
STEPS = [[[0, 1], [0, 1], [0, 1]], [[2], [3, 2], [1]], [[0, 1, 2], [3], [2, 0]]]


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(61, 61) for _ in range(5))  # the last is never chosen

    def forward(self, x, chosen):
        for index in chosen:
            x = self.experts[index](x).tanh()
        return x.sum()


def inputs(step, rank):
    return torch.randn(7, 61, generator=torch.Generator().manual_seed(10 * step + rank))


def train(rank, world_size, port, first, file):
    """The gradients of every step, after a first backward that used the experts `first`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    network = Experts()
    model = DistributedDataParallel(network, gradient_as_bucket_view=True, bucket_cap_mb=0.03)
    first_backward(model(inputs(9, rank), first), model, accelerator)
    gradients = []
    for step, chosen in enumerate(STEPS):
        network.zero_grad()
        with model.no_sync():
            accelerator.backward(connect_parameters(model(inputs(step, rank), chosen[0]), model))
        accelerator.backward(connect_parameters(model(inputs(step, rank), chosen[rank]), model))
        gradients.append([parameter.grad.clone() for parameter in network.parameters()])
    everywhere = [None] * world_size
    dist.all_gather_object(everywhere, gradients)
    if rank == 0:
        torch.save(everywhere, file)
    os._exit(0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The gradients on each of 3 processes, for two different first batches."""
    files = [tmp_path_factory.mktemp("gradients") / "gradients.pt" for _ in range(2)]
    for file, first in zip(files, ([0, 1, 2, 3, 4], [3, 0]), strict=True):
        port = forked.free_port()
        processes = [server.Process(target=train, args=(rank, 3, port, first, file)) for rank in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(300)
        assert [process.exitcode for process in processes] == [0, 0, 0]
    return [torch.load(file) for file in files]


def test_unused_parameters_get_zero_used_mean_gradient(trained):
    torch.manual_seed(0)
    network = Experts()
    for step, chosen in enumerate(STEPS):
        losses = [network(inputs(step, r), chosen[0]) + network(inputs(step, r), chosen[r]) for r in range(3)]
        network.zero_grad()
        (sum(losses) / 3).backward()
        fill_missing_gradients(list(network.parameters()))
        for of_process in trained[0]:
            for gradient, parameter in zip(of_process[step], network.parameters(), strict=True):
                torch.testing.assert_close(gradient, parameter.grad)
        assert not any(gradient.any() for gradient in trained[0][0][step][-2:])


def test_gradients_do_not_depend_on_first_batch(trained):
    for one, other in zip(trained[0][0], trained[1][0], strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_missing_gradients_become_zero():
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    parameters[0].grad = torch.full((3,), 6.0)
    fill_missing_gradients(parameters)
    assert parameters[0].grad.tolist() == [6.0] * 3 and parameters[1].grad.tolist() == [0.0] * 3


def test_sparse_and_frozen_model_trains_on_any_processes(runs):
    """As in a mixture of experts. MLP inputs are normalised, so the sign of their sum is effectively random."""
    words = "--steps 4 --evaluation.every 0 --checkpoint.every 1 --model.dropout 0 --check_replicas_every 1"
    words = [*TINY_STORIES, *words.split()]
    for processes in (0, 2):
        own = ["--out_dir", str(runs), "--name", str(processes)]
        done = forked.run("tests/programs/sparse_train.py", [*words, *own], processes, environment())
        assert done.returncode == 0, done.stdout + done.stderr
    alone, together = metrics(runs / "0"), metrics(runs / "2")
    for one, other in zip(alone, together, strict=True):
        assert one["train/loss"] == pytest.approx(other["train/loss"], rel=1e-5)
        assert one["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-4)
    never = [tensors(runs / name, 4)["model.blocks.0.mlp.never"] for name in ("0", "2")]
    assert torch.equal(*never) and not torch.equal(never[0], tensors(runs / "0", 1)["model.blocks.0.mlp.never"])
    frozen = [tensors(runs / name, step)["model.blocks.0.mlp.up_proj.weight"] for name in ("0", "2") for step in (1, 4)]
    assert all(torch.equal(frozen[0], weight) for weight in frozen)
