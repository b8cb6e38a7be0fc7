"""Compilation, activation checkpointing and the chunked loss do not change results."""

import json
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from torch._inductor.exc import CppCompileError

from model.config import GPTConfig
from model.gpt import GPTModel
from model.loss import differentiate_loss
from runtime.cli.scripts import run_script
from runtime.config.errors import ConfigError
from runtime.config.schema import TrainConfig
from tests.conftest import ROOT, environment, metrics, train, train_command
from trainer.prepare_model import checkpointed, missing_compiler, prepare_network
from trainer.schedule import SCHEDULES

TINY = "--config tests/support/tiny_stories.yaml --steps 6 --evaluation.every 0 --checkpoint.every 6".split()


@pytest.mark.parametrize(("setting", "chunked"), [(None, True), (True, True), (False, False)])
def test_compile_includes_the_loss_and_chunks_it(setting, chunked):
    network = GPTModel(GPTConfig(vocab_size=37, n_layers=1, n_heads=2, d_model=16, d_ff=32))
    prepare_network(network, TrainConfig(compile=True, chunked_loss=setting), torch.device("cpu"))
    assert network.next_token_loss.differentiate._torchdynamo_orig_callable is differentiate_loss
    assert network.next_token_loss.chunked is chunked


@pytest.mark.parametrize("setting", ["compile", "cuda_graph"])
def test_scheduled_dropout_is_refused(setting, monkeypatch):
    monkeypatch.setitem(SCHEDULES, "dropout", lambda rate, config, step: rate / (step + 1))
    network = GPTModel(GPTConfig(vocab_size=37, n_layers=1, n_heads=2, d_model=16, d_ff=32))
    with pytest.raises(ConfigError, match=f"{setting}: true supports no scheduled dropout"):
        prepare_network(network, TrainConfig(**{setting: True}), torch.device("cpu"))


def test_compile_allows_schedule_outside_of_blocks(monkeypatch):
    """The forward of the model, which contains the blocks, is not compiled."""
    monkeypatch.setitem(SCHEDULES, "norm_eps", lambda value, config, step: value * (step + 1))
    network = GPTModel(GPTConfig(vocab_size=37, n_layers=1, n_heads=2, d_model=16, d_ff=32))
    vars(network)["norm_eps"] = 1e-5
    prepare_network(network, TrainConfig(compile=True), torch.device("cpu"))


@pytest.mark.slow
def test_compiled_block_is_one_graph(tmp_path):
    """Compiled for training and for evaluation; text is generated without compiling again."""
    evaluation = "--evaluation.every 3 --evaluation.num_samples 6 --evaluation.num_logged_generations 2"
    command = train_command(*TINY, *evaluation.split(), "--compile", "true", "--name", "run", "--out_dir", tmp_path)
    env = environment(TORCH_LOGS="graph_breaks,recompiles")
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "compile: each block and the loss\n" in done.stdout and "Graph break" not in done.stderr
    recompiled = re.findall(r"Recompiling function (\w+)", done.stderr)
    assert recompiled.count("forward") == 1, recompiled
    assert (tmp_path / "run" / "generations.jsonl").stat().st_size > 0


def test_activation_checkpointing_changes_no_bit(tmp_path):
    """Dropout included: the recomputed forward draws the same masks."""
    for name, recomputed in (("kept", "false"), ("recomputed", "true")):
        settings = ["--name", name, "--steps", 3, "--model.dropout", 0.2, "--activation_checkpointing", recomputed]
        done = train(*TINY, *settings, "--out_dir", tmp_path)
        assert ("activation checkpointing" in done.stdout) == (recomputed == "true")
    assert metrics(tmp_path / "kept") == metrics(tmp_path / "recomputed")


def test_machine_without_compiler_trains_uncompiled(tmp_path):
    done = train(
        *TINY, "--name", "run", "--compile", "true", "--steps", 2, "--out_dir", tmp_path, CXX="no-such-compiler"
    )
    assert "compile: off, no compiler: no-such-compiler\n" in done.stdout
    assert done.stdout.endswith("Training finished.\n")


