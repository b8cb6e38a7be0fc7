"""Muon on the matrices inside the blocks and AdamW on the rest, as one optimizer, equal the separate ones."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import _muon

from model.config import GPTConfig
from model.gpt import GPTModel
from runtime.config.schema import OptimizerConfig
from runtime.distributed.sharding import full_tensor
from tests.conftest import TINY_STORIES, assert_same_bits, metrics, rewind, tensors, train
from tests.support.forked import server
from trainer import optimizer as optimizer_module
from trainer.optimizer import POLAR_EXPRESS, build_optimizer, learning_rates, orthogonalize

CONFIG = OptimizerConfig(name="muon", lr=0.01, weight_decay=0.2, betas=(0.8, 0.9))


def new_model():
    torch.manual_seed(0)
    return GPTModel(GPTConfig(vocab_size=20, n_layers=2, d_model=16, n_heads=2, d_ff=32, dropout=0.0, zero_init=True))


def backward(model, step):
    input_ids = torch.randint(20, (2, 8), generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    model(input_ids, labels=input_ids)[1].backward()


def orthogonal(matrix):
    """Apply the polynomials to the singular values."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm().clamp(min=1e-9)
    for a, b, c in POLAR_EXPRESS:
        s = a * s + b * s**3 + c * s**5
    return u @ s.diag() @ vh


class NorMuon:
    """One matrix and one row at a time, in float64."""

    def __init__(self, weights, lr, weight_decay, betas):
        self.weights, self.betas, self.lr, self.weight_decay = list(weights), betas, lr, weight_decay
        self.momenta = [torch.zeros_like(weight, dtype=torch.float64) for weight in self.weights]
        self.squares = [[0.0] * len(weight) for weight in self.weights]

    @torch.no_grad()
    def step(self):
        for weight, momentum, squares in zip(self.weights, self.momenta, self.squares, strict=True):
            momentum.copy_(self.betas[0] * momentum + (1 - self.betas[0]) * weight.grad)
            step = orthogonal(self.betas[0] * momentum + (1 - self.betas[0]) * weight.grad.double())
            length = step.norm()
            for index, row in enumerate(step):
                squares[index] = self.betas[1] * squares[index] + (1 - self.betas[1]) * row.square().mean().item()
                row /= max(squares[index], 1e-10) ** 0.5
            step *= 0.2 * max(step.shape) ** 0.5 * length / step.norm().clamp(min=1e-9)
            weight.copy_(weight * (1 - self.lr * self.weight_decay) - self.lr * step)


def test_muon_updates_linear_matrices_only():
    """An embedding table in a block is also a matrix, but its rows must not be orthogonalised."""
    model = new_model()
    model.blocks[0].values, model.blocks[0].scales = nn.Embedding(20, 16), nn.Parameter(torch.ones(2, 16))
    muon, matrices, _ = build_optimizer(model, CONFIG).param_groups
    linear = [layer.weight for block in model.blocks for layer in block.modules() if type(layer) is nn.Linear]
    assert [*map(id, muon["params"])] == [*map(id, linear)] and len(linear) == 2 * 6
    assert {id(model.blocks[0].values.weight), id(model.blocks[0].scales)} < {*map(id, matrices["params"])}


def test_muon_and_adamw_match_separate_optimizers():
    together, apart = new_model(), new_model()
    optimizer = build_optimizer(together, CONFIG)
    named = dict(apart.named_parameters())
    hidden = {name: p for name, p in named.items() if ".attention." in name or ".mlp." in name and "norm" not in name}
    hidden = {name: p for name, p in hidden.items() if p.dim() == 2}
    assert len(hidden) == 2 * 6
    rest = [p for name, p in named.items() if name not in hidden]
    decay = [
        {"params": [p for p in rest if p.dim() > 1]},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0},
    ]
    muon = NorMuon(hidden.values(), lr=1, weight_decay=0.2, betas=(0.8, 0.9))
    adamw = torch.optim.AdamW(decay, lr=CONFIG.lr, weight_decay=0.2, betas=(0.8, 0.9), fused=True)
    for step in range(6):
        backward(together, step)
        for name, parameter in together.named_parameters():
            named[name].grad = parameter.grad.clone()
        muon.lr = 0.01 / (step + 1)
        for group in (*optimizer.param_groups, *adamw.param_groups):
            group["lr"] = muon.lr
        for each in (optimizer, muon, adamw):
            each.step()
        if step == 2:  # the state can be loaded into another optimizer
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = build_optimizer(together, CONFIG)
            optimizer.load_state_dict(state)
    for name, parameter in together.named_parameters():
        torch.testing.assert_close(parameter, named[name], rtol=0, atol=1e-6 if name in hidden else 0, msg=name)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=str)
