"""The GPU benchmark in miniature on a CPU; on a GPU, small models.

The environment variable NANOGPT may name a folder with nanoGPT's model.py, which is then measured, too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import ROOT, environment
from tools.benchmark import gpu
from tools.benchmark.__main__ import run_interleaved

NANOGPT = os.environ.get("NANOGPT")
ALL = gpu.CASES | gpu.SMALL_MODELS | gpu.SMALL_BATCHES
# Packages that a machine with a GPU may lack: importing one of these is an error.
BARE = """
import runpy, sys
sys.modules |= dict.fromkeys(["datasets", "wandb", "matplotlib", "pyarrow"])
sys.argv[0] = "-m"
runpy.run_module("tools.benchmark", run_name="__main__")
"""


def miniature(*arguments):
    command = [sys.executable, "-c", BARE, "gpu", "--quick", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def groups():
    done = miniature("--rounds", 2, *(["--nanogpt", NANOGPT] if NANOGPT else []))
    assert done.returncode == 1, done.stderr  # two backends of attention are a GPU's alone
    groups = json.loads(done.stdout)
    assert list(groups) == list(gpu.CASES)
    return groups


@pytest.mark.slow
def test_variants_are_measured_and_failures_recorded(groups):
    for name, cases in groups.items():
        assert min(cases.pop(gpu.PRODUCT)["flops_per_second"]) > 0
        assert set(cases) == {variant for variant in gpu.CASES[name].variants if variant != gpu.PEER or NANOGPT}
        for variant, case in cases.items():
            if name in ("124m_1024_cudnn", "124m_1024_efficient"):
                assert "Error" in case["error"]
                continue
            assert "error" not in case, case.get("error")
            assert len(case["tokens_per_second"]) == 2 and min(case["tokens_per_second"]) > 0
            assert float(case["first_loss"]) != case["loss"][-1]  # it trains
            blocks = 1 if "124m" in name or variant == gpu.PEER else 2
            assert case["kernels"]["compiled_regions_a_step"] == blocks, "every block is compiled"
            shares = [share for share, _ in case["kernels"]["top"].values()]
            assert 0 < len(shares) <= 15 and shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 1.001


@pytest.mark.slow
@pytest.mark.skipif(not NANOGPT, reason="NANOGPT names no checkout")
def test_nanogpt_has_same_parameters(groups):
    ours, theirs = groups["124m_1024"]["ours"], groups["124m_1024"][gpu.PEER]
    assert ours["parameters"] == theirs["parameters"] and gpu.PEER in ours["against"]
    assert float(ours["first_loss"]) == pytest.approx(float(theirs["first_loss"]), rel=0.05)


@pytest.mark.slow
def test_budget_and_missing_gpu_are_reported():
    done = miniature("--budget_seconds", 0.001)
    assert done.stdout.strip() == "{}" and done.stderr.count("left out") == len(gpu.CASES)
    if not torch.cuda.is_available():
        done = subprocess.run(
            [sys.executable, "-m", "tools.benchmark", "gpu"],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode and "no GPU was found" in done.stderr


@pytest.mark.slow
def test_failed_variant_ends_alone(monkeypatch):
    def build(config, tokens, scale, out_of_memory=False, steps=1000):
        if out_of_memory:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
        losses = iter([0.0] * steps)
        return torch.nn.Linear(1, 1), None, lambda wait: next(losses)

    monkeypatch.setattr(gpu, "build_ours", build)
    monkeypatch.setattr(gpu.Variant, "profile_kernels", lambda self: {})
    settings = {"ours": {}, "too_large": {"out_of_memory": True}, "short": {"steps": 5}, "other": {}}
    monkeypatch.setattr(gpu, "SETTINGS", settings)
    case = gpu.Case("124M", 1024, 32, list(settings))
    figures = run_interleaved(*gpu.build_cases(case, gpu.MINIATURE, None), rounds=2)
    assert figures["too_large"]["error"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB."
    assert "tokens_per_second" not in figures["too_large"]
    assert figures["short"]["error"].startswith("StopIteration")  # in its second round
    assert len(figures["short"]["tokens_per_second"]) == 1
    assert len(figures["ours"]["tokens_per_second"]) == len(figures["other"]["tokens_per_second"]) == 2
    assert figures["other"]["against"] == [gpu.PRODUCT, "ours"]


def test_settings_reach_the_model(monkeypatch):
    # A real Accelerator would leave bf16 behind for every later test of this process.
    accelerator = SimpleNamespace(device=torch.device("cpu"), prepare_model=lambda network: network)
    monkeypatch.setattr(gpu, "Accelerator", lambda **settings: accelerator)
    scale, tokens = gpu.MINIATURE, [torch.zeros(1, 16, dtype=torch.long)]

    def facts(name):
        network, optimizer, _ = gpu.build_ours(scale.model_config("124M", 48), tokens, scale, **gpu.SETTINGS[name])
        return network.next_token_loss.chunked, type(optimizer).__name__

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
        batch = torch.randint(64, (4, 340), generator=torch.Generator().manual_seed(1))
        config = gpu.MINIATURE.model_config("11M", 340)
        _, _, step = gpu.build_ours(config, batch.chunk(parts), gpu.MINIATURE, compile=False)
        losses[parts] = [step(True) for _ in range(3)]
    assert losses[4] == pytest.approx(losses[1], rel=1e-3) and losses[1][2] < losses[1][0]


def test_groups_are_valid():
    for case in ALL.values():
        config = gpu.Scale().model_config(case.shape, case.context)
        assert config.problems() == [] and config.max_position_embeddings == case.context
        assert set(case.variants) <= {*gpu.SETTINGS, gpu.PEER} and case.backend in (None, *gpu.BACKENDS)
        assert case.variants[0] == "ours" and case.batch % case.micro_batches == 0
        assert case.micro_batches == 1 or gpu.PEER not in case.variants, "its step has one micro-batch"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here, or hidden without -m cuda")
@pytest.mark.parametrize("name", ALL)
def test_small_model_is_measured_on_gpu(name):
    small = dict.fromkeys(gpu.SHAPES, (1, 2, 128, 512))
    scale = gpu.Scale(shapes=small, product_size=512, window_seconds=0.0, warm_up_steps=1, context=256)
    backend = ALL[name].backend
    with gpu.sdpa_kernel(gpu.BACKENDS[backend]) if backend else gpu.nullcontext():
        figures = run_interleaved(*gpu.build_cases(ALL[name], scale, NANOGPT and Path(NANOGPT)), rounds=2)
    assert min(figures.pop(gpu.PRODUCT)["flops_per_second"]) > 0
    for variant, case in figures.items():
        assert "error" not in case, case["error"]
        launched_alone = "graph" not in variant and "uncompiled" not in variant
        assert case["kernels"]["compiled_regions_a_step"] >= 1 or not launched_alone
        assert min(case["tokens_per_second"]) > 0 and 0 < min(case["peak_gib"]) < 10
    torch.compiler.reset()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here, or hidden without -m cuda")
def test_step_does_not_synchronise():
    scale = gpu.Scale(shapes=dict.fromkeys(gpu.SHAPES, (1, 2, 128, 512)), context=256)
    tokens = torch.randint(512, (2, 256), device="cuda")
    _, _, step = gpu.build_ours(scale.model_config("124M", 256), [tokens], scale)
    for _ in range(3):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
