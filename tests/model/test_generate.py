"""Generation: the tokens that a model without a cache would choose, drawn as transformers draws them."""

import pytest
import torch
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from model import gpt
from model.generate import KVCache, sample_tokens
from tests.model.test_model import make_lively_model, make_model, make_tokens
from trainer.cpu_kernels import use_cpu_kernels

KINDS = {
    "learned": {},
    "learned-grouped": dict(n_kv_heads=2),
    "rope": dict(position="rope"),
    "windows": dict(position="rope", window=4, window_pattern="S", n_layers=3),
    "rope-grouped-normed": dict(position="rope", n_kv_heads=1, qk_norm=True, norm="rmsnorm", mlp="swiglu", bias=False),
}
every_kind = pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS.keys())


@every_kind
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_kv_cache_changes_no_token_beyond_max_position(settings, temperature):
    """21 tokens in the end, of which the model can see 16."""
    model, tokens = make_lively_model(**settings), make_tokens(length=5)
    generator = torch.Generator().manual_seed(3)
    expected = tokens
    for _ in range(16):
        logits = model(expected[:, -16:])[0][:, -1]
        if temperature:
            chosen = torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator)
        else:
            chosen = logits.argmax(-1, keepdim=True)
        expected = torch.cat((expected, chosen), dim=1)
    generated = model.generate(tokens, 16, temperature, generator=torch.Generator().manual_seed(3))
    assert torch.equal(generated, expected)
    assert len(expected[:, 5:].unique()) > 3, "a model that repeats itself would test little"


@every_kind
@pytest.mark.parametrize("parts", [(11,), (5, 1, 1, 4), (1, 10)])
def test_logits_with_kv_cache_equal_full_forward(settings, parts):
    model, tokens = make_lively_model(**settings), make_tokens()
    cache = [KVCache(11) for _ in model.blocks]
    pieces = [model(piece, cache=cache)[0] for piece in tokens.split(parts, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens)[0], rtol=1e-6, atol=1e-6)  # rope is in float32
    with pytest.raises(ValueError, match="input_ids: 17 tokens"):
        model(make_tokens(length=6), cache=cache)


class NarrowValues(gpt.Attention):
    """The attention of a fork, whose values have half of the width of its keys."""

    def __init__(self, config):
        super().__init__(config)
        self.width = self.head_dim // 2
        self.v_proj = torch.nn.Linear(config.d_model, config.resolved_n_kv_heads * self.width)
        self.out_proj = torch.nn.Linear(config.n_heads * self.width, config.d_model)

    def forward(self, x_BTC, rope, mask, cache=None):
        projections = (self.q_proj, self.head_dim), (self.k_proj, self.head_dim), (self.v_proj, self.width)
        q, k, v = (project(x_BTC).unflatten(-1, (-1, width)).transpose(1, 2) for project, width in projections)
        k, v = (k, v) if cache is None else cache.append(k, v)
        return self.out_proj(gpt.dot_product_attention(q, k, v, mask, 0.0, self.sdpa).transpose(1, 2).flatten(-2))


def test_values_may_be_narrower_than_keys(monkeypatch):
    monkeypatch.setattr(gpt, "Attention", NarrowValues)
    network, tokens = make_lively_model(), make_tokens()
    use_cpu_kernels(network)
    cache = [KVCache(11) for _ in network.blocks]
    pieces = [network(piece, cache=cache)[0] for piece in tokens.split((5, 1, 5), dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), network(tokens)[0], rtol=1e-5, atol=1e-5)


def test_each_token_is_computed_once():
    model, lengths = make_lively_model(), []
    model.token_embedding.register_forward_hook(lambda module, inputs, output: lengths.append(inputs[0].shape[1]))
    model.generate(make_tokens(length=11), 8, temperature=0)
    assert lengths == [11, 1, 1, 1, 1, 1, 16, 16], (
        "beyond the last position, positions shift and every token is recomputed"
    )


def test_generation_keeps_no_activations():
    model, records_gradients = make_lively_model(), []
    model.token_embedding.register_forward_hook(lambda *_: records_gradients.append(torch.is_grad_enabled()))
    for _ in model.stream(make_tokens(length=3), 2, temperature=0):
        assert torch.is_grad_enabled(), "the caller's code"
    assert records_gradients == [False, False]