@pytest.mark.parametrize("shape", [(96, 96), (48, 160), (160, 48)], ids=str)
def test_orthogonalize_of_stack_matches_each_matrix(shape, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.to(dtype, copy=True))
    stack = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    stack[2] = 0
    polynomial = _muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C
    alone = [_muon._zeropower_via_newtonschulz(matrix, polynomial, 5, _muon.EPS) for matrix in stack]
    torch.testing.assert_close(orthogonalize(stack, 5 * [polynomial]), torch.stack(alone), rtol=0, atol=tolerance)


def test_orthogonalize_raises_small_singular_values():
    values = torch.logspace(-2, 0, 40, dtype=torch.float64)
    values = values / values.norm()
    left, right = (torch.linalg.qr(torch.randn(size, 40, dtype=torch.float64))[0] for size in (40, 90))
    result = torch.linalg.svdvals(orthogonalize((left @ values.diag() @ right.T)[None]))
    assert 0.003 < values.min() < 0.005 and 0.15 < result.min() and result.max() < 1.9


def take_steps_sharded_and_whole(rank, rendezvous, limit, num_gathers):
    """On two processes, each of which holds half of the rows of every matrix; the gradients are the same."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    torch.set_num_threads(1)
    optimizer_module.MAX_GATHERED_ELEMENTS = limit
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    whole, sharded = new_model(), new_model()
    for module in sharded.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    optimizers = [build_optimizer(model, CONFIG) for model in (whole, sharded)]
    pairs = list(zip(whole.parameters(), sharded.parameters(), strict=True))
    for step in range(3):
        backward(whole, step)
        for parameter, part in pairs:
            part.grad = distribute_tensor(parameter.grad, mesh, [Shard(0)])
        optimizers[0].step()
        with CommDebugMode() as communication:
            optimizers[1].step()
        assert communication.get_total_counts() == num_gathers
    for parameter, part in pairs:
        moments, parts = (optimizer.state[p] for optimizer, p in zip(optimizers, (parameter, part), strict=True))
        for whole_tensor, sharded_tensor in [(parameter, part), *((moments[key], parts[key]) for key in moments)]:
            torch.testing.assert_close(full_tensor(sharded_tensor), whole_tensor, rtol=0, atol=1e-6)
    assert sum("second_momentum_buffer" in parts for parts in optimizers[1].state.values()) == 2 * 6
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("limit", "num_gathers"),
    [
        pytest.param(2**26, 3, id="a gather for each shape", marks=pytest.mark.slow),
        pytest.param(4 * 16 * 16, 2 + 1 + 1, id="eight matrices of 16 x 16 in two gathers"),
    ],
)
@pytest.mark.slow
def test_muon_on_sharded_matrices_equals_whole(tmp_path, limit, num_gathers):
    arguments = [(rank, tmp_path / "rendezvous", limit, num_gathers) for rank in (0, 1)]
    processes = [server.Process(target=take_steps_sharded_and_whole, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
    assert [process.exitcode for process in processes] == [0, 0]


def test_log_has_the_rates_of_groups_that_differ():
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.1, 0.01, 0.2)]
    groups[2]["name"] = "embedding"
    rates = learning_rates(torch.optim.SGD(groups))
    assert rates == {"train/lr": 0.1, "train/lr_embedding": 0.01, "train/lr_3": 0.2}


@pytest.mark.slow
def test_muon_run_resumes_bitwise_and_learns(runs):
    arguments = [*TINY_STORIES, "--optimizer.name", "muon", "--out_dir", runs, "--name", "run"]
    train(*arguments, processes=2)
    finished, rows = tensors(runs / "run", 8), metrics(runs / "run")
    assert "optimizer.state.blocks.0.attention.q_proj.weight.momentum_buffer" in finished
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.3
    rewind(runs / "run", 4)
    train(*arguments, processes=2)
    assert_same_bits(tensors(runs / "run", 8), finished)
    assert metrics(runs / "run") == rows
