"""train.py of a fork: a model trained with z-loss and auxiliary metrics, and a corpus with its own score."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import model.loss
import train
from cli import scripts
from run import resolve

Z_LOSS, HELP = 0.01, 100.0
cross_entropy_loss = model.loss.loss_of_logits


class Model(train.GPTModel):
    def forward(self, input_ids, labels=None, **named):
        if labels is None:
            return super().forward(input_ids, **named)
        logits, loss, metrics = super().forward(input_ids, labels=labels, **named)
        num_targets = (labels[:, 1:] != -100).sum()
        term = self.token_embedding.weight.square().mean()
        loss = loss + HELP * term * num_targets / named["num_items_in_batch"]
        return logits, loss, {**metrics, "targets_per_row": (num_targets, len(labels)), "nothing": (0, 0)}


def with_z_loss(logits_NV, targets_N, config):
    cross_entropy, _ = cross_entropy_loss(logits_NV, targets_N, config)
    z_loss = logits_NV.logsumexp(dim=-1).masked_fill(targets_N == -100, 0).square().sum()
    return cross_entropy + Z_LOSS * z_loss, {"loss": cross_entropy, "z_loss": z_loss}


def score(logits, batch):
    targets = batch["labels"][:, 1:]
    return {"top1": ((logits[:, :-1].argmax(dim=-1) == targets).sum(), (targets != -100).sum())}


def corpus_with_scores(config):
    corpus = load_corpus(config)
    corpus.validation.entropy_nats = 0.0
    corpus.score_logits, corpus.score_texts = score, lambda texts: {"characters": (sum(map(len, texts)), len(texts))}
    return corpus


if __name__ == "__main__":
    model.loss.loss_of_logits, train.GPTModel = with_z_loss, Model
    load_corpus, resolve.load_corpus = resolve.load_corpus, corpus_with_scores
    scripts.run_and_exit("train")
