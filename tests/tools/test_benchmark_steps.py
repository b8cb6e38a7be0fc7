"""The program that measures a training step, in miniature.

The environment variable NANOGPT may name a checkout of nanoGPT, which is then measured, too.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from config.parser import parse_config
from tests.conftest import ROOT, environment
from tools.benchmark import gpu, steps
from tools.benchmark.programs import Shape

NANOGPT = os.environ.get("NANOGPT")
SHAPE = Shape(2, 2, 32, 340).settings()  # above 256 tokens no eager attention replaces the kernels on a CPU
MINIATURE = f"--config configs/random_tokens.yaml {SHAPE} --model.vocab_size 64 --model.dropout 0 --steps 4".split()
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here, or hidden without -m cuda")


def measure(kind, *words, **env):
    """Return what the program prints, its last line parsed."""
    command = [sys.executable, "-m", "tools.benchmark.steps", kind, *MINIATURE, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment(**env), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *lines, figures = done.stdout.splitlines()
    return lines, json.loads(figures)


def test_first_half_of_steps_is_not_timed(monkeypatch, capsys):
    now, events = [0.0], []

    def step(wait):
        events.append(wait)
        now[0] += 100.0 if len(events) <= 2 else 2.0

    monkeypatch.setattr(steps.time, "perf_counter", lambda: now[0])
    figures = steps.measure_steps(step, parse_config([*MINIATURE, "--steps=5", "--tracking.log_every=2"]))
    assert events == [False] * 5 and figures["seconds_a_step"] == 2.0
    assert capsys.readouterr().out.splitlines() == ["[step 2", "[step 4"]


@pytest.mark.slow
def test_all_kinds_train_the_same_batch_alike():
    """The step of train.py takes the batch in four parts here."""
    kinds = {"train": ["--micro_batch_size=1", "--global_batch_size=4"], "bare": ["--micro_batch_size=4"]}
    if NANOGPT:
        kinds[NANOGPT] = ["--micro_batch_size=4"]
    lines, train = measure("train", *kinds["train"])
    assert lines == ["tokens: 1360 a step"] and train["peak_mib"] > 0
    assert train["flops_per_second"] > train["tokens_per_second"] == pytest.approx(1360 / train["seconds_a_step"])
    for kind, words in kinds.items():
        one, ten = (measure(kind, *words, f"--steps={number}", "--optimizer.lr=1e-3")[1]["loss"] for number in (1, 10))
        assert ten < one
        if kind == "bare":
            assert measure("train", *kinds["train"])[1]["loss"] == pytest.approx(
                measure("bare", *words)[1]["loss"], 1e-4
            )


def test_settings_reach_the_model(monkeypatch):
    states = []
    monkeypatch.setattr(steps, "train_step", lambda state, *_: states.append(state))
    tokens = torch.zeros(8, 340, dtype=torch.long, device=steps.DEVICE)

    def facts(settings):
        steps.step_of_train(parse_config([*MINIATURE, *settings.split()]), tokens)(False)
        return states[-1].network.next_token_loss.chunked, type(states[-1].optimizer).__name__

    without_graph = {name: facts(words) for name, words in gpu.SETTINGS.items() if "cuda_graph" not in words}
    assert without_graph == {
        **{"ours": (None, "AdamW"), "whole_loss": (False, "AdamW"), "uncompiled": (None, "AdamW")},
        "muon": (None, "MuonAndAdamW"),
    }


@pytest.mark.cuda
@on_gpu
@pytest.mark.parametrize("kind", ["train", "bare", *([NANOGPT] if NANOGPT else [])])
@pytest.mark.parametrize("attention", ["", "FLASH", "CUDNN", "EFFICIENT"])
def test_step_is_measured_on_gpu(kind, attention):
    env = {"ACCELERATE_MIXED_PRECISION": "bf16"} | ({"ATTENTION": attention} if attention else {})
    _, figures = measure(kind, "--compile=true", **env)
    assert figures["tokens_per_second"] > 0 and 0 < figures["peak_gib"] < 10
    assert figures["kernels"] > 0 and figures["kernel_milliseconds"] > 0


@pytest.mark.cuda
@on_gpu
def test_step_does_not_synchronise():
    step = steps.step_of_train(parse_config(MINIATURE), torch.randint(64, (8, 340), device="cuda"))
    for _ in range(3):
        step(False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step(False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
