"""Guarantees of the model on its own; tests/model/test_hf.py compares it with transformers."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model.config import GPTConfig
from model.generate import KVCache
from model.gpt import GPTModel, Teacher, rope_tables

SHAPE = dict(vocab_size=61, max_position_embeddings=16, n_layers=2, n_heads=4, d_model=32, d_ff=48, dropout=0.0)
QWEN3 = dict(position="rope", norm="rmsnorm", mlp="swiglu", qk_norm=True, bias=False, n_kv_heads=2)


def make_model(seed: int = 0, **settings) -> GPTModel:
    torch.manual_seed(seed)
    return GPTModel(GPTConfig(**SHAPE | settings))


def make_lively_model(**settings) -> GPTModel:
    """In float64, with weights far from their init, where every logit depends visibly on every token before it."""
    model = make_model(**settings).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def make_tokens(rows: int = 3, length: int = 11, seed: int = 1) -> torch.Tensor:
    return torch.randint(SHAPE["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def attention_calls(monkeypatch) -> list[dict]:
    """The keyword arguments of each call of the attention kernel."""
    calls, kernel = [], F.scaled_dot_product_attention

    def spy(*args, **kwargs):
        calls.append(kwargs)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return calls


# The config


def test_config_problems_are_reported_together_by_setting():
    config = GPTConfig(d_model=130, n_kv_heads=3)
    assert config.problems() == [
        "model.d_model: 130 is not divisible by model.n_heads: 4; use 128 or 132, or set model.head_dim",
        "model.n_kv_heads: 3 does not divide model.n_heads: 4; use one of 1, 2, 4",
    ]
    with pytest.raises(ValueError) as error:
        GPTModel(config)
    assert all(problem in str(error.value) for problem in config.problems())
    with pytest.raises(ValueError, match="model.vocab_size is null: set it"):
        GPTModel(GPTConfig())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (dict(d_model=3), "model.d_model: 3 is not divisible by model.n_heads: 4; use 4,"),
        (
            dict(d_model=12, position="rope"),
            r"model.head_dim: 3 (model.d_model 12 / n_heads 4) is odd, and model.position",
        ),
        (
            dict(head_dim=5, position="rope"),
            "model.head_dim: 5 is odd, and model.position rope needs an even one; use 6",
        ),
        (
            dict(window=129),
            "model.window: 129 is more than model.max_position_embeddings: 128; use at most that, or null",
        ),
        (
            dict(window=9, window_pattern="SsL"),
            "model.window_pattern: 'SsL' does not consist of letters S (with the window) and L",
        ),
        (dict(window=9, window_pattern=""), "model.window_pattern: '' does not consist of letters"),
    ],
)
def test_inconsistent_config_is_refused(settings, problem):
    assert problem in "\n".join(GPTConfig(**settings).problems())


@pytest.mark.parametrize(
    "settings", [dict(n_layers=-1), dict(n_heads=0), dict(position="rotary"), dict(norm_eps=math.inf), dict(d_ff=2**63)]
)
def test_wrong_value_is_refused(settings):
    with pytest.raises(ValueError, match=f"1 validation error for GPTConfig\n{next(iter(settings))}"):
        GPTConfig(**settings)


@pytest.mark.parametrize("settings", [{}, dict(d_model=130, head_dim=5), dict(d_model=12, n_kv_heads=1)])
def test_consistent_config_has_no_problems(settings):
    assert GPTConfig(**settings).problems() == []


def test_window_pattern_repeats_and_ends_with_full_attention():
    of_layers = {"SSL": [9, 9, None, 9, 9, None], "LS": [None, 9, None, 9, None, None], "S": [9] * 5 + [None]}
    for letters, windows in of_layers.items():
        assert GPTConfig(n_layers=6, window=9, window_pattern=letters).windows == windows
    assert GPTConfig(n_layers=2).windows == [None, None]


# Parameters

WINDOWS = dict(window=4, window_pattern="SL")
SWITCHES = [
    dict(),
    dict(position="rope"),
    dict(norm="rmsnorm"),
    dict(mlp="gelu_exact"),
    dict(mlp="swiglu"),
    dict(mlp="relu2"),
    dict(qk_norm=True),
    dict(bias=False),
    dict(tie_embeddings=True),
    dict(logit_softcap=30.0),
    dict(n_kv_heads=1),
    WINDOWS,
    dict(head_dim=10),
    dict(QWEN3, tie_embeddings=True, head_dim=20),
]


@pytest.mark.parametrize("settings", SWITCHES, ids=str)
def test_every_variant_trains_all_its_parameters(settings):
    model = make_model(dropout=0.1, **settings)
    tokens = make_tokens()
    loss = model(tokens, labels=tokens)[1]
    loss.backward()
    assert abs(loss.item() - math.log(61)) < 0.1
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias") and model.config.position == "learned" and not model.config.qk_norm:
            # It adds a constant to all scores of a query, which the softmax cancels.
            assert parameter.grad.abs().max() < 1e-8
        else:
            assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 1e-7, name
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    assert model(tokens, labels=tokens)[1] < loss - 0.1


def documented_init(name: str, n_layers: int) -> tuple[float, float]:
    """Mean and standard deviation of a parameter, read from the table in the docstring of init_weights."""
    *_, module, kind = name.split(".")
    found = []
    for line in GPTModel.init_weights.__doc__.splitlines():
        if line.strip().startswith("|"):
            _, parameters, value, _ = (cell.strip() for cell in line.split("|"))
            if (kind if kind == "bias" else module) in parameters.split(", "):
                found.append(value)
    assert len(found) == 1, f"{name} has {len(found)} rows in the table"
    if found[0].startswith("normal, std "):
        formula = found[0].removeprefix("normal, std ").replace("2 n_layers", "2 * n_layers")
        return 0.0, eval(formula, {"sqrt": math.sqrt, "n_layers": n_layers})
    return float(found[0].partition(",")[0]), 0.0


@pytest.mark.parametrize("settings", SWITCHES, ids=str)
def test_shared_modules_have_identical_initial_weights(settings):
    """An added layer does not change the initial weights of the others."""
    depth = {"n_layers": settings.get("n_layers", SHAPE["n_layers"])}  # the init of residual projections depends on it
    models = make_model(**depth), make_model(**settings), make_model(**depth, seed=1)
    plain, other, another = (model.state_dict() for model in models)
    shared, drawn = 0, set()
    for name, weight in plain.items():
        if name in other and other[name].shape == weight.shape:
            assert torch.equal(weight, other[name]), name
            shared += 1
        if "norm" not in name and not name.endswith("bias"):
            assert not torch.equal(weight, another[name]), f"{name} does not depend on the seed"
            drawn.add(weight.flatten()[0].item())
    assert shared >= len(plain) / 4
    assert len(drawn) == sum("norm" not in name and not name.endswith("bias") for name in plain), (
        "two parameters have the same initial values"
    )


@pytest.mark.parametrize("settings", [dict(), dict(QWEN3, d_model=128, n_layers=8)], ids=["gpt2", "qwen3"])
def test_initial_weights_are_as_documented(settings):
    settings = dict(d_model=128, d_ff=512, n_layers=3, vocab_size=500, max_position_embeddings=128) | settings
    model = make_model(**settings)
    seen = set()
    for name, parameter in model.named_parameters():
        mean, std = documented_init(name, model.config.n_layers)
        seen.add(std)
        if std == 0.0:
            assert torch.equal(parameter, torch.full_like(parameter, mean)), name
        else:
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(parameter.mean().item()) < 0.03 * std, name
            assert (parameter.abs() < std).float().mean().item() == pytest.approx(0.6827, abs=0.02), f"{name}: normal?"
    assert seen == {0.0, 0.02, 0.02 / math.sqrt(2 * model.config.n_layers)}
    assert model(make_tokens())[0].isfinite().all()


@pytest.mark.parametrize("zero_init", [False, True])
def test_init_matches_whole_names_of_layers(zero_init):
    """A fork's kv_down_proj, as in multi-head latent attention, does not write to the residual stream."""
    model = make_model(zero_init=zero_init)
    model.blocks[0].attention.kv_down_proj = torch.nn.Linear(32, 200)
    model.init_weights()
    assert model.blocks[0].attention.kv_down_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[0].mlp.down_proj.weight.any() != zero_init


