"""The optimizers: AdamW, and Muon for the linear weights of the blocks."""

import math
from collections.abc import Sequence
from typing import assert_never

import torch
from torch import Tensor, nn

from model.config import GPTConfig
from runtime.config.schema import OptimizerConfig, TrainConfig
from runtime.distributed.sharding import full_tensor, is_sharded, shard_like
from runtime.private_torch import foreach_add_, foreach_lerp_, foreach_mul_
from trainer.ema import track_ema
from trainer.schedule import SCHEDULES, scheduled_value


def build_optimizer(model: nn.Module, config: OptimizerConfig, ema_decay: float | None = None) -> torch.optim.Optimizer:
    """Build the optimizer that `config.name` selects; weight decay applies to matrices only.

    With `ema_decay`, the optimizer also updates an exponential moving average (EMA) of the weights.
    """
    optimizer = _select_optimizer(model, config)
    if ema_decay is not None:
        track_ema(optimizer, ema_decay)
    return optimizer


def _select_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    # With `muon`, Muon updates the weights of the linear layers in the blocks, and AdamW everything else: matrices such
    # as the embeddings and the output projection, and vectors (biases and the scales of norms).
    linear_weights = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Linear)}
    muon_weights, matrices, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_linear_in_block = id(parameter) in linear_weights and name.startswith("blocks.")
            if config.name == "muon" and is_linear_in_block:
                muon_weights.append(parameter)
            elif parameter.dim() >= 2:
                matrices.append(parameter)
            else:
                vectors.append(parameter)
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]

    # AdamW writes its defaults, such as lr and betas, into the dicts that it gets. It gets copies, so that a fork can
    # pass `groups` to another optimizer, which then writes its own defaults.
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

    Raises:
        ValueError: a setting of the model is scheduled, but no module has an attribute of its name.
    """
    # Settings of the optimizer, such as lr. The first call stores the configured value as `initial_NAME`.
    for group in optimizer.param_groups:
        for name in SCHEDULES.keys() & group.keys():
            unscheduled = group.setdefault(f"initial_{name}", group[name])
            group[name] = scheduled_value(name, unscheduled, config, step)

    # Settings of the model, such as dropout: a module that uses one has it as an attribute of the same name. torch's
    # nn.Dropout is the exception.
    for name in SCHEDULES.keys() & GPTConfig.model_fields.keys():
        value = scheduled_value(name, getattr(config.model, name), config, step)
        modules_with_setting = [module for module in network.modules() if name in vars(module)]
        if not modules_with_setting:
            raise ValueError(f"model.{name} is scheduled, but no module has an attribute {name!r}")
        for module in modules_with_setting:
            setattr(module, name, value)
        if name == "dropout":
            for module in network.modules():
                if isinstance(module, nn.Dropout):
                    module.p = value  # torch's module calls the probability `p`


def learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return `train/lr`, the rate of the first group, and `train/lr_GROUP` for each group with another rate.

    GROUP is the `name` of the group, or its number if it has none.
    """
    first_lr = optimizer.param_groups[0]["lr"]
    rates = {"train/lr": first_lr}
    for index, group in enumerate(optimizer.param_groups):
        if group["lr"] != first_lr:
            rates[f"train/lr_{group.get('name', index)}"] = group["lr"]
    return rates


# Polar Express (Amsel et al. 2025, arXiv:2505.16932): polynomials a x + b x^3 + c x^5 with coefficients (a, b, c),
# applied one after another. The coefficients are those of modded-nanogpt, computed for singular values from 0.001 to 1,
# with a safety margin of 1.02 for rounding in each polynomial. Before the first polynomial, modded-nanogpt also divides
# the matrix by 1.02; here the first polynomial contains this division. To save time, the last two of the five
# polynomials are left out: the first three map singular values from 0.001 to 1 into [0.12, 1.9] instead of close to 1.
# After 200 steps the validation loss was only 0.005 higher than with torch.optim.Muon. The standard deviation of that
# loss over seeds is 0.016. We measured this at a width of 128 only (benchmarks/LOG.md, 2026-11-21).
POLAR_EXPRESS = (
    (8.156554524902461 / 1.02, -22.48329292557795 / 1.02**3, 15.878769915207462 / 1.02**5),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
)

# Largest number of elements in sharded matrices that are gathered and updated together: 256 MiB in float32. A matrix
# with more elements is gathered alone.
MAX_GATHERED_ELEMENTS = 2**26


def frobenius_norm(matrices: Tensor) -> Tensor:
    """Return the Frobenius norms, [N, 1, 1], of matrices [N, rows, columns]."""
    return matrices.norm(dim=(-2, -1), keepdim=True)


