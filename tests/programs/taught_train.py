"""Runs train.py, and prints what became of the teacher: the hash of its weights, and whether they have gradients."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import train
from runtime.config.parser import parse_config
from trainer.pretrained.load import hash_weights

if __name__ == "__main__":
    models, add_teacher = [], train.add_teacher

    def add_and_record(network, model, *arguments):
        models.append(model)
        add_teacher(network, model, *arguments)

    train.add_teacher = add_and_record
    train.main(parse_config())
    has_gradients = any(parameter.grad is not None for parameter in models[0].parameters())
    print("teacher after the training:", hash_weights(models[0].state_dict()), has_gradients)
