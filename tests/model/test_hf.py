"""The model against transformers, an independent implementation: same weights, same numbers."""

import subprocess
import sys
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen3Config
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from model.config import GPTConfig
from model.gpt import GPTModel
from model.hf import (
    config_from_transformers,
    config_to_transformers,
    find_unused_tensors,
    from_transformers,
    tensors_to_transformers,
    to_transformers,
)

GPT2 = dict(position="learned", norm="layernorm", mlp="gelu_tanh", qk_norm=False, bias=True)
QWEN3 = dict(position="rope", norm="rmsnorm", mlp="swiglu", qk_norm=True, bias=False)
LLAMA = QWEN3 | dict(qk_norm=False)
SHAPE = dict(vocab_size=61, max_position_embeddings=16, n_layers=2, n_heads=4, d_model=32, d_ff=48, dropout=0.0)

CONFIGS = {
    "gpt2": GPTConfig(**GPT2 | SHAPE),
    "gpt2-tied": GPTConfig(**GPT2 | SHAPE | dict(tie_embeddings=True)),
    "gpt2-exact": GPTConfig(**GPT2 | SHAPE | dict(mlp="gelu_exact")),
    "gpt2-odd": GPTConfig(**GPT2 | SHAPE | dict(n_layers=3, n_heads=3, d_model=21, d_ff=35, norm_eps=1e-3)),
    "qwen3": GPTConfig(**QWEN3 | SHAPE),
    "qwen3-tied-gqa": GPTConfig(**QWEN3 | SHAPE | dict(n_kv_heads=2, tie_embeddings=True)),
    "qwen3-wide-heads": GPTConfig(**QWEN3 | SHAPE | dict(n_kv_heads=1, head_dim=22, rope_theta=1e6, norm_eps=1e-3)),
    "qwen3-windows": GPTConfig(**QWEN3 | SHAPE | dict(n_layers=4, n_kv_heads=2, window=5, window_pattern="SL")),
    "llama": GPTConfig(**LLAMA | SHAPE),
    "llama-smollm2": GPTConfig(**LLAMA | SHAPE | dict(n_heads=9, n_kv_heads=3, d_model=36, tie_embeddings=True)),
    "llama-tinyllama": GPTConfig(**LLAMA | SHAPE | dict(n_heads=8, n_kv_heads=1, d_ff=88)),
    "llama-wide-heads": GPTConfig(**LLAMA | SHAPE | dict(head_dim=22, rope_theta=1e5, norm_eps=1e-3)),
    "qwen3-odd": GPTConfig(**QWEN3 | SHAPE | dict(n_layers=3, n_heads=3, d_model=17, head_dim=6, d_ff=29)),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def randomise(model: torch.nn.Module) -> None:
    """Weights far from their init, where attention is nearly uniform, norms are one and biases zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))


def make_model(config: GPTConfig, dtype: torch.dtype = torch.float64) -> GPTModel:
    torch.manual_seed(0)
    model = GPTModel(config).to(dtype)
    randomise(model)
    return model


def make_batch(config: GPTConfig, padding: str) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Inputs, mask and labels [3, 13]; padding, and two labels besides, are -100."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(config.vocab_size, (3, 13), generator=generator)
    mask = torch.ones_like(input_ids)
    if padding == "left":
        mask[0, :4], mask[1, :1] = 0, 0
    elif padding == "right":
        mask[0, -4:], mask[1, -1:] = 0, 0
    labels = input_ids.masked_fill(mask == 0, -100)
    labels[2, 5:7] = -100
    return input_ids, None if padding == "none" else mask, labels


@pytest.fixture
def float64_reference(monkeypatch):
    """Lets transformers compute in float64: it casts to float32 in the norms of Qwen3 and Llama, and in each loss.

    Its rotary tables stay float32, as they are in the model under test.
    """

    class Float64Torch:
        float32 = torch.float64

        def __getattr__(self, name):
            return getattr(torch, name)

    def loss_in_float64(*args, **kwargs):
        with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
            return ForCausalLMLoss(*args, **kwargs)

    for module in (modeling_llama, modeling_qwen3):
        monkeypatch.setattr(module, "torch", Float64Torch())
    monkeypatch.setattr("transformers.PreTrainedModel.loss_function", staticmethod(loss_in_float64))


def compare_a_training_step(config, padding, num_items_in_batch, dtype, **tolerance):
    """Asserts that logits, loss, gradients and the weights after one AdamW step equal those of transformers."""
    model = make_model(config, dtype)
    reference = to_transformers(model).train()
    model.train()
    input_ids, mask, labels = make_batch(config, padding)

    def assert_same_tensors(ours: dict, theirs: dict):
        ours = tensors_to_transformers(config, ours)
        assert ours.keys() == theirs.keys()
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], msg=lambda text: f"{name}: {text}", **tolerance)  # noqa: B023

    logits, loss = model(input_ids, mask, labels, num_items_in_batch, logits_to_keep=0)[:2]
    expected = reference(
        input_ids=input_ids, attention_mask=mask, labels=labels, num_items_in_batch=num_items_in_batch, use_cache=False
    )
    real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(logits[real], expected.logits[real], **tolerance)
    torch.testing.assert_close(loss, expected.loss, **tolerance)
    assert loss.dtype == dtype and loss > 0

    loss.backward()
    expected.loss.backward()
    assert_same_tensors(
        {name: parameter.grad for name, parameter in model.named_parameters()},
        {name: parameter.grad for name, parameter in reference.named_parameters()},
    )
    for network in (model, reference):
        # Where the gradient is only rounding (a bias of keys), a smaller eps would blow it up to a whole step.
        torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4).step()
    assert_same_tensors(dict(model.named_parameters()), dict(reference.named_parameters()))


@every_config
@pytest.mark.parametrize("padding", ["none", "left", "right", "all ones"])
def test_training_step_equals_transformers(config, padding, float64_reference):
    compare_a_training_step(config, padding, None, torch.float64, rtol=1e-10, atol=1e-10)


@every_config
def test_num_items_in_batch_divides_loss_like_transformers(config, float64_reference):
    compare_a_training_step(config, "right", 101, torch.float64, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["gpt2", "qwen3-tied-gqa", "llama-smollm2"])
def test_training_step_equals_unmodified_transformers_in_float32(name):
    compare_a_training_step(CONFIGS[name], "left", torch.tensor(33), torch.float32, rtol=1e-4, atol=2e-5)


def test_dropout_falls_where_gpt2_has_it(float64_reference):
    """The same seed draws the same zeros only if they are drawn in the same places, shapes and order."""
    config = GPTConfig(**GPT2 | SHAPE | dict(dropout=0.2))
    model = make_model(config)
    reference = to_transformers(model).train()
    input_ids, _, labels = make_batch(config, "none")
    torch.manual_seed(7)
    loss = model.train()(input_ids, labels=labels)[1]
    torch.manual_seed(7)
    expected = reference(input_ids=input_ids, labels=labels, use_cache=False).loss
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    assert (loss - model.eval()(input_ids, labels=labels)[1]).abs() > 1e-3


@every_config
def test_weights_and_config_survive_the_round_trip_bitwise(config):
    model = make_model(config, torch.float32)
    returned = from_transformers(to_transformers(model))
    assert returned.config.problems() == []
    for name in (
        "resolved_n_kv_heads",
        "resolved_head_dim",
        "n_layers",
        "n_heads",
        "d_model",
        "d_ff",
        "dropout",
        "norm_eps",
        "tie_embeddings",
        "vocab_size",
        "windows",
    ):
        assert getattr(returned.config, name) == getattr(config, name)
    assert config_to_transformers(returned.config).to_dict() == config_to_transformers(config).to_dict()
    state, returned_state = model.state_dict(), returned.state_dict()
    assert state.keys() == returned_state.keys()
    for name in state:
        assert torch.equal(state[name], returned_state[name]), name


@pytest.mark.parametrize("name", ["gpt2-odd", "qwen3-wide-heads", "llama-tinyllama"])
def test_from_transformers_gives_same_logits(name, float64_reference):
    torch.manual_seed(2)
    reference = AutoModelForCausalLM.from_config(config_to_transformers(CONFIGS[name]), dtype=torch.float64).eval()
    randomise(reference)
    model = from_transformers(reference)
    input_ids, _, _ = make_batch(CONFIGS[name], "none")
    torch.testing.assert_close(model(input_ids)[0], reference(input_ids).logits, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        model.token_embedding.weight.zero_()
    assert reference.get_input_embeddings().weight.abs().sum() > 0, "the weights must be copies"


@every_config
def test_trained_model_reloads_from_folder(config, tmp_path):
    model = make_model(config, torch.float32)
    input_ids, _, labels = make_batch(config, "none")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids, labels=labels)[1].backward()
        optimizer.step()
    to_transformers(model).save_pretrained(tmp_path)
    reopened, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    assert reopened.config.bos_token_id is None and reopened.config.eos_token_id is None, "it belongs to the tokenizer"
    assert torch.equal(reopened.eval()(input_ids).logits, to_transformers(model)(input_ids).logits)
    torch.testing.assert_close(reopened(input_ids).logits, model.eval()(input_ids)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2-tied", "qwen3-tied-gqa", "qwen3-windows", "llama-smollm2"])
def test_greedy_generation_equals_transformers(name):
    model = make_model(CONFIGS[name]).eval()
    reference = to_transformers(model)
    prompt = make_batch(CONFIGS[name], "none")[0][:, :4]
    settings = dict(do_sample=False, max_new_tokens=10, attention_mask=torch.ones_like(prompt))
    free = model.generate(prompt, max_new_tokens=10, temperature=0)
    assert torch.equal(free, reference.generate(prompt, pad_token_id=0, **settings))
    eos = int(free[0, 6])  # the first row ends at its third new token
    ended = reference.generate(prompt, eos_token_id=eos, pad_token_id=eos, **settings)
    assert torch.equal(model.generate(prompt, max_new_tokens=10, temperature=0, eos_token_id=eos), ended)
    assert not torch.equal(ended, free)


@pytest.mark.parametrize("window", [1, 2, 3])
def test_small_windows_generate_as_in_transformers(window):
    config = CONFIGS["qwen3-windows"].replace(window=window)
    model = make_model(config).eval()
    if window == 1:
        with pytest.raises(ValueError, match="qwen3: model.window is 1, .*; train with 2 or more"):
            to_transformers(model)
        assert to_transformers(make_model(config.replace(n_layers=1))), "its only layer has no window"
        return
    prompt = make_batch(config, "none")[0][:, :4]
    settings = dict(do_sample=False, max_new_tokens=10, attention_mask=torch.ones_like(prompt), pad_token_id=0)
    ours = model.generate(prompt, max_new_tokens=10, temperature=0)
    assert torch.equal(ours, to_transformers(model).generate(prompt, **settings))


def test_to_transformers_names_settings_outside_each_family():
    mixed = GPTConfig(**QWEN3 | SHAPE | dict(mlp="relu2", bias=True))
    with pytest.raises(
        ValueError, match="qwen3: model.mlp is relu2, not swiglu; model.bias is True, not False"
    ) as error:
        to_transformers(GPTModel(mixed))
    assert "gpt2: model.position is rope, not learned; model.norm is rmsnorm" in str(error.value)
    for setting, value in (("n_kv_heads", 2), ("head_dim", 16), ("window", 5)):
        with pytest.raises(ValueError, match=f"gpt2: model.{setting} is {value}, not"):
            to_transformers(GPTModel(GPTConfig(**GPT2 | SHAPE | {setting: value})))
    with pytest.raises(ValueError, match="llama: model.window is 5, not None"):
        to_transformers(GPTModel(GPTConfig(**LLAMA | SHAPE | {"window": 5})))
    with pytest.raises(ValueError, match="llama: model.d_model 30 is not divisible by model.n_heads 4"):
        to_transformers(GPTModel(GPTConfig(**LLAMA | SHAPE | {"d_model": 30, "head_dim": 8})))


class ForkedConfig(GPTConfig):
    """A config with settings that the mapping does not have."""

    parallel: bool = False
    ahead: float = 0.0


class ForkedModel(GPTModel):
    """A model with parallel blocks, or with a head that only the loss uses."""

    def __init__(self, config: ForkedConfig):
        super().__init__(config)
        if config.ahead:
            self.ahead = torch.nn.Linear(config.d_model, config.vocab_size)

    def forward(self, input_ids, *rest, labels=None, **others):
        output = super().forward(input_ids, *rest, labels=labels, **others)
        if self.config.parallel and output.logits is not None:
            output.logits.add_(1e-7 * input_ids[..., None] * torch.arange(output.logits.shape[-1]))
        if self.config.ahead and labels is not None:
            two_ahead = self.ahead(self.token_embedding(input_ids))[:, :-2].flatten(0, 1)
            loss = output.loss + self.config.ahead * torch.nn.functional.cross_entropy(
                two_ahead, labels[:, 2:].flatten()
            )
            return output._replace(loss=loss)
        return output


@pytest.fixture
def forked(monkeypatch):
    monkeypatch.setattr("model.hf.GPTModel", ForkedModel)


def test_to_transformers_refuses_unknown_settings_that_change_logits(forked):
    assert to_transformers(ForkedModel(ForkedConfig(**GPT2 | SHAPE))), "at its default the setting changes nothing"
    with pytest.raises(
        ValueError, match="model.logit_softcap is 30.0, not None\nqwen3: .*model.logit_softcap is 30.0, not None"
    ):
        to_transformers(ForkedModel(ForkedConfig(**GPT2 | SHAPE | {"logit_softcap": 30.0})))
    both = ForkedModel(ForkedConfig(**GPT2 | SHAPE | {"parallel": True, "ahead": 0.3}))
    with pytest.raises(
        ValueError, match="gpt2: model.parallel is True, not False\nqwen3: .*model.parallel is True"
    ) as e:
        to_transformers(both)
    assert "ahead" not in str(e.value)


@pytest.mark.parametrize("family", ["gpt2", "llama-smollm2"])
def test_weights_that_only_the_loss_uses_are_left_out(family, forked, tmp_path):
    """transformers, which has no such head, computes the logits of the trained model."""
    model = ForkedModel(ForkedConfig(**dict(CONFIGS[family]), ahead=0.3)).train()
    randomise(model)
    input_ids, _, labels = make_batch(model.config, "none")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids, labels=labels).loss.backward()
    assert model.ahead.weight.grad.norm() > 0, "the head is trained"
    optimizer.step()
    to_transformers(model).save_pretrained(tmp_path)
    assert model.training, "as it was"
    reopened, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    torch.testing.assert_close(reopened.eval()(input_ids).logits, model.eval()(input_ids)[0], rtol=1e-4, atol=1e-4)


def test_added_tensors_are_refused_if_logits_depend_on_them(monkeypatch):
    model = make_model(CONFIGS["gpt2"], torch.float32)
    model.blocks[1].router = torch.nn.Linear(32, 2, bias=False)
    model.register_buffer("counts", torch.zeros(2))
    assert find_unused_tensors(model) == ["counts", "blocks.1.router.weight"] and to_transformers(model)
    forward = model.blocks[1].mlp.forward
    refused = pytest.raises(ValueError, match="it and its family differ in 2 tensors, such as blocks.1.router.weight")

    def chosen(x):  # by an index, so that autograd does not know
        return forward(x) * (1 + model.blocks[1].router(x).argmax(-1, keepdim=True))

    monkeypatch.setattr(model.blocks[1].mlp, "forward", chosen)
    with refused:
        to_transformers(model)
    monkeypatch.setattr(model.blocks[1].mlp, "forward", lambda x: forward(x) + model.blocks[1].router(x)[..., :1])
    torch.nn.init.zeros_(model.blocks[1].router.weight)
    with refused:
        to_transformers(model)


def test_config_from_transformers_reads_published_gpt2():
    """GPT2Config's defaults are those of the 124M model, with n_inner left out."""
    assert config_from_transformers(GPT2Config()) == GPTConfig(
        vocab_size=50257,
        max_position_embeddings=1024,
        n_layers=12,
        n_heads=12,
        d_model=768,
        d_ff=3072,
        tie_embeddings=True,
    )


PUBLISHED_LLAMAS = {
    "SmolLM2-135M": (
        dict(vocab_size=49152, max_position_embeddings=8192, num_hidden_layers=30, num_attention_heads=9,
             rope_scaling=None, num_key_value_heads=3, hidden_size=576, intermediate_size=1536, rms_norm_eps=1e-5,
             rope_theta=100000, tie_word_embeddings=True, attention_bias=False, bos_token_id=0, eos_token_id=0,
             rope_interleaved=False),
        dict(vocab_size=49152, max_position_embeddings=8192, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64,
             d_model=576, d_ff=1536, norm_eps=1e-5, rope_theta=1e5, tie_embeddings=True),
    ),
    "TinyLlama-1.1B": (  # its config.json has no rope_theta
        dict(vocab_size=32000, max_position_embeddings=2048, num_hidden_layers=22, num_attention_heads=32,
             num_key_value_heads=4, hidden_size=2048, intermediate_size=5632, rms_norm_eps=1e-5, rope_scaling=None,
             tie_word_embeddings=False, pretraining_tp=1, bos_token_id=1, eos_token_id=2),
        dict(vocab_size=32000, max_position_embeddings=2048, n_layers=22, n_heads=32, n_kv_heads=4, head_dim=64,
             d_model=2048, d_ff=5632, norm_eps=1e-5, rope_theta=1e4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED_LLAMAS)
def test_config_from_transformers_reads_published_llamas(name):
    theirs, ours = PUBLISHED_LLAMAS[name]
    assert config_from_transformers(LlamaConfig(**theirs)) == GPTConfig(**LLAMA | ours, dropout=0.0)


LLAMA_3_ROPE = dict(
    rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=1024,
)  # fmt: skip


@pytest.mark.parametrize(
    ("hf_config", "message"),
    [
        (
            GPT2Config(activation_function="relu"),
            "activation_function is relu, not gelu_new or gelu_pytorch_tanh or gelu",
        ),
        (GPT2Config(attn_pdrop=0.0), "attn_pdrop is 0.0, not 0.1"),
        (GPT2Config(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx is True"),
        (Qwen3Config(attention_bias=True), "attention_bias is True"),
        (
            Qwen3Config(num_hidden_layers=2, use_sliding_window=True, max_window_layers=1),
            "layer_types is .'full_attention', 'sliding_attention'., not .'full_attention', 'full_attention'.",
        ),
        (Qwen3Config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}), "rope_type is linear"),
        (LlamaConfig(attention_bias=True), "this llama model has settings .*: attention_bias is True"),
        (LlamaConfig(mlp_bias=True), "mlp_bias is True, not False"),
        (LlamaConfig(hidden_act="gelu"), "hidden_act is gelu, not silu"),
        (LlamaConfig(rope_parameters=LLAMA_3_ROPE), "rope_type is llama3, not default"),
        (MistralConfig(), "type mistral: only gpt2, qwen3, llama can be read"),
    ],
)
def test_from_transformers_refuses_unsupported_settings(hf_config, message):
    with pytest.raises(ValueError, match=message):
        config_from_transformers(hf_config)


def test_config_imports_without_torch():
    code = "import sys, model.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("name", "theta"), [("qwen3-wide-heads", 1e6), ("llama-wide-heads", 1e5)])
def test_exported_config_has_transformers_4_rope_theta(name, theta):
    written = config_to_transformers(CONFIGS[name]).to_diff_dict()
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == theta
