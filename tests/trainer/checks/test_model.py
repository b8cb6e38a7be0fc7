"""Checks of the model pass here and fail on a model with the fault that they look for."""

import math

import pytest
import torch

import model.attention
import model.gpt
import model.hf
from model.config import FAMILIES, GPTConfig
from model.gpt import GPTModel
from runtime.config.parser import parse_config
from tests.conftest import TINY_STORIES
from trainer.checks import model as checks
from trainer.pretrained.load import LoadedModel

SMALL = GPTConfig(vocab_size=20, d_model=16)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_logits_of_short_sequences(family):
    config = parse_config([*TINY_STORIES, *"--seq_len 8 --model.max_position_embeddings 8".split()])
    assert checks.check_transformers_logits(family, config.model)[0]


@pytest.fixture
def wider_windows(monkeypatch):
    """Masks with windows that are too wide by one."""
    make_mask_mod = model.attention.make_mask_mod
    monkeypatch.setattr(model.attention, "make_mask_mod", lambda window, *rest: make_mask_mod(window + 1, *rest))


@pytest.fixture
def leaking_documents(monkeypatch):
    """Masks that ignore the borders of documents."""
    make_mask_mod = model.attention.make_mask_mod
    monkeypatch.setattr(model.attention, "make_mask_mod", lambda window, _: make_mask_mod(window, None))


@pytest.fixture
def wrong_flex_mask(monkeypatch):
    """A mask of flex attention that lets a query attend to one key after it."""
    create = model.attention.create_block_mask

    def create_wrong(mask_mod, *arguments, **settings):
        def wrong(row, head, query, key):
            return mask_mod(row, head, query, key) | (key == query + 1)

        return create(wrong, *arguments, **settings)

    monkeypatch.setattr(model.attention, "create_block_mask", create_wrong)


@pytest.mark.parametrize("window", [None, 100])
def test_transformers_logits_find_wrong_window(window, wider_windows):
    """With and without a window in the config."""
    config = GPTConfig(window=window, logit_softcap=3.0)
    assert checks.check_transformers_logits("qwen3", config)[0] is False


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_logits_ignore_other_settings(family, window):
    assert checks.check_transformers_logits(family, GPTConfig(window=window, logit_softcap=3.0))[0]


@pytest.mark.parametrize("seq_len", [1, 2, 3, 128])
@pytest.mark.parametrize("window", [None, 2, 100])
def test_masks_pass(seq_len, window):
    assert checks.check_masks(GPTConfig(window=window), seq_len)[0]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    ("fault", "kernel", "kind"),
    [
        ("wider_windows", "the dense mask", "window"),
        ("leaking_documents", "the dense mask", "several documents"),
        ("wrong_flex_mask", "the mask of flex attention", "window"),
    ],
)
def test_masks_find_fault(fault, kernel, kind, window, request):
    request.getfixturevalue(fault)
    passed, detail = checks.check_masks(GPTConfig(window=window), 16)
    assert passed is False
    assert detail.startswith(f"{kernel} is wrong for window ")
    assert kind in detail


@pytest.mark.parametrize("seq_len", [2, 3, 16])
@pytest.mark.parametrize("settings", [{}, {"position": "rope"}], ids=str)
def test_isolated_documents_pass(settings, seq_len):
    assert checks.check_isolated_documents(GPTConfig(vocab_size=20, d_model=16, **settings), seq_len)[0] is True


def test_isolated_documents_find_leak(leaking_documents):
    assert checks.check_isolated_documents(SMALL, 16)[0] is False


def test_isolated_documents_skip_single_positions():
    assert checks.check_isolated_documents(SMALL, 1)[0] is None


class Gate(torch.nn.Module):
    """The MLP of a fork: a gate that is initialised to 0, and an embedding table in the block."""

    def __init__(self, mlp, rows):
        super().__init__()
        self.mlp, self.values, self.gate = mlp, torch.nn.Embedding(rows, 16), torch.nn.Linear(16, 16, bias=False)
        torch.nn.init.zeros_(self.gate.weight)
        self.scale = torch.nn.Parameter(torch.full((16,), 0.5))

    def forward(self, x_BTC):
        return self.mlp(x_BTC) + self.scale * self.gate(self.values(x_BTC.argmax(dim=-1)))


@pytest.fixture
def config():
    return parse_config([*TINY_STORIES, "--model.vocab_size", "50", "--model.window", "9"]).model


