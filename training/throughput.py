"""Speed: tokens per second of training, and the share of the device's peak that they make (MFU)."""

import re
import resource
import sys
import time

import torch
from accelerate import Accelerator

from data.sampler import BatchSizes

# Dense bf16 peaks in FLOP/s, from the makers' data sheets. On a device that is not here no MFU is reported.
PEAK_BF16_FLOPS = {"B200": 2.25e15, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12}
PEAK_BF16_FLOPS |= {"L40S": 362e12, "L4": 121e12, "RTX 4090": 165e12, "RTX 3090": 71e12}
# MIG's parts, as in "H100 80GB HBM3 MIG 1g.10gb", and those of a virtual GPU, as in "A100-40C".
PART_OF_A_CARD = r"\bMIG\b|-\d+[ABCQ]\b"


def peak_bf16_flops(device: torch.device) -> float:
    """The data sheet's dense bf16 FLOP/s of a CUDA device; 0 where it is not known, or this is a part of a card."""
    device_name = torch.cuda.get_device_name(device)
    if re.search(PART_OF_A_CARD, device_name):
        return 0.0
    other_card = r"\b(?! (NVL|Ti|D|Laptop)\b)"  # of which the sheet says something else
    peaks = (flops for name, flops in PEAK_BF16_FLOPS.items() if re.search(rf"\b{name}{other_card}", device_name))
    return next(peaks, 0.0)


def peak_flops(accelerator: Accelerator) -> float:
    """What all processes together can do in bf16, in FLOP/s; 0 where that is not known, or not what the run does."""
    is_bf16_gpu = accelerator.device.type == "cuda" and accelerator.mixed_precision == "bf16"
    return peak_bf16_flops(accelerator.device) * accelerator.num_processes if is_bf16_gpu else 0.0


def peak_memory_bytes() -> int:
    """The most that this process has held: tensors on a GPU, and without any there all that is in memory."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return torch.cuda.max_memory_allocated() or resident  # compiling for a CPU brings CUDA up as well


class Throughput:
    """A stopwatch over training steps. Restart it after an evaluation or a checkpoint: they are not training."""

    def __init__(self, sizes: BatchSizes, seq_len: int, flops_per_token: float, peak_flops: float):
        self.sizes, self.seq_len, self.flops_per_token, self.peak_flops = sizes, seq_len, flops_per_token, peak_flops

    def restart(self, step: int) -> None:
        """Begin to measure at `step`."""
        self.tokens, self.seconds = self.sizes.before(step) * self.seq_len, time.perf_counter()

    def measure(self, step: int) -> dict[str, float]:
        """`train/tokens` of so many steps, `perf/tokens_per_second` over all processes since the last call,
        `perf/peak_memory_bytes` of this one, and `perf/mfu` where the device's peak is known; begins to measure anew.
        """
        tokens, seconds = self.tokens, self.seconds
        self.restart(step)
        tokens_per_second = (self.tokens - tokens) / (self.seconds - seconds)
        metrics = {"train/tokens": self.tokens, "perf/tokens_per_second": tokens_per_second}
        metrics["perf/peak_memory_bytes"] = peak_memory_bytes()
        if self.peak_flops:
            metrics["perf/mfu"] = tokens_per_second * self.flops_per_token / self.peak_flops
        return metrics
