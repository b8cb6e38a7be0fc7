"""Holds the gradient that a run trains with against autograd of plain operations in float64; for verify.py.

In float64 the model has no backward of its own: attention and products are torch's, the loss is computed as a whole,
nothing is compiled or recomputed. So the two gradients come from different code. What has a backward of its own in
float64 too, as a torch.autograd.Function of a fork may, is held against differences of the loss.
"""

from copy import deepcopy
from dataclasses import replace
from unittest.mock import patch

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.data import Dataset

from checks.model import with_short_windows
from config.schema import TrainConfig
from data.loader import load_batch
from model import kernels
from model.gpt import GPTModel
from model.loss import CHUNK_BYTES
from training.gradients import loss_scale
from training.optimizer import build_optimizer
from training.prepare_model import prepare_network

MAX_LAYERS, MAX_POSITIONS = 2, 32
MIN_TARGETS = 160  # so that the loss has two of its smallest chunks, and oneDNN takes the products
# Part of the norm of the whole gradient that is added to a tensor's own, which may be 0, as that of the keys' bias.
FLOOR = 0.003
STEP = 1e-4  # of a difference, along a direction of length 1


def gradient_errors(config: TrainConfig, dataset: Dataset, accelerator: Accelerator) -> dict[str, float]:
    """By the tensor and the way to compute: the error of its gradient, relative to the gradient's norm.

    The model is this config's with at most two layers and no dropout, on rows of the data cut to 32 positions.
    """
    length = min(MAX_POSITIONS, config.seq_len)
    small = replace(config.model, n_layers=min(MAX_LAYERS, config.model.n_layers), dropout=0.0)
    config = replace(config, model=with_short_windows(small, length))
    eager = replace(config, compile=False)
    batch = first_rows(dataset, length)
    torch.manual_seed(0)
    network = GPTModel(config.model)
    for parameter in network.parameters():  # so that also what begins at zero does something
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    build_optimizer(network, config.optimizer)  # it freezes what a fork does not train

    plain = deepcopy(network).double()
    prepare_network(plain, replace(eager, activation_checkpointing=False, chunked_loss=False), torch.device("cpu"))
    plain_loss = loss_of(plain, batch)
    functions = own_functions(plain_loss)
    plain_loss.backward()
    expected = gradient_of(plain)
    floor = FLOOR * torch.stack([tensor.norm() for tensor in expected.values()]).norm()
    norms = {name: tensor.norm() + floor for name, tensor in expected.items()}

    errors = {}
    ways = {
        "as configured": config,
        "with the loss in chunks": replace(eager, chunked_loss=True),
        "with blocks recomputed": replace(eager, activation_checkpointing=True),
    }
    for way, changed in ways.items():
        if changed.problems(accelerator.num_processes):
            continue  # a fork may refuse a setting
        loss, gradient = as_trained(deepcopy(network), changed, batch, accelerator, smallest=way != "as configured")
        errors[f"the loss, {way}"] = abs(loss / plain_loss.item() - 1)
        for name, tensor in expected.items():
            errors[f"{name}, {way}"] = ((gradient[name] - tensor).norm() / norms[name]).item()
    for name, tensor in expected.items() if functions else ():
        error = slope_error(plain, plain.get_parameter(name), tensor, batch) / norms[name].item()
        errors[f"{name}, against differences of the loss, with {', '.join(sorted(functions))}"] = error
    return errors


def first_rows(dataset: Dataset, length: int) -> dict[str, Tensor]:
    """A batch of them, cut to `length` positions; all are targets but for half a row."""
    num_rows = MIN_TARGETS // (length - 1) + 2
    batch = load_batch(dataset, [index % len(dataset) for index in range(num_rows)])
    batch = {name: rows[:, :length].clone() for name, rows in batch.items()}
    batch["labels"] = batch["labels"].where(batch["labels"] != -100, batch["input_ids"])
    batch["labels"][0, length // 2 :] = -100
    return batch


def loss_of(network: GPTModel, batch: dict[str, Tensor]) -> Tensor:
    """As in a step of training."""
    torch.manual_seed(0)
    return network(**batch, num_items_in_batch=(batch["labels"][:, 1:] != -100).sum())[1]


def gradient_of(network: GPTModel) -> dict[str, Tensor]:
    """By the parameter, in float64 on the CPU; zeros for one that was not used."""
    return {
        name: torch.zeros_like(weight, dtype=torch.float64) if weight.grad is None else weight.grad.cpu().double()
        for name, weight in network.named_parameters()
        if weight.requires_grad
    }


def as_trained(
    network: GPTModel, config: TrainConfig, batch: dict[str, Tensor], accelerator: Accelerator, smallest: bool
) -> tuple[float, dict[str, Tensor]]:
    """The loss and its gradient, as a run with these settings has them; with the `smallest` chunks, and by oneDNN where
    there is one, whatever this machine would choose."""
    network.to(accelerator.device)
    prepare_network(network, config, accelerator.device)
    batch = {name: rows.to(accelerator.device) for name, rows in batch.items()}
    scale = loss_scale(accelerator.mixed_precision, 0, skipped=0)
    with (
        patch.dict(CHUNK_BYTES, dict.fromkeys(CHUNK_BYTES, 0) if smallest else {}),
        patch.object(kernels, "use_onednn", kernels.ONEDNN_IS_THERE if smallest else kernels.use_onednn),
    ):
        with accelerator.autocast():
            loss = loss_of(network, batch)
        (scale * loss).backward()
    return loss.item(), {name: tensor / scale for name, tensor in gradient_of(network).items()}


def own_functions(loss: Tensor) -> set[str]:
    """Names of the torch.autograd.Functions in its graph."""
    nodes, visited = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in visited:
            visited.add(node)
            nodes += [earlier for earlier, _ in node.next_functions]
    return {type(node).__name__.removesuffix("Backward") for node in visited if isinstance(node, BackwardCFunction)}


@torch.no_grad()
def slope_error(network: GPTModel, weight: Tensor, gradient: Tensor, batch: dict[str, Tensor]) -> float:
    """How far the slope of the loss is from what the gradient says of it, along the gradient and something else."""
    direction = torch.randn_like(gradient)
    direction /= direction.norm()
    direction += gradient / gradient.norm().clamp(min=1e-12)
    direction /= direction.norm()
    losses = []
    for step in (STEP, -2 * STEP):
        weight.add_(direction, alpha=step)
        losses.append(loss_of(network, batch).item())
    weight.add_(direction, alpha=STEP)
    return abs((losses[0] - losses[1]) / (2 * STEP) - (gradient * direction).sum().item())
