"""Logged throughput and memory are those of this device."""

import json

import psutil
import pytest
import torch

from data.sampler import BatchSizes, TokenCount
from tests.conftest import TINY_STORIES, environment
from tests.support import forked
from trainer import throughput
from trainer.throughput import Throughput, peak_bf16_flops, peak_memory_bytes


@pytest.mark.parametrize(
    ("card", "peak"),
    [
        *(("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12)),
        *(("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA L4", 121e12), ("NVIDIA GeForce RTX 3090", 71e12)),
        *(("NVIDIA L40S", 362e12), ("NVIDIA L40", 0), ("NVIDIA H100 NVL", 0), ("NVIDIA GB200", 0)),
        *(("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 0), ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 0), ("GRID A100-40C", 0)),
        *(("NVIDIA GeForce RTX 3090 Ti", 0), ("NVIDIA GeForce RTX 4090 Laptop GPU", 0)),
    ],
)
def test_peak_bf16_flops_matches_exact_card(card, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
    assert peak_bf16_flops(torch.device("cuda")) == peak


def test_peak_memory_on_cpu_ignores_initialised_cuda(monkeypatch):
    """torch.compile initialises CUDA on a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    now = psutil.Process().memory_info().rss
    assert 0.9 * now < peak_memory_bytes() < 100 * now


def test_mfu_is_the_fraction_of_the_peak(monkeypatch):
    """Steps 3 to 7, of 4 sequences of 10 tokens each, take 8 seconds; a token takes 50 FLOPs."""
    times = iter([100.0, 108.0])
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(times))
    meter = Throughput(TokenCount(BatchSizes(4), 10), flops_per_token=50.0, peak_flops=5000.0)
    meter.restart(2)
    metrics = meter.measure(7)
    assert metrics["train/tokens"] == 280 and metrics["perf/tokens_per_second"] == 25
    assert metrics["perf/mfu"] == 25 * 50 / 5000
    assert meter.seconds_per_step == 8 / 5


def test_time_left_includes_evaluations_and_growing_batches(monkeypatch):
    """Steps 0 to 3 have 2 sequences, later ones 4. Four steps take 4 seconds, and an evaluation 12 more."""
    times = iter([100.0, 104.0, 116.0, 116.0, 126.0])
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(times))
    meter = Throughput(TokenCount(BatchSizes(4, warmup_from=2, warmup_steps=4), 10), flops_per_token=0, peak_flops=0)
    meter.restart(0)
    assert "perf/mfu" not in meter.measure(4), "the peak is unknown"
    assert meter.seconds_per_step == 1
    assert meter.seconds_left(4, 10) == 16 / 80 * 240, "16 seconds for 80 tokens; 240 tokens are left"
    meter.restart(4)
    assert meter.seconds_left(9, 10) == 26 / 280 * 40


# A clock that only training steps (1 s), evaluations and saves (1000 s) advance.
CLOCK = """
import train
from runtime.cli import scripts
from trainer import throughput
seconds = 0.0
def passes(duration, function):
    def timed(*arguments, **options):
        global seconds
        seconds += duration
        return function(*arguments, **options)
    return timed
throughput.time.perf_counter = lambda: seconds
train.train_step, train.evaluate = passes(1, train.train_step), passes(1000, train.evaluate)
train.Saver.save = passes(1000, train.Saver.save)
scripts.run_and_exit("train")
"""


def test_throughput_excludes_evaluations_and_saves(runs):
    arguments = "--steps 7 --tracking.log_every 1 --evaluation.every 2 --checkpoint.every 3 --name run --out_dir"
    done = forked.run("-c", [CLOCK, *TINY_STORIES, *arguments.split(), str(runs)], 0, environment())
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (runs / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    tokens = rows[0]["train/tokens"]
    assert [row["perf/tokens_per_second"] for row in rows] == 7 * [tokens]
