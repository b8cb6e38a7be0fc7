"""CPU cores of this process: their number and load, and low priority for background threads. Does not import torch."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MAX_LOAD = 1.5  # of a core, averaged over a minute; the program that ran before this one may have left 1
OWN_CGROUPS, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Return the number of cores that this process may use: its CPU affinity, and the CPU quota of its container.

    Rounded down, because the threads of an operation wait for each other. On Apple silicon only the performance cores:
    all would wait for the slower efficiency cores.
    """
    if hasattr(os, "sched_getaffinity"):
        return max(1, math.floor(min([len(os.sched_getaffinity(0)), *_cpu_quotas()])))
    command = ["sysctl", "-n", "hw.perflevel0.physicalcpu"]
    with suppress(OSError, ValueError, subprocess.CalledProcessError):  # Intel Macs have no such number
        return int(subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True))
    return os.cpu_count() or 1


def describe_load() -> str:
    """Return such as "the load is 10.5 on 4 cores" if other programs keep the cores busy; otherwise ""."""
    load, cores = 0.0, os.cpu_count() or 1
    with suppress(OSError):  # some containers do not tell it
        load = os.getloadavg()[0]
    return f"the load is {load:.1f} on {cores} cores" if load > MAX_LOAD * cores else ""


def _cpu_quotas() -> Iterator[float]:
    """Yield the CPU quotas, in cores, of this process's cgroup and of those around it (Linux, man 7 cgroups)."""
    lines = OWN_CGROUPS.read_text().splitlines() if OWN_CGROUPS.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        # Version 2 has one tree, and version 1 a tree for each controller.
        root = CGROUPS / "cpu" if controllers else CGROUPS
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = root / path.strip("/")
        for folder in (group, *group.parents[: len(group.parts) - len(root.parts)]):
            with suppress(OSError, ValueError):  # no such file, or "max"
                if controllers:
                    quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                else:
                    quota, period = (folder / "cpu.max").read_text().split()
                if int(quota) > 0:  # -1: none
                    yield int(quota) / int(period)


def lower_thread_priority() -> None:
    """Give the calling thread the lowest priority; thread pools for file work during training call it.

    Training threads wait for each other in every operation, so a background thread that takes one core makes
    each step several times slower. Only Linux has a priority per thread; elsewhere this does nothing.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # background work at normal priority is still correct
            os.setpriority(os.PRIO_PROCESS, 0, 19)  # os.nice would add 19 to the present one
