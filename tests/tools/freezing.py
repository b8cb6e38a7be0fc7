"""Run train.py or tools.replay of a fork: python tests/tools/freezing.py train|replay ...

The model has a loss term weighted by the targets, as in docs/forking.md, and the optimizer trains only the output
projections of attention.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import train
from cli import scripts
from tools.replay import replay
from tools.replay.settings import ReplayConfig
from training.optimizer import build_optimizer


class Model(train.GPTModel):
    def forward(self, input_ids, labels=None, num_items_in_batch=None, **named):
        inputs = {"labels": labels, "num_items_in_batch": num_items_in_batch, **named}
        logits, loss, metrics = super().forward(input_ids, **inputs)
        if labels is None:
            return logits, loss, metrics
        num_targets = (labels[:, 1:] != -100).sum()
        sums = {"loss": (loss.detach() * num_items_in_batch, num_targets)}
        return logits, loss + num_targets / num_items_in_batch, sums


def build_and_freeze(network, *arguments):
    for name, parameter in network.named_parameters():
        parameter.requires_grad_("out_proj" in name)
    return build_optimizer(network, *arguments)


if __name__ == "__main__":
    for module in (train, replay):
        module.GPTModel, module.build_optimizer = Model, build_and_freeze
    script = sys.argv.pop(1)
    if script == "replay":
        scripts.run_and_exit("tools.replay", ReplayConfig, module="tools.replay.replay")
    scripts.run_and_exit(script)
