"""The optimizer: which weights decay, and at what learning rate."""

import torch
from torch import nn

from training.config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that `config.name` says, over two parameter groups: matrices decay, everything else does not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Write the learning rate of the coming update into every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
