"""Distillation from a frozen teacher: the objective, what is refused, and the guarantees of every run."""

import shutil

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config

from data.corpus import load_corpus
from model.gpt import GPTModel
from runtime.config.errors import ConfigError
from runtime.config.parser import parse_config
from tests.conftest import ROOT, TINY_STORIES, assert_same_run, environment, metrics, tensors, train
from tests.runtime.distributed.test_sharding import sharded
from tests.support import forked
from trainer.pretrained.load import hash_weights, load_run
from trainer.run.resolve import resolve

WEIGHT, TEMPERATURE = 0.75, 2.0
LEARN = ["--steps", 4, "--teacher.weight", WEIGHT, "--teacher.temperature", TEMPERATURE]
SIZES = {"vocab_size": 300, "n_positions": 128, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A large and a small GPT-2 with distributions that are far from uniform, created in transformers."""
    folder = tmp_path_factory.mktemp("teacher")
    for name, sizes in {"large": {"n_layer": 3, "n_embd": 24}, "small": {"n_layer": 1, "n_embd": 16}}.items():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(GPT2Config(**SIZES, **sizes))  # with dropout, in training
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        model.save_pretrained(folder / name)
    recipe = yaml.safe_load((ROOT / "tests" / "support" / "tiny_stories.yaml").read_text())
    recipe["model"] |= {"vocab_size": 300}
    recipe["teacher"] = {"path": str(folder / "large")}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"out_dir": str(folder / "runs")}))
    return folder


def recipe(made, *words):
    return ["--config", str(made / "recipe.yaml"), *map(str, (*LEARN, *words))]


def replaced(folder, copy):
    """Copy a model, with one of its weights changed by the smallest step."""
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    bias = weights["transformer.ln_f.bias"]
    bias[0] = torch.nextafter(bias[0], bias[0] + 1)
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    return copy


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_objective_equals_transformers_and_numpy(made):
    """Divergence, loss and gradient of a step, for padded rows and rows of several lengths."""
    student = ["--init_from", made / "small", "--model.dropout", 0, "--optimizer.lr", 0]
    recipe_file = yaml.safe_load((made / "recipe.yaml").read_text())
    del recipe_file["model"]
    (made / "student.yaml").write_text(yaml.safe_dump(recipe_file))
    train("--config", made / "student.yaml", *LEARN, *student, "--name", "first", "--optimizer.grad_clip", "null")
    row = metrics(made / "runs" / "first")[0]

    corpus = load_corpus(config := load_run(made / "runs" / "first").config)
    batch = [corpus.train[index] for index in corpus.global_batches(config).indices(0)]
    ids, labels = (torch.stack([sample[key] for sample in batch]) for key in ("input_ids", "labels"))
    is_target = labels[:, 1:] != -100
    large, small = (AutoModelForCausalLM.from_pretrained(made / name).eval() for name in ("large", "small"))
    theirs, ours = (model(ids).logits[:, :-1][is_target] for model in (large, small))
    p, q = (log_softmax(logits.detach().double().numpy() / TEMPERATURE) for logits in (theirs, ours))
    divergence = (np.exp(p) * (p - q)).sum(-1).mean()
    assert divergence > 0.1 and row["train/teacher_kl"] == pytest.approx(divergence, rel=1e-5)

    loss = torch.nn.functional.cross_entropy(ours, labels[:, 1:][is_target])
    assert row["train/loss"] == pytest.approx(loss.item(), rel=1e-5), "the cross-entropy alone"
    p, q = ((logits / TEMPERATURE).softmax(-1) for logits in (theirs.detach(), ours))
    divergence = (p * (p.log() - q.log())).sum(-1).mean()
    ((1 - WEIGHT) * loss + WEIGHT * TEMPERATURE**2 * divergence).backward()
    norm = torch.stack([parameter.grad.norm() for parameter in small.parameters()]).norm().item()
    assert row["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_teacher_is_imitated_and_stays_frozen(made):
    words = recipe(made, "--name", "imitates", "--steps", 8, "--teacher.weight", 1, "--teacher.temperature", 1)
    done = train(*words, script="tests/programs/taught_train.py")
    rows = metrics(run := made / "runs" / "imitates")
    assert rows[-1]["train/teacher_kl"] < 0.7 * rows[0]["train/teacher_kl"]
    assert rows[-1]["val/teacher_kl"] < rows[3]["val/teacher_kl"]
    weights = load_run(made / "large").model.state_dict()
    stored = yaml.safe_load((run / "config.yaml").read_text())["teacher"]["hash"]
    assert stored == hash_weights(weights) and f"teacher after the training: {stored} False\n" in done.stdout
    assert f"teacher: {made / 'large'}, " in done.stdout
    assert "Loading weights" not in done.stderr
    saved = {name.removeprefix("model.") for name in tensors(run, 8) if name.startswith("model.")}
    assert saved == load_run(run).model.state_dict().keys(), "the student alone"


@pytest.mark.slow
def test_resumed_run_has_bits_of_two_processes(made):
    """With `exact`, a run of one process that was stopped equals an uninterrupted one of two."""
    words = recipe(made, "--exact", "true", "--micro_batch_size", 3, "--name")
    for until, exit_code in ((2, 75), (4, 0)):
        train(*words, "one", "--stop_after", until, exit_code=exit_code)
    train(*words, "two", processes=2)
    assert_same_run(made / "runs" / "one", made / "runs" / "two", 4)


def test_replaced_or_missing_teacher_is_refused(made):
    copy = shutil.copytree(made / "large", made / "copy")
    words = recipe(made, "--name", "replaced", "--teacher.path", copy)
    words += ["--schedule.name", "constant", "--schedule.warmup_steps", "0", "--evaluation.every", "0", "--steps"]
    train(*words, 1)
    replaced(made / "large", copy)
    refused = train(*words, 2, exit_code=2).stderr
    now = hash_weights(load_run(copy).model.state_dict())
    assert f" in the run, {now} now\n" in refused and "  teacher.hash: " in refused
    assert "--branch_from" in refused and "choose another name" in refused
    without = ["--teacher.path", "null", "--teacher.weight", "0.5", "--teacher.temperature", "1"]
    elsewhere = shutil.copytree(made / "large", made / "elsewhere")
    train(*words, 2, "--teacher.path", elsewhere)
    assert "teacher.hash: " in train(*words, 3, *without, exit_code=2).stderr
    shutil.rmtree(copy)
    assert f"teacher.path: '{copy}' is not a directory" in train(*words, 3, exit_code=2).stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    {
        "--model.vocab_size 301": "model.vocab_size: 301, but 300 in the teacher .*; set it to the latter",
        "--seq_len 129 --model.max_position_embeddings 200": "seq_len: 129 is longer than the 128 positions of",
        "--teacher.hash abc": "teacher.hash: abc, but the weights of .* have the hash .*; set teacher.hash to the",
        "--teacher.path null": "teacher.weight: 0.75 has no effect with teacher.path: null; .*\nteacher.temp",
    }.items(),
)  # fmt: skip
def test_settings_that_contradict_teacher_are_refused(settings, message, made):
    with pytest.raises(ConfigError, match=message):
        resolve(parse_config(recipe(made, *settings.split())))


def test_teacher_that_predicts_other_tokens_is_refused(made, monkeypatch):
    monkeypatch.setattr(GPTModel, "predicts_next_token", False)
    with pytest.raises(ConfigError, match="teacher.path: .*large predicts the next token, and this model does not"):
        resolve(parse_config(["--config", str(made / "recipe.yaml"), "--evaluation.num_scored_generations", "0"]))


def test_teacher_with_another_tokenizer_is_refused(made, tmp_path):
    train(*TINY_STORIES, "--steps", 2, "--out_dir", tmp_path, "--name", "teacher", "--data.facts", 20)
    words = [*TINY_STORIES, "--teacher.path", str(tmp_path / "teacher")]
    with pytest.raises(ConfigError, match="the tokenizer of the corpus differs from that of"):
        resolve(parse_config(words))


WAYS = {
    "one micro-batch": ["--micro_batch_size", 6],
    "chunked": ["--chunked_loss", "true"],
    "compiled": ["--compile", "true"],
    "recomputed": ["--activation_checkpointing", "true"],
    "two processes": [],
    "fsdp2": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_distillation_is_same_in_all_ways(way, made):
    words = recipe(made, "--model.dropout", 0, "--steps", 8, "--name")
    if not (made / "runs" / "plain").exists():
        train(*words, "plain")
    words = [*words, way, *map(str, WAYS[way])]
    if way == "fsdp2":
        sharded("fsdp2", 2, *words)
    else:
        train(*words, processes=2 * (way == "two processes"))
    for ours, theirs in zip(*(metrics(made / "runs" / name) for name in (way, "plain")), strict=True):
        for name in ("train/teacher_kl", "train/loss", "train/grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4)
    saved = tensors(made / "runs" / way, 8)
    assert sum(tensor.numel() for name, tensor in saved.items() if name.startswith("model.")) < 20_000


@pytest.mark.slow
def test_distillation_in_bf16_resumes_bitwise(made):
    words, env = [*recipe(made, "--on_nonfinite", "skip"), "--name"], {"ACCELERATE_MIXED_PRECISION": "bf16"}
    train(*words, "bf16 straight", **env)
    for until, exit_code in ((2, 75), (4, 0)):
        train(*words, "bf16", "--stop_after", str(until), exit_code=exit_code, **env)
    assert_same_run(made / "runs" / "bf16", made / "runs" / "bf16 straight", 4)


@pytest.mark.slow
def test_verify_passes_with_teacher(made):
    done = forked.run("verify.py", recipe(made, "--global_batch_size", 4), 2, environment())
    assert done.returncode == 0 and done.stdout.endswith("Everything holds.\n"), done.stdout + done.stderr
    assert "Loading weights" not in done.stdout + done.stderr


@pytest.mark.slow
def test_branch_may_have_another_teacher(made):
    run = made / "runs" / "parent"
    train(*recipe(made, "--name", run.name))
    words = recipe(made, "--steps", 6, "--name", "branch", "--branch_from", run / "checkpoints" / "step-00000004")
    train(*words, "--teacher.path", replaced(made / "large", made / "other"))
    assert [row["step"] for row in metrics(made / "runs" / "branch")] == [5, 6]
