"""train.py with MLPs that skip some micro-batches, so that some processes do not use their parameters.

Each MLP also has a matrix that is never used and one that is frozen.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import model.gpt
from runtime.cli import scripts


class SparseMLP(model.gpt.MLP):
    def __init__(self, config):
        super().__init__(config)
        self.up_proj.weight.requires_grad_(False)
        self.never = torch.nn.Parameter(torch.ones(2, 2))

    def forward(self, x_BTC):
        return super().forward(x_BTC) if x_BTC.sum() > 0 else x_BTC


if __name__ == "__main__":
    model.gpt.MLP = SparseMLP
    scripts.run_and_exit("train")