def test_top_k_and_top_p_match_transformers():
    logits = 3 * torch.randn(1, 61, generator=torch.Generator().manual_seed(0))
    for top_k, top_p in ((5, 1.0), (None, 0.7), (9, 0.8), (100, 0.999), (1, 0.5)):
        kept = TopKLogitsWarper(top_k)(None, logits / 1.5) if top_k else logits / 1.5
        expected = TopPLogitsWarper(top_p)(None, kept).softmax(-1)[0]
        rows = logits.expand(20_000, -1)
        drawn = sample_tokens(rows, 1.5, top_k, top_p, torch.Generator().manual_seed(0)).flatten()
        frequencies = drawn.bincount(minlength=61) / 20_000
        assert (frequencies - expected).abs().max() < 0.015
        assert not frequencies[expected == 0].any()


@pytest.mark.parametrize(
    "top_k, kept", [(1, [3]), (2, [3, 0]), (3, [3, 0, 2]), (5, [3, 0, 2, 4, 1]), (9, [3, 0, 2, 4, 1])]
)
def test_top_k_keeps_exactly_k_of_equal_logits(top_k, kept):
    """The lower ids of those that equal the k-th; argmax, greedy decoding, takes the first of equal ones, too."""
    rows = torch.tensor([2.0, -1.0, 2.0, 5.0, 2.0]).expand(3_000, -1)
    drawn = sample_tokens(rows, 9.0, top_k, 1.0, torch.Generator().manual_seed(0))
    assert sorted(set(drawn.flatten().tolist())) == sorted(kept)
    equal = torch.zeros(500, 300)
    assert not sample_tokens(equal, 1.0, 1, 1.0, None).any(), "top_k=1 is greedy decoding"
    for top_p in (1e-6, 1e-46, 1e-300):  # float32 has no numbers as small as the last two
        assert not sample_tokens(equal, 1.0, None, top_p, None).any(), "top_p, too, takes the lower id first"


def test_temperature_near_zero_takes_the_likeliest_token():
    logits = 9 * torch.randn(3, 61, generator=torch.Generator().manual_seed(0))
    for temperature in (0, 1e-300, 1e-40, 1e-20):
        assert torch.equal(sample_tokens(logits, temperature, None, 0.9, None), logits.argmax(-1, keepdim=True))


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_samples_follow_the_distribution_at_their_temperature(temperature):
    model, prompt = make_lively_model(), make_tokens(rows=1, length=3)
    samples = model.generate(
        prompt.expand(20_000, -1), max_new_tokens=1, temperature=temperature, generator=torch.Generator().manual_seed(0)
    )
    frequencies = samples[:, -1].bincount(minlength=61) / 20_000
    expected = (model(prompt)[0][0, -1] / temperature).softmax(-1)
    assert (frequencies - expected).abs().max() < 0.015 < (model(prompt)[0][0, -1].softmax(-1) - expected).abs().max()


def test_sampling_depends_on_the_generator_alone():
    model, tokens = make_lively_model(), make_tokens()

    def sample(seed: int, global_seed: int) -> torch.Tensor:
        torch.manual_seed(global_seed)
        return model.generate(tokens, 5, temperature=2.0, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(sample(1, 1), sample(1, 2)) and not torch.equal(sample(1, 1), sample(2, 1))


def test_generate_pads_ended_rows_and_stops():
    model, tokens = make_lively_model(), make_tokens(rows=8)

    def sample(eos_token_id: int | None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return model.generate(tokens, 500, temperature=9.0, generator=generator, eos_token_id=eos_token_id)[:, 11:]

    ended, free = sample(5), sample(None)
    first_end = [(row == 5).nonzero()[0].item() for row in ended]
    assert len(set(first_end)) > 2 and ended.shape[1] == max(first_end) + 1 < free.shape[1] == 500
    for row, end in enumerate(first_end):
        assert torch.equal(ended[row, : end + 1], free[row, : end + 1])
        assert (ended[row, end:] == 5).all()


def test_generate_refuses_training_mode_and_invalid_settings():
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"):
        make_model().generate(make_tokens(), 1)
    with pytest.raises(ValueError, match="temperature is -1"):
        make_model().eval().generate(make_tokens(), 1, temperature=-1)
    for setting, value in (("top_p", 0), ("top_p", 1.1), ("top_k", 0)):
        with pytest.raises(ValueError, match=f"{setting} is {value}"):
            make_model().eval().generate(make_tokens(), 1, **{setting: value})


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("weight", [torch.nan, torch.inf])
def test_generate_refuses_infinite_and_nan_logits(weight, temperature):
    model = make_model().eval()
    model.final_norm.weight.data.fill_(weight)
    with pytest.raises(FloatingPointError, match="the logits are NaN or infinite"):
        model.generate(make_tokens(), 1, temperature)
