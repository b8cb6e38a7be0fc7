"""train.py of a fork: a model whose loss and blocks have auxiliary terms and metrics, and a corpus with scores."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch

import model.gpt
import model.loss
import train
from runtime.cli import scripts
from trainer.run import resolve

Z_LOSS, HELP = 0.01, 100.0
cross_entropy_loss = model.loss.loss_of_logits


class LossWithTerms(model.loss.NextTokenLoss):
    def __call__(self, *arguments, **named):
        terms = [(1 + i) * block.mlp.down_proj.weight.square().mean() for i, block in enumerate(self.blocks)]
        return super().__call__(*arguments, auxiliary={"help": HELP * sum(terms)}, **named)


class Model(train.GPTModel):
    def __init__(self, config):
        super().__init__(config)
        self.next_token_loss.blocks = self.blocks

    def forward(self, input_ids, labels=None, **named):
        if labels is None:
            return super().forward(input_ids, **named)
        logits, loss, metrics = super().forward(input_ids, labels=labels, **named)
        num_targets = (labels[:, 1:] != -100).sum()
        of_blocks = {"index": (torch.tensor(sum(range(len(self.blocks)))), torch.tensor(len(self.blocks)))}
        of_blocks |= {f"only/{i}": (i, 1) for i in range(len(self.blocks))}
        of_rows = {"targets_per_row": (num_targets, len(labels)), "nothing": (0, 0)}
        return logits, loss, {**metrics, **of_blocks, **of_rows}


def with_z_loss(logits_NV, targets_N, config):
    cross_entropy, _ = cross_entropy_loss(logits_NV, targets_N, config)
    z_loss = logits_NV.logsumexp(dim=-1).masked_fill(targets_N == -100, 0).square().sum()
    return cross_entropy + Z_LOSS * z_loss, {"loss": cross_entropy, "z_loss": z_loss}


def score(logits, batch):
    targets = batch["labels"][:, 1:]
    rows = batch["score_row"].sum(), len(targets)
    return {"top1": ((logits[:, :-1].argmax(dim=-1) == targets).sum(), (targets != -100).sum()), "row": rows}


def score_generated(network, batch):
    """Report the mean of the token ids that the model generates after the first four tokens of a row."""
    assert not network.training and type(network) is Model
    generated = network.generate(batch["input_ids"][:, :4], max_new_tokens=1, temperature=0.0)[:, 4]
    return {"generated": (generated.sum(), len(generated))}


class Numbered:
    """A data set with a number of each sample, which only the score reads."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getattr__(self, name):
        return getattr(self.dataset, name)

    def arrays(self, indices):
        return {**self.dataset.arrays(indices), "score_row": np.array(indices) / 2}


def corpus_with_scores(config):
    corpus = load_corpus(config)
    corpus.validation.entropy_nats = 0.0
    corpus.train, corpus.validation = Numbered(corpus.train), Numbered(corpus.validation)
    corpus.score_model = score_generated
    corpus.score_logits, corpus.score_texts = score, lambda texts: {"characters": (sum(map(len, texts)), len(texts))}
    return corpus


if __name__ == "__main__":
    model.loss.loss_of_logits, model.gpt.NextTokenLoss, train.GPTModel = with_z_loss, LossWithTerms, Model
    load_corpus, resolve.load_corpus = resolve.load_corpus, corpus_with_scores
    scripts.run_and_exit("train")