@pytest.fixture
def gated_mlp(monkeypatch):
    own = model.gpt.MLP
    monkeypatch.setattr(model.gpt, "MLP", lambda config: Gate(own(config), 500))


def test_constant_init_passes(config):
    assert checks.check_constant_init(config)[0]


def test_constant_init_names_overwritten_parameter(config, gated_mlp):
    passed, detail = checks.check_constant_init(config)
    assert passed is False
    assert detail == "init_weights draws blocks.0.mlp.gate.weight, which its module initialises to 0"
    weights = model.gpt.GPTModel(config).state_dict()
    assert weights["blocks.0.mlp.scale"].eq(0.5).all()


def test_constant_init_names_uninitialised_parameter(config, monkeypatch):
    monkeypatch.setattr(Gate, "__init__", lambda self, mlp, rows: uninitialised(self, mlp))
    monkeypatch.setattr(Gate, "forward", lambda self, x_BTC: self.mlp(x_BTC) * self.gain)
    own = model.gpt.MLP
    monkeypatch.setattr(model.gpt, "MLP", lambda config: Gate(own(config), 500))
    assert checks.check_constant_init(config) == (False, "blocks.0.mlp.gain is not initialised")


def uninitialised(self, mlp):
    torch.nn.Module.__init__(self)
    self.mlp, self.gain = mlp, torch.nn.Parameter(torch.empty(16))


def test_flops_pass(config):
    assert checks.check_flops(config, 128)[0]


def test_flops_ignore_embedding_in_block(config, gated_mlp):
    assert checks.check_flops(config, 128)[0]


def test_flops_find_block_applied_twice(config, monkeypatch):
    forward = model.gpt.Block.forward
    monkeypatch.setattr(
        model.gpt.Block, "forward", lambda self, x, *rest: forward(self, forward(self, x, *rest), *rest)
    )
    assert checks.check_flops(config, 128)[0] is False


class WithFrozenPart(model.gpt.GPTModel):
    """A model with a larger part that is in no module and only runs forward."""

    def __init__(self, config):
        super().__init__(config)
        self.others = [torch.nn.Linear(config.d_model, 4096, bias=False)]

    def forward(self, input_ids, **arguments):
        if self.training:
            with torch.no_grad():
                self.others[0](self.token_embedding(input_ids))
        return super().forward(input_ids, **arguments)

    def flops_per_token(self, seq_len):
        return super().flops_per_token(seq_len) + self.flops_of_others * self.others[0].weight.numel()


@pytest.mark.parametrize(("flops", "passed"), [(2, True), (6, False), (0, False)])
def test_flops_count_frozen_part(flops, passed, config, monkeypatch):
    monkeypatch.setattr(WithFrozenPart, "flops_of_others", flops, raising=False)
    monkeypatch.setattr(model.hf, "GPTModel", WithFrozenPart)
    assert checks.check_flops(config, 128)[0] is passed


def say_float(monkeypatch):
    """A block that computes in float32, as linear attentions and routers do."""
    forward = model.gpt.MLP.forward
    monkeypatch.setattr(model.gpt.MLP, "forward", lambda self, x: forward(self, x.float()))


def test_flops_of_model_that_says_float(config, monkeypatch):
    say_float(monkeypatch)
    assert checks.check_flops(config, 128)[0]


class RefusesDocuments(model.gpt.GPTModel):
    """A model that has no isolated documents."""

    def forward(self, input_ids, position_ids=None):
        if position_ids is not None:
            raise ValueError("position_ids: not supported")
        return super().forward(input_ids)


def test_isolated_documents_may_be_refused_unless_run_has_them(monkeypatch):
    monkeypatch.setattr(model.hf, "GPTModel", RefusesDocuments)
    passed, reason = checks.check_isolated_documents(SMALL, 16, is_needed=False)
    assert passed is None and reason.endswith("refuses them: position_ids: not supported")
    with pytest.raises(ValueError, match="position_ids: not supported"):
        checks.check_isolated_documents(SMALL, 16, is_needed=True)


class InBlocks(model.gpt.GPTModel):
    """A model that computes in blocks of 48 tokens, as some linear attentions do."""

    def forward(self, input_ids, **arguments):
        if input_ids.shape[1] % 48:
            raise ValueError(f"input_ids: {input_ids.shape[1]} tokens, not a multiple of 48")
        return super().forward(input_ids, **arguments)


