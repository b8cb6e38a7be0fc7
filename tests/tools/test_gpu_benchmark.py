"""The GPU benchmark in miniature on a CPU; on a GPU, small models.

The environment variable NANOGPT may name a folder with nanoGPT's model.py, which is then measured, too.
"""

import argparse
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from model.gpt import GPTModel
from tests.conftest import ROOT, environment
from tools.benchmark import gpu, programs
from tools.benchmark.__main__ import run_interleaved

NANOGPT = os.environ.get("NANOGPT")
ALL = gpu.LARGE_MODELS | gpu.SMALL_MODELS | gpu.SMALL_BATCHES
MINIATURE = gpu.Steps("miniature", 340, 4, [])
OPTIONS = argparse.Namespace(quick=True, nanogpt=NANOGPT and Path(NANOGPT))
# Packages that a machine with a GPU may lack: importing one of these is an error.
BARE = """
import runpy, sys
sys.modules |= dict.fromkeys(["datasets", "wandb", "matplotlib", "pyarrow"])
sys.argv[0] = "-m"
runpy.run_module("tools.benchmark", run_name="__main__")
"""


@pytest.mark.slow
def test_variants_are_measured():
    command = [
        sys.executable,
        "-c",
        BARE,
        "gpu",
        "--quick",
        "--rounds",
        "2",
        *(["--nanogpt", NANOGPT] if NANOGPT else []),
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    [cases] = json.loads(done.stdout).values()
    assert min(cases.pop(gpu.PRODUCT)["flops_per_second"]) > 0
    assert set(cases) == {"ours", "whole_loss", *([gpu.PEER] if NANOGPT else [])}
    for case in cases.values():
        assert len(case["tokens_per_second"]) == 2 and min(case["tokens_per_second"]) > 0
        assert case["loss"][0] != case["loss"][1]  # it trains
        shares = [share for share, _ in case["top"].values()]
        assert 0 < len(shares) <= 15 and shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 1.001


@pytest.mark.skipif(not NANOGPT, reason="NANOGPT names no checkout")
def test_nanogpt_has_same_parameters():
    config, tokens = MINIATURE.model_config(), torch.randint(64, (4, 340), device=gpu.DEVICE)
    theirs, _ = programs.nanogpt_model(OPTIONS.nanogpt, config, gpu.OPTIMIZER)
    sizes = [sum(weight.numel() for weight in network.parameters()) for network in (GPTModel(config), theirs)]
    assert sizes[0] == sizes[1]
    losses = [gpu.our_step(config, tokens)(True), gpu.nanogpt_step(config, tokens, OPTIONS.nanogpt)(True)]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_missing_gpu_is_reported():
    command = [sys.executable, "-m", "tools.benchmark", "gpu"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1 and "no GPU was found" in done.stderr


@pytest.mark.slow
def test_failed_variant_ends_alone(monkeypatch):
    def build(config, tokens, micro_batches, out_of_memory=False, steps=1000):
        if out_of_memory:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
        losses = iter([0.0] * steps)
        return lambda wait: next(losses)

    monkeypatch.setattr(gpu, "our_step", build)
    monkeypatch.setattr(gpu, "profile_kernels", lambda step: {})
    settings = {"ours": {}, "too_large": {"out_of_memory": True}, "short": {"steps": 9}, "other": {}}
    monkeypatch.setattr(gpu, "SETTINGS", settings)
    cases = gpu.build_cases(gpu.Steps("124M", 1024, 32, list(settings)), OPTIONS)
    figures = run_interleaved(cases, {}, rounds=2)
    assert figures["too_large"]["error"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB."
    assert "tokens_per_second" not in figures["too_large"]
    assert "StopIteration" in figures["short"]["error"]  # in its second round
    assert len(figures["short"]["tokens_per_second"]) == 1
    assert len(figures["ours"]["tokens_per_second"]) == len(figures["other"]["tokens_per_second"]) == 2


def test_warm_up_is_not_timed(monkeypatch):
    """A window is of the steps after the first, of five more and of those that are profiled."""
    events = []
    monkeypatch.setattr(gpu, "profile_kernels", lambda step: events.append("profile") or {"kernels": 1.0})
    monkeypatch.setattr(gpu, "mean_seconds", lambda work, times: events.append(times) or 0.5)
    windows = gpu.measure_windows(lambda: lambda wait: events.append("loss") or 1.0, 8, 10.0, window_seconds=2.0)
    first, second = next(windows), next(windows)
    assert events == ["loss", *[1] * 5, "profile", 4, "loss", 4, "loss"]
    assert first == second and first["tokens_per_second"] == 16 and first["flops_per_second"] == 160


def test_settings_reach_the_model(monkeypatch):
    states = []
    monkeypatch.setattr(gpu, "train_step", lambda state, *_: states.append(state))
    monkeypatch.setattr(gpu.Accelerator, "__init__", lambda self, real=gpu.Accelerator.__init__, **_: real(self))
    tokens = torch.zeros(1, 340, dtype=torch.long, device=gpu.DEVICE)

    def facts(name):
        gpu.our_step(MINIATURE.model_config(), tokens, **gpu.SETTINGS[name])(False)
        return states[-1].network.next_token_loss.chunked, type(states[-1].optimizer).__name__

    without_graph = [name for name, settings in gpu.SETTINGS.items() if not settings.get("cuda_graph")]
    assert {name: facts(name) for name in without_graph} == {
        **{"ours": (None, "AdamW"), "whole_loss": (False, "AdamW"), "uncompiled": (None, "AdamW")},
        "muon": (None, "MuonAndAdamW"),
    }


@pytest.mark.slow
def test_micro_batches_are_of_one_step(monkeypatch):
    """Four parts of a batch take the step that the whole batch takes."""
    losses = {}
    for parts in (1, 4):
        torch.manual_seed(0)
        batch = torch.randint(64, (4, 340), generator=torch.Generator().manual_seed(1)).to(gpu.DEVICE)
        step = gpu.our_step(MINIATURE.model_config(), batch, parts, compile=False)
        losses[parts] = [step(True) for _ in range(3)]
    assert losses[4] == pytest.approx(losses[1], rel=1e-3) and losses[1][2] < losses[1][0]


def test_groups_are_valid():
    for group in ALL.values():
        config = group.model_config()
        assert config.problems() == [] and config.max_position_embeddings == group.context
        assert set(group.variants) <= {*gpu.SETTINGS, gpu.PEER} and group.backend in (None, *gpu.BACKENDS)
        assert group.variants[0] == "ours" and group.batch % group.micro_batches == 0
        assert group.micro_batches == 1 or gpu.PEER not in group.variants, "its step has one micro-batch"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here, or hidden without -m cuda")
@pytest.mark.parametrize("name", ALL)
def test_small_model_is_measured_on_gpu(name):
    backend = ALL[name].backend
    with gpu.sdpa_kernel(gpu.BACKENDS[backend]) if backend else nullcontext():
        figures = run_interleaved(gpu.build_cases(ALL[name], OPTIONS), {}, rounds=2)
    assert min(figures.pop(gpu.PRODUCT)["flops_per_second"]) > 0
    for case in figures.values():
        assert "error" not in case, case["error"]
        assert min(case["tokens_per_second"]) > 0 and 0 < min(case["peak_gib"]) < 10
    torch.compiler.reset()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here, or hidden without -m cuda")
def test_step_does_not_synchronise():
    step = gpu.our_step(MINIATURE.model_config(), torch.randint(64, (2, 340), device="cuda"))
    for _ in range(3):
        step(False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step(False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
