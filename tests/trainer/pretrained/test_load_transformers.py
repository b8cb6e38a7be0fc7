"""A model or tokenizer of transformers is the same here, and its code is never executed."""

import ast
import io
import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer

from data.prepare.tokenizer import save_tokenizer
from data.tokenizer import open_tokenizer
from evaluate import EvaluateConfig, evaluation_settings
from model import hf
from model.config import FAMILIES, GPTConfig
from model.gpt import GPTModel
from model.hf import log_probability_difference, to_transformers
from runtime.config.errors import ConfigError
from tests.conftest import ROOT
from trainer.pretrained.load import load_run

SHIPPED = [
    file
    for file in ROOT.rglob("*.py")
    if not {"tests", ".venv"} & set(file.relative_to(ROOT).parts) and not file.name.startswith(".")
]


def calls_of_from_pretrained(text):
    """Yield each call of `from_pretrained` in Python source."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained":
            yield node


def allows_remote_code(call):
    values = [keyword.value for keyword in call.keywords if keyword.arg == "trust_remote_code"]
    return not (values and isinstance(values[0], ast.Constant) and values[0].value is False)


def test_every_from_pretrained_refuses_remote_code():
    calls = [(file.name, call) for file in SHIPPED for call in calls_of_from_pretrained(file.read_text())]
    assert len(calls) >= 3
    assert not [f"{name}:{call.lineno}" for name, call in calls if allows_remote_code(call)]


def test_every_tokenizer_is_compared_with_its_file():
    """Only `open_tokenizer` opens one: it compares the tokens of a probe with those of tokenizer.json."""
    owners = {file.relative_to(ROOT).as_posix() for file in SHIPPED if "AutoTokenizer.from_" in file.read_text()}
    assert owners - {file for file in owners if file.startswith(("docs/", "examples/"))} == {"data/tokenizer.py"}


@pytest.fixture
def malicious(tmp_path, monkeypatch):
    """A folder whose tokenizer names custom code, which would write a file next to it; stdin holds "y" lines."""
    (folder := tmp_path / "model").mkdir()
    (folder / "own.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\nclass Own: pass\n")
    facts = {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    yield folder
    assert not (tmp_path / "was_run").exists()
    assert sys.stdin.read() == "y\n" * 9, "a question took a line of the input"


def test_open_tokenizer_runs_no_code(malicious):
    with pytest.raises(ValueError, match="trust_remote_code"):
        open_tokenizer(malicious)


def test_save_tokenizer_runs_no_code(malicious, tmp_path):
    with pytest.raises(ConfigError, match="trust_remote_code"):
        save_tokenizer(str(malicious), tmp_path / "out", [])


def test_load_run_runs_no_code(malicious):
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_run(malicious)


def small_config(family, **settings):
    shape = dict(vocab_size=300, n_layers=2, n_heads=2, d_model=16, d_ff=32, max_position_embeddings=24, dropout=0.0)
    return GPTConfig(**FAMILIES[family] | shape | settings)


@pytest.fixture
def exported(tmp_path):
    """A function that saves a random model with an edit of its tensors, as another program might."""

    def save(family, edit=lambda tensors: tensors, **settings):
        torch.manual_seed(1)
        hf_model = to_transformers(GPTModel(small_config(family, **settings)))
        hf_model.save_pretrained(tmp_path / family)
        file = tmp_path / family / "model.safetensors"
        save_file(edit(load_file(file)), file, metadata={"format": "pt"})
        return tmp_path / family

    return save


@pytest.mark.parametrize("family", FAMILIES)
def test_second_output_projection_of_tied_model_is_kept(family, exported):
    """As PEFT leaves one with modules_to_save=["lm_head"]: the config says tied, and transformers keeps both."""
    head = torch.randn(300, 16)
    folder = exported(family, lambda tensors: {**tensors, "lm_head.weight": head}, tie_embeddings=True)
    model = load_run(folder).model
    assert torch.equal(model.output_weight, head) and not model.config.tie_embeddings
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(24)[None]
    assert log_probability_difference(model(tokens).logits, theirs(tokens).logits) < 1e-5
    exported(family, tie_embeddings=True)
    assert load_run(folder).model.config.tie_embeddings, "of a tied model, one parameter stays one"


EXTRA = {
    "LoRA": "model.layers.0.self_attn.q_proj.lora_A.default.weight",
    "another layer": "model.layers.2.mlp.up_proj.weight",
    "a bias": "model.layers.0.self_attn.q_proj.bias",
}


@pytest.mark.parametrize("name", EXTRA)
def test_tensors_that_the_model_lacks_are_refused(name, exported):
    folder = exported("qwen3", lambda tensors: {**tensors, EXTRA[name]: torch.ones(16)})
    with pytest.raises(ConfigError, match=f"has 1 tensors that its model lacks, such as {EXTRA[name]}"):
        load_run(folder)


def test_constant_that_old_versions_saved_is_ignored(exported):
    """The masks of GPT-2's attention, which are in most models that were saved by transformers 4.26 or earlier."""
    old = {f"transformer.h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
    assert load_run(exported("gpt2", lambda tensors: tensors | old)).model.config.n_layers == 2
    with pytest.raises(ConfigError, match="has 1 tensors that its model lacks, such as .*c_attn.masked_bias"):
        load_run(exported("gpt2", lambda tensors: {**tensors, "transformer.h.0.c_attn.masked_bias": torch.ones(1)}))


def test_model_that_predicts_otherwise_is_refused(exported, monkeypatch):
    """Whatever the cause: here a setting that this code reads and ignores."""
    folder = exported("qwen3")
    read = hf.config_from_transformers
    monkeypatch.setattr(hf, "config_from_transformers", lambda config: read(config).replace(rope_theta=500.0))
    with pytest.raises(ConfigError, match="its log-probabilities here differ .* nats"):
        load_run(folder)


@pytest.fixture
def long_model():
    """A model of 40,960 positions, as Qwen/Qwen3-0.6B has, and the same in transformers."""
    torch.manual_seed(1)
    model = GPTModel(small_config("qwen3", max_position_embeddings=40_960)).eval()
    return model, to_transformers(model)


@pytest.mark.parametrize("window, length", [(None, 100), (200, 216)])
def test_comparison_of_long_context_is_bounded(window, length, monkeypatch):
    """By parameters times positions, or by the window. The whole context of a Qwen3-0.6B would take an hour."""
    config = small_config("qwen3", max_position_embeddings=40_960, window=window)
    model = GPTModel(config)
    monkeypatch.setattr(hf, "COMPARED_WORK", 100 * model.num_parameters())
    first, last = hf.compared_inputs(model)
    assert first["input_ids"].shape == (1, length)
    assert last["position_ids"].tolist() == [[*range(40_960 - 16, 40_960)]]
    monkeypatch.setattr(hf, "COMPARED_WORK", 10**15)
    assert hf.compared_inputs(model)[0]["input_ids"].shape == (1, 4096)


@pytest.mark.parametrize("begin", [0, 40_000], ids=["everywhere", "at the end"])
def test_positions_scaled_at_the_end_of_long_context_are_found(begin, long_model, monkeypatch):
    monkeypatch.setattr(hf, "MAX_COMPARED", 40)
    model, hf_model = long_model
    assert hf.compare_predictions(model, hf_model) < 1e-5
    embed = model.embed
    monkeypatch.setattr(model, "embed", lambda x, at: embed(x, torch.where(at < begin, at, begin + 8 * (at - begin))))
    assert hf.compare_predictions(model, hf_model) > hf.MAX_DIFFERENCE


def test_model_whose_predictions_are_nan_is_refused(exported):
    folder = exported("qwen3", lambda tensors: {**tensors, "model.norm.weight": torch.full((16,), torch.nan)})
    with pytest.raises(ConfigError, match="its weights give NaN or infinite logits, in transformers too"):
        load_run(folder)


def test_only_differences_of_log_probabilities_count():
    logits = torch.randn(3, 5)
    assert log_probability_difference(logits, logits + 7) < 1e-5, "a bias of all logits predicts the same"
    assert log_probability_difference(torch.zeros(1, 2), torch.tensor([[0.0, -torch.inf]])) == torch.inf


def test_windows_without_a_size_are_refused(exported):
    """transformers reads sliding_window as null if use_sliding_window is false, and its model does not run."""
    folder = exported("qwen3", window=8)
    facts = json.loads((folder / "config.json").read_text())
    for changes in ({"use_sliding_window": False}, {"sliding_window": None}):
        (folder / "config.json").write_text(json.dumps(facts | changes))
        with pytest.raises(ConfigError, match="layer_types name sliding_attention, but it has no sliding_window"):
            load_run(folder)


def test_slow_tokenizer_is_refused(exported, tmp_path):
    """Its class has no tokenizer.json, which everything else reads."""
    ByT5Tokenizer().save_pretrained(exported("qwen3", vocab_size=400))
    with pytest.raises(ConfigError, match="tokenizer: ByT5Tokenizer, .* of '.*qwen3', is not a fast tokenizer;"):
        load_run(tmp_path / "qwen3")
    with pytest.raises(ConfigError, match="tokenizer: .*is not a fast tokenizer"):
        save_tokenizer(str(tmp_path / "qwen3"), tmp_path / "copy", [])


def test_context_of_one_token_cannot_be_evaluated(exported):
    folder = exported("qwen3", max_position_embeddings=1)
    config = EvaluateConfig(run=str(folder), data="corpus")
    with pytest.raises(ConfigError, match=f"run: '{folder}' has a context of 1 token; a loss needs at least 2"):
        evaluation_settings(config, load_run(folder))


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "PreTrainedTokenizerFast"])
def test_tokenizer_that_its_class_replaces_is_refused(name, tmp_path):
    """transformers builds some classes from the vocabulary alone, with another pre-tokenizer."""
    save_tokenizer("train:400", tmp_path, ["in 12345 or 12345 times, 20 and 24"] * 9)
    facts = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(facts | {"tokenizer_class": name}))
    if name == "PreTrainedTokenizerFast":
        assert open_tokenizer(tmp_path).is_fast
    else:
        with pytest.raises(ConfigError, match="tokenizer_class .* otherwise than its tokenizer.json; set it to"):
            open_tokenizer(tmp_path)
        with pytest.raises(ConfigError, match="tokenizer_class"):
            save_tokenizer(str(tmp_path), tmp_path / "copy", [])


