"""Training throughput: tokens per second, and model FLOPs utilisation (MFU), the fraction of the device's peak."""

import math
import re
import resource
import sys
import time

import torch
from accelerate import Accelerator

from data.sampler import BatchSizes

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

    def __init__(
        self,
        batch_sizes: BatchSizes,
        seq_len: int,
        flops_per_token: float,
        peak_flops: float,
        since: tuple[int, int] = (0, 0),
    ):
        """Start at the step `since[0]`, before which the run trained `since[1]` tokens."""
        self.batch_sizes, self.seq_len, self.since = batch_sizes, seq_len, since
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.start: tuple[int, float] | None = None  # tokens and time at the first restart
        self.seconds_per_step = math.nan

    def tokens_before(self, step: int) -> int:
        """Return the training tokens of the run in steps 0 to `step` - 1."""
        return self.batch_sizes.tokens(step, self.seq_len, self.since)

    def restart(self, step: int) -> None:
        """Start measuring at `step`; the first call is the start of training."""
        self.step, self.tokens, self.seconds = step, self.tokens_before(step), time.perf_counter()
        self.start = self.start or (self.tokens, self.seconds)

    def measure(self, step: int) -> dict[str, float]:
        """Return the metrics, and restart.

        Returns:
            `train/tokens` in steps 0 to `step` - 1, `perf/tokens_per_second` over all processes since the last restart,
            `perf/peak_memory_bytes` of this process, and `perf/mfu` where the peak of the device is known.
        """
        last_step, tokens, seconds = self.step, self.tokens, self.seconds
        self.restart(step)
        self.seconds_per_step = (self.seconds - seconds) / (step - last_step)
        tokens_per_second = (self.tokens - tokens) / (self.seconds - seconds)
        metrics = {"train/tokens": self.tokens, "perf/tokens_per_second": tokens_per_second}
        metrics["perf/peak_memory_bytes"] = peak_memory_bytes()
        if self.peak_flops:
            metrics["perf/mfu"] = tokens_per_second * self.flops_per_token / self.peak_flops
        return metrics

    def seconds_left(self, step: int, steps: int) -> float:
        """Estimate the seconds until step `steps` from the time per token so far, evaluations and saves included."""
        assert self.start is not None, "restart is called before the first step"
        tokens, seconds = self.start
        seconds_per_token = (time.perf_counter() - seconds) / (self.tokens_before(step) - tokens)
        return seconds_per_token * (self.tokens_before(steps) - self.tokens_before(step))
