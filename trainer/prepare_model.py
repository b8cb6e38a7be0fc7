"""Compilation, activation checkpointing and the chunked loss of a model."""

import hashlib
import json
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from model import attention
from model.gpt import GPTModel, Teacher
from runtime.config.errors import ConfigError
from runtime.config.schema import TrainConfig
from trainer.cpu_kernels import use_cpu_kernels
from trainer.schedule import SCHEDULES

PROCESSOR_FOLDER = "processor-"


def cache_dir() -> str:
    """Return the folder of compiled code."""
    from torch._inductor.runtime import cache_dir_utils  # slow to import

    return cache_dir_utils.cache_dir()


def missing_compiler(device: torch.device) -> str:
    """Describe what this machine lacks to compile for `device` with torch.compile; empty if nothing."""
    if device.type == "cuda" and not attention.HAS_TRITON:
        return "no Triton"
    default = "clang++" if sys.platform == "darwin" else "g++"
    compilers = [os.environ.get("CXX", default)] if device.type == "cpu" else [os.environ.get("CC", "gcc"), "clang"]
    if not any(map(shutil.which, compilers)):
        return f"no compiler: {' or '.join(compilers)}"
    if device.type == "cpu":
        # torch does not quote these paths in the command lines of the compiler and the linker.
        unquoted = {
            "torch is installed": str(Path(torch.__file__).parent),
            "Python's library is": sysconfig.get_config_var("LIBDIR") or "",
            "the compilation cache (TORCHINDUCTOR_CACHE_DIR, or TMPDIR) is": cache_dir(),
        }
        for what, path in unquoted.items():
            if re.search(r"[^\w./+@:~-]", path, re.ASCII):
                return f"{what} in {path!r}; use a path of plain letters, without spaces and quotes"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.exists() else f"no {header}; install the package python3-dev"


def separate_compilation_caches() -> None:
    """Give the compilation cache a subdirectory for each kind of processor.

    Inductor's cache key does not contain the processor, and it compiles with -march=native: machines that share a home
    directory would run each other's instructions. Code generated under ATEN_CPU_CAPABILITY=avx2 (vectors of 8 floats)
    would be reused by a process without it, compiled for vectors of 16, and write beyond the end of tensors.
    """
    features = {name: known for name, known in torch.cpu.get_capabilities().items() if isinstance(known, bool)}
    kind = json.dumps([os.environ.get("ATEN_CPU_CAPABILITY"), features], sort_keys=True)
    folder = Path(cache_dir())
    if folder.name.startswith(PROCESSOR_FOLDER):  # set before, here or by the parent process
        folder = folder.parent
    digest = hashlib.sha256(kind.encode()).hexdigest()[:8]
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"{PROCESSOR_FOLDER}{digest}")


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `forward` in activation checkpointing: it keeps only its inputs and runs again in the backward.

    Not `partial(checkpoint, forward)`: torch.compile compiles from the first frame outside torch, and without a frame
    in this repository it would silently leave the block uncompiled.
    """

    def forward_keeping_inputs(*inputs, **named_inputs):
        return checkpoint(forward, *inputs, use_reentrant=False, **named_inputs)

    return forward_keeping_inputs


def prepare_network(network: GPTModel, config: TrainConfig, device: torch.device) -> None:
    """Apply the settings `tf32`, `compile`, `activation_checkpointing` and `chunked_loss`; weights stay the same.

    On a CPU, choose the fastest layers, too.
    """
    if device.type == "cpu":
        use_cpu_kernels(network)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = config.tf32
    compiled = config.compile and not missing_compiler(device)
    if compiled or config.cuda_graph:
        # After eight values torch would run the blocks uncompiled, but a resumed run would compile eight others. A CUDA
        # graph, which contains the whole forward, keeps the value with which it was captured.
        setting, part = ("cuda_graph", network) if config.cuda_graph else ("compile", network.blocks)
        for name in SCHEDULES:
            if getattr(config.model, name, None) and any(name in vars(module) for module in part.modules()):
                raise ConfigError(f"{setting}: true supports no scheduled {name}; set it to false")
    if compiled:
        separate_compilation_caches()
        network.next_token_loss.compile()
    network.next_token_loss.chunked = True if compiled and config.chunked_loss is None else config.chunked_loss
    for block in network.blocks:
        if config.activation_checkpointing:
            block.forward = checkpointed(block.forward)
        if compiled:
            # In place, so that parameters keep their names and DDP does not split the graph at its buckets. With
            # fallback_random dropout is drawn as in eager mode, so that a run may be resumed compiled or not.
            block.compile(options={"fallback_random": True})


def add_teacher(network: GPTModel, model: GPTModel, config: TrainConfig, device: torch.device) -> None:
    """Make `network` learn from `model`, which is frozen and prepared like it."""
    model = model.to(device).requires_grad_(False)
    prepare_network(model, config.replace(activation_checkpointing=False), device)
    network.teacher = Teacher(model, config.teacher.weight, config.teacher.temperature)
