"""Using a trained model: load it, and sample from it."""

import io
import json
import os
import re
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, GPT2Config, GPT2LMHeadModel, MistralConfig, PreTrainedTokenizerFast

import sample
from data.corpus import Corpus
from data.prepare.prepare import encode_text
from data.prepare.tokenizer import save_tokenizer
from data.synthetic.stories import STORIES, StoriesDataset
from data.tokenizer import load_tokenizer
from runtime.config.errors import ConfigError
from runtime.config.parser import parse_tool
from runtime.config.schema import TrainConfig
from runtime.files import sha256
from sample import SampleConfig
from tests.conftest import ROOT, TINY_STORIES, environment, metrics, python, tensors, train
from tests.model.test_model import make_model
from tests.support import forked
from trainer.checkpoint.manifest import File, read_manifest
from trainer.pretrained.load import LoadedModel, find_checkpoint, load_run

STORY = (
    "--evaluation.every 1 --evaluation.num_scored_generations 0 --checkpoint.every 1 --optimizer.lr 3 "
    "--schedule.name constant"
).split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose best checkpoint is not its last."""
    runs = tmp_path_factory.mktemp("runs")
    train(*TINY_STORIES, *STORY, "--out_dir", runs, "--name", "run")
    return runs / "run"


def test_load_run_restores_settings_weights_and_tokenizer(run):
    losses = {row["step"]: row["val/loss"] for row in metrics(run)}
    best = min(losses, key=losses.get)
    assert best != 8
    for checkpoint, step in (("latest", 8), ("best", best), (3, 3)):
        config, model, tokenizer = load_run(run, checkpoint)
        stored = tensors(run, step)
        assert not model.training and config.optimizer.lr == 3 and config.name == "run"
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, stored[f"model.{name}"]), name
        text = "Meet a brave girl named Anna."
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        assert tokenizer.eos_token_id == 0
        assert config.model.model_dump() == read_manifest(run / "checkpoints" / f"step-{step:08d}").config["model"]
    loaded = load_run(run / "checkpoints" / "step-00000003")
    assert torch.equal(loaded.model.final_norm.weight, tensors(run, 3)["model.final_norm.weight"])


@pytest.fixture
def copy(run, tmp_path):
    """A copy of a checkpoint to change: its directory, manifest and tensors."""
    directory = tmp_path / "step-00000008"
    directory.mkdir()
    (original,) = (run / "checkpoints" / "step-00000008").glob("*.safetensors")
    return directory, read_manifest(original.parent), load_file(original)


def write(directory, manifest, files):
    """Write shards and the manifest. Each of `files` is (tensors, offsets of the tensors in the whole ones)."""
    described = {}
    for number, (pieces, begins) in enumerate(files):
        path = directory / f"shard-{number}.safetensors"
        save_file(pieces, path, {"DCP_SHARDING_INFO": json.dumps({k: {"saved_offsets": v} for k, v in begins.items()})})
        described[path.name] = File(path.stat().st_size, sha256(path))
    manifest.files.clear()
    manifest.files.update(described)
    manifest.write(directory)


def test_load_run_assembles_sharded_checkpoint(run, copy):
    directory, manifest, whole = copy
    first = {name: tensor[: len(tensor) // 2].clone() for name, tensor in whole.items() if tensor.dim()}
    second = {name: tensor[len(tensor) // 2 :].clone() for name, tensor in whole.items() if tensor.dim()}
    begins = {name: [len(first[name]), *[0] * (second[name].dim() - 1)] for name in second}
    write(directory, manifest, [(second, begins), (first, {})])
    state = load_run(run).model.state_dict()
    for name, tensor in load_run(directory).model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_load_run_refuses_missing_or_extra_tensors(copy):
    directory, manifest, whole = copy
    lacking = {name: tensor for name, tensor in whole.items() if "final_norm.bias" not in name}
    write(directory, manifest, [(lacking, {})])
    with pytest.raises(ConfigError, match="lacks 1 tensors of the model, such as final_norm.bias"):
        load_run(directory)
    write(directory, manifest, [(whole | {"model.extra": torch.zeros(2)}, {})])
    with pytest.raises(ConfigError, match=r"a tensor extra of \[2\], which the model lacks"):
        load_run(directory)


def test_load_run_names_model_setting_of_other_code(copy):
    directory, manifest, whole = copy
    manifest.config.update(loss="focal", data=manifest.config["data"] | {"shuffle": 3})
    write(directory, manifest, [(whole, {})])
    load_run(directory)  # settings outside model are ignored
    for lost, message in (
        (
            {"logit_scale": 20.0},
            "model.logit_scale: 20.0 in the run, but this code has no such setting; use the code that trained it",
        ),
        ({"position": "alibi"}, "model.position: alibi must be one of learned, rope; use the code that"),
    ):
        replace(manifest, config=manifest.config | {"model": manifest.config["model"] | lost}).write(directory)
        with pytest.raises(ConfigError, match=re.escape(f"{directory}: {message}")):
            load_run(directory)


def test_scripts_skip_damaged_newest_checkpoint(run, tmp_path):
    whole = shutil.copytree(run, tmp_path / "run") / "checkpoints" / "step-00000007"
    (damaged,) = whole.with_name("step-00000008").glob("*.safetensors")
    damaged.unlink()
    loaded = f"python sample.py {tmp_path}/run --max_new_tokens 2", f"python evaluate.py {tmp_path}/run"
    for command in (*loaded, f"python export.py {tmp_path}/run {tmp_path}/out"):
        assert python(command).stderr.count(f"Checkpoint skipped: {damaged}: missing\n") == 1, command
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text())["step"] == 7


def test_find_best_checkpoint_names_damaged_manifest(run, tmp_path, capsys):
    """The damaged manifest may be that of the best checkpoint."""
    damaged = shutil.copytree(run, tmp_path / "run") / "checkpoints" / "step-00000008" / "manifest.json"
    damaged.write_text("{}")
    find_checkpoint(tmp_path / "run", "best")
    assert f"Checkpoint skipped: {damaged.parent}: no valid manifest.json: format None" in capsys.readouterr().err


def test_load_run_names_missing_run_or_checkpoint(run, tmp_path, monkeypatch):
    (tmp_path / "runs").symlink_to(run.parent)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="has the steps 8, 7, .* 1; use one of these, latest or best"):
        load_run(run, 77)
    for name, what in (("runs/runn", "is not a directory"), ("runs", "has no model")):
        with pytest.raises(ConfigError, match=f"run: '{name}' {what}; name the .* on the Hub$"):
            load_run(name)
    with pytest.raises(ConfigError, match="init_from: 'runs/runn' is not a directory"):
        load_run("runs/runn", setting="init_from")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="has no valid checkpoint"):
        load_run(tmp_path)
    for other in ("best", 7):
        with pytest.raises(ConfigError, match=f"{other!r}, but '.*step-00000008' is a checkpoint itself; leave it"):
            load_run(run / "checkpoints" / "step-00000008", other)
    with pytest.raises(ConfigError, match="checkpoint: 'best', but .* is not a run; leave it out"):
        (tmp_path / "empty").mkdir()
        load_run(tmp_path / "empty", "best")


# Root gives up the rights to read and write every file, CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.
AS_ANOTHER_USER = """
import ctypes, os, runpy, sys
if os.geteuid() == 0:
    header, rights = (ctypes.c_uint32 * 2)(0x20080522), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None)
    assert libc.capget(header, rights) == 0
    rights[0] = rights[1] = rights[0] & ~0b110
    assert libc.capset(header, rights) == 0
