"""The GPU benchmark runs from end to end on a CPU, in miniature; a GPU's figures are no business of a test.

The environment variable NANOGPT may name a folder with nanoGPT's model.py; without it the peer is left out.
"""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu, record
from tests.conftest import ROOT, environment

pytestmark = pytest.mark.slow
NANOGPT = os.environ.get("NANOGPT")
RUN = ["124m_1024", "124m_1024_settings", "124m_1024_cudnn", "1.3b_4096_settings"]


def miniature(*arguments):
    command = [sys.executable, "-m", "benchmarks.gpu", "--miniature", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu") / "out.json"
    peer = ["--nanogpt", NANOGPT] if NANOGPT else []
    miniature("--out", out, "--cases", *RUN, *peer)
    recorded = json.loads(out.read_text())
    assert recorded["figures"]["miniature"] and recorded["figures"]["left_out"] == []
    assert {"command", "date", "machine", "versions"} < recorded.keys()
    return recorded["figures"]["cases"]


def test_every_variant_is_measured(cases):
    assert list(cases) == RUN
    for case in cases.values():
        for name, variant in case.get("variants", {}).items():
            if case["attention"] == "cudnn" or (name == gpu.PEER and not NANOGPT):
                continue
            assert "error" not in variant, variant["error"]
            slowest, fastest = variant["slowest_and_fastest_window"]
            assert 0 < slowest <= variant["tokens_per_second"] <= fastest
            assert variant["mfu_of_measured_product"] == pytest.approx(
                variant["tokens_per_second"] * case["flops_per_token"] / case["measured_product_flops_per_second"],
                rel=1e-2,
            )
            assert variant["first_loss"] != variant["last_loss"]  # it trains
            assert 0 < variant["pieces"]["optimizer_share"] < 1
            kernels = variant["kernels"]["top"]
            shares = [kernel["share"] for kernel in kernels]
            assert 0 < len(kernels) <= 15 and shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 1.001


def test_the_loss_is_told_from_the_blocks(cases):
    pieces = cases["124m_1024"]["variants"]["ours"]["pieces"]
    order = ["forward", "loss_forward", "loss_backward", "backward", "clip_and_totals", "optimizer"]
    assert list(pieces["seconds"]) == order
    assert 0 < pieces["loss_share"] < 1


def test_every_block_is_compiled_in_every_variant(cases):
    def compiled(case):
        return {
            name: variant["kernels"]["compiled_regions_a_step"]
            for name, variant in cases[case]["variants"].items()
            if "kernels" in variant
        }

    assert compiled("124m_1024") == {"ours": 1, **({gpu.PEER: 1} if NANOGPT else {})}
    assert compiled("124m_1024_settings") == dict.fromkeys(gpu.CASES["124m_1024_settings"].variants, 1)
    assert compiled("1.3b_4096_settings") == {"ours": 2, "activation_checkpointing": 2}


def test_settings_change_what_runs(cases):
    def calls(case, variant, name):
        kernels = cases[case]["variants"][variant]["kernels"]
        return sum(count for kernel, count in kernels["attention_calls_a_step"].items() if kernel == name)

    attention = "aten::scaled_dot_product_attention"
    assert calls("1.3b_4096_settings", "ours", attention) > 0
    assert calls("1.3b_4096_settings", "activation_checkpointing", attention) == 2 * calls(
        "1.3b_4096_settings", "ours", attention
    )
    ratios = cases["124m_1024_settings"]["ratios"]
    assert set(ratios) == {f"{name} / ours" for name in ("chunked_loss", "whole_loss", "foreach_adamw")}


def test_a_case_that_fails_is_recorded_and_the_others_go_on(cases):
    assert "Error" in cases["124m_1024_cudnn"]["variants"]["ours"]["error"]  # a CPU has no cuDNN
    assert "error" not in cases[RUN[-1]]["variants"]["ours"]


def test_the_peer(cases):
    case = cases["124m_1024"]
    if not NANOGPT:
        assert "left_out" in case["variants"][gpu.PEER] and case["ratios"] == {}
        return
    ours, theirs = case["variants"]["ours"], case["variants"][gpu.PEER]
    assert ours["parameters"] == theirs["parameters"]
    assert ours["first_loss"] == pytest.approx(theirs["first_loss"], rel=0.05)
    assert case["ratios"].keys() == {f"ours / {gpu.PEER}"}


class Stub:
    """In place of a model and its step."""

    def __init__(self, case, shape, setting, scale):
        if setting.chunked_loss:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nSee the manual.")
        self.network, self.left, self.setting = torch.nn.Linear(1, 1), 5, setting

    def step(self, mark=gpu.unmarked):
        self.left -= 1
        if self.setting.foreach and self.left == 0:
            raise RuntimeError("it breaks\nwhile it runs")
        mark("begin")
        mark("optimizer")
        return torch.zeros(())

    splitting = gpu.Peer.splitting


def test_a_variant_that_fails_ends_alone(monkeypatch):
    monkeypatch.setattr(gpu, "Ours", Stub)
    monkeypatch.setattr(gpu, "profile_kernels", lambda trainer, device: {})
    scale = gpu.Miniature(torch.device("cpu"), gpu.MINIATURE_SHAPES, None)
    case = gpu.Case("124M", 1024, 32, ("ours", "chunked_loss", "foreach_adamw", "whole_loss"))
    figures = gpu.run_case(case, scale)
    variants = figures["variants"]
    assert variants["chunked_loss"] == {"error": "out of memory: CUDA out of memory. Tried to allocate 9 GiB."}
    assert variants["foreach_adamw"]["error"] == "RuntimeError: it breaks ... while it runs"
    assert variants["ours"]["tokens_per_second"] > 0 and list(figures["ratios"]) == ["whole_loss / ours"]


def test_settings_reach_the_model_and_the_optimizer(monkeypatch):
    # A real Accelerator would leave bf16 behind for every later test of this process.
    accelerator = SimpleNamespace(device=torch.device("cpu"), prepare=lambda *objects: objects)
    monkeypatch.setattr(gpu, "Accelerator", lambda **settings: accelerator)
    scale = gpu.Miniature(torch.device("cpu"), gpu.MINIATURE_SHAPES, None)
    case = gpu.Case("124M", 16, 1, ())

    def facts(name):
        ours = gpu.Ours(case, scale.shapes["124M"], gpu.SETTINGS[name], scale)
        (group, _) = ours.optimizer.param_groups
        checkpointed = "forward" in vars(ours.network.blocks[0])
        return ours.network.chunked_loss, group["fused"], bool(group["foreach"]), checkpointed

    assert {name: facts(name) for name in gpu.SETTINGS} == {
        "ours": (None, True, False, False),
        "chunked_loss": (True, True, False, False),
        "whole_loss": (False, True, False, False),
        "foreach_adamw": (None, False, True, False),
        "activation_checkpointing": (None, True, False, True),
    }


def test_ratios_are_of_speed_and_of_memory_round_by_round():
    ours = gpu.Runner(None, 0, 1, seconds=[1.0, 2.0, 1.0], peak_bytes=30)
    peer = gpu.Runner(None, 0, 1, seconds=[2.0, 4.0, 9.0], peak_bytes=40)
    assert gpu.compare({"ours": ours, gpu.PEER: peer}, gpu.PEER) == {
        "ours / nanogpt": {"tokens_per_second": 2.0, "peak_memory": 0.75}
    }


def test_every_case_is_one_that_can_run():
    for case in gpu.CASES.values():
        assert case.shape in gpu.SHAPES and set(case.variants) <= {*gpu.SETTINGS, gpu.PEER}
        assert case.attention in (None, *gpu.ATTENTION)
        assert case.variants[0] == "ours"


def test_a_spent_budget_names_what_was_left_out_and_a_miniature_leaves_the_results_alone():
    results = record.RESULTS / "gpu.json"
    before = results.read_bytes() if results.exists() else None
    printed = miniature("--budget_seconds", 0)
    assert [line.split(":")[0] for line in printed.splitlines()] == list(gpu.CASES)
    assert (results.read_bytes() if results.exists() else None) == before
