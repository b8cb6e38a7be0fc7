"""The optimizer: which weights it is that a rule updates, which decay, and at what learning rate."""

import torch
from torch import nn

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


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) on the matrices inside the blocks, AdamW on everything else, as one optimizer.

    Muon's updates are scaled to the root mean square of AdamW's (Liu et al. 2025, "Muon is scalable for LLM training"),
    so that one learning rate and one weight decay serve both.
    """

    def __init__(self, hidden: list[nn.Parameter], adamw: torch.optim.AdamW, config: OptimizerConfig):
        muon = torch.optim.Muon(
            hidden, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
        )  # fmt: skip
        self.parts = [muon, adamw]
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """One list of groups and one state, of which each part works on its own: what is saved is what is used."""
        muon, adamw = self.parts
        muon.param_groups, adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        muon.state = adamw.state = self.state

    def load_state_dict(self, state_dict: dict) -> None:
        """Take over another's moments."""
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """One update from the gradients in `.grad`."""
        for part in self.parts:
            part.step()
