"""Check for verify.py of the gradient of a training step, against autograd in float64.

In float64 the model uses no custom backward: attention and products are PyTorch's, the loss is not chunked, and nothing
is compiled or recomputed. So the two gradients come from different code. If a fork adds a torch.autograd.Function that
also runs in float64, the gradient in float64 is itself compared with finite differences of the loss.
"""

from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from data.loader import load_batch, model_inputs
from model.config import GPTConfig
from model.gpt import GPTModel
from model.hf import build_perturbed
from model.loss import CHUNK_BYTES, align_targets, count_targets, soft_cap
from runtime.config.schema import TrainConfig
from trainer import cpu_kernels
from trainer.checks.model import with_short_windows
from trainer.gradients import loss_scale
from trainer.optimizer import build_optimizer
from trainer.prepare_model import add_teacher, prepare_network

MAX_LAYERS, MAX_POSITIONS = 2, 32
MIN_TARGETS = 160  # at least two chunks of the smallest size, and enough rows for oneDNN
# Errors are relative to the tensor's norm, which may be 0 (the keys' bias), plus this fraction of the gradient's norm.
MIN_RELATIVE_NORM = 0.003
STEP = 1e-4  # length of a finite-difference step


class NoFloat64(Exception):
    """The model computes a loss in float32 but not in float64, for example because it calls `.float()`."""


def gradient_errors(
    config: TrainConfig,
    dataset: Any,
    accelerator: Accelerator,
    teacher_config: GPTConfig | None = None,
    initial: GPTModel | None = None,
    max_positions: int = MAX_POSITIONS,
) -> dict[str, float]:
    """Compute the relative error of each tensor's gradient, by the tensor's name and how it was computed.

    The model is the config's with at most two layers and no dropout, on rows of the data cut to `max_positions`. It has
    the weights of `initial` as far as that has them, since a fault may need large ones, and random others. It is run as
    configured, with a chunked loss, and with recomputed blocks. It learns from a teacher of `teacher_config`, if
    that is given; the objective is then compared with its definition, too.

    Raises:
        NoFloat64: the loss cannot be computed in float64, but in float32.
    """
    length = min(max_positions, config.seq_len)
    config = config.replace(model=make_small(config.model, length))
    eager = config.replace(compile=False)
    batch = first_rows(dataset, length)
    teacher = build_teacher(make_small(teacher_config, length), batch) if teacher_config else None
    network = build_perturbed(config.model).train()  # parameters initialised to zero have an effect, too
    if initial:
        network.load_state_dict(initial.state_dict(), strict=False)  # the layers that the small model lacks are ignored
    build_optimizer(network, config.optimizer)  # a fork may freeze parameters there

    plain = deepcopy(network).double()
    plain_config, cpu = eager.replace(activation_checkpointing=False, chunked_loss=False), torch.device("cpu")
    prepare_network(plain, plain_config, cpu)
    if teacher:
        add_teacher(plain, deepcopy(teacher).double(), plain_config, cpu)
    try:
        plain_loss = compute_loss(plain, batch)
    except Exception as error:
        try:
            compute_loss(deepcopy(network), batch)
        except Exception:  # it fails in float32, too: one that works in blocks of tokens may need longer sequences
            if length == config.seq_len:
                raise
            return gradient_errors(config, dataset, accelerator, teacher_config, initial, config.seq_len)
        raise NoFloat64(f"{type(error).__name__}: {error}") from error
    functions = find_custom_functions(plain_loss)
    plain_loss.backward()
    expected = collect_gradients(plain)
    min_norm = MIN_RELATIVE_NORM * torch.stack([tensor.norm() for tensor in expected.values()]).norm()
    norms = {name: tensor.norm() + min_norm for name, tensor in expected.items()}

    errors = (
        {"the objective, against the definition of distillation": distillation_error(plain, batch)} if teacher else {}
    )
    ways = {
        "as configured": config,
        "with a chunked loss": eager.replace(chunked_loss=True),
        "with recomputed blocks": eager.replace(activation_checkpointing=True),
    }
    for way, changed in ways.items():
        if changed.problems(accelerator.num_processes):
            continue  # a fork may refuse a setting
        loss, gradient = train_gradients(
            deepcopy(network), deepcopy(teacher), changed, batch, accelerator, smallest_chunks=way != "as configured"
        )
        errors[f"the loss, {way}"] = abs(loss / plain_loss.item() - 1)
        for name, tensor in expected.items():
            errors[f"{name}, {way}"] = ((gradient[name] - tensor).norm() / norms[name]).item()
    for name, tensor in expected.items() if functions else ():
        error = finite_difference_error(plain, plain.get_parameter(name), tensor, batch) / norms[name].item()
        errors[f"{name}, against finite differences, with {', '.join(sorted(functions))}"] = error
    return errors


