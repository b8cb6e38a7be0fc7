"""The optimizers: AdamW, and Muon for the matrices of the blocks."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from config.errors import unhandled_choice
from config.schema import OptimizerConfig, TrainConfig
from distributed.private_torch import foreach_add_, foreach_lerp_, foreach_mul_
from distributed.sharding import full_tensor, is_sharded, shard_like
from training.ema import track_ema
from training.schedule import SCHEDULES, scheduled_value


def build_optimizer(model: nn.Module, config: OptimizerConfig, ema_decay: float | None = None) -> torch.optim.Optimizer:
    """Build the optimizer that `config.name` selects. Weight decay applies to matrices only.

    With `ema_decay` (evaluation.ema_decay) it also tracks an exponential moving average of the weights.
    """
    optimizer = _select_optimizer(model, config)
    if ema_decay is not None:
        track_ema(optimizer, ema_decay)
    return optimizer


def _select_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    linear_weights = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Linear)}
    hidden, matrices, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_hidden = id(parameter) in linear_weights and name.startswith("blocks.")
            if config.name == "muon" and is_hidden:
                hidden.append(parameter)
            elif parameter.dim() >= 2:
                matrices.append(parameter)
            else:
                vectors.append(parameter)
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
    match config.name:
        case "adamw":
            return adamw
        case "muon":
            return MuonAndAdamW(hidden, adamw, config)
        case other:
            raise unhandled_choice("optimizer.name", other)


def set_schedules(optimizer: torch.optim.Optimizer, network: nn.Module, config: TrainConfig, step: int) -> None:
    """Set every scheduled value for step `step` (from 0) in the optimizer's groups and the dropout layers.

    The base value of a group is the one that the optimizer was built with.
    """
    for group in optimizer.param_groups:
        for name in SCHEDULES.keys() & group.keys():
            base = group.setdefault(f"initial_{name}", group[name])
            group[name] = scheduled_value(name, base, config, step)
    if "dropout" in SCHEDULES:
        rate = scheduled_value("dropout", config.model.dropout, config, step)
        for module in network.modules():
            if isinstance(module, nn.Dropout):
                module.p = rate
            elif isinstance(getattr(module, "dropout", None), float):
                module.dropout = rate


def learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return `train/lr`, and `train/lr_GROUP` of every group whose rate is another, by the group's `name` or number."""
    first, *others = (group["lr"] for group in optimizer.param_groups)
    rates = {"train/lr": first}
    for index, lr in enumerate(others, start=1):
        if lr != first:
            rates[f"train/lr_{optimizer.param_groups[index].get('name', index)}"] = lr
    return rates


# Polar Express (Amsel et al. 2025, arXiv:2505.16932): optimal polynomials, applied in turn, for singular values from
# 0.001 to 1, with the safety factor for rounding of modded-nanogpt (the first also covers the norm by 1.02). After
# these three of the five, singular values are between 0.2 and 1.9 instead of near 1; the loss is the same
# (benchmarks/LOG.md).
POLAR_EXPRESS = (
    (8.156554524902461 / 1.02, -22.48329292557795 / 1.02**3, 15.878769915207462 / 1.02**5),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
)


def frobenius_norm(matrices: Tensor) -> Tensor:
    """Return the Frobenius norm of each matrix [N, rows, columns], [N, 1, 1]."""
    return matrices.norm(dim=(-2, -1), keepdim=True)


def orthogonalize(matrices: Tensor, polynomials: Sequence[tuple[float, float, float]] = POLAR_EXPRESS) -> Tensor:
    """Approximate U V^T of each matrix U S V^T in [N, rows, columns], in its dtype.

    Each polynomial maps the singular values x to a x + b x^3 + c x^5, as a Newton-Schulz iteration does.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthogonalize(matrices.mT, polynomials).mT
    x = matrices / frobenius_norm(matrices).clamp(min=1e-7)
    for a, b, c in polynomials:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) on the linear layers inside the blocks, AdamW on everything else, as one optimizer.

    Each matrix moves along its orthogonalised momentum, scaled to the root mean square of AdamW's updates (Liu et al.
    2025, arXiv:2502.16982), so that one learning rate and one weight decay serve both, as in torch.optim.Muon. As in
    NorMuon (Li et al. 2025, arXiv:2510.05491) each row of the update, a neuron, is then divided by the root of an
    exponential moving average of its mean square, and the update is rescaled to its Frobenius norm before.

    Matrices of one shape are updated together, in float32 on CPUs, few of which compute in bfloat16, and in bfloat16
    elsewhere.
    """

    def __init__(self, hidden: list[nn.Parameter], adamw: torch.optim.AdamW, config: OptimizerConfig):
        self.adamw = adamw
        muon = {"params": hidden, "lr": config.lr, "weight_decay": config.weight_decay, "betas": config.betas}
        super().__init__([muon, *adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update the weights once from the gradients in `.grad`."""
        muon, by_shape = self.param_groups[0], {}
        for weight in muon["params"]:
            if weight.grad is not None:
                # Sharded matrices are updated one by one: gathered together they may not fit into memory.
                key = weight if is_sharded(weight) else weight.shape
                by_shape.setdefault(key, []).append(weight)
        for weights in by_shape.values():
            self._step_along_momentum(weights, muon)
        # AdamW uses its part of the same groups and the same state, so the state that is saved is the one it uses.
        self.adamw.param_groups, self.adamw.state = self.param_groups[1:], self.state
        self.adamw.step()

    def _step_along_momentum(self, weights: list[nn.Parameter], group: dict) -> None:
        """Update matrices of one shape by Muon's rule."""
        (momentum, square_decay), lr = group["betas"], group["lr"]
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
                self.state[weight]["second_momentum_buffer"] = torch.zeros(len(weight), 1, device=weight.device)
        gradients = [weight.grad for weight in weights if weight.grad is not None]  # all have one
        momenta = [self.state[weight]["momentum_buffer"] for weight in weights]
        squares = [self.state[weight]["second_momentum_buffer"] for weight in weights]
        foreach_lerp_(momenta, gradients, 1 - momentum)
        # Nesterov momentum; in place, which torch 2.11 supports for sharded tensors too.
        ahead = [gradient.clone() for gradient in gradients]
        foreach_lerp_(ahead, momenta, momentum)
        ahead = torch.stack([full_tensor(matrix) for matrix in ahead])
        dtype = torch.float32 if ahead.device.type == "cpu" else torch.bfloat16
        steps = orthogonalize(ahead.to(dtype)).float()
        foreach_lerp_(squares, steps.square().mean(-1, keepdim=True).unbind(), 1 - square_decay)
        normed = steps * torch.stack(squares).clamp(min=1e-10).rsqrt()
        steps = normed * (frobenius_norm(steps) / frobenius_norm(normed).clamp(min=1e-7))
        foreach_mul_(weights, 1 - lr * group["weight_decay"])
        steps = [shard_like(weight, step) for weight, step in zip(weights, steps, strict=True)]
        foreach_add_(weights, steps, alpha=-lr * 0.2 * math.sqrt(max(ahead.shape[-2:])))
