"""Training throughput: tokens per second, and model FLOPs utilisation (MFU), the fraction of the device's peak."""

import math
import re
import resource
import sys
import time

import torch
from accelerate import Accelerator

from data.sampler import TokenCount

# Dense bf16 peaks in FLOP/s, from the manufacturers' data sheets. For other devices no MFU is reported.
PEAK_BF16_FLOPS = {"B200": 2.25e15, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12}
PEAK_BF16_FLOPS |= {"L40S": 362e12, "L4": 121e12, "RTX 4090": 165e12, "RTX 3090": 71e12}
# A MIG slice such as "H100 80GB HBM3 MIG 1g.10gb", or a slice of a virtual GPU such as "A100-40C".
PARTIAL_GPU = r"\bMIG\b|-\d+[ABCQ]\b"


def peak_bf16_flops(device: torch.device) -> float:
    """Return the dense bf16 FLOP/s in the data sheet of a CUDA device; 0 if unknown or for a slice of a GPU."""
    device_name = torch.cuda.get_device_name(device)
    if re.search(PARTIAL_GPU, device_name):
        return 0.0
    not_a_variant = r"\b(?! (NVL|Ti|D|Laptop)\b)"  # variants have other data sheets
    peaks = (flops for name, flops in PEAK_BF16_FLOPS.items() if re.search(rf"\b{name}{not_a_variant}", device_name))
    return next(peaks, 0.0)


def peak_flops(accelerator: Accelerator) -> float:
    """Return the bf16 FLOP/s of all processes together; 0 if unknown or the run does not compute in bf16 on GPUs."""
    is_bf16_gpu = accelerator.device.type == "cuda" and accelerator.mixed_precision == "bf16"
    return peak_bf16_flops(accelerator.device) * accelerator.num_processes if is_bf16_gpu else 0.0


def peak_memory_bytes() -> int:
    """Return the peak memory of this process: allocated on the GPU, or resident without a GPU."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return torch.cuda.max_memory_allocated() or resident  # compiling for a CPU initialises CUDA too


class Throughput:
    """Times training steps. Restart it after an evaluation or a checkpoint, which are not training."""

    def __init__(self, count_tokens: TokenCount, flops_per_token: float, peak_flops: float):
        """Measure nothing before the first call of `restart`."""
        self.count_tokens, self.flops_per_token, self.peak_flops = count_tokens, flops_per_token, peak_flops
        self.start: tuple[int, float] | None = None  # tokens and time at the first restart
        self.seconds_per_step = math.nan

    def restart(self, completed_steps: int) -> None:
        """Start measuring after `completed_steps`; the first call is the start of training."""
        self.step, self.tokens, self.seconds = completed_steps, self.count_tokens(completed_steps), time.perf_counter()
        self.start = self.start or (self.tokens, self.seconds)

    def measure(self, completed_steps: int) -> dict[str, float]:
        """Return the metrics after `completed_steps`, and restart.

        Returns:
            `train/tokens` of the whole run so far, `perf/tokens_per_second` over all processes since the last restart,
            `perf/peak_memory_bytes` of this process, and `perf/mfu` where the peak of the device is known.
        """
        last_step, tokens, seconds = self.step, self.tokens, self.seconds
        self.restart(completed_steps)
        self.seconds_per_step = (self.seconds - seconds) / (completed_steps - last_step)
        tokens_per_second = (self.tokens - tokens) / (self.seconds - seconds)
        metrics = {"train/tokens": self.tokens, "perf/tokens_per_second": tokens_per_second}
        metrics["perf/peak_memory_bytes"] = peak_memory_bytes()
        if self.peak_flops:
            metrics["perf/mfu"] = tokens_per_second * self.flops_per_token / self.peak_flops
        return metrics

    def seconds_left(self, completed_steps: int, steps: int) -> float:
        """Estimate the seconds until `steps` are completed, from all time so far, with evaluations and saves."""
        assert self.start is not None, "restart is called before the first step"
        tokens, seconds = self.start
        seconds_per_token = (time.perf_counter() - seconds) / (self.count_tokens(completed_steps) - tokens)
        return seconds_per_token * (self.count_tokens(steps) - self.count_tokens(completed_steps))