del sys.argv[0]
run = runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module
run(sys.argv[0], run_name="__main__")
"""


@pytest.mark.skipif(os.geteuid() == 0 and sys.platform != "linux", reason="root can read every file")
@pytest.mark.parametrize(
    "words",
    [
        *("sample.py RUN --prompt a", "train.py --config RUN/config.yaml"),
        pytest.param(
            "tools.compare RUN --out null",
            marks=pytest.mark.skipif(not (ROOT / "tools").exists(), reason="tools/ was removed"),
        ),
        "train.py --config tests/support/tiny_random.yaml --out_dir RUN/.. --name secret",
        "train.py --config tests/support/tiny_random.yaml --init_from RUN",
        "evaluate.py RUN",
        "export.py RUN RUN/../exported",
    ],
)
def test_run_of_another_user_is_one_message(words, run, tmp_path):
    secret = shutil.copytree(run, tmp_path / "secret")
    secret.chmod(0)
    try:
        done = forked.run("-c", [AS_ANOTHER_USER, *words.replace("RUN", str(secret)).split()], 0, environment())
    finally:
        secret.chmod(0o755)
    printed = done.stdout + done.stderr
    assert done.returncode == 2 and printed.count("error: ") == printed.count("Permission denied") == 1, printed
    assert str(secret) in printed and "Traceback" not in printed and "damaged" not in printed, printed


# Sampling


def capture_sample(capsys, run, **settings):
    sample.main(SampleConfig(run=str(run), **settings))
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "why"),
    [
        *(("{}", ""), ("{", "")),
        # Refused before the weights are loaded, which from the Hub could take hours.
        ('{"model_type": "bert"}', "a transformers model of type bert"),
        ('{"model_type": "mistral"}', "a transformers model of type mistral"),
        ('{"model_type": "own", "auto_map": {"AutoConfig": "code.Own"}}', ".*custom code"),
        ('{"model_type": "gpt2", "scale_attn_weights": false}', ".*scale_attn_weights is False"),
    ],
)
def test_load_run_refuses_unsupported_model_folder(content, why, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(content)
    questions = []
    monkeypatch.setattr("builtins.input", questions.append)
    with pytest.raises(ConfigError, match=f"run: '{tmp_path}' cannot be opened: {why}"):
        load_run(tmp_path)
    assert not questions


def test_load_run_refuses_unsupported_hub_model(monkeypatch):
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda name, **settings: MistralConfig())
    with pytest.raises(ConfigError, match="run: 'me/mistral' cannot be opened: a transformers model of type mistral"):
        load_run("me/mistral")


@pytest.mark.parametrize("cut", [None, 1], ids=["missing", "of another shape"])
def test_load_run_refuses_incomplete_transformers_weights(cut, tmp_path):
    """transformers would initialise the missing tensors at random."""
    GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    weights, name = load_file(tmp_path / "model.safetensors"), "transformer.ln_f.bias"
    whole = weights.pop(name)
    if cut:
        weights[name] = whole[cut:].clone()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    problem = "lacks 1 tensors of its model, such as .*ln_f.bias" if cut is None else "(lacks|cannot be opened)"
    with pytest.raises(ConfigError, match=f"run: '{tmp_path}' {problem}"):
        load_run(tmp_path)


def test_sample_refuses_run_without_tokenizer(runs):
    train("--config", ROOT / "tests" / "support" / "tiny_random.yaml", "--steps", 1, "--name", "run", "--out_dir", runs)
    run = runs / "run"
    with pytest.raises(ConfigError, match=f"run: '{run}' has no tokenizer; its data, data.source: random, have none"):
        sample.main(SampleConfig(run=str(run)))


def test_model_without_tokenizer_is_loaded_without_its_data(runs, monkeypatch):
    """The data source of a fork may read files that have moved."""
    tiny = ROOT / "tests" / "support" / "tiny_random.yaml"
    train("--config", tiny, "--steps", 1, "--name", "run", "--out_dir", runs)

    def moved(config):
        raise ConfigError("data.path: it has moved")

    monkeypatch.setattr("trainer.pretrained.tokenizer.load_corpus", moved)
    assert load_run(runs / "run").tokenizer is None


def test_encode_without_end_of_text_requires_prompt():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"ma": 0})))
    with pytest.raises(ConfigError, match="prompt: .* no end-of-text token .*; give a prompt"):
        sample.encode(LoadedModel(None, None, tokenizer), "")
    assert sample.encode(LoadedModel(None, None, tokenizer), "ma") == [0]


def test_prompt_is_encoded_like_corpus(run, tmp_path, capsys):
    """A special token spelled in a prompt is plain text unless `special_tokens` is set."""
    prompt = "a<|endoftext|>b"
    save_tokenizer("byte", tmp_path / "tokenizer", [])
    of_corpus, facts = load_tokenizer(tmp_path / "tokenizer")
    loaded = LoadedModel(None, None, AutoTokenizer.from_pretrained(tmp_path / "tokenizer"))
    for _ in range(2):  # special_tokens does not affect the next call
        assert sample.encode(loaded, prompt) == [256, *encode_text(of_corpus, 256, prompt, False)[1]["input_ids"]]
        assert sample.encode(loaded, prompt, special_tokens=True) == [256, 97, 256, 98]
    # A model of transformers may have its own token for the beginning of a text; a run began with end-of-text.
    loaded.tokenizer.bos_token = "a"
    assert sample.encode(loaded, "b") == [97, 98]
    assert sample.encode(loaded._replace(config=TrainConfig()), "b") == [256, 98]
    with pytest.raises(ConfigError, match="prompt: the tokenizer has no tokens for 'There<|endoftext|>'"):
        capture_sample(capsys, run, prompt="There<|endoftext|>", max_new_tokens=1)
    assert capture_sample(capsys, run, prompt="There<|endoftext|>", special_tokens=True, max_new_tokens=1)


def test_encode_refuses_prompt_that_panics_tokenizer():
    words = Tokenizer(models.BPE({"</s>": 0, "a": 1, "b": 2}, []))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("(a|a)+$"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    with pytest.raises(ConfigError, match="prompt: the tokenizer has no tokens for 'a*b': .*retry-limit"):
        sample.encode(LoadedModel(None, None, tokenizer), "a" * 40 + "b")


def test_load_run_refuses_home_of_unknown_user():
    with pytest.raises(ConfigError, match="init_from: '~no-such-user/run' names a user that this machine"):
        load_run("~no-such-user/run", setting="init_from")


@pytest.mark.parametrize("script", ["sample.py", "evaluate.py", "export.py out"])
def test_missing_directory_is_refused_before_torch_is_imported(script, tmp_path):
    script, *words = script.split()
    refused = train(tmp_path / "missing", *words, script=script, exit_code=2)
    problem = f"run: '{tmp_path}/missing' is not a directory; name one, or a model on the Hub"
    assert refused.stderr == f"{script}: error: {problem}\n"  # without a line that torch is loaded


@pytest.mark.parametrize("top_p", [0.0, 1.5])
def test_top_p_out_of_range_is_refused(top_p):
    with pytest.raises(ConfigError, match=f"top_p: {top_p} must be a number above 0 and at most 1"):
        parse_tool(SampleConfig, "sample.py", ["nowhere", "--top_p", str(top_p)])


def test_sample_prints_generated_text_and_verdict(run, capsys):
    _, model, tokenizer = load_run(run, "best")
    prompt = tokenizer("Meet a")["input_ids"]
    expected = model.generate(torch.tensor([[0, *prompt]]), 20, temperature=0, eos_token_id=0)
    text = tokenizer.decode(expected[0], skip_special_tokens=True)
    assert text.startswith("Meet a") and STORIES.grammar.log_probability(text) is None
    loss = model(expected, labels=expected, num_items_in_batch=1)[1]
    shown = capture_sample(capsys, run, prompt="Meet a", checkpoint="best", temperature=0, max_new_tokens=20)
    assert shown == f"{text}\n  (not accepted by the grammar; the model's {-loss:.2f})\n"


def test_verdict_names_scored_length_of_long_text(run, capsys):
    shown = capture_sample(capsys, run, max_new_tokens=140, temperature=9.0, seed=1)
    assert re.search(r"\(not accepted by the grammar; the model's -\d+\.\d\d, of its first 128 tokens\)\n$", shown)


def test_story_probability_excludes_auxiliary_loss(run, capsys, monkeypatch):
    loaded, story = load_run(run), StoriesDataset("train", 1, 0, 128).text(0)
    tokens, settings = (
        [0, *loaded.tokenizer(story)["input_ids"]],
        SampleConfig(run="x", temperature=0, max_new_tokens=1),
    )
    sample.generate_sample(loaded, story, tokens, 0, settings)
    expected, forward = capsys.readouterr().out, type(loaded.model).forward

    def with_a_term(self, *arguments, **named):
        logits, loss, _ = forward(self, *arguments, **named)
        return (logits, loss, {}) if loss is None else (logits, loss + 5, {"loss": (loss, 99)})

    monkeypatch.setattr(type(loaded.model), "forward", with_a_term)
    sample.generate_sample(loaded, story, tokens, 0, settings)
    assert capsys.readouterr().out == expected


def test_load_run_uses_tokenizer_of_corpus(run, monkeypatch):
    """A data source of a fork may bring its own tokenizer, whose end-of-text token keeps its name."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[END]": 2}, unk_token="[END]"))
    corpus = Corpus([], [], tokenizer, 3, end_of_text=2)
    monkeypatch.setattr("trainer.pretrained.tokenizer.load_corpus", lambda config: corpus)
    loaded = load_run(run)
    assert loaded.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert loaded.tokenizer.eos_token == "[END]" and loaded.tokenizer.eos_token_id == 2


