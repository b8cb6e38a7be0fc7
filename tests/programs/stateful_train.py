"""A fork that keeps state in the places that the environment variable STATE names; runs train.py, or verify.py's check.

Without one of the checkpoint's places, a resumed run differs: the state scales the learning rate or the loss.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import train
from runtime.cli import scripts
from trainer.checks import verification
from trainer.checks.short_run import parse_short_run

STATE = os.environ["STATE"].split(",")


class CountingSGD(torch.optim.Optimizer):
    """SGD with a learning rate that decays with its number of steps."""

    def __init__(self, model, *_):
        super().__init__(list(model.parameters()), {"lr": 0.1, "count": 0})
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        self.count += "optimizer attribute" in STATE
        group["count"] += "parameter group" in STATE
        first = self.state[group["params"][0]]
        first["count"] = first.get("count", torch.zeros(())) + ("tensor of the first parameter" in STATE)
        for weight in group["params"]:
            state = self.state[weight]
            state["step"] = state.get("step", torch.zeros(())) + ("tensor" in STATE)
            if "number" in STATE:
                state["step"], state["last"] = 1, 0.5
            count = float(state["step"]) + float(first["count"]) + self.count + group["count"]
            weight.sub_(group["lr"] / (1 + count) * weight.grad)


class Model(train.GPTModel):
    def __init__(self, config):
        super().__init__(config)
        self.num_calls, self.ema = 0, torch.zeros(2)
        self.table: torch.Tensor
        self.register_buffer("table", torch.zeros(2), persistent=False)

    def forward(self, *arguments, **named):
        self.num_calls += "model attribute" in STATE
        self.ema += "model tensor" in STATE
        self.table += "non-persistent buffer" in STATE
        logits, loss, *metrics = super().forward(*arguments, **named)
        if self.training:
            assert loss is not None
            loss = loss * (1 + self.num_calls + self.ema.sum() + self.table.sum())
        return logits, loss, *metrics


if __name__ == "__main__":
    train.GPTModel = verification.GPTModel = Model
    train.build_optimizer = verification.build_optimizer = CountingSGD
    if "--verify_steps" in sys.argv:
        verification.Verification.checks = lambda self: {"resuming is bitwise": self.resuming_is_bitwise}
        scripts.run_and_exit("verify", parse_short_run)
    scripts.run_and_exit("train")