def test_tied_embeddings_are_one_parameter():
    tied, untied = make_model(tie_embeddings=True), make_model()
    assert "lm_head.weight" in untied.state_dict() and "lm_head.weight" not in tied.state_dict()
    assert untied.num_parameters() - tied.num_parameters() == 61 * 32


@pytest.mark.parametrize("settings", SWITCHES, ids=str)
def test_state_dict_is_parameters_without_shared_memory(settings):
    model = make_model(**settings)
    assert list(model.buffers()) == []
    state = model.state_dict()
    assert state.keys() == dict(model.named_parameters()).keys()
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == len(state)


@pytest.mark.parametrize(
    ("settings", "total", "lookups"),
    [
        # Embeddings 61 + 16, lm_head 61. A block: two norms, four attention matrices, two of the MLP. The last norm.
        (dict(), (61 + 16 + 61) * 32 + 2 * (4 * 32 + 4 * (32 * 32 + 32) + 2 * 32 * 48 + 48 + 32) + 64, (61 + 16) * 32),
        (dict(tie_embeddings=True, bias=False), (61 + 16) * 32 + 2 * (64 + 4 * 32 * 32 + 2 * 32 * 48) + 32, 16 * 32),
        # A block: two norms, q and out, k and v of two heads, two norms of heads, three matrices of the MLP.
        (QWEN3, 2 * 61 * 32 + 2 * (64 + 2 * 32 * 32 + 2 * 32 * 16 + 2 * 8 + 3 * 32 * 48) + 32, 61 * 32),
    ],
)
def test_num_parameters_matches_architecture(settings, total, lookups):
    model = make_model(**settings)
    assert model.num_parameters() == total
    assert model.num_matmul_parameters() == total - lookups