@pytest.mark.parametrize("folder", ["my project", "b\u00fccher", "it's", "a(b)"])
def test_missing_compiler_names_path_the_linker_cannot_take(folder, monkeypatch):
    assert missing_compiler(torch.device("cpu")) == ""
    monkeypatch.setattr(torch, "__file__", f"/home/me/{folder}/.venv/torch/__init__.py")
    assert "torch is installed in" in missing_compiler(torch.device("cpu"))
    monkeypatch.undo()
    libraries = f"/Users/me/{folder}/python/lib"
    monkeypatch.setattr(sysconfig, "get_config_var", {"LIBDIR": libraries}.get)
    assert f"Python's library is in {libraries!r}; use" in missing_compiler(torch.device("cpu"))


def test_trains_uncompiled_with_space_in_cache_path(tmp_path):
    (cache := tmp_path / "my cache").mkdir()
    words = [*TINY, "--name", "run", "--compile", "true", "--steps", 2, "--out_dir", tmp_path]
    done = train(*words, TORCHINDUCTOR_CACHE_DIR=str(cache))
    assert f"compile: off, the compilation cache (TORCHINDUCTOR_CACHE_DIR, or TMPDIR) is in '{cache}" in done.stdout
    assert done.stdout.endswith("Training finished.\n")


LOGS = """
Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace
For even more developer context, set TORCH_LOGS="+dynamo"
"""
NOEXEC = "OSError: /tmp/a.so: failed to map segment from shared object. Perhaps noexec; set TORCHINDUCTOR_CACHE_DIR."


@pytest.mark.parametrize("last", ["a.cpp:7: error: no such instruction", NOEXEC])
def test_failed_compilation_prints_last_line(last, monkeypatch, capsys):
    def refuse_to_compile(config):
        raise CppCompileError(["c++"], f"a.cpp: note: first\n{last}\n{LOGS}")

    monkeypatch.setattr("sys.argv", ["train.py", *TINY])
    monkeypatch.setattr("train.main", refuse_to_compile)
    assert run_script("train") == 1
    message = capsys.readouterr().err
    error = rf"train.py: error: compile: torch.compile failed: {re.escape(last)}\n"
    [log] = re.findall(error + r"All of its output is in (\S+)\. .*--compile false\.\n$", message)
    assert "Traceback" not in message and "in refuse_to_compile" in Path(log).read_text()
    Path(log).unlink()


@pytest.mark.slow
def test_profile_traces_the_given_steps(tmp_path):
    train(*TINY, "--name", "run", "--profile", "[3, 4]", "--out_dir", tmp_path, processes=2)
    for rank in range(2):
        trace = json.loads((tmp_path / "run" / f"trace-steps-3-4-rank-{rank}.json").read_text())
        names = [event["name"] for event in trace["traceEvents"]]
        assert sum(name == "Optimizer.step#AdamW.step" for name in names) == 2
        assert {name for name in names if name.startswith("ProfilerStep")} == {"ProfilerStep#3", "ProfilerStep#4"}
        assert any("all_reduce" in name or "allreduce" in name for name in names)


def test_profile_of_first_step_has_no_warm_up(tmp_path):
    train(*TINY, "--name", "run", "--profile", "[1, 1]", "--evaluation.every", "2", "--out_dir", tmp_path)
    trace = json.loads((tmp_path / "run" / "trace-steps-1-1-rank-0.json").read_text())
    names = [event["name"] for event in trace["traceEvents"]]
    assert sum(name == "Optimizer.step#AdamW.step" for name in names) == 1
    embeddings = sum(name == "aten::embedding" for name in names)
    assert embeddings == 6 * 2, "of tokens and positions, in 6 micro-batches: none in the warm-up and the evaluation"


@pytest.mark.parametrize(
    ("steps", "problem"),
    {"[4, 3]": "is not the first and the last step", "[7, 9]": "begins after the last step"}.items(),
)
def test_profile_of_impossible_steps_is_refused(steps, problem, tmp_path):
    done = train(*TINY, "--name", "run", "--profile", steps, "--out_dir", tmp_path, exit_code=2)
    assert f"profile: {steps} {problem}" in done.stderr


def test_recomputed_block_takes_keyword_arguments():
    x = torch.ones(3, requires_grad=True)
    checkpointed(lambda x, *, scale: x * scale)(x, scale=2.0).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
