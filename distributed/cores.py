"""CPU cores of this process: their number, and low priority for background threads. Does not import torch."""

import os
import subprocess
import sys
from contextlib import suppress


def available_cores() -> int:
    """Return the number of cores that this process may run on (its CPU affinity, where the system has one).

    On Apple silicon only the performance cores: in every operation they would wait for the slower efficiency cores.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    command = ["sysctl", "-n", "hw.perflevel0.physicalcpu"]
    with suppress(OSError, ValueError, subprocess.CalledProcessError):  # Intel Macs have no such number
        return int(subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True))
    return os.cpu_count() or 1


def lower_thread_priority() -> None:
    """Give the calling thread the lowest priority; thread pools for file work during training call it.

    Training threads wait for each other in every operation, so a background thread that takes one core makes
    each step several times slower. Only Linux has a priority per thread; elsewhere this does nothing.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # background work at normal priority is still correct
            os.nice(19)
