"""A fork with experts that the recipe of docs/forking_reference.md balances; runs train.py, or verify.py."""

import inspect
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import model.gpt
import train
from runtime.cli import scripts
from trainer.checks.short_run import parse_short_run

N_EXPERTS = 3
PAGE = Path(__file__).parents[2] / "docs" / "forking_reference.md"
recipe = {"F": F, "Tensor": Tensor, "dist": dist, "nn": nn, "torch": train.torch}
[code] = re.findall(r"```python\n(class BalancedRouter.*?)```", PAGE.read_text(), re.DOTALL)
exec(code, recipe)


class Experts(nn.Module):
    """MLPs, of which the router chooses one for each token."""

    def __init__(self, config):
        super().__init__()
        self.router = recipe["BalancedRouter"](config.d_model, N_EXPERTS)
        self.experts = nn.ModuleList(MLP(config) for _ in range(N_EXPERTS))

    def forward(self, x_BTC):
        score_BT1, choice_BT = self.router(x_BTC)
        outputs = [expert(x_BTC) * (choice_BT == number)[..., None] for number, expert in enumerate(self.experts)]
        return score_BT1 * sum(outputs)


def insert(source, line, before="", after=""):
    """Insert lines before and after a line of the source, with its indentation."""
    [(whole, indentation)] = re.findall(rf"(?m)^(( *){re.escape(line)}\n)", source)
    new = [f"{indentation}{text}\n" if text else "" for text in (before, after)]
    return source.replace(whole, new[0] + whole + new[1])


if __name__ == "__main__":
    MLP, model.gpt.MLP = model.gpt.MLP, Experts
    step = inspect.getsource(train.train_step)
    step = insert(step, "compute = state.graph or partial(forward_backward, state)", "start_counts(state.network)")
    step = insert(step, "state.optimizer.step()", after="update_biases(state.network, results.num_processes)")
    exec(step, vars(train) | recipe, recipe)
    train.train_step = recipe["train_step"]
    if "--verify_steps" in sys.argv:
        scripts.run_and_exit("verify", parse_short_run)
    scripts.run_and_exit("train")
