"""Processes that find each other again after an elastic restart.

The launcher's key-value store outlives a restart, so a process may read the address that its neighbour had before the
crash, and connect to nothing (pytorch#135712; launchers with a static rendezvous still share the store). Restart counts
cannot keep the keys apart, since each machine counts its own. So every start agrees on a fresh prefix first.
"""

import os
import sys
import time
from datetime import timedelta
from uuid import uuid4

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from config.errors import RunError
from distributed.environment import size_variable

SILENT_SECONDS = 5
POLL_SECONDS = 0.02


def fresh_store(rank: int, num_processes: int, timeout_seconds: float) -> Store:
    """The launcher's store under a prefix that only the processes of this start know; called by all of them.

    Process 0 invites those that it sees, again and again, until all of one invitation have accepted it: an entry that
    a dead process left is replaced by its successor's before that can happen.

    Raises:
        RunError: not all processes came.
    """
    store = PrefixStore("start", _launchers_store(rank, timeout_seconds))
    own_name, start, said = uuid4().hex, time.monotonic(), False
    if rank > 0:
        store.set(f"present/{rank}", own_name)
    while (waited := time.monotonic() - start) < timeout_seconds:
        absent = []
        if rank == 0:
            host, absent = _invite(store, own_name, num_processes)
        else:
            host = _accept(store, own_name, rank)
        if host is not None:
            return PrefixStore(host, store)
        if absent and not said and waited > SILENT_SECONDS:
            print(
                f"still waiting for process(es) {absent} to be started, on {os.environ['MASTER_ADDR']} or elsewhere, "
                f"for at most {timeout_seconds} s ({size_variable(os.environ)}={num_processes}) ...",
                file=sys.stderr,
                flush=True,
            )
            said = True
        time.sleep(POLL_SECONDS)
    told_by = size_variable(os.environ)
    raise RunError(
        f"process {rank} waited {timeout_seconds} s for all {num_processes} processes to start, as many as {told_by} "
        f"of the environment says; if there is but one, unset {told_by}"
    )


def _launchers_store(rank: int, timeout_seconds: float) -> Store:
    address = os.environ["MASTER_ADDR"]
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return TCPStore(
            address,
            int(os.environ["MASTER_PORT"]),
            is_master=rank == 0 and not of_launcher,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_seconds),
            multi_tenant=True,
        )
    except DistError as error:
        why = str(error).splitlines()[0]
        raise RunError(f"process {rank} finds no meeting place at MASTER_ADDR {address}: {why}") from None


def _invite(store: Store, own_name: str, num_processes: int) -> tuple[str | None, list[int]]:
    """Of process 0: its name, if all that it sees have accepted its invitation, and who is absent."""
    others = range(1, num_processes)
    names = {other: store.get(f"present/{other}").decode() for other in others if store.check([f"present/{other}"])}
    invited = [names.get(other, "absent") for other in others]
    store.set("invitation", " ".join([own_name, *invited]))
    if store.check([f"accepted/{own_name}/{name}" for name in invited]):
        store.set(f"begin/{own_name}", "")
        return own_name, []
    return None, [other for other in others if other not in names]


def _accept(store: Store, own_name: str, rank: int) -> str | None:
    """Of all others: the name of the process 0 that has invited this one, once all have accepted."""
    if not store.check(["invitation"]):
        return None
    host, *invited = store.get("invitation").decode().split()
    if invited[rank - 1] != own_name:  # it is for the process that had this rank before the restart
        return None
    store.set(f"accepted/{host}/{own_name}", "")
    return host if store.check([f"begin/{host}"]) else None
