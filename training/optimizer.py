"""The optimizers: AdamW, and Muon for the matrices of the blocks."""

import math
from collections.abc import Sequence
from typing import assert_never

import torch
from torch import Tensor, nn

from config.schema import OptimizerConfig, TrainConfig
from distributed.private_torch import foreach_add_, foreach_lerp_, foreach_mul_
from distributed.sharding import full_tensor, is_sharded, shard_like
from model.config import GPTConfig
from training.ema import track_ema
from training.schedule import SCHEDULES, scheduled_value


def build_optimizer(model: nn.Module, config: OptimizerConfig, ema_decay: float | None = None) -> torch.optim.Optimizer:
    """Build the optimizer that `config.name` selects; weight decay applies to matrices only.

    With `ema_decay`, the optimizer also updates an exponential moving average (EMA) of the weights.
    """
    optimizer = _select_optimizer(model, config)
    if ema_decay is not None:
        track_ema(optimizer, ema_decay)
    return optimizer


def _select_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    linear_weights = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Linear)}
    muon_weights, matrices, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_hidden = id(parameter) in linear_weights and name.startswith("blocks.")
            if config.name == "muon" and is_hidden:
                muon_weights.append(parameter)
            elif parameter.dim() >= 2:
                matrices.append(parameter)
            else:
                vectors.append(parameter)
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    # Copies, because torch writes the defaults of an optimizer into its groups, which a fork may pass to another one.
    adamw = torch.optim.AdamW([{**group} for group in groups], lr=config.lr, betas=config.betas, fused=True)
    match config.name:
        case "adamw":
            return adamw
        case "muon":
            return MuonAndAdamW(muon_weights, adamw, config)
        case other:
            assert_never(other)


def apply_schedules(optimizer: torch.optim.Optimizer, network: nn.Module, config: TrainConfig, step: int) -> None:
    """Set the scheduled values of step `step` (from 0) in the optimizer's groups and the attributes of modules.

    Raise ValueError if a setting of the model is scheduled that no module has as an attribute.
    """
    for group in optimizer.param_groups:
        for name in SCHEDULES.keys() & group.keys():
            unscheduled = group.setdefault(f"initial_{name}", group[name])
            group[name] = scheduled_value(name, unscheduled, config, step)
    for name in SCHEDULES.keys() & GPTConfig.model_fields.keys():
        value = scheduled_value(name, getattr(config.model, name), config, step)
        readers = [module for module in network.modules() if name in vars(module)]
        if not readers:
            raise ValueError(f"model.{name} is scheduled, but no module has an attribute {name!r}")
        for module in readers:
            setattr(module, name, value)
        if name == "dropout":
            for module in network.modules():
                if isinstance(module, nn.Dropout):
                    module.p = value


def learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return `train/lr`, the rate of the first group, and `train/lr_GROUP` for each group with another rate.

    GROUP is the `name` of the group, or its number if it has none.
    """
    first, *others = (group["lr"] for group in optimizer.param_groups)
    rates = {"train/lr": first}
    for index, lr in enumerate(others, start=1):
        if lr != first:
            rates[f"train/lr_{optimizer.param_groups[index].get('name', index)}"] = lr
    return rates


# Polar Express (Amsel et al. 2025, arXiv:2505.16932): polynomials (a, b, c), applied one after another, optimal for
# singular values from 0.001 to 1. The factor 1.02, from modded-nanogpt, is a safety margin for rounding. The first
# three of the five polynomials suffice: they leave singular values between 0.12 and 1.9 instead of near 1, and the loss
# is the same (benchmarks/LOG.md).
POLAR_EXPRESS = (
    (8.156554524902461 / 1.02, -22.48329292557795 / 1.02**3, 15.878769915207462 / 1.02**5),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
)

MAX_GATHERED_ELEMENTS = 2**26  # limit on sharded matrices that are updated together: 256 MiB in float32


def frobenius_norm(matrices: Tensor) -> Tensor:
    """Return the Frobenius norms, [N, 1, 1], of matrices [N, rows, columns]."""
    return matrices.norm(dim=(-2, -1), keepdim=True)


def orthogonalize(matrices: Tensor, polynomials: Sequence[tuple[float, float, float]] = POLAR_EXPRESS) -> Tensor:
    """Approximate U V^T for each matrix U S V^T (its SVD) in [N, rows, columns]; computed in the dtype of `matrices`.

    Each polynomial (a, b, c) maps every singular value s to a s + b s^3 + c s^5, as a Newton-Schulz iteration does.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthogonalize(matrices.mT, polynomials).mT
    x = matrices / frobenius_norm(matrices).clamp(min=1e-7)
    for a, b, c in polynomials:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for the linear weights of the blocks and AdamW for all others, as one optimizer.

    Muon orthogonalises the Nesterov momentum of each matrix. As in NorMuon (Li et al. 2025, arXiv:2510.05491), each row
    is then divided by the root of an exponential moving average of its mean square, and the Frobenius norm is restored.
    The update is scaled to a root mean square of 0.2, which is typical of AdamW (Liu et al. 2025, arXiv:2502.16982), so
    that both use the same learning rate and weight decay, as in torch.optim.Muon with adjust_lr_fn="match_rms_adamw".

    Matrices of the same shape are stacked and orthogonalised together: in bfloat16, or in float32 on a CPU, because few
    CPUs compute in bfloat16.
    """

    def __init__(self, muon_weights: list[nn.Parameter], adamw: torch.optim.AdamW, config: OptimizerConfig):
        self.adamw = adamw
        muon = {"params": muon_weights, "lr": config.lr, "weight_decay": config.weight_decay, "betas": config.betas}
        super().__init__([muon, *adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update the weights once from the gradients in `.grad`."""
        muon, by_shape = self.param_groups[0], {}
        for weight in muon["params"]:
            if weight.grad is not None:
                by_shape.setdefault(weight.shape, []).append(weight)
        for shape, weights in by_shape.items():
            # One all-gather gathers several sharded matrices; their number is limited to bound the memory.
            num_together = max(1, MAX_GATHERED_ELEMENTS // shape.numel()) if is_sharded(weights[0]) else len(weights)
            for start in range(0, len(weights), num_together):
                self._muon_step(weights[start : start + num_together], muon)
        # AdamW updates the groups and the state of this optimizer, so that one state_dict contains both. They are
        # assigned in every step because load_state_dict replaces them.
        self.adamw.param_groups, self.adamw.state = self.param_groups[1:], self.state
        self.adamw.step()

    def _muon_step(self, weights: list[nn.Parameter], group: dict) -> None:
        """Update matrices of the same shape, sharded or not, from their gradients.

        torch's foreach_lerp_, foreach_mul_ and foreach_add_ apply lerp_, mul_ and add_ to each tensor of a list.
        """
        (beta1, beta2), lr = group["betas"], group["lr"]
        gradients: list[Tensor] = []
        for weight in weights:
            assert weight.grad is not None, "step selects the weights that have gradients"
            gradients.append(weight.grad)
            if not self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
                self.state[weight]["second_momentum_buffer"] = torch.zeros(len(weight), 1, device=weight.device)
        momenta = [self.state[weight]["momentum_buffer"] for weight in weights]
        squares = [self.state[weight]["second_momentum_buffer"] for weight in weights]
        foreach_lerp_(momenta, gradients, 1 - beta1)
        # Copies, because the out-of-place foreach_lerp of torch 2.11 to 2.13 does not support sharded tensors.
        nesterov_momenta = [gradient.clone() for gradient in gradients]
        foreach_lerp_(nesterov_momenta, momenta, beta1)
        nesterov = full_tensor(torch.stack(nesterov_momenta))
        dtype = torch.float32 if nesterov.device.type == "cpu" else torch.bfloat16
        updates = orthogonalize(nesterov.to(dtype)).float()
        foreach_lerp_(squares, updates.square().mean(-1, keepdim=True).unbind(), 1 - beta2)
        normalized = updates * torch.stack(squares).clamp(min=1e-10).rsqrt()
        updates = normalized * (frobenius_norm(updates) / frobenius_norm(normalized).clamp(min=1e-7))
        foreach_mul_(weights, 1 - lr * group["weight_decay"])
        updates = [shard_like(weight, update) for weight, update in zip(weights, updates, strict=True)]
        # The root mean square of an orthogonal matrix [rows, columns] is 1 / sqrt(max(rows, columns)).
        foreach_add_(weights, updates, alpha=-lr * 0.2 * math.sqrt(max(nesterov.shape[-2:])))