def test_load_run_refuses_unknown_data_source(copy):
    directory, manifest, weights = copy
    manifest.config["data"]["source"] = "chars"
    write(directory, manifest, [(weights, {})])
    with pytest.raises(ConfigError, match="data.source: chars must be one of random, stories, text; use the code"):
        load_run(directory)


def test_load_run_names_moved_data(copy, monkeypatch):
    """The data source of a fork may read files; its code is present, but the files have moved."""
    directory, manifest, weights = copy
    manifest.config["data"] |= {"source": "stories", "path": "/no/such/folder"}
    write(directory, manifest, [(weights, {})])

    def moved(config):
        raise ConfigError(f"data.path: {config.data.path} is not there")

    monkeypatch.setattr("trainer.pretrained.tokenizer.load_corpus", moved)
    with pytest.raises(ConfigError, match="/no/such/folder is not there; use .*, or restore its data"):
        load_run(directory)


def test_sample_prints_verdict_of_accepted_story(run, capsys):
    """The whole story is the prompt; the model ends it, or continues with invalid text."""
    loaded, story = load_run(run), StoriesDataset("train", 1, 0, 128).text(0)
    shown = capture_sample(capsys, run, prompt=story, max_new_tokens=1, top_k=1)
    assert "not accepted" in shown
    tokens = [0, *loaded.tokenizer(story)["input_ids"]]
    with torch.no_grad():
        for block in loaded.model.blocks:  # a model that always predicts the end of text
            block.attention.out_proj.weight.zero_()
        loaded.model.lm_head.weight.zero_()
    sample.generate_sample(loaded, story, tokens, 0, SampleConfig(run="x", temperature=0, max_new_tokens=1))
    assert f"accepted, log-probability {STORIES.grammar.log_probability(story):.2f} nats" in capsys.readouterr().out