def orthogonalize(matrices: Tensor, polynomials: Sequence[tuple[float, float, float]] = POLAR_EXPRESS) -> Tensor:
    """Approximate U V^T for each matrix U S V^T (its SVD) in [N, rows, columns]; computed in the dtype of `matrices`.

    Each polynomial (a, b, c) maps every singular value s to a s + b s^3 + c s^5, as a Newton-Schulz iteration does.
    """
    # Transpose tall matrices, so that the product x x^T is as small as possible: [N, rows, rows], rows <= columns.
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthogonalize(matrices.mT, polynomials).mT

    # The polynomials need singular values of at most 1, and the Frobenius norm is an upper bound of them.
    x = matrices / frobenius_norm(matrices).clamp(min=1e-7)  # [N, rows, columns]

    for a, b, c in polynomials:
        gram = x @ x.mT  # [N, rows, rows]
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)  # a x + (b gram + c gram^2) x
    return x


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for the linear weights of the blocks and AdamW for all others, as one optimizer.

    Muon orthogonalises the Nesterov momentum of each matrix. As in NorMuon (Li et al. 2025, arXiv:2510.05491), each row
    is then divided by the root of an exponential moving average of the row's mean square, and the Frobenius norm is
    restored.

    The update is multiplied by 0.2 sqrt(max(rows, columns)), as in torch.optim.Muon with
    adjust_lr_fn="match_rms_adamw". An exactly orthogonal update then has a root mean square of 0.2, as AdamW's updates
    typically have (Liu et al. 2025, arXiv:2502.16982), so both can use the same learning rate and weight decay. But the
    result of `orthogonalize` is only roughly orthogonal. For Gaussian matrices of 128 x 128 to 768 x 3072 the root mean
    square is 0.15 to 0.29, and for matrices of rank 4 with 1% noise 0.02 to 0.06, because small singular values remain
    small.

    Matrices of the same shape are stacked and orthogonalised together, in bfloat16 on a GPU and in float32 on a CPU,
    because few CPUs compute in bfloat16.
    """

    def __init__(self, muon_weights: list[nn.Parameter], adamw: torch.optim.AdamW, config: OptimizerConfig):
        self.adamw = adamw
        muon = {"params": muon_weights, "lr": config.lr, "weight_decay": config.weight_decay, "betas": config.betas}
        super().__init__([muon, *adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update the weights once from the gradients in `.grad`; a closure is not supported."""
        # Muon updates the first group, all matrices of one shape together.
        muon, by_shape = self.param_groups[0], {}
        for weight in muon["params"]:
            if weight.grad is not None:
                by_shape.setdefault(weight.shape, []).append(weight)
        for shape, weights in by_shape.items():
            # One all-gather gathers several sharded matrices; their number is limited to bound the memory.
            num_together = max(1, MAX_GATHERED_ELEMENTS // shape.numel()) if is_sharded(weights[0]) else len(weights)
            for start in range(0, len(weights), num_together):
                self._muon_step(weights[start : start + num_together], muon)

        # AdamW updates the other groups. It uses the groups and the state of this optimizer, so that one state_dict
        # contains both. They are assigned in every step because load_state_dict replaces them.
        self.adamw.param_groups, self.adamw.state = self.param_groups[1:], self.state
        self.adamw.step()

    def _muon_step(self, weights: list[nn.Parameter], group: dict) -> None:
        """Update N matrices of one shape, [rows, columns], from their gradients; FSDP2 shards all of them or none.

        torch's foreach_lerp_, foreach_mul_ and foreach_add_ apply lerp_, mul_ and add_ to each tensor of a list.
        """
        (beta1, beta2), lr = group["betas"], group["lr"]

        # Collect the gradients and the state, which is created in the first update of a weight.
        gradients: list[Tensor] = []
        for weight in weights:
            assert weight.grad is not None, "step selects the weights that have gradients"
            gradients.append(weight.grad)
            if not self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
                self.state[weight]["second_momentum_buffer"] = torch.zeros(len(weight), 1, device=weight.device)
        momenta = [self.state[weight]["momentum_buffer"] for weight in weights]  # each [rows, columns]
        mean_squares = [self.state[weight]["second_momentum_buffer"] for weight in weights]  # each [rows, 1]

        # Nesterov momentum. It is computed in place on clones, because torch 2.11, with which the GPU tests last ran,
        # has no out-of-place foreach_lerp for sharded tensors. torch 2.13 has it: once 2.11 is out of use, write
        # `foreach_lerp(gradients, momenta, beta1)` (test_muon_on_sharded_matrices_equals_whole must still pass).
        foreach_lerp_(momenta, gradients, 1 - beta1)
        nesterov_momenta = [gradient.clone() for gradient in gradients]
        foreach_lerp_(nesterov_momenta, momenta, beta1)

        # Orthogonalisation. Each row of the result depends on all rows, so sharded matrices are gathered.
        nesterov = full_tensor(torch.stack(nesterov_momenta))  # [N, rows, columns]
        dtype = torch.float32 if nesterov.device.type == "cpu" else torch.bfloat16
        updates = orthogonalize(nesterov.to(dtype)).float()  # [N, rows, columns]

        # NorMuon: divide each row by its root mean square over time, then restore the norm of the matrix. The average
        # needs no bias correction, because restoring the norm cancels a common factor.
        foreach_lerp_(mean_squares, updates.square().mean(-1, keepdim=True).unbind(), 1 - beta2)
        normalized = updates * torch.stack(mean_squares).clamp(min=1e-10).rsqrt()
        updates = normalized * (frobenius_norm(updates) / frobenius_norm(normalized).clamp(min=1e-7))

        # Decoupled weight decay.
        foreach_mul_(weights, 1 - lr * group["weight_decay"])

        # Update the weights. The root mean square of an orthogonal matrix is 1 / sqrt(max(rows, columns)).
        updates = [shard_like(weight, update) for weight, update in zip(weights, updates, strict=True)]
        foreach_add_(weights, updates, alpha=-lr * 0.2 * math.sqrt(max(nesterov.shape[-2:])))
