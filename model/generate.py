"""How the model writes: token by token, with what attention needs of earlier positions kept."""

from collections.abc import Iterator

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one layer at the first `length` positions; the buffers are [B, K, capacity, D]."""

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0

    def append(self, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Add the next T positions; returns the keys and the values of all."""
        begin, self.length = self.length, self.length + k_BKTD.shape[2]
        if begin == 0:
            B, K, _, D = k_BKTD.shape
            self.keys, self.values = (k_BKTD.new_empty(B, K, self.capacity, D) for _ in range(2))
        self.keys[:, :, begin : self.length], self.values[:, :, begin : self.length] = k_BKTD, v_BKTD
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


def choose(
    logits_BV: Tensor, temperature: float, top_k: int | None, top_p: float, generator: torch.Generator | None
) -> Tensor:
    """The next token of each row, int64 [B, 1]; see Generation.stream."""
    if temperature < 1e-30:  # as 0: divided by less, logits are infinite
        return logits_BV.argmax(dim=-1, keepdim=True)
    logits_BV = logits_BV.float() / temperature
    if top_k is not None:
        least = logits_BV.topk(min(top_k, logits_BV.shape[-1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least, -torch.inf)
    probabilities = logits_BV.softmax(dim=-1)
    if top_p < 1:
        likeliest, tokens = probabilities.sort(descending=True)
        likeliest[likeliest.cumsum(dim=-1) - likeliest >= top_p] = 0
        return tokens.gather(1, torch.multinomial(likeliest, num_samples=1, generator=generator))
    return torch.multinomial(probabilities, num_samples=1, generator=generator)


class Generation:
    """The part of GPTModel that writes."""

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
        """Continues each row of input_ids, int64 [B, T] without padding; yields the next tokens, int64 [B, 1].

        Temperature 0 takes the likeliest token; otherwise tokens are drawn, with `generator` if given: of the top_k
        likeliest, and of these from the fewest that together have the probability top_p (Holtzman et al. 2020,
        arXiv:1904.09751). A row that has emitted eos_token_id goes on emitting it, and all stop when every row has.
        Beyond max_position_embeddings the oldest tokens are forgotten one by one, and each new token takes a pass over
        all that are left, because their positions move.

        Raises:
            ValueError: in training mode, where dropout would spoil the samples, or a setting has no meaning.
        """
        if self.training:
            raise ValueError("generate() would sample with dropout: call model.eval() first")
        if temperature < 0:
            raise ValueError(f"temperature is {temperature}: it must be at least 0")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p is {top_p}: it must be greater than 0 and at most 1")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k is {top_k}: it must be at least 1")
        limit = self.config.max_position_embeddings
        cache = [LayerCache(min(input_ids.shape[1] + max_new_tokens, limit)) for _ in range(self.config.n_layers)]
        ended_B1, unseen = torch.zeros_like(input_ids[:, :1], dtype=torch.bool), input_ids
        for _ in range(max_new_tokens):
            if input_ids.shape[1] > limit:
                unseen, cache = input_ids[:, -limit:], None
            logits_B1V, *_ = self(unseen, cache=cache, logits_to_keep=1)
            next_B1 = choose(logits_B1V[:, -1], temperature, top_k, top_p, generator)
            if eos_token_id is not None:
                next_B1 = next_B1.masked_fill(ended_B1, eos_token_id)
                ended_B1 = next_B1 == eos_token_id
            input_ids, unseen = torch.cat((input_ids, next_B1), dim=1), next_B1
            yield next_B1
            if eos_token_id is not None and ended_B1.all():
                break

    def generate(self, input_ids: Tensor, max_new_tokens: int, *settings, **named_settings) -> Tensor:
        """input_ids and what `stream`, which takes the same, adds to them: int64 [B, at most T + max_new_tokens]."""
        return torch.cat((input_ids, *self.stream(input_ids, max_new_tokens, *settings, **named_settings)), dim=1)