def test_flops_count_shared_blocks_at_each_use():
    model, shared = make_model(n_layers=3), make_model(n_layers=3)
    shared.blocks = torch.nn.ModuleList([shared.blocks[0]] * 3)
    assert shared.num_parameters() < model.num_parameters()
    assert shared.flops_per_token(16) == model.flops_per_token(16)


def test_flops_of_window_count_its_positions():
    whole, windows = make_model(n_layers=3), make_model(n_layers=3, window=5)
    of_a_position = 12 * SHAPE["d_model"]
    assert whole.flops_per_token(11) - windows.flops_per_token(11) == 2 * (11 - 5) * of_a_position
    assert whole.flops_per_token(4) == windows.flops_per_token(4)


def test_zero_init_blocks_are_the_identity():
    x_BTC = torch.randn(2, 5, SHAPE["d_model"])
    rope = rope_tables(torch.arange(5), 8, 10000.0)
    for zero_init in (True, False):
        for block in make_model(**QWEN3, zero_init=zero_init).blocks:
            assert torch.equal(block(x_BTC, rope, None), x_BTC) == zero_init


@pytest.mark.parametrize("settings", [dict(tie_embeddings=True), dict(QWEN3, head_dim=64)], ids=["gpt2", "qwen3"])
def test_flops_per_token_match_counted_operations(settings):
    model = make_model(max_position_embeddings=256, d_model=64, d_ff=128, **settings).double()
    tokens = make_tokens(rows=2, length=256)
    # The counter has formulas for the products of the math kernel, which computes the scores once.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, labels=tokens)[1].backward()
    assert counter.get_total_flops() / tokens.numel() == pytest.approx(model.flops_per_token(256), rel=0.02)


# The forward pass


