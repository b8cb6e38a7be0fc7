"""Rendezvous of processes that survives elastic restarts.

The launcher's key-value store outlives a restart of the processes, so a new process may read the address that another
one had before the crash, and wait for it until the timeout (pytorch#135712; launchers with a static rendezvous share
the store too). Restart counts cannot separate the keys, because each machine counts its own restarts. Therefore the
processes of each start first agree on a fresh prefix.
"""

import os
import sys
import time
from datetime import timedelta
from uuid import uuid4

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage] public

from config.errors import RunError
from distributed.environment import world_size_variable

SILENT_SECONDS = 5
POLL_SECONDS = 0.02


def fresh_store(rank: int, num_processes: int, timeout_seconds: float) -> Store:
    """Return the launcher's store under a prefix that only the processes of this start use; all call this together.

    Process 0 repeatedly invites the processes whose names it finds in the store, until all processes of one invitation
    have accepted it. A name left by a dead process is never accepted, and its successor overwrites it.

    Raises:
        RunError: Not all processes arrived within `timeout_seconds`.
    """
    store = PrefixStore("start", _launcher_store(rank, timeout_seconds))
    own_name, start, reported = uuid4().hex, time.monotonic(), False
    size_variable = world_size_variable(os.environ)
    if rank > 0:
        store.set(f"present/{rank}", own_name)
    while (waited := time.monotonic() - start) < timeout_seconds:
        absent: list[int] = []
        if rank == 0:
            host, absent = _invite(store, own_name, num_processes)
        else:
            host = _accept(store, own_name, rank)
        if host is not None:
            return PrefixStore(host, store)
        if absent and not reported and waited > SILENT_SECONDS:
            print(
                f"still waiting for process(es) {absent} to start, on {os.environ['MASTER_ADDR']} or elsewhere, for at "
                f"most {timeout_seconds} s ({size_variable}={num_processes}) ...",
                file=sys.stderr,
                flush=True,
            )
            reported = True
        time.sleep(POLL_SECONDS)
    raise RunError(
        f"process {rank} waited {timeout_seconds} s for all {num_processes} processes to start ({size_variable} in the "
        f"environment); to train with one process, unset {size_variable}"
    )


def _launcher_store(rank: int, timeout_seconds: float) -> Store:
    address = os.environ["MASTER_ADDR"]
    launcher_hosts_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return TCPStore(
            address,
            int(os.environ["MASTER_PORT"]),
            is_master=rank == 0 and not launcher_hosts_store,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_seconds),
            multi_tenant=True,
        )
    except DistError as error:
        reason = str(error).splitlines()[0]
        raise RunError(f"process {rank} cannot connect to MASTER_ADDR {address}: {reason}") from None


def _invite(store: Store, own_name: str, num_processes: int) -> tuple[str | None, list[int]]:
    """Invite all present processes (process 0); return its name if all have accepted, else None and absent ranks."""
    others = range(1, num_processes)
    names = {other: store.get(f"present/{other}").decode() for other in others if store.check([f"present/{other}"])}
    invited = [names.get(other, "absent") for other in others]
    store.set("invitation", " ".join([own_name, *invited]))
    if store.check([f"accepted/{own_name}/{name}" for name in invited]):
        store.set(f"begin/{own_name}", "")
        return own_name, []
    return None, [other for other in others if other not in names]


def _accept(store: Store, own_name: str, rank: int) -> str | None:
    """Accept an invitation (all other processes); return the name of process 0 once all have accepted, else None."""
    if not store.check(["invitation"]):
        return None
    host, *invited = store.get("invitation").decode().split()
    if invited[rank - 1] != own_name:  # addressed to the process that had this rank before a restart
        return None
    store.set(f"accepted/{host}/{own_name}", "")
    return host if store.check([f"begin/{host}"]) else None
