"""CPU setup: number of threads, memory allocator, and arithmetic with the same bits on every x86-64 processor."""

import ctypes
import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from runtime.config.errors import ConfigError
from runtime.machine.cores import available_cores

# Options of mallopt (man 3 mallopt), in order: the amount of free memory above which it is returned to the system, the
# extra memory per request, and the size above which a block is mapped separately (and unmapped as soon as it is freed).
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
# From MKL's mkl_service.h: the argument that queries the current code branch, and the branch named COMPATIBLE.
MKL_CBWR_BRANCH, MKL_CBWR_COMPATIBLE = 1, 3


def prepare_cpu() -> None:
    """Divide the cores among the processes of this machine, and let malloc reuse freed memory.

    By default malloc unmaps large blocks when they are freed, and the kernel zeroes them again for the next tensor.
    """
    launcher: Mapping[str, str] = os.environ
    with suppress(psutil.Error):  # the parent may belong to another user
        launcher = psutil.Process(os.getppid()).environ()
    if threads := threads_to_set(os.environ, launcher, available_cores()):
        torch.set_num_threads(threads)
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):  # glibc only
        for option, value in ((M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**27), (M_MMAP_THRESHOLD, 2**25)):
            libc.mallopt(option, value)


def processor_name() -> str:
    """Return the model of the processor, such as "AMD EPYC (family 25, model 17)"; not on Linux, only its kind."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", cpuinfo, re.MULTILINE))
    name = fields.get("model name", platform.processor() or platform.machine())
    # A shared machine may hide the name of its model.
    return f"{name} (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else name


def prepare_exact() -> None:
    """Select algorithms whose bits do not depend on the machine. Call this before anything is computed."""
    torch.use_deterministic_algorithms(True)
    # Filling is slow, and no code here reads uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue] no stub
    torch.set_num_threads(1)  # the number of threads decides the order of a sum
    use_portable_arithmetic()


def use_portable_arithmetic() -> None:
    """On x86-64 compute with AVX2 and nothing newer; on a GPU make matrix products deterministic.

    ATen, oneDNN and MKL multiply matrices with the widest instructions that the processor has, and each width adds
    in a different order. Every x86-64 processor with AVX2 can run the code selected here. Of MKL's modes only
    COMPATIBLE gives the same bits on Intel and AMD processors. Other architectures (ARM) are left as they are. Raise
    ConfigError if the processor lacks AVX2, or if torch or MKL has already selected different code.
    """
    # cuBLAS is deterministic only with a fixed workspace; it reads the variable at its first product.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if platform.machine() not in ("x86_64", "AMD64"):
        return
    os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}
    if (capability := torch.backends.cpu.get_cpu_capability()) != "AVX2":
        raise ConfigError(
            f"exact: true needs AVX2, but torch computes with {capability}: either this processor lacks AVX2, or "
            "something was computed before; in the second case set ATEN_CPU_CAPABILITY=avx2 in the environment"
        )
    # MKL selects its code at its first product. mkl_cbwr_get has this name inside torch; builds without MKL lack it.
    mkl_cbwr_get = getattr(ctypes.CDLL(torch._C.__file__), "mkl_serv_cbwr_get", None)
    if mkl_cbwr_get is not None and mkl_cbwr_get(MKL_CBWR_BRANCH) != MKL_CBWR_COMPATIBLE:
        raise ConfigError(
            "exact: true needs MKL's compatible mode, but this process has already multiplied matrices in another "
            "mode; start a new process, or set MKL_CBWR=COMPATIBLE in the environment"
        )


def threads_to_set(environment: Mapping[str, str], launcher: Mapping[str, str], cores: int) -> int | None:
    """Return the number of compute threads for this process; None if the user has set OMP_NUM_THREADS.

    `environment` is that of this process and `launcher` that of its parent: launchers set OMP_NUM_THREADS=1 unless it
    is set already. More threads than cores wait for each other, which makes a small model ten times slower.
    """
    set_by_launcher = "OMP_NUM_THREADS" not in launcher and environment.get("OMP_NUM_THREADS") == "1"
    launched = {"LOCAL_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"} & environment.keys()
    if "OMP_NUM_THREADS" in environment and not (launched and set_by_launcher):
        return None
    return max(1, cores // int(environment.get("LOCAL_WORLD_SIZE", 1)))
