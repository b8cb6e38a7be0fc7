"""Autoregressive generation with a cache of keys and values."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from model.config import GPTConfig


class KVCache:
    """What one layer remembers of the first `length` positions: keys and values, in buffers [B, K, capacity, D].

    GPTModel.run_blocks adds to `length` after all blocks have run. The values of a fork may have another D than its
    keys. A layer without keys, such as a recurrent one, keeps its own tensors in `state`.
    """

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0
        self.state: dict[str, Tensor] = {}

    def append(self, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of T new positions; return those of all positions, [B, K, length + T, D]."""
        if self.length == 0:
            self.keys, self.values = (
                x_BKTD.new_empty(*x_BKTD.shape[:2], self.capacity, x_BKTD.shape[3]) for x_BKTD in (k_BKTD, v_BKTD)
            )
        end = self.length + k_BKTD.shape[2]
        self.keys[:, :, self.length : end], self.values[:, :, self.length : end] = k_BKTD, v_BKTD
        return self.keys[:, :, :end], self.values[:, :, :end]


def sample_tokens(
    logits_BV: Tensor, temperature: float, top_k: int | None, top_p: float, generator: torch.Generator | None
) -> Tensor:
    """Sample the next token of each row, int64 [B, 1]; see GenerativeModel.stream."""
    if not logits_BV.amax(dim=-1).isfinite().all():  # multinomial would fail, on a GPU without a message
        raise FloatingPointError("the logits are NaN or infinite")
    if temperature < 1e-30:  # greedy: dividing by a smaller number would give infinite logits
        return logits_BV.argmax(dim=-1, keepdim=True)
    logits_BV = logits_BV.float() / temperature
    if top_k is not None:
        # Exactly k: of tokens with the k-th largest logit, those with the lowest ids fill the remaining places.
        kth_largest = logits_BV.topk(min(top_k, logits_BV.shape[-1])).values[:, -1:]
        is_larger, is_tied = logits_BV > kth_largest, logits_BV == kth_largest
        places_left = top_k - is_larger.sum(dim=-1, keepdim=True)
        is_kept = is_larger | (is_tied & (is_tied.cumsum(dim=-1) <= places_left))
        logits_BV = logits_BV.masked_fill(~is_kept, -torch.inf)
    probabilities = logits_BV.softmax(dim=-1)
    if top_p < 1:
        sorted_probabilities, tokens = probabilities.sort(descending=True, stable=True)  # equal ones: lower id first
        is_dropped = sorted_probabilities.cumsum(dim=-1) - sorted_probabilities >= top_p
        is_dropped[:, 0] = False  # in float32 a tiny top_p is 0
        sorted_probabilities[is_dropped] = 0
        return tokens.gather(1, torch.multinomial(sorted_probabilities, num_samples=1, generator=generator))
    return torch.multinomial(probabilities, num_samples=1, generator=generator)


class CannotGenerate(ValueError):
    """The model does not predict the next token."""


class GenerativeModel(nn.Module):
    """Base class of GPTModel with its generation methods."""

    config: GPTConfig
    predicts_next_token: bool

    @torch.no_grad()
    def stream(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        eos_token_id: int | None = None,
        top_k: int | None = None,
        top_p: float = 1.0,
    ) -> Iterator[Tensor]:
        """Generate a continuation of each row, one token at a time.

        A context longer than max_position_embeddings loses its oldest tokens. The positions of all others then change,
        so that each new token takes a forward over the whole context.

        Args:
            input_ids: prompts, int64 [B, T], without padding.
            max_new_tokens: upper bound on the number of tokens generated.
            temperature: divisor of the logits; 0: greedy decoding.
            generator: source of randomness; None: torch's default.
            eos_token_id: token that ends a row, which then repeats it; generation stops when every row has ended.
            top_k: sample from the k most probable tokens; of equally probable ones, the lower id comes first, so that
                `top_k=1` is greedy decoding. (TopKLogitsWarper of transformers keeps all that equal the k-th.)
            top_p: sample from the smallest set of most probable tokens (after top_k) with this total probability
                (Holtzman et al. 2020, arXiv:1904.09751).

        Yields:
            The next token of each row, int64 [B, 1].

        Raises:
            CannotGenerate: the model does not predict the next token.
            ValueError: the model is in training mode, or a setting is out of range.
            FloatingPointError: the logits are NaN or infinite.
        """
        if not self.predicts_next_token:
            raise CannotGenerate("predicts_next_token is False: write how this model generates in model/generate.py")
        if self.training:
            raise ValueError("generate() would sample with dropout: call model.eval() first")
        if temperature < 0:
            raise ValueError(f"temperature is {temperature}: it must be at least 0")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p is {top_p}: it must be greater than 0 and at most 1")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k is {top_k}: it must be at least 1")
        limit = self.config.max_position_embeddings
        cache = [KVCache(min(input_ids.shape[1] + max_new_tokens, limit)) for _ in range(self.config.n_layers)]
        ended_B1, uncached = torch.zeros_like(input_ids[:, :1], dtype=torch.bool), input_ids
        for _ in range(max_new_tokens):
            if input_ids.shape[1] > limit:
                uncached, cache = input_ids[:, -limit:], None
            logits_B1V, *_ = self(uncached, cache=cache, logits_to_keep=1)
            next_B1 = sample_tokens(logits_B1V[:, -1], temperature, top_k, top_p, generator)
            if eos_token_id is not None:
                next_B1 = next_B1.masked_fill(ended_B1, eos_token_id)
                ended_B1 = next_B1 == eos_token_id
            input_ids, uncached = torch.cat((input_ids, next_B1), dim=1), next_B1
            yield next_B1
            if eos_token_id is not None and ended_B1.all():
                break

    def generate(self, input_ids: Tensor, max_new_tokens: int, *settings, **named_settings) -> Tensor:
        """Return the prompts with their continuations, int64 [B, at most T + max_new_tokens]; see `stream`."""
        return torch.cat((input_ids, *self.stream(input_ids, max_new_tokens, *settings, **named_settings)), dim=1)
