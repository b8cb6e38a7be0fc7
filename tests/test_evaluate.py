"""evaluate.py against a manual loop over an exported model, on one process and on two."""

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import evaluate
import sample
from data.corpus import load_corpus
from data.synthetic.stories import STORIES, StoriesDataset
from evaluate import EvaluateConfig
from model.config import GPTConfig
from model.seeds import derive_seed
from runtime.config.errors import ConfigError
from runtime.config.schema import DataConfig, TrainConfig
from sample import SampleConfig
from tests.conftest import TINY_STORIES, environment, metrics, python, train
from tests.support import forked
from trainer.checkpoint.manifest import read_manifest
from trainer.pretrained import export
from trainer.pretrained.export import ExportConfig
from trainer.pretrained.load import LoadedModel, load_run

TEXT = "To be, or not to be? Äh: that is the question.\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A corpus of text, one of another tokenizer, a run on the first, and its export."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "input.txt").write_text(TEXT * 60)
    for name, tokenizer in (("corpus", "byte"), ("other", "train:300")):
        prepare = f"--source {folder}/input.txt --tokenizer {tokenizer} --validation tail:0.3"
        python(f"python -m data.prepare {prepare} --num_workers 1 --out {folder}/{name}")
    text = f"--data.source text --data.path {folder}/corpus --seq_len 32 --steps 3"
    train(*TINY_STORIES, *text.split(), "--evaluation.every", "3", "--out_dir", folder, "--name", "run")
    export.main(ExportConfig(run=str(folder / "run"), out=str(folder / "export")))
    return folder


def evaluated(made, processes, *arguments):
    out = made / f"out{processes}"
    done = forked.run("evaluate.py", [*map(str, arguments), "--out", str(out)], processes, environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((out / "evaluation.json").read_text())


def test_evaluation_prints_its_progress(made, capsys, monkeypatch, tmp_path):
    """To stderr, from the first window on: stdout is the result."""
    monkeypatch.setattr(evaluate, "PROGRESS_SECONDS", 0)
    arguments = {"run": str(made / "run"), "micro_batch_size": 4, "out": str(tmp_path)}
    evaluate.main(EvaluateConfig(**arguments))
    printed = capsys.readouterr()
    windows = json.loads(printed.out)["windows"]
    first, *others = [line for line in printed.err.splitlines() if line.startswith("evaluate.py: ")]
    assert first == f"evaluate.py: {windows} windows of 32 tokens ..."
    done = [int(re.fullmatch(rf"evaluate.py: (\d+) of {windows} windows, [\d,]+ s left", line)[1]) for line in others]
    assert done == [*range(4, windows, 4)]


def test_evaluation_equals_manual_loop_on_any_processes(made):
    arguments = (made / "export", "--data", made / "corpus", "--seq_len", 24, "--micro_batch_size", 3)
    one, two = (evaluated(made, processes, *arguments) for processes in (0, 2))
    assert one == two
    model = AutoModelForCausalLM.from_pretrained(made / "export").eval()
    text = (TEXT * 60)[math.floor(len(TEXT * 60) * 0.7) :].encode()
    tokens = [256, *text]
    windows = torch.tensor([tokens[i : i + 24] for i in range(0, len(tokens) - 23, 23)])
    with torch.no_grad():
        logits = model(windows).logits.double()
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), windows[:, 1:], reduction="none")
    assert one["windows"] == len(windows) > 30 and "step" not in one
    assert one["val/loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    assert one["val/perplexity"] == pytest.approx(losses.mean().exp().item(), rel=1e-4)
    assert one["val/bits_per_byte"] == pytest.approx(losses.mean().item() / math.log(2), rel=1e-5)
    assert one["loss_by_position"] == pytest.approx(losses.mean(0).tolist(), rel=1e-4)


def test_run_is_evaluated_on_its_own_data(made, capsys):
    evaluate.main(EvaluateConfig(run=str(made / "run"), num_samples=7, out=str(made / "own")))
    shown = json.loads(capsys.readouterr().out.partition("Loss by position")[0])
    assert shown["val/loss"] == pytest.approx(metrics(made / "run")[-1]["val/loss"], rel=1e-5)
    content = json.loads((made / "corpus" / "metadata.json").read_text())["hash"]
    data = {"source": "text", "path": f"{made}/corpus", "hash": content, "packing": "concat"}
    assert (shown["run"], shown["step"], shown["data"]) == (str(made / "run"), 3, data)
    evaluate.main(EvaluateConfig(run=str(made / "run" / "checkpoints" / "step-00000003")))
    assert (made / "run" / "evaluation.json").exists(), "beside the run"


@pytest.mark.parametrize("facts, zipf", [(0, 1.3), (16, 1.0)])
def test_identify_data_names_facts_of_stories(facts, zipf):
    world = {"facts": 16, "zipf": 1.0} if facts else {}
    described = evaluate.identify_data(DataConfig(source="stories", seed=3, facts=facts, zipf=zipf))
    assert described == {"source": "stories", "seed": 3} | world


def test_identify_data_names_all_settings_of_another_source():
    data = DataConfig.model_construct(source="own", seed=0, path="rows.npy", hash="ab", num_workers=3)
    described = evaluate.identify_data(data)
    assert described.items() >= {"source": "own", "seed": 0, "path": "rows.npy", "hash": "ab"}.items()
    assert "num_workers" not in described


def test_output_directory_is_beside_an_evaluated_folder(tmp_path, monkeypatch):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "manifest.json").touch()
    (tmp_path / "export").mkdir()
    monkeypatch.chdir(tmp_path / "export")
    for run, folder in {
        str(tmp_path / "kept"): tmp_path / "kept.evaluation",
        ".": tmp_path / "export.evaluation",
        "Qwen/Qwen3-0.6B": Path("Qwen--Qwen3-0.6B.evaluation"),
    }.items():
        assert evaluate.output_directory(EvaluateConfig(run=run)) == folder