def test_sample_seed_reproduces_distinct_texts(run, capsys):
    hot = {"max_new_tokens": 8, "temperature": 50}
    three = capture_sample(capsys, run, num_samples=3, **hot).splitlines()[::2]
    assert len(set(three)) == 3
    assert capture_sample(capsys, run, num_samples=2, **hot).splitlines()[::2] == three[:2]
    assert capture_sample(capsys, run, seed=1, **hot).splitlines()[0] not in three


def test_sample_streams_whole_characters(monkeypatch, tmp_path):

    save_tokenizer("byte", tmp_path / "tokenizer", [])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    model = make_model(vocab_size=257).eval()
    texts, shown = "né €!", []
    monkeypatch.setattr(
        model, "stream", lambda *args, **kwargs: (torch.tensor([[token]]) for token in tokenizer(texts)["input_ids"])
    )

    class Screen(io.StringIO):
        def flush(self):
            shown.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Screen())
    sample.generate_sample(
        LoadedModel(None, model, tokenizer), "ma", tokenizer("ma")["input_ids"], 0, SampleConfig(run="x")
    )
    assert shown == ["ma", "man", "mané", "mané ", "mané €", "mané €!"]


def test_sample_keeps_space_after_prompt(monkeypatch, capsys):
    """Some tokenizers, such as Llama's, drop the space before the first token that they decode."""
    words = Tokenizer(models.WordLevel({"▁ma": 0, "▁ni": 1, "</s>": 2}))
    words.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    model = make_model(vocab_size=3).eval()
    monkeypatch.setattr(model, "stream", lambda *args, **kwargs: iter([torch.tensor([[1]])]))
    sample.generate_sample(LoadedModel(None, model, tokenizer), "ma", [2, 0], 0, SampleConfig(run="x"))
    assert capsys.readouterr().out == "ma ni\n"


