"""An exported model is the same model, opened by transformers alone."""

import json
import math
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from model import hf
from model.config import FAMILIES as FAMILIES_OF_CONFIGS
from model.config import GPTConfig
from model.gpt import MLP, GPTModel
from model.hf import to_transformers
from runtime.config.errors import ConfigError, RunError
from runtime.config.schema import DataConfig, TrainConfig
from tests.conftest import TINY_STORIES, metrics, tensors, train
from tests.data.prepare.test_prepare import make
from trainer.pretrained import export
from trainer.pretrained.export import ExportConfig
from trainer.pretrained.load import LoadedModel, load_run

QWEN3 = "--model.position rope --model.norm rmsnorm --model.mlp swiglu --model.qk_norm true --model.bias false".split()
TIED_AND_GROUPED = ["--model.tie_embeddings", "true", "--model.n_kv_heads", "1"]
FAMILIES = {
    "gpt2": [],
    "qwen3": [*QWEN3, *TIED_AND_GROUPED],
    "llama": [*QWEN3, *TIED_AND_GROUPED, "--model.qk_norm", "false"],
}
forward = MLP.forward
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each family."""
    runs = tmp_path_factory.mktemp("runs")
    for name, settings in FAMILIES.items():
        train(*TINY_STORIES, *settings, "--checkpoint.every", 2, "--out_dir", runs, "--name", name)
    return runs


def exported(run, out, **settings):
    config = ExportConfig(run=str(run), out=str(out), **settings)
    export.main(config)
    return config.out


@every_family
def test_transformers_computes_and_generates_the_same(family, runs, tmp_path):
    out = exported(runs / family, tmp_path / "a new" / "folder" / "out")
    theirs, loading = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    _, model, tokenizer = load_run(runs / family)
    their_tokenizer = AutoTokenizer.from_pretrained(out)
    tokens = their_tokenizer("Meet a brave girl named Anna.")["input_ids"]
    assert tokens == [0, *tokenizer("Meet a brave girl named Anna.")["input_ids"]], (
        "a text starts with this token in training"
    )
    assert their_tokenizer.decode(tokens, skip_special_tokens=True) == "Meet a brave girl named Anna."
    ids = torch.tensor([tokens])
    torch.testing.assert_close(theirs(ids).logits, model(ids)[0], rtol=0, atol=1e-5)
    ours = model.generate(ids, 30, temperature=0, eos_token_id=0)
    assert torch.equal(theirs.generate(ids, max_new_tokens=30, do_sample=False), ours)
    assert theirs.generation_config.eos_token_id == theirs.generation_config.bos_token_id == 0


def test_export_begins_with_end_of_text(runs, tmp_path):
    """Training documents began with end-of-text, whatever token the tokenizer calls bos."""
    loaded = load_run(runs / "gpt2")
    loaded.tokenizer.bos_token = loaded.tokenizer.convert_ids_to_tokens(1)
    export.write_model(tmp_path, loaded, conversations=False)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.bos_token_id == model.generation_config.bos_token_id == tokenizer("Meet").input_ids[0] == 0


@every_family
def test_export_works_with_batches_and_card_code(family, runs, tmp_path, monkeypatch, capsys):
    """Batches, long texts and the code of the card; what transformers generates starts as in training."""
    out = exported(runs / family, tmp_path / "out")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    texts = ["Meet a girl.", "Meet" + " a brave girl" * 100]
    batch = tokenizer(texts, truncation=True, padding=True, return_tensors="pt")
    assert batch.input_ids.shape == (2, 128) and batch.keys() == {"input_ids", "attention_mask"}
    assert model(**batch).logits.shape[:2] == (2, 128)
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```python\n(.*?)```", Path("out", "README.md").read_text(), re.DOTALL)
    names = {}
    exec(code, names)
    written = names["generate"]("Meet a", max_new_tokens=5, do_sample=False)[0]["generated_text"]
    ids = load_run(out).model.generate(torch.tensor([tokenizer("Meet a").input_ids]), 5, temperature=0)
    assert written == tokenizer.decode(ids[0], skip_special_tokens=True)
    assert "\nMeet a" in capsys.readouterr().out


def test_exported_gpt2_has_n_ctx_for_llama_cpp(runs, tmp_path):
    config = json.loads(Path(exported(runs / "gpt2", tmp_path / "out"), "config.json").read_text())
    assert config["n_ctx"] == config["n_positions"] == 128, "as in the published model; the converter reads only n_ctx"


def test_export_names_tokenizer_class_for_transformers_4(runs, tmp_path):
    settings = json.loads(Path(exported(runs / "gpt2", tmp_path / "out"), "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["model_input_names"] == ["input_ids", "attention_mask"], (
        "otherwise transformers adds token_type_ids"
    )


@every_family
def test_export_of_an_export_is_bytewise_identical(family, runs, tmp_path):
    first = exported(runs / family, tmp_path / "first")
    second = exported(first, tmp_path / "second")
    state, stored = load_run(second).model.state_dict(), tensors(runs / family, 8)
    assert all(torch.equal(tensor, stored[f"model.{name}"]) for name, tensor in state.items())
    files = {path.name for path in (tmp_path / "first").iterdir()}
    assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "README.md"} < files
    for name in files - {"README.md"}:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


def test_average_exports_mean_of_newest_checkpoints(runs, tmp_path):
    state = load_run(exported(runs / "gpt2", tmp_path / "out", average=3)).model.state_dict()
    parts = [tensors(runs / "gpt2", step) for step in (4, 6, 8)]
    for name, tensor in state.items():
        expected = sum(part[f"model.{name}"].double() for part in parts) / 3
        assert torch.equal(tensor, expected.float()), name
    with pytest.raises(ConfigError, match="average: 5 needs that many valid checkpoints, .* has 4; use"):
        exported(runs / "gpt2", tmp_path / "other", average=5)
    exported(runs / "gpt2", tmp_path / "folder")
    checkpoint = next((runs / "gpt2" / "checkpoints").iterdir())
    for place in (tmp_path / "folder", checkpoint):
        with pytest.raises(ConfigError, match=f"average: 2, but '{place}' is not the directory of a run; leave it out"):
            exported(place, tmp_path / "other", average=2)
    with pytest.raises(ConfigError, match="checkpoint: 'best', but average takes the newest ones; leave it out"):
        exported(runs / "gpt2", tmp_path / "other", average=2, checkpoint="best")


def test_average_skips_damaged_checkpoint(runs, tmp_path):
    run = shutil.copytree(runs / "gpt2", tmp_path / "run")
    next((run / "checkpoints" / "step-00000008").glob("*.safetensors")).write_bytes(b"")
    state = load_run(exported(run, tmp_path / "out", average=2)).model.state_dict()
    weight = "token_embedding.weight"
    expected = sum(tensors(run, step)[f"model.{weight}"].double() for step in (4, 6)) / 2
    assert torch.equal(state[weight], expected.float())


def test_card_names_origin_of_the_model(runs, tmp_path):
    out = exported(runs / "gpt2", tmp_path / "story-teller", checkpoint=4)
    card = (tmp_path / "story-teller" / "README.md").read_text()
    row = next(row for row in metrics(runs / "gpt2") if row["step"] == 4)
    manifest = json.loads((runs / "gpt2" / "checkpoints" / "step-00000004" / "manifest.json").read_text())
    for phrase in (
        "# story-teller",
        f"| val/loss | {row['val/loss']:.6g} |",
        f"- git_commit: {manifest['provenance']['git_commit']}",
        "source `stories`",
        "  lr: 0.01\n",
        'pipeline("text-generation", "./story-teller")',
        "began with an end-of-text token (id 0), which the tokenizer prepends.",
    ):
        assert phrase in card
    assert str(runs) not in card, "no path of this machine"
    assert out.endswith("story-teller")


def test_card_recipe_has_no_local_path():
    settings = {"data": {"mix": {"/home/me/a": 1.0, "b/c": 2.0}, "path": "~/x"}, "init_from": "Qwen/Qwen3-0.6B"}
    shown = {"data": {"mix": {"a": 1.0, "b/c": 2.0}, "path": "x"}, "init_from": "Qwen/Qwen3-0.6B"}
    assert export.without_folders(settings) == shown


def test_card_recipe_keeps_every_corpus_of_mixture():
    mix = {"/a/corpus": 3.0, "/b/corpus": 1.0, "/c/corpus": 1.0, "d/corpus": 2.0}
    shown = export.without_folders({"mix": mix})["mix"]
    assert list(shown.values()) == list(mix.values()) and list(shown)[::3] == ["corpus", "d/corpus"]


def test_card_ignores_replaced_corpus_at_same_path(tmp_path):
    (tmp_path / "plays.txt").write_text("to learn")
    metadata = make(tmp_path / "plays.txt", tmp_path / "plays")
    for of_run in (metadata["hash"], f"00ff+{metadata['hash']}"):
        config = TrainConfig(data=DataConfig(source="text", path=str(tmp_path / "plays"), hash=of_run))
        described = export.describe_data(LoadedModel(config, None, None))
        assert described.endswith("- `plays`: 1 documents, 9 tokens by `byte`")
    metadata = make(tmp_path / "plays.txt", tmp_path / "copy", str(tmp_path / "plays" / "tokenizer"))
    copy = config.replace(**{"data.path": str(tmp_path / "copy"), "data.hash": metadata["hash"]})
    assert export.describe_data(LoadedModel(copy, None, None)).endswith("tokens by `tokenizer`"), "no local path"
    config = config.replace(**{"data.hash": "00ff"})
    assert export.describe_data(LoadedModel(config, None, None)).endswith("- `plays`")


def test_card_names_a_deleted_corpus():
    config = TrainConfig(data=DataConfig(source="text", path="/gone/plays", hash="00ff"))
    facts = export.describe_data(LoadedModel(config, None, None))
    assert facts == "Content hash of the tokens and the tokenizer: `00ff`.\n- `plays`"


def test_card_claims_only_known_tokenizer_and_origin(runs, tmp_path):
    random = "--data.source random --model.vocab_size 50 --evaluation.num_scored_generations 0 --steps 2".split()
    train(*TINY_STORIES, *random, "--out_dir", tmp_path, "--name", "random")
    for source, opened in ((tmp_path / "random", "it has no tokenizer"), (runs / "gpt2", "pipeline(")):
        first = exported(source, tmp_path / f"{source.name}-export")
        second = exported(first, tmp_path / f"{source.name}-again")
        cards = [(tmp_path / out / "README.md").read_text() for out in (first, second)]
        assert all(opened in card for card in cards)
        assert [" began with" in card for card in cards] == [source.name == "gpt2", False]


def test_export_refuses_model_outside_transformers(runs, tmp_path):
    train(*TINY_STORIES, "--model.mlp", "relu2", "--steps", "2", "--out_dir", tmp_path, "--name", "odd")
    with pytest.raises(ConfigError, match="gpt2: model.mlp is relu2, not gelu_tanh\n"):
        exported(tmp_path / "odd", tmp_path / "out")
    assert not list(tmp_path.glob("out*")), "nothing is left behind"


@every_family
def test_export_refuses_model_edited_in_place(family, runs, tmp_path, monkeypatch):
    """An edit without a setting, which changes what the same weights compute."""
    monkeypatch.setattr(MLP, "forward", lambda self, x: 1.1 * forward(self, x))
    with pytest.raises(ConfigError, match=f"log-probabilities differ by up to .* from those of transformers' {family}"):
        exported(runs / family, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def both_models():
    """A model of 256 positions, and the same in transformers."""
    settings = FAMILIES_OF_CONFIGS["qwen3"] | {"max_position_embeddings": 256}
    model = GPTModel(GPTConfig(vocab_size=50, n_layers=2, **settings)).eval()
    return model, to_transformers(model)


@pytest.mark.parametrize("num_bytes", [hf.LOGIT_BYTES, 4 * 50 * 70], ids=["at once", "in parts"])
@pytest.mark.parametrize("position", [0, 70, 100, 255])
def test_export_compares_every_position(position, num_bytes, both_models, monkeypatch):
    def change(module, inputs, x_BTC):
        x_BTC[:, position : position + 1] *= 1.1

    monkeypatch.setattr(hf, "LOGIT_BYTES", num_bytes)
    model, _ = both_models
    export.check_same_logits(*both_models)
    model.final_norm.register_forward_hook(change)
    with pytest.raises(ConfigError, match="log-probabilities differ by up to"):
        export.check_same_logits(*both_models)


def test_export_refuses_short_window_edited_in_place(both_models):
    """It changes no logit of the first 100 positions."""
    both_models[0].windows = [100, 100]
    with pytest.raises(ConfigError, match="log-probabilities differ by up to"):
        export.check_same_logits(*both_models)


@pytest.mark.parametrize("which", [0, 1], ids=["ours", "transformers"])
def test_export_refuses_nan(which, both_models):
    next(both_models[which].parameters()).data[7, 0] = math.nan
    with pytest.raises(ConfigError, match="log-probabilities differ by up to nan nats"):
        export.check_same_logits(*both_models)


def test_export_names_nan_weights_as_the_cause(both_models):
    """Both models give NaN, so model/ need not have been edited."""
    for model in both_models:
        next(model.parameters()).data[7, 0] = math.nan
    with pytest.raises(ConfigError, match="^run: its weights give NaN or infinite logits, in transformers too$"):
        export.check_same_logits(*both_models)


def test_export_ignores_constant_added_to_all_logits(both_models):
    """The largest logit is no measure of a difference: softmax ignores what is added to all of them."""
    for model in both_models:
        model.register_forward_hook(lambda module, inputs, output: add_to_logits(output, 1000.0))
    export.check_same_logits(*both_models)
    both_models[0].windows = [250, 250]
    with pytest.raises(ConfigError, match="log-probabilities differ by up to"):
        export.check_same_logits(*both_models)


def add_to_logits(output, constant):
    output.logits.add_(constant)


def test_export_says_how_many_positions_were_compared(both_models, monkeypatch, capsys):
    export.check_same_logits(*both_models)
    assert not capsys.readouterr().out
    monkeypatch.setattr(hf, "MAX_COMPARED", 200)
    export.check_same_logits(*both_models)
    expected = "at the first 200 positions and the last 16; the other 40 were not compared"
    assert expected in capsys.readouterr().out


def test_export_names_tensors_that_change_no_logits(both_models, tmp_path, capsys):
    both_models[0].ahead = torch.nn.Linear(2, 3)
    export.write_model(tmp_path, LoadedModel(None, both_models[0], None), conversations=False)
    assert capsys.readouterr().out == "2 tensors that change no logits are left out, such as ahead.weight.\n"
    assert not any("ahead" in name for name in load_file(tmp_path / "model.safetensors"))


def test_export_refuses_window_edited_in_place():
    settings = FAMILIES_OF_CONFIGS["qwen3"] | {"window": 70, "window_pattern": "S", "max_position_embeddings": 256}
    model = GPTModel(GPTConfig(vocab_size=50, n_layers=2, **settings)).eval()
    exported_model = to_transformers(model)
    export.check_same_logits(model, exported_model)
    model.windows = [None, None]
    with pytest.raises(ConfigError, match="log-probabilities differ by up to"):
        export.check_same_logits(model, exported_model)


def test_exported_files_have_equal_permissions(runs, tmp_path):
    exported(runs / "gpt2", tmp_path / "out")
    assert len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1


def test_export_refuses_existing_folder(runs, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists; name a folder that does not"):
        exported(runs / "gpt2", tmp_path / "out")


def test_export_reports_write_errors(runs, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="out: '.*file/out' cannot be written: .*Not a directory"):
        exported(runs / "gpt2", tmp_path / "file" / "out")
    full = SafetensorError("No space left on device (os error 28)")
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", Mock(side_effect=full))
    with pytest.raises(ConfigError, match="out: '.*out' cannot be written: No space left"):
        exported(runs / "gpt2", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left behind"


def test_first_of_two_concurrent_exports_is_complete(runs, tmp_path, monkeypatch):
    def write_while_another_does(folder, *rest):
        monkeypatch.setattr(export, "write_model", write)
        exported(runs / "gpt2", tmp_path / "out")
        before.update({file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()})
        write(folder, *rest)

    write, before = export.write_model, {}
    monkeypatch.setattr(export, "write_model", write_while_another_does)
    with pytest.raises(ConfigError, match="out: '.*out' cannot be written: .*not empty"):
        exported(runs / "gpt2", tmp_path / "out")
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing is left behind"


def test_export_pushes_to_the_hub(runs, tmp_path, monkeypatch):
    calls = []

    class Hub:
        def create_repo(self, repository, exist_ok):
            if repository == "nobody/here":
                raise ValueError("401 Unauthorized")
            calls.append((repository, exist_ok))

        def upload_folder(self, repo_id, folder_path):
            calls.append((repo_id, {path.name for path in folder_path.iterdir()}))

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    exported(runs / "gpt2", tmp_path / "out", push="me/stories")
    assert calls[0] == ("me/stories", True) and calls[1][0] == "me/stories"
    assert {"README.md", "model.safetensors", "tokenizer.json"} < calls[1][1]
    assert 'pipeline("text-generation", "me/stories")' in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(RunError, match="is complete, but the upload to 'nobody/here' failed: 401"):
        exported(runs / "gpt2", tmp_path / "again", push="nobody/here")
    assert (tmp_path / "again" / "config.json").exists()
