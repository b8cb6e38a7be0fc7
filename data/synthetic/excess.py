"""What a model has learnt of the stories: how far above the floor it is on each kind of token."""

import functools
import math
from collections.abc import Callable

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from data.synthetic.stories import Storyteller

ROWS_KEPT = 2**14  # an evaluation reads the same ones again


def excess_by_kind(teller: Storyteller) -> Callable[[Tensor, dict[str, Tensor]], dict[str, tuple[float, float]]]:
    """A score of a validation set (see Corpus): `excess_loss/KIND`, nats/target token of any kind, so that all kinds
    together are the loss above the floor."""
    tokens, kinds = list(teller.vocabulary), teller.kinds

    @functools.lru_cache(ROWS_KEPT)
    def known(story: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Of each token of a story and the end of text: -log P by the grammar, in nats, and the number of its kind."""
        explained = teller.grammar.explain("".join(tokens[token] for token in story))
        if explained is None:  # a row of a fork that holds no whole story: how far it is above the floor is not known
            return np.full(len(story) + 1, math.nan), np.zeros(len(story) + 1, dtype=np.int64)
        # That a story ends is no surprise: no other begins as this one.
        nats = [*(token.nats for token in explained), 0.0]
        numbers = [*(kinds.index(teller.kind(token)) for token in explained), kinds.index("endings")]
        return np.array(nats), np.array(numbers)

    def score(logits_BTV: Tensor, batch: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
        targets_BT = batch["labels"][:, 1:]
        losses = F.cross_entropy(logits_BTV[:, :-1].float().transpose(1, 2), targets_BT, reduction="none").cpu()
        is_target, targets = (targets_BT != -100).cpu(), targets_BT.tolist()
        rows = [known(tuple(row[: length - 1])) for row, length in zip(targets, is_target.sum(1).tolist(), strict=True)]
        nats, numbers = (np.concatenate(of_rows) for of_rows in zip(*rows, strict=True))
        sums = np.bincount(numbers, losses.double()[is_target].numpy() - nats, len(kinds))
        return {f"excess_loss/{kind}": (total, len(nats)) for kind, total in zip(kinds, sums.tolist(), strict=True)}

    return score