def test_sample_escapes_generated_control_characters(monkeypatch, capsys):
    """A model may generate terminal control sequences; line breaks are kept."""
    words = Tokenizer(models.WordLevel({"\x1b[2J": 0, "\n": 1, "</s>": 2}))
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    model = make_model(vocab_size=3).eval()
    monkeypatch.setattr(model, "stream", lambda *args, **kwargs: iter([torch.tensor([[0]]), torch.tensor([[1]])]))
    text = sample.generate_sample(LoadedModel(None, model, tokenizer), "\x9b1m", [2], 0, SampleConfig(run="x"))
    assert capsys.readouterr().out == "\\x9b1m\\x1b[2J\n\n"
    assert text == "\x9b1m\x1b[2J\n"


def test_sample_prompts_repeatedly_on_terminal(run, capsys, monkeypatch):
    answers = iter(["Meet a", "Dragon", "There"])

    def answer(question):
        assert question == "> "
        if (line := next(answers, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    sample.main(SampleConfig(run=str(run), max_new_tokens=3))
    out, err = capsys.readouterr()
    texts = [line for line in out.splitlines() if not line.startswith("  (")]
    assert texts[0].startswith("Meet a") and texts[1].startswith("There") and "'Dragon'" in err


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_with_closed_stdin(chat, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert list(sample.prompts(None, chat)) == ([] if chat else [""])


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_sample_reports_a_diverged_model(temperature, tmp_path):
    """The probabilities of its tokens are NaN."""
    words = "--name run --steps 2 --optimizer.lr 1e30 --on_nonfinite skip --evaluation.every 0".split()
    train(*TINY_STORIES, *words, "--out_dir", tmp_path)
    failed = train(tmp_path / "run", "--temperature", temperature, script="sample.py", exit_code=1)
    assert "Traceback" not in failed.stderr
    assert f"error: run: '{tmp_path}/run': the logits are NaN or infinite; try an earlier" in failed.stderr


def test_stored_value_out_of_range_is_refused(copy):
    directory, manifest, whole = copy
    manifest.config.update(steps=-3)
    write(directory, manifest, [(whole, {})])
    with pytest.raises(ConfigError, match="steps: -3 must be a positive integer; use the code that trained it"):
        load_run(directory)