def test_model_may_refuse_shorter_sequences(config, monkeypatch):
    monkeypatch.setattr(model.hf, "GPTModel", InBlocks)
    assert checks.check_flops(config, 96)[0] is True
    assert checks.check_isolated_documents(SMALL, 96)[0] is True
    assert checks.check_isolated_documents(SMALL, 48, is_needed=False)[0] is None
    with pytest.raises(ValueError, match="50 tokens, not a multiple of 48"):
        checks.check_flops(config, 50)


def test_cache_may_be_refused(monkeypatch):
    def refuse(self, input_ids, cache=None):
        if cache is not None:
            raise ValueError("cache: not supported")
        raise AssertionError("nothing is compared")

    monkeypatch.setattr(model.gpt.GPTModel, "forward", refuse)
    passed, reason = checks.check_cached_logits(SMALL, 16)
    assert passed is None and reason == "the model refuses a cache, so it cannot generate: cache: not supported"


class ForgetsCache(model.gpt.GPTModel):
    """A model that drops the cache when it is given a single token."""

    def forward(self, input_ids, cache=None):
        return super().forward(input_ids, cache=cache if input_ids.shape[1] > 1 else None)


class WithIdleExpert(model.gpt.GPTModel):
    """A model with a layer that no token uses, whose bias is as large as the biases of many experts."""

    def __init__(self, config):
        super().__init__(config)
        self.idle = torch.nn.Linear(config.d_model, 400)

    def flops_per_token(self, seq_len):
        return super().flops_per_token(seq_len) - 6 * sum(weight.numel() for weight in self.idle.parameters())


def test_flops_do_not_subtract_biases_of_idle_experts(config, monkeypatch):
    monkeypatch.setattr(model.hf, "GPTModel", WithIdleExpert)
    assert checks.check_flops(config, 128)[0]


@pytest.mark.parametrize("seq_len", [2, 3, 16])
@pytest.mark.parametrize("settings", [{}, {"position": "rope", "zero_init": True}], ids=str)
def test_cached_logits_find_forgotten_cache(settings, seq_len, monkeypatch):
    config = GPTConfig(vocab_size=20, d_model=16, **settings)
    assert checks.check_cached_logits(config, seq_len)[0] is True
    monkeypatch.setattr(model.hf, "GPTModel", ForgetsCache)
    assert checks.check_cached_logits(config, seq_len)[0] is False


class ReadsPrefix(model.gpt.GPTModel):
    """A prefix-LM: the first position reads the first four tokens, if they are given together."""

    def forward(self, input_ids, cache=None):
        begins = cache is None or cache[0].length == 0
        output = super().forward(input_ids, cache=cache)
        if begins:
            output.logits[:, 0, 0] += input_ids[:, :4].sum()
        return output


def test_cached_logits_find_prefix_longer_than_prompt(monkeypatch):
    monkeypatch.setattr(model.hf, "GPTModel", ReadsPrefix)
    assert checks.check_cached_logits(SMALL, 16)[0] is False


class AddsConstant(ForgetsCache):
    """The same fault, under a constant that is added to all logits, which changes no probability."""

    def forward(self, input_ids, cache=None):
        output = super().forward(input_ids, cache=cache)
        output.logits.add_(1e4)
        return output


def test_cached_logits_find_fault_under_constant(monkeypatch):
    monkeypatch.setattr(model.hf, "GPTModel", AddsConstant)
    assert checks.check_cached_logits(SMALL, 16)[0] is False


@pytest.mark.parametrize("is_nan", [(True, False), (False, True), (True, True)], ids=str)
def test_nan_is_a_difference(is_nan):
    ours, expected = (torch.zeros(2, 3).index_fill(1, torch.tensor([1]), torch.nan if nan else 0) for nan in is_nan)
    assert checks.compare(ours, expected, 1e-3)[0] is False


@pytest.mark.parametrize("name", ["check_cached_logits", "check_isolated_documents"])
def test_checks_are_of_the_initial_weights(name, monkeypatch):
    """Weights that are not finite, which no random ones are."""
    initial = LoadedModel(None, GPTModel(SMALL), None)
    check = getattr(checks, name)
    assert check(SMALL, 16, initial)[0] is True
    initial.model.final_norm.weight.data[0] = math.nan
    assert check(SMALL, 16, initial)[0] is False
