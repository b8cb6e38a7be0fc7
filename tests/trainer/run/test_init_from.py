"""Runs initialised with the weights of another model: GPT-2, Qwen3 or Llama of transformers, or another run."""

import shutil

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

from data.corpus import load_corpus
from model.gpt import GPTModel
from model.hf import tensors_from_transformers
from runtime.config.errors import ConfigError
from runtime.config.parser import parse_config
from tests.conftest import ROOT, TINY_STORIES, assert_same_bits, metrics, tensors, thinned, train
from trainer.pretrained import export
from trainer.pretrained.export import ExportConfig
from trainer.pretrained.load import copy_initial_weights, load_run
from trainer.run.resolve import resolve_initial_model

MODELS = {
    "gpt2": GPT2Config(
        vocab_size=300, n_positions=128, n_layer=2, n_head=2, n_embd=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ),
    "qwen3": Qwen3Config(
        vocab_size=300, max_position_embeddings=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, hidden_size=16, intermediate_size=24, tie_word_embeddings=True,
    ),
    "llama": LlamaConfig(
        vocab_size=300, max_position_embeddings=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        hidden_size=16, intermediate_size=24,
    ),
}  # fmt: skip
RECIPE = ROOT / "tests" / "support" / "tiny_stories.yaml"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model of each kind, created in transformers, and a config file without a model section."""
    folder = tmp_path_factory.mktemp("init_from")
    for name, config in MODELS.items():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    recipe = yaml.safe_load(RECIPE.read_text())
    del recipe["model"]
    (folder / "recipe.yaml").write_text(
        yaml.safe_dump(recipe | {"steps": 4, "schedule": {"name": "cosine", "warmup_steps": 0}})
    )
    return folder


def arguments(made, *more):
    return ["--config", str(made / "recipe.yaml"), "--out_dir", str(made / "runs"), *map(str, more)]


@pytest.mark.parametrize("name", thinned(MODELS, 2))
def test_first_step_loss_equals_transformers(name, made):
    train(*arguments(made, "--init_from", made / name, "--name", name, "--steps", 1, "--optimizer.lr", 0))
    config = load_run(made / "runs" / name).config
    reference = AutoModelForCausalLM.from_pretrained(made / name).eval()
    theirs = tensors_from_transformers(config.model, reference.state_dict())
    trained = tensors(made / "runs" / name, 1)
    assert all(torch.equal(trained[f"model.{key}"], tensor) for key, tensor in theirs.items())
    assert config.model.vocab_size == 300 and config.model.max_position_embeddings == 128 + 32 * (name == "qwen3")
    corpus = load_corpus(config)
    batch = [corpus.train[index] for index in corpus.global_batches(config).indices(0)]
    ids, labels = (torch.stack([row[key] for row in batch]) for key in ("input_ids", "labels"))
    rows = metrics(made / "runs" / name)
    with torch.no_grad():
        assert rows[0]["train/loss"] == pytest.approx(reference(ids, labels=labels).loss.item(), rel=1e-5)


@pytest.mark.slow
def test_init_from_resumes_bitwise_and_on_two_processes(made):
    init = ("--init_from", made / "gpt2", "--optimizer.lr", 0.01)
    train(*arguments(made, *init, "--name", "straight"))
    for until, exit_code in ((2, 75), (4, 0)):
        train(*arguments(made, *init, "--name", "stopped", "--stop_after", until), exit_code=exit_code)
    assert_same_bits(tensors(made / "runs" / "stopped", 4), tensors(made / "runs" / "straight", 4))
    train(*arguments(made, *init, "--name", "two"), processes=2)
    straight, two = (metrics(made / "runs" / name) for name in ("straight", "two"))
    assert [row["train/loss"] for row in two] == pytest.approx([row["train/loss"] for row in straight], rel=1e-5)


@pytest.mark.slow
def test_init_from_run_equals_init_from_export(made):
    train(*TINY_STORIES, "--steps", "2", "--out_dir", made / "runs", "--name", "first")
    export.main(ExportConfig(run=str(made / "runs" / "first"), out=str(made / "export")))
    configs = []
    for source in (made / "runs" / "first", made / "export"):
        config = parse_config(arguments(made, "--init_from", source, "--name", "next"))
        configs.append(resolve_initial_model(config)[0])
    assert configs[0].init_hash == configs[1].init_hash and len(configs[0].init_hash) == 32


def test_restart_refuses_changed_initial_weights(made):
    command = arguments(made, "--init_from", made / "copy", "--name", "again", "--schedule.name", "constant")
    model = AutoModelForCausalLM.from_pretrained(made / "gpt2")
    model.save_pretrained(made / "copy")
    train(*command, "--steps", 1)
    with torch.no_grad():
        model.transformer.ln_f.bias[3] += 1e-3
    model.save_pretrained(made / "copy")
    elsewhere = shutil.copytree(made / "copy", made / "elsewhere")
    refused = train(*command, "--init_from", elsewhere, exit_code=2)
    assert "init_hash: " in refused.stderr and "--branch_from" not in refused.stderr, "which excludes init_from"
    random = [*arguments(made, "--name", "again"), "--model.d_model", 16, "--schedule.name", "constant"]
    assert "init_hash: " in train(*random, exit_code=2).stderr, "nor with random ones"
    shutil.rmtree(made / "runs" / "again" / "checkpoints")  # killed before the first
    (made / "runs" / "again" / "status.json").unlink()
    assert "init_hash: " in train(*command, exit_code=2).stderr


@pytest.mark.slow
@pytest.mark.parametrize("change", ["trained on", "deleted"])
def test_resume_ignores_changed_or_deleted_initial_run(change, made):
    """The run has its own checkpoint and no longer needs the initial weights."""
    words = [*TINY_STORIES, "--out_dir", made / "runs", "--schedule.name", "constant"]
    train(*words, "--name", change, "--steps", 2)
    command = arguments(made, "--init_from", made / "runs" / change, "--name", f"from {change}")
    command += ["--schedule.name", "constant", "--steps"]
    train(*command, 2)
    if change == "trained on":
        train(*words, "--name", change, "--steps", 3)
    else:
        shutil.rmtree(made / "runs" / change)
    refused = train(*command, 3, "--model.n_layers", 1, exit_code=2)
    assert "model.n_layers: 2 in the run, 1 now" in refused.stderr
    train(*command, 3)
    assert [row["step"] for row in metrics(made / "runs" / f"from {change}")] == [1, 2, 3]


def test_log_model_refuses_unexportable_initial_model(made):
    words = "--model.mlp relu2 --steps 2 --evaluation.every 0 --name relu2"
    train(*TINY_STORIES, *words.split(), "--out_dir", made / "runs")
    command = arguments(made, "--init_from", made / "runs" / "relu2", "--name", "logged")
    refused = train(*command, "--tracking.log_model", "true", exit_code=2)
    assert "tracking.log_model: true" in refused.stderr and "model.mlp is relu2" in refused.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("--model.n_layers 3", "model.n_layers: 3, but 2 in .*gpt2; leave it out"),
        ("--model.d_ff 512", "model.d_ff: 512, but 64 in"),  # the default
        ("--seq_len 200", "seq_len: 200 is longer than model.max_position_embeddings: 128"),
        ("--init_hash abc", "init_hash: abc, but the weights"),
        ("--branch_from x", "set only one of them"),
    ],
)
def test_settings_that_contradict_initial_model_are_refused(settings, message, made):
    with pytest.raises(ConfigError, match=message):
        resolve_initial_model(parse_config(arguments(made, "--init_from", made / "gpt2", *settings.split())))


def test_init_from_refuses_unmerged_adapter(made, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "gpt2"}')
    with pytest.raises(ConfigError, match="init_from: .* is a PEFT adapter; merge it"):
        resolve_initial_model(parse_config(arguments(made, "--init_from", tmp_path)))


def test_dropout_may_differ_from_initial_model(made):
    config = parse_config(arguments(made, "--init_from", made / "gpt2", "--model.dropout", 0.3))
    config, _ = resolve_initial_model(config)
    assert config.model.dropout == 0.3 and config.model.n_heads == 2


def test_copy_initial_weights_keeps_added_parameters(made, capsys):
    """Parameters that a fork adds keep their initial values; a loaded tensor without a destination is refused."""
    initial = load_run(made / "gpt2")
    network = GPTModel(initial.model.config)
    network.adapter = torch.nn.Linear(2, 2)
    begun, weights = network.adapter.weight.clone(), initial.model.state_dict()
    copy_initial_weights(network, initial)
    assert "init_from: it lacks 2 tensors, which are initialised at random, such as adapter." in capsys.readouterr().out
    assert torch.equal(network.adapter.weight, begun)
    assert all(torch.equal(network.state_dict()[name], weight) for name, weight in weights.items())
    del network.final_norm
    with pytest.raises(ConfigError, match=r"2 of its tensors are not in the model, such as final_norm\."):
        copy_initial_weights(network, initial)


def test_init_from_refuses_corpus_with_another_tokenizer(made):
    export_of_stories = made / "stories-export"
    train(*TINY_STORIES, "--steps", "2", "--out_dir", made / "runs", "--name", "stories")
    export.main(ExportConfig(run=str(made / "runs" / "stories"), out=str(export_of_stories)))
    words = export_of_stories / "tokenizer.json"
    words.write_text(words.read_text().replace('"Anna"', '"Anno"').replace('" Anna"', '" Anno"'))
    refused = train(*arguments(made, "--init_from", export_of_stories, "--name", "other"), exit_code=2)
    assert "the tokenizer of the corpus differs from that of" in refused.stderr and "Ann" in refused.stderr
    assert not (made / "runs" / "other").exists()


def test_init_from_refuses_corpus_with_larger_vocabulary(made, tmp_path):
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(GPT2Config(**MODELS["gpt2"].to_diff_dict() | {"vocab_size": 100})).save_pretrained(
        tmp_path / "small"
    )
    config = parse_config(arguments(made, "--init_from", tmp_path / "small"))
    config, _ = resolve_initial_model(config)
    with pytest.raises(ConfigError, match=r"model.vocab_size: 100 is less .* corpus with the tokenizer of .*small$"):
        load_corpus(config)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("finetune_*.yaml")), ids=lambda path: path.stem)
def test_finetune_recipes_take_settings_from_initial_model(path, made):
    small = path.stem.removeprefix("finetune_").split("_")[0]
    config = parse_config(["--config", str(path), "--init_from", str(made / small), "--data.path", "x"])
    assert not config.model.model_fields_set - {"dropout"}
    config, _ = resolve_initial_model(config.replace(seq_len=64))
    assert config.model.n_layers == 2