def make_small(config: GPTConfig, length: int) -> GPTConfig:
    """Return a config with at most two layers, windows that are shorter than `length` tokens, and no dropout."""
    return with_short_windows(config.replace(n_layers=min(MAX_LAYERS, config.n_layers), dropout=0.0), length)


def first_rows(dataset: Any, length: int) -> dict[str, Tensor]:
    """Return a batch of rows cut to `length` positions, all of them targets except for half of the first row."""
    num_rows, num_samples = MIN_TARGETS // (length - 1) + 2, len(dataset)
    batch = model_inputs(load_batch(dataset, [index % num_samples for index in range(num_rows)]))
    batch = {name: rows[:, :length].clone() for name, rows in batch.items()}
    batch["labels"] = batch["labels"].where(batch["labels"] != -100, batch["input_ids"])
    batch["labels"][0, length // 2 :] = -100
    return batch


def compute_loss(network: GPTModel, batch: dict[str, Tensor]) -> Tensor:
    """Compute the loss as a training step does."""
    torch.manual_seed(0)
    return network(**batch, num_items_in_batch=count_targets(batch["labels"], network.predicts_next_token))[1]


def collect_gradients(network: GPTModel) -> dict[str, Tensor]:
    """Return the gradient of each trained parameter in float64 on the CPU, zeros if the loss does not use it."""
    return {
        name: torch.zeros_like(weight, dtype=torch.float64) if weight.grad is None else weight.grad.cpu().double()
        for name, weight in network.named_parameters()
        if weight.requires_grad
    }


@torch.no_grad()
def build_teacher(config: GPTConfig, batch: dict[str, Tensor]) -> GPTModel:
    """Build a teacher whose predictions are far from uniform, so that they differ between positions."""
    teacher = build_perturbed(config, seed=1)
    teacher.output_weight.mul_(2 / teacher(batch["input_ids"]).logits.std())
    return teacher


def distillation_error(network: GPTModel, batch: dict[str, Tensor]) -> float:
    """Compare the objective, its gradient and `teacher_kl` with their definition (see TeacherConfig.weight).

    The definition reads the logits of both models. Its cross-entropy is the loss without the teacher, to which a fork
    may have added terms.
    """
    # The arguments of the loss, at which the training step computes it.
    next_token_loss = network.next_token_loss
    with patch.object(network, "next_token_loss", side_effect=next_token_loss) as recorded, torch.no_grad():
        compute_loss(network, batch)
    (hidden_BTC, weight_VC, labels_BT, *_), other_targets = recorded.call_args_list[0]
    other_targets = {name: value for name, value in other_targets.items() if name != "auxiliary"}  # terms beside it
    hidden_BTC = hidden_BTC.requires_grad_()
    objective, metrics = next_token_loss(hidden_BTC, weight_VC, labels_BT, 1.0, **other_targets)

    # The definition, row by row.
    assert network.teacher is not None
    weight, temperature = network.teacher.weight, network.teacher.temperature
    divergence = torch.zeros_like(objective)
    for row, (hidden_TC, labels_T) in enumerate(zip(hidden_BTC, labels_BT, strict=True)):
        inputs = {name: batch[name][row : row + 1] for name in ("input_ids", "position_ids") if name in batch}
        is_target = align_targets(labels_T[None], network.predicts_next_token)[0] != -100
        logits = soft_cap(hidden_TC @ weight_VC.T, network.config.logit_softcap)[is_target]
        log_q = (logits / temperature).log_softmax(-1)
        log_p = (network.teacher.model(**inputs).logits[0, is_target] / temperature).log_softmax(-1)
        divergence = divergence + (log_p.exp() * (log_p - log_q)).sum()
    of_teacher = {"teacher_NV", "teacher_weight", "temperature"}
    without_teacher = {name: value for name, value in other_targets.items() if name not in of_teacher}
    loss, _ = next_token_loss(hidden_BTC, weight_VC, labels_BT, 1.0, **without_teacher)
    expected = (1 - weight) * loss + weight * temperature**2 * divergence

    gradient, expected_gradient = (torch.autograd.grad(value, hidden_BTC)[0] for value in (objective, expected))
    logged, _ = metrics.get("teacher_kl", (torch.inf, 1))
    ratios = logged / divergence, objective / expected
    gradient_error = (gradient - expected_gradient).norm() / expected_gradient.norm()
    errors = torch.stack([gradient_error, *(abs(ratio - 1) for ratio in ratios)])
    return errors.max().item()  # NaN if one of them is; Python's max would depend on their order


def train_gradients(
    network: GPTModel,
    teacher: GPTModel | None,
    config: TrainConfig,
    batch: dict[str, Tensor],
    accelerator: Accelerator,
    smallest_chunks: bool,
) -> tuple[float, dict[str, Tensor]]:
    """Compute the loss and its gradient as a run with these settings does; the network is modified.

    With `smallest_chunks`, the loss is in the smallest chunks, and any processor that has oneDNN uses it.
    """
    network.to(accelerator.device)
    onednn = (smallest_chunks and cpu_kernels.HAS_ONEDNN) or cpu_kernels.mkl_is_slow()
    with patch.object(cpu_kernels, "mkl_is_slow", lambda: onednn):
        prepare_network(network, config, accelerator.device)
        if teacher:
            add_teacher(network, teacher, config, accelerator.device)
    batch = {name: rows.to(accelerator.device) for name, rows in batch.items()}
    scale = loss_scale(accelerator.mixed_precision, 0, skipped=0)
    with patch.dict(CHUNK_BYTES, dict.fromkeys(CHUNK_BYTES, 0) if smallest_chunks else {}):
        with accelerator.autocast():
            loss = compute_loss(network, batch)
        (scale * loss).backward()
    return loss.item(), {name: tensor / scale for name, tensor in collect_gradients(network).items()}


def find_custom_functions(loss: Tensor) -> set[str]:
    """Return the names of the torch.autograd.Functions in the graph of the loss."""
    nodes, visited = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in visited:
            visited.add(node)
            nodes += [inputs for inputs, _ in node.next_functions]
    return {type(node).__name__.removesuffix("Backward") for node in visited if isinstance(node, BackwardCFunction)}


@torch.no_grad()
def finite_difference_error(network: GPTModel, weight: Tensor, gradient: Tensor, batch: dict[str, Tensor]) -> float:
    """Compare the derivative along the gradient plus a random vector with a central difference; return the error."""
    direction = torch.randn_like(gradient)
    direction /= direction.norm()
    direction += gradient / gradient.norm().clamp(min=1e-12)
    direction /= direction.norm()
    losses = []
    for step in (STEP, -2 * STEP):
        weight.add_(direction, alpha=step)
        losses.append(compute_loss(network, batch).item())
    weight.add_(direction, alpha=STEP)
    return abs((losses[0] - losses[1]) / (2 * STEP) - (gradient * direction).sum().item())