def loss_by_hand(model: GPTModel, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The sum of the loss over targets, and their number, one target at a time."""
    log_probabilities = model(tokens)[0].log_softmax(-1)
    total, targets = torch.zeros((), dtype=torch.float64), 0
    for row in range(tokens.shape[0]):
        for position in range(tokens.shape[1] - 1):
            label = labels[row, position + 1].item()
            if label != -100:
                total = total - log_probabilities[row, position, label]
                targets += 1
    return total, targets


def test_loss_predicts_next_label_at_each_position():
    model, tokens = make_lively_model(), make_tokens()
    labels = make_tokens(seed=2)
    labels[0, 3:5], labels[1] = -100, -100  # the second row has no target
    total, targets = loss_by_hand(model, tokens, labels)
    assert targets == 10 - 2 + 10
    torch.testing.assert_close(model(tokens, labels=labels)[1], total / targets)
    for num_items in (7, 7.5, torch.tensor(7), torch.tensor(7.5)):
        torch.testing.assert_close(model(tokens, labels=labels, num_items_in_batch=num_items)[1], total / num_items)
    total, targets = loss_by_hand(model, tokens, tokens)
    assert targets == 3 * 10
    torch.testing.assert_close(model(tokens, labels=tokens)[1], total / targets)


@pytest.mark.parametrize("length", [11, 1])
def test_loss_without_targets_is_zero_or_nan(length):
    model, tokens = make_model(), make_tokens(length=length)
    labels = torch.full_like(tokens, -100)
    assert model(tokens, labels=labels)[1].isnan()
    loss = model(tokens, labels=labels, num_items_in_batch=7)[1]
    assert loss == 0
    loss.backward()
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


def test_logits_to_keep_selects_returned_logits():
    model, tokens = make_lively_model(), make_tokens()
    logits, loss, metrics = model(tokens)
    assert logits.shape == (3, 11, 61) and loss is None
    assert model(tokens, labels=tokens)[0] is None
    assert torch.equal(model(tokens, labels=tokens, logits_to_keep=0)[0], logits)
    torch.testing.assert_close(model(tokens, logits_to_keep=2)[0], logits[:, -2:])


def test_logit_softcap_applies_to_logits_and_loss():
    model, tokens = make_lively_model(), make_tokens()
    free = model(tokens)[0]
    capped = make_lively_model(logit_softcap=1.5)
    logits, loss, _ = capped(tokens, labels=tokens, logits_to_keep=0)
    torch.testing.assert_close(logits, 1.5 * (1 - 2 / ((free / 0.75).exp() + 1)))
    assert free.abs().max() > 1.5 > logits.abs().max()
    torch.testing.assert_close(loss, F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))


@pytest.mark.parametrize("settings", [dict(), QWEN3], ids=["gpt2", "qwen3"])
@pytest.mark.parametrize("padding", [0, 2])
def test_attention_is_causal(settings, padding):
    model, tokens = make_lively_model(**settings), make_tokens()
    mask = torch.ones_like(tokens)
    mask[:, :padding] = 0
    changed = tokens.clone()
    changed[:, 6] = (tokens[:, 6] + 1) % 61
    before, after = model(tokens, mask)[0], model(changed, mask)[0]
    assert torch.equal(before[:, :6], after[:, :6])
    assert ((before - after)[:, 6:].abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("settings", [dict(), QWEN3], ids=["gpt2", "qwen3"])
def test_sequence_beyond_max_position_is_refused(settings):
    with pytest.raises(ValueError, match="input_ids: 17 tokens, more than model.max_position_embeddings 16"):
        make_model(**settings)(make_tokens(length=17))


def test_masks_documents_and_cache_exclude_each_other():
    model, tokens = make_model(), make_tokens()
    mask, position_ids = torch.ones_like(tokens), torch.arange(11).expand_as(tokens)
    cache = [KVCache(11) for _ in model.blocks]
    for arguments in (
        dict(attention_mask=mask, cache=cache),
        dict(position_ids=position_ids, cache=cache),
        dict(attention_mask=mask, position_ids=position_ids),
    ):
        with pytest.raises(ValueError, match="attention_mask, position_ids, cache: give at most one"):
            model(tokens, **arguments)


def test_teacher_and_cache_exclude_each_other():
    """The teacher would predict the new tokens without those before."""
    model, tokens = make_model(), make_tokens()
    model.teacher = Teacher(make_model(), weight=0.5, temperature=1.0)
    cache = [KVCache(11) for _ in model.blocks]
    model(tokens[:, :5], cache=cache)
    with pytest.raises(ValueError, match="cache: the teacher has none"):
        model(tokens[:, 5:], cache=cache, labels=tokens[:, 5:])


def test_all_ones_mask_never_reaches_attention_kernel(attention_calls):
    model, tokens = make_model(), make_tokens()
    mask = torch.ones_like(tokens)
    model(tokens)
    model(tokens, mask)
    model(tokens, mask.bool())
    assert [(call["attn_mask"], call["is_causal"]) for call in attention_calls] == [(None, True)] * 6
    attention_calls.clear()
    mask[0, 0] = 0
    model(tokens, mask)
    assert [(call["attn_mask"].shape, call["is_causal"]) for call in attention_calls] == [((3, 1, 11, 11), False)] * 2


def test_padding_does_not_influence_other_tokens():
    model, tokens = make_lively_model(**QWEN3), make_tokens()
    mask = torch.ones_like(tokens)
    mask[0, :3], mask[1, -3:] = 0, 0
    other = torch.where(mask == 1, tokens, (tokens + 1) % 61)
    assert torch.equal(model(tokens, mask)[0][mask == 1], model(other, mask)[0][mask == 1])
    assert not torch.allclose(model(tokens, mask)[0][0, 3:], model(tokens)[0][0, 3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fully_masked_rows_give_no_nan(dtype):
    model, tokens = make_model(**QWEN3).to(dtype), make_tokens()
    mask = torch.ones_like(tokens)
    mask[0, :3], mask[1] = 0, 0  # left padding, and a row of padding alone
    logits, loss = model(tokens, mask, labels=tokens, logits_to_keep=0)[:2]
    loss.backward()
    assert logits.isfinite().all() and loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_dropout_is_seeded_while_training_and_off_otherwise(attention_calls):
    model, tokens = make_model(dropout=0.2), make_tokens()

    def loss(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model(tokens, labels=tokens)[1]

    assert torch.equal(loss(1), loss(1)) and not torch.equal(loss(1), loss(2))
    assert {call["dropout_p"] for call in attention_calls} == {0.2}
    attention_calls.clear()
    model.eval()
    assert torch.equal(loss(1), loss(2))
    assert {call["dropout_p"] for call in attention_calls} == {0.0}


@pytest.mark.parametrize("settings", [dict(), QWEN3], ids=["gpt2", "qwen3"])
def test_under_bfloat16_the_loss_is_computed_in_float32(settings, recwarn):
    model, tokens = make_lively_model(**settings).float(), make_tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, loss = model(tokens, labels=tokens, logits_to_keep=0)[:2]
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    expected = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert model(tokens, labels=tokens)[1].item() == pytest.approx(loss.item(), rel=0.02)
    assert [str(warning.message) for warning in recwarn] == []
    assert model.bfloat16()(tokens, labels=tokens)[1].dtype == torch.float32
