"""Excess loss of a model on each kind of token of the stories."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.synthetic.stories import StoryGenerator

NUM_CACHED_ROWS = 2**14  # every evaluation reads the same rows


def build_excess_loss_score(
    generator: StoryGenerator,
) -> Callable[[Tensor, dict[str, Tensor]], dict[str, tuple[Any, Any]]]:
    """Return a score of validation batches (Corpus.score_logits): `excess_loss/KIND`, in nats per target token.

    Each sum is divided by the number of all target tokens, so the values of all kinds add up to the excess loss.
    """
    tokens, kinds = list(generator.vocabulary), generator.kinds

    @functools.lru_cache(NUM_CACHED_ROWS)
    def explain(story: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray] | None:
        """Return -log P by the grammar in nats and the index of the kind, for each token of a story and its end.

        Return None if the targets of a row, as of a fork, are not one whole story: their entropy is unknown.
        """
        if -100 in story:
            return None
        explained = generator.grammar.explain("".join(tokens[token] for token in story))
        if explained is None:
            return None
        # The end of a story has probability 1: no other story begins with this one.
        nats = [*(token.nats for token in explained), 0.0]
        kind_indices = [*(kinds.index(generator.kind(token)) for token in explained), kinds.index("endings")]
        return np.array(nats), np.array(kind_indices)

    def score(logits_BTV: Tensor, batch: dict[str, Tensor]) -> dict[str, tuple[Any, Any]]:
        targets_BT = batch["labels"][:, 1:]
        losses_BT = F.cross_entropy(logits_BTV[:, :-1].float().transpose(1, 2), targets_BT, reduction="none")
        # One copy to the host for both; float32 represents the tokens exactly.
        losses, targets = torch.stack([losses_BT, targets_BT.float()]).cpu()
        is_target, rows = targets != -100, targets.long().tolist()
        lengths = is_target.sum(1).tolist()
        explained = [explain(tuple(row[: length - 1])) for row, length in zip(rows, lengths, strict=True)]
        known = [row for row in explained if row is not None]
        if len(known) < len(explained):
            return {f"excess_loss/{kind}": (math.nan, sum(lengths)) for kind in kinds}
        nats, kind_indices = (np.concatenate(arrays) for arrays in zip(*known, strict=True))
        sums = np.bincount(kind_indices, losses.double()[is_target].numpy() - nats, len(kinds))
        return {f"excess_loss/{kind}": (total, len(nats)) for kind, total in zip(kinds, sums.tolist(), strict=True)}

    return score
