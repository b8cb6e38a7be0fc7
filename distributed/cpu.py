"""How the processor is used: threads, memory, and arithmetic that gives the same bits on every machine."""

import ctypes
import os
import platform
from collections.abc import Mapping
from contextlib import suppress

import psutil
import torch

from config.errors import ConfigError
from model import kernels

# Options of mallopt (man 3 mallopt): when to give memory back to the system, how much to ask it for at once, and from
# what size on a block is one of its own, which goes back as soon as it is freed.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
# Of MKL's mkl_service.h: the question which code is in use, and the answer that stands for every processor.
MKL_CBWR_BRANCH, MKL_CBWR_COMPATIBLE = 1, 3


def prepare_cpu() -> None:
    """Share the cores among the processes of this machine, and keep freed memory for the next tensor.

    If each tensor gave its memory back, the system would have to clear it for the next one.
    """
    if threads := threads_to_set(os.environ, _environment_of_launcher(), available_cores()):
        torch.set_num_threads(threads)
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):  # glibc's; others do as they do
        for option, value in ((M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**27), (M_MMAP_THRESHOLD, 2**25)):
            libc.mallopt(option, value)


def prepare_exact() -> None:
    """Choose, of all ways to compute, those whose bits do not depend on the machine; before anything is computed.

    Raises:
        ConfigError: as `compute_as_any_processor`.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing reads what it did not write
    torch.set_num_threads(1)  # of the CPU: how many share a sum decides its order
    compute_as_any_processor()


def compute_as_any_processor() -> None:
    """On a CPU compute with AVX2 and nothing newer; on a GPU let products be deterministic.

    ATen, oneDNN and MKL multiply matrices with the widest instructions that a processor has, and with each width the
    sums are added in another order. Every x86-64 processor with AVX2 can do what is chosen here; of MKL's modes
    COMPATIBLE is the only one with the same bits on processors of Intel and AMD. Other processors (ARM) compute as they
    do. What is set for cuBLAS is read once, at the first product.

    Raises:
        ConfigError: this is an x86-64 processor without AVX2, or something was computed before.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is deterministic only with a fixed workspace
    if platform.machine() not in ("x86_64", "AMD64"):
        return
    os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}
    kernels.use_onednn = kernels.ONEDNN_IS_THERE
    if (found := torch.backends.cpu.get_cpu_capability()) != "AVX2":
        raise ConfigError(
            f"exact: true computes with AVX2, and torch with {found}: either this processor lacks it, or something was "
            "computed before; then set ATEN_CPU_CAPABILITY=avx2 in the environment"
        )
    # MKL chooses once, with its first product. Inside torch its mkl_cbwr_get has this name; builds without MKL lack it.
    mkl_cbwr_get = getattr(ctypes.CDLL(torch._C.__file__), "mkl_serv_cbwr_get", None)
    if mkl_cbwr_get is not None and mkl_cbwr_get(MKL_CBWR_BRANCH) != MKL_CBWR_COMPATIBLE:
        raise ConfigError(
            "exact: true computes in MKL's compatible mode, but this process multiplied matrices before, in another; "
            "start a new one, or set MKL_CBWR=COMPATIBLE in the environment"
        )


def available_cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def threads_to_set(own: Mapping[str, str], of_launcher: Mapping[str, str], cores: int) -> int | None:
    """Threads of a process with the environment `own`: an equal share of the cores, or None if the user chose.

    A launcher sets OMP_NUM_THREADS to 1 if it has none itself. More threads than cores make each other wait, which
    costs a small model a factor of ten.
    """
    set_by_launcher = "OMP_NUM_THREADS" not in of_launcher and own.get("OMP_NUM_THREADS") == "1"
    launched = {"LOCAL_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"} & own.keys()
    if "OMP_NUM_THREADS" in own and not (launched and set_by_launcher):
        return None
    return max(1, cores // int(own.get("LOCAL_WORLD_SIZE", 1)))


def _environment_of_launcher() -> Mapping[str, str]:
    with suppress(psutil.Error):  # of another user, whose environment nobody else may read
        return psutil.Process(os.getppid()).environ()
    return os.environ
