"""train.py of a fork that keeps state in the place that the environment variable STATE names."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import train
from cli import scripts


class CountingSGD(torch.optim.Optimizer):
    """SGD with a learning rate that decays with its number of steps."""

    def __init__(self, model, lr):
        super().__init__(list(model.parameters()), {"lr": lr, "count": 0})
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        for weight in group["params"]:
            state = self.state[weight]
            first = torch.zeros(()) if os.environ["STATE"] == "tensor" else 0
            state["step"] = state.get("step", first) + (1 if os.environ["STATE"] in ("number", "tensor") else 0)
            if os.environ["STATE"] not in ("number", "tensor"):
                state["step"] = torch.zeros(())
            weight.sub_(group["lr"] / (1 + float(state["step"])) * weight.grad)
        self.count += os.environ["STATE"] == "optimizer attribute"
        group["count"] += os.environ["STATE"] == "parameter group"


class Model(train.GPTModel):
    def __init__(self, config):
        super().__init__(config)
        self.num_calls, self._num_calls, self.ema = 0, 0, torch.zeros(2)

    def forward(self, *arguments, **named):
        self._num_calls += 1
        self.num_calls += os.environ["STATE"] == "model attribute"
        if os.environ["STATE"] == "model tensor":
            self.ema += 1
        return super().forward(*arguments, **named)


if __name__ == "__main__":
    train.GPTModel = Model
    train.build_optimizer = lambda model, config, ema_decay: CountingSGD(model, config.lr)
    scripts.run_and_exit("train")
