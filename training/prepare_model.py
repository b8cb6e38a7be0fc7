"""How a network computes what it computes: each block compiled, recomputed in the backward, or both, and its loss in
chunks.
"""

import hashlib
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from config.schema import TrainConfig
from model import attention
from model.gpt import GPTModel

PROCESSOR_FOLDER = "processor-"


def no_compiler(device: torch.device) -> str:
    """What torch.compile lacks on this machine to compile for `device`, or nothing."""
    if device.type == "cuda" and not attention.HAS_TRITON:
        return "no Triton"
    default = "clang++" if sys.platform == "darwin" else "g++"
    compilers = [os.environ.get("CXX", default)] if device.type == "cpu" else [os.environ.get("CC", "gcc"), "clang"]
    if not any(map(shutil.which, compilers)):
        return f"no compiler: {' or '.join(compilers)}"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.exists() else f"no {header}, which the package python3-dev brings"


def separate_compiled_code() -> None:
    """Keep what torch.compile makes for this kind of processor in a folder of its own, below torch's.

    Inductor finds code again by a key that says nothing of the processor. It wrote loops of 8 numbers under
    ATEN_CPU_CAPABILITY=avx2; a process without that takes them, builds them for registers of 16, and writes beyond the
    end of tensors. And as it builds with -march=native, a home directory that several machines share would give one of
    them the other's instructions.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # slow to import

    features = {name: known for name, known in torch.cpu.get_capabilities().items() if isinstance(known, bool)}
    kind = json.dumps([os.environ.get("ATEN_CPU_CAPABILITY"), features], sort_keys=True)
    folder = Path(cache_dir())
    if folder.name.startswith(PROCESSOR_FOLDER):  # chosen before, here or by the process that started this one
        folder = folder.parent
    digest = hashlib.sha256(kind.encode()).hexdigest()[:8]
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"{PROCESSOR_FOLDER}{digest}")


def recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`forward`, which keeps its inputs only and runs again in the backward.

    It must be a function of this repository, not `checkpoint` with arguments: torch.compile begins at the first frame
    that is not torch's own, finds none behind `checkpoint`, and leaves the block uncompiled without a word.
    """

    def forward_keeping_inputs(*inputs):
        return checkpoint(forward, *inputs, use_reentrant=False)

    return forward_keeping_inputs


def prepare_network(network: GPTModel, config: TrainConfig, device: torch.device) -> None:
    """Set how the network computes what it computes: each block recomputed in the backward, compiled, or both, and the
    loss in chunks."""
    compiled = config.compile and not no_compiler(device)
    if compiled:
        separate_compiled_code()
        network.next_token_loss.compile()
    network.next_token_loss.chunked = True if compiled and config.chunked_loss is None else config.chunked_loss
    for block in network.blocks:
        if config.activation_checkpointing:
            block.forward = recomputed(block.forward)
        if compiled:
            # In place: names stay clean, and DDP does not split the graph at its buckets. With dropout drawn as eager
            # draws it, so that a run may go on compiled or not.
            block.compile(options={"fallback_random": True})
