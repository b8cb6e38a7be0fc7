"""Give this process an Apple GPU that computes on the CPU: `install()`; see README.md."""

import math
import types
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
import torchgen
import yaml

from tests.fake_cuda import device

NATIVE_FUNCTIONS = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"


def install() -> types.ModuleType:
    """Replace torch's MPS in this process.

    Returns:
        The emulator, whose `operations()` are the names of the operations that ran on the device.
    """
    ext = device.load("-DFAKE_MPS")
    torch._C._has_mps = True
    private = dict(
        is_available=lambda: True,
        is_on_macos_or_newer=lambda major, minor: True,
        get_default_generator=lambda: ext.generator(0),
        deviceSynchronize=lambda: ext.synchronize("device"),
        emptyCache=lambda: None,
        currentAllocatedMemory=ext.live_bytes,
        driverAllocatedMemory=ext.live_bytes,
        recommendedMaxMemory=lambda: 16 * 2**30,
    )
    for name, function in private.items():
        setattr(torch._C, f"_mps_{name}", function)
    for remembered in (torch.backends.mps.is_available, torch.backends.mps.is_macos_or_newer):
        remembered.cache_clear()
    torch.nn.functional.scaled_dot_product_attention = math_attention
    return ext


def math_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """Attend as torch does on MPS where gradients are needed; torch asks a table of kernels that this build lacks."""
    if attn_mask is not None:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -math.inf)
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


@cache
def backends() -> dict[str, set[str]]:
    """Return the backends that have a kernel of their own for each operation, by the table that torch is built from."""
    functions = yaml.load(NATIVE_FUNCTIONS.read_text(), yaml.CSafeLoader)
    return {
        "aten::" + function["func"].partition("(")[0]: set(", ".join(function.get("dispatch", {})).split(", "))
        for function in functions
    }


def without_kernel(operations: Iterable[str]) -> list[str]:
    """Return those of the operations for which MPS has no kernel."""
    return sorted(name for name in operations if "MPS" not in backends().get(name, ()))
