"""Rendezvous of processes that survives elastic restarts.

The launcher's key-value store outlives a restart of the processes, so a new process may read an address that was
written before the crash, and wait for it until the timeout (pytorch#135712). Restart counts cannot separate the keys,
because each machine counts its own restarts. Therefore the processes of each start first agree on a fresh prefix.
"""

import os
import sys
import time
from datetime import timedelta
from uuid import uuid4

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage] public

from config.errors import RunError

REPORT_AFTER_SECONDS = 5
POLL_SECONDS = 0.02


def fresh_store(rank: int, num_processes: int, timeout_seconds: float) -> Store:
    """Return the launcher's store under a prefix that only the processes of this start use; all call this together.

    Every process has a random name, and the name of process 0 is the prefix. Each of the others publishes its name
    (question/RANK), receives the prefix (answer/NAME) and confirms it (joined/PREFIX/RANK). Process 0 may also answer a
    name that a dead process left in the store, but nobody confirms that answer. Raise RunError after `timeout_seconds`.
    """
    address, own_name, start, is_reported = os.environ["MASTER_ADDR"], uuid4().hex, time.monotonic(), False
    try:
        server = TCPStore(
            address,
            int(os.environ["MASTER_PORT"]),
            is_master=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
        store = PrefixStore("start", server)
        if rank > 0:
            store.set(f"question/{rank}", own_name)
            prefix = store.get(f"answer/{own_name}").decode()  # blocks until process 0 has answered
            store.set(f"joined/{prefix}/{rank}", "")
            return PrefixStore(prefix, store)
        absent = list(range(1, num_processes))
        while absent := [other for other in absent if not store.check([f"joined/{own_name}/{other}"])]:
            for question in (f"question/{other}" for other in absent):
                if store.check([question]):
                    store.set(f"answer/{store.get(question).decode()}", own_name)
            waited = time.monotonic() - start
            if waited > timeout_seconds:
                raise TimeoutError(f"process(es) {absent} did not start within {timeout_seconds} s")
            if waited > REPORT_AFTER_SECONDS and not is_reported:
                is_reported = True
                print(f"still waiting for process(es) {absent} to reach {address} ...", file=sys.stderr, flush=True)
            time.sleep(POLL_SECONDS)
    except (DistError, TimeoutError) as error:
        raise RunError(
            f"process {rank} of {num_processes} cannot join the others at MASTER_ADDR {address}: "
            f"{str(error).splitlines()[0]}; to train with one process, unset WORLD_SIZE"
        ) from None
    return PrefixStore(own_name, store)
