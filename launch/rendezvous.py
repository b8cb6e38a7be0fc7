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

from config import RunError
from launch.environment import size_variable

SILENT_SECONDS = 5
POLL_SECONDS = 0.02


def fresh_store(rank: int, num_processes: int, timeout_seconds: float) -> Store:
    """The launcher's store under a prefix that only the processes of this start know; called by all of them.

    Process 0 invites those that it sees, again and again, until all of one invitation have accepted it: an entry that
    a dead process left is replaced by its successor's before that can happen.

    Raises:
        RunError: not all processes came.
    """
    address, of_launcher = os.environ["MASTER_ADDR"], os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            address, int(os.environ["MASTER_PORT"]), is_master=rank == 0 and not of_launcher, wait_for_workers=False,
            timeout=timedelta(seconds=timeout_seconds), multi_tenant=True,
        )  # fmt: skip
    except DistError as error:
        why = str(error).splitlines()[0]
        raise RunError(f"process {rank} finds no meeting place at MASTER_ADDR {address}: {why}") from None
    store, me, start, said = PrefixStore("start", store), uuid4().hex, time.monotonic(), False
    if rank > 0:
        store.set(f"present/{rank}", me)
    while (waited := time.monotonic() - start) < timeout_seconds:
        if rank == 0:
            keys = [f"present/{other}" for other in range(1, num_processes)]
            invited = [store.get(key).decode() if store.check([key]) else "absent" for key in keys]
            if not said and waited > SILENT_SECONDS and "absent" in invited:
                absent = [other for other, name in enumerate(invited, start=1) if name == "absent"]
                print(f"still waiting for process(es) {absent} to be started, on {address} or elsewhere, "
                      f"for at most {timeout_seconds} s ({size_variable(os.environ)}={num_processes}) ...",
                      file=sys.stderr, flush=True)  # fmt: skip
                said = True
            store.set("invitation", " ".join([me, *invited]))
            if store.check([f"accepted/{me}/{other}" for other in invited]):
                store.set(f"begin/{me}", "")
                return PrefixStore(me, store)
        elif store.check(["invitation"]):
            host, *invited = store.get("invitation").decode().split()
            if invited[rank - 1] == me:
                store.set(f"accepted/{host}/{me}", "")
                if store.check([f"begin/{host}"]):
                    return PrefixStore(host, store)
        time.sleep(POLL_SECONDS)
    told_by = size_variable(os.environ)
    raise RunError(
        f"process {rank} waited {timeout_seconds} s for all {num_processes} processes to start, as many as {told_by} "
        f"of the environment says; if there is but one, unset {told_by}"
    )