def test_incompatible_run_and_data_are_refused(made):
    with pytest.raises(ConfigError, match="tokenizer of the corpus differs from that of .*run: .* entries differ"):
        evaluate.main(EvaluateConfig(run=str(made / "run"), data=str(made / "other")))
    with pytest.raises(ConfigError, match="is not a run; name a corpus"):
        evaluate.main(EvaluateConfig(run=str(made / "export")))
    with pytest.raises(ConfigError, match="seq_len: 129 must be from 2 to 128, the max_position_embeddings"):
        evaluate.main(EvaluateConfig(run=str(made / "run"), seq_len=129))
    with pytest.raises(ConfigError, match="out: '.*input.txt/x' cannot be written: .*Not a directory"):
        evaluate.main(EvaluateConfig(run=str(made / "run"), num_samples=1, out=str(made / "input.txt" / "x")))


def test_gpt2_folder_without_tokenizer_json_is_opened(made, tmp_path):
    """It has vocab.json and merges.txt, and no tokenizer.json; a corpus of other tokens is refused all the same."""
    config = GPT2Config(vocab_size=300, n_positions=32, n_embd=8, n_layer=1, n_head=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    Tokenizer.from_file(str(made / "other" / "tokenizer" / "tokenizer.json")).model.save(str(tmp_path))
    assert load_run(tmp_path).tokenizer.decode(load_run(tmp_path).tokenizer(TEXT)["input_ids"]) == TEXT
    evaluate.main(EvaluateConfig(run=str(tmp_path), data=str(made / "other"), out=str(tmp_path)))
    with pytest.raises(ConfigError, match="tokenizer of the corpus differs from that of"):
        evaluate.main(EvaluateConfig(run=str(tmp_path), data=str(made / "corpus"), out=str(tmp_path)))


def test_tokenizer_larger_than_the_model_is_refused(made, tmp_path):
    config = GPT2Config(vocab_size=250, n_positions=32, n_embd=8, n_layer=1, n_head=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    load_run(made / "export").tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="data: the tokenizer of the corpus .* has 257 tokens, and the model 250"):
        evaluate.main(EvaluateConfig(run=str(tmp_path), data=str(made / "corpus"), out=str(tmp_path)))
    with pytest.raises(ConfigError, match="run: the prompt has token 256, but the model has 250 tokens"):
        sample.main(SampleConfig(run=str(tmp_path), prompt="To be"))


@pytest.mark.parametrize(("positions", "window"), [(40_960, 1024), (512, 512)])
def test_evaluation_seq_len_of_hub_model_is_bounded(positions, window):
    """A row of 40,960 positions and Qwen3's 151,936 tokens has 25 GB of logits."""
    loaded = LoadedModel(None, SimpleNamespace(config=GPTConfig(max_position_embeddings=positions, vocab_size=9)), None)
    assert evaluate.evaluation_settings(EvaluateConfig(run="Qwen/Qwen3-0.6B", data="corpus"), loaded).seq_len == window


def test_evaluation_keeps_packing_of_training(made):
    loaded = load_run(made / "run")
    loaded = loaded._replace(config=loaded.config.replace(**{"data.packing": "isolated"}))
    config = EvaluateConfig(run=str(made / "run"), data=str(made / "corpus"))
    assert evaluate.evaluation_settings(config, loaded).data.packing == "isolated"


def test_data_settings_of_other_code_are_refused(made, tmp_path):
    checkpoint = made / "run" / "checkpoints" / "step-00000003"
    directory = shutil.copytree(checkpoint, tmp_path / "run" / "checkpoints" / checkpoint.name)
    shutil.copytree(made / "run" / "tokenizer", tmp_path / "run" / "tokenizer")
    manifest = read_manifest(directory)
    manifest.config["data"]["lower_case"] = True
    manifest.write(directory)
    with pytest.raises(
        ConfigError, match=f"{directory}: data.lower_case: True in the run, .*, or name a corpus with --data"
    ):
        evaluate.main(EvaluateConfig(run=str(tmp_path / "run")))
    evaluate.main(EvaluateConfig(run=str(tmp_path / "run"), data=str(made / "corpus"), num_samples=2))


def test_text_run_prints_samples_at_every_evaluation(made, tmp_path):
    text = f"--data.source text --data.path {made}/corpus --seq_len 24 --steps 4"
    shown = "--evaluation.every 2 --checkpoint.every 2 --evaluation.num_logged_generations 2"
    shown += " --evaluation.temperature 0.7"
    done = train(*TINY_STORIES, *text.split(), *shown.split(), "--out_dir", tmp_path, "--name", "run", processes=2)
    expected = []
    for step in (2, 4):
        _, model, tokenizer = load_run(tmp_path / "run", step)
        generator = torch.Generator().manual_seed(derive_seed(0, "samples", 0))
        rows = model.generate(torch.full((2, 1), 256), 23, 0.7, generator=generator, eos_token_id=256)
        texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
        expected += ["  | " + text.replace("\n", "\n  | ") for text in texts]
    assert len(set(expected)) == 4
    between = re.findall(r"(?s)(  \| .*?)\n\[step", done.stdout.replace("\r\n", "\n"))
    assert between == ["\n".join(expected[:2]), "\n".join(expected[2:])]


def test_describe_text_gives_log_probability_of_story():
    story = StoriesDataset("train", 1, 0, 128).text(0)
    corpus = load_corpus(TrainConfig(seq_len=128))
    assert corpus.describe_text(story) == f"accepted, log-probability {STORIES.grammar.log_probability(story):.2f} nats"
    assert corpus.describe_text(story[:-1]) == "not accepted by the grammar"


class DeviceWithoutFloat64(TorchFunctionMode):
    """A device without float64, such as an Apple GPU."""

    brought: list[torch.Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func is not torch.Tensor.double or any(args[0] is tensor for tensor in self.brought)
        result = func(*args, **(kwargs or {}))
        self.brought += [result] * (func is torch.Tensor.cpu)
        return result


def test_loss_by_position_needs_no_float64_device():
    config = TrainConfig(seq_len=96, data=DataConfig(source="random"), model=GPTConfig(vocab_size=5))
    corpus = evaluate.with_positions(load_corpus(config))
    batch = {"labels": torch.zeros(2, 3, dtype=torch.int64)}
    with DeviceWithoutFloat64():
        sums = corpus.score_logits(torch.zeros(2, 3, 5), batch)
    assert sums["position/1"] == (pytest.approx(2 * math.log(5)), 2)


def test_generated_data_of_a_run_that_never_evaluated(tmp_path):
    """Its config may leave the size of the validation set open; the default is used."""
    words = (
        "--config configs/random_tokens.yaml --steps 1 --model.vocab_size 16 --evaluation.num_samples null --name run"
    )
    train(*words.split(), "--out_dir", tmp_path)
    evaluate.main(EvaluateConfig(run=str(tmp_path / "run")))
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text())["windows"] == 500
