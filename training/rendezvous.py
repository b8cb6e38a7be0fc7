"""Processes that find each other again after an elastic restart.

The launcher's key-value store outlives a restart, so a process may read the address that its neighbour had before the
crash, and connect to nothing (pytorch#135712; launchers with a static rendezvous still share the store). Restart counts
cannot keep the keys apart, since each machine counts its own. So every start agrees on a fresh prefix first.
"""

import time
from uuid import uuid4

from torch.distributed import PrefixStore, Store

TIMEOUT_SECONDS = 600  # machines of one job start at different times
POLL_SECONDS = 0.02


def fresh_store(store: Store, rank: int, num_processes: int) -> Store:
    """`store` under a prefix that only the processes of this start know; called by all of them.

    Process 0 invites those that it sees, again and again, until all of one invitation have accepted it: an entry that
    a dead process left is replaced by its successor's before that can happen.

    Raises:
        TimeoutError: not all processes came.
    """
    store, me = PrefixStore("start", store), uuid4().hex
    if rank > 0:
        store.set(f"present/{rank}", me)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if rank == 0:
            keys = [f"present/{other}" for other in range(1, num_processes)]
            invited = [store.get(key).decode() if store.check([key]) else "absent" for key in keys]
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
    raise TimeoutError(f"process {rank} waited {TIMEOUT_SECONDS} s for all {num_processes} processes to start")