@pytest.mark.parametrize("name, normalizer", [("Qwen2Tokenizer", None), ("GPT2Tokenizer", normalizers.NFKC())])
def test_normalizer_that_its_class_replaces_is_refused(name, normalizer, tmp_path):
    """Qwen2Tokenizer adds NFC, and GPT2Tokenizer drops any normalizer; no text of plain letters shows it."""
    save_tokenizer("train:400", tmp_path, ["in 12345 or 12345 times, 20 and 24"] * 9)
    facts = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(facts | {"tokenizer_class": name}))
    pipeline = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    pipeline.pre_tokenizer = AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer.pre_tokenizer
    pipeline.normalizer = normalizer
    pipeline.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="encodes or decodes .* otherwise than its tokenizer.json"):
        open_tokenizer(tmp_path)


def test_tokenizer_that_decodes_otherwise_is_refused(tmp_path, monkeypatch):
    """As LlamaTokenizer does, whose decoder removes a leading space."""
    save_tokenizer("train:400", tmp_path, ["in 12345 or 12345 times, 20 and 24"] * 9)
    opened = open_tokenizer(tmp_path)
    opened.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: opened)
    with pytest.raises(ConfigError, match="encodes or decodes .* otherwise than its tokenizer.json"):
        open_tokenizer(tmp_path)
