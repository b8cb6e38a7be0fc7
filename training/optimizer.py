"""The optimizer: which weights it is that a rule updates, which decay, and at what learning rate."""

import math

import torch
from torch import Tensor, nn

from config import OptimizerConfig, no_code_for


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that `config.name` says. Matrices decay, everything else does not."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [parameter for _, parameter in named if parameter.dim() >= 2]
    vectors = [parameter for _, parameter in named if parameter.dim() < 2]
    hidden = []
    if config.name == "muon":
        hidden = [parameter for name, parameter in named if parameter.dim() == 2 and name.startswith("blocks.")]
        matrices = [parameter for parameter in matrices if not any(parameter is other for other in hidden)]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
    match config.name:
        case "adamw":
            return adamw
        case "muon":
            return MuonAndAdamW(hidden, adamw, config)
        case other:
            raise no_code_for("optimizer.name", other)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Write the learning rate of the coming update into every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def orthogonalize(matrices: Tensor) -> Tensor:
    """About U V^T of each matrix U S V^T of a stack [N, rows, columns], in its dtype.

    Five steps of a Newton-Schulz iteration (Jordan et al. 2024, kellerjordan.github.io/posts/muon), whose coefficients
    lift small singular values fast: they end between 0.7 and 1.2 instead of all at 1.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthogonalize(matrices.mT).mT
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) on the matrices inside the blocks, AdamW on everything else, as one optimizer.

    Muon is torch.optim.Muon's rule: each matrix takes a step along its momentum made orthogonal, scaled to the root
    mean square of AdamW's steps (Liu et al. 2025, arXiv:2502.16982), so that one learning rate and one weight decay
    serve both. Matrices of one shape are made orthogonal together; on a CPU in float32, because few have arithmetic in
    bfloat16, and elsewhere in bfloat16.
    """

    momentum = 0.95

    def __init__(self, hidden: list[nn.Parameter], adamw: torch.optim.AdamW, config: OptimizerConfig):
        self.adamw = adamw
        muon = {"params": hidden, "lr": config.lr, "weight_decay": config.weight_decay}
        super().__init__([muon, *adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        """One list of groups and one state, of which AdamW works on its own: what is saved is what is used."""
        self.adamw.param_groups, self.adamw.state = self.param_groups[1:], self.state

    def load_state_dict(self, state_dict: dict) -> None:
        """Take over another's moments."""
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """One update from the gradients in `.grad`."""
        alike = {}
        for weight in self.param_groups[0]["params"]:
            if weight.grad is not None:
                # Sharded ones go one by one: each has to be gathered, and all of them may be too large.
                alike.setdefault(weight if is_sharded(weight) else weight.shape, []).append(weight)
        for weights in alike.values():
            self._step_along_momentum(weights, self.param_groups[0]["lr"], self.param_groups[0]["weight_decay"])
        self.adamw.step()

    def _step_along_momentum(self, weights: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        """Muon, for matrices of one shape."""
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        gradients = [weight.grad for weight in weights]
        momenta = [self.state[weight]["momentum_buffer"] for weight in weights]
        torch._foreach_lerp_(momenta, gradients, 1 - self.momentum)
        ahead = torch.stack([gathered(x) for x in torch._foreach_lerp(gradients, momenta, self.momentum)])  # Nesterov
        steps = orthogonalize(ahead.to(torch.float32 if ahead.device.type == "cpu" else torch.bfloat16))
        steps = [sharded_as(weight, step) for weight, step in zip(weights, steps, strict=True)]
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
        torch._foreach_add_(weights, steps, alpha=-lr * 0.2 * math.sqrt(max(ahead.shape[-2:])))


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, of which this process holds a part; that class is slow to import."""
    return hasattr(tensor, "full_tensor")


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def sharded_as(like: Tensor, tensor: Tensor) -> Tensor:
    """A tensor that all processes hold whole, sharded as `like` is, if it is."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
