"""Rendezvous of processes that survives elastic restarts.

The launcher's key-value store outlives a restart of the processes, so a new process may read an address that was
written before the crash, and wait for it until the timeout (pytorch#135712). Restart counts cannot separate the keys,
because each machine counts its own restarts. Therefore the processes of each start first agree on a fresh prefix.

That issue is closed, but torch 2.13 still needs this file: if runtime/distributed/launch.py calls init_process_group
without a store, so that torch meets by its own environment variables, then the test
test_launcher_restarts_killed_processes (tests/trainer/checkpoint/test_faults.py) hangs after the restart. Remove the
file once that test passes without it.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from uuid import uuid4

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage] public

from runtime.config.errors import RunError
from runtime.distributed.signals import launcher_is_gone

REPORT_AFTER_SECONDS = 5
POLL_SECONDS = 0.02
CONNECT_SECONDS = 5


def fresh_store(rank: int, num_processes: int, timeout_seconds: float) -> Store:
    """Return the launcher's store under a prefix that only the processes of this start use; all call this together.

    Every process has a random name, and the name of process 0 is the prefix. Each of the others publishes its name
    (question/RANK), receives the prefix (answer/NAME) and confirms it (joined/PREFIX/RANK). Process 0 may also answer a
    name that a dead process left in the store, but nobody confirms that answer. Raise RunError after `timeout_seconds`,
    or when the launcher has been killed.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    own_name, start, is_reported = uuid4().hex, time.monotonic(), False

    def pause(reason: str) -> None:
        if launcher_is_gone():
            raise RunError(f"process {rank} of {num_processes} ends because its launcher has been killed")
        if time.monotonic() - start > timeout_seconds:
            raise TimeoutError(f"{reason} within {timeout_seconds} s")
        time.sleep(POLL_SECONDS)

    try:
        # A launcher has opened its store before it starts a process.
        has_launcher_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_server = rank == 0 and not has_launcher_store
        # TCPStore itself and its `get` would block, even if the launcher is killed.
        while not is_server and (error := connection_error(address, port)):
            if has_launcher_store and isinstance(error, ConnectionRefusedError):
                raise RunError(f"process {rank} of {num_processes} ends because the launcher at {address} has ended")
            pause(f"it could not be reached ({error})")
        timeout = timedelta(seconds=timeout_seconds)
        options = {"is_master": is_server, "timeout": timeout, "wait_for_workers": False, "multi_tenant": True}
        # The constructor waits without limit for an answer, which another program at this port never sends.
        server = in_background(
            lambda: TCPStore(address, port, **options),
            lambda: pause("another program seems to use the port (choose another one): it did not answer"),
        )
        store = PrefixStore("start", server)
        if rank > 0:
            store.set(f"question/{rank}", own_name)
            while not store.check([f"answer/{own_name}"]):
                pause("process 0 did not answer")
            prefix = store.get(f"answer/{own_name}").decode()
            store.set(f"joined/{prefix}/{rank}", "")
            return PrefixStore(prefix, store)
        absent = list(range(1, num_processes))
        while absent := [other for other in absent if not store.check([f"joined/{own_name}/{other}"])]:
            for question in (f"question/{other}" for other in absent):
                if store.check([question]):
                    store.set(f"answer/{store.get(question).decode()}", own_name)
            if time.monotonic() - start > REPORT_AFTER_SECONDS and not is_reported:
                is_reported = True
                print(f"still waiting for process(es) {absent} to reach {address} ...", file=sys.stderr, flush=True)
            pause(f"process(es) {absent} did not start")
    except (DistError, TimeoutError) as error:
        reason = str(error).splitlines()[0]
        if "EADDRINUSE" in reason:
            reason = "another program on this machine uses the port (choose another one)"
        raise RunError(
            f"process {rank} of {num_processes} cannot join the others at MASTER_ADDR:MASTER_PORT {address}:{port}: "
            f"{reason}; to train with one process, unset WORLD_SIZE"
        ) from None
    return PrefixStore(own_name, store)


def in_background(call: Callable[[], Store], wait: Callable[[], object]) -> Store:
    """Return or raise the outcome of `call`, which runs in a thread; `wait`, called meanwhile, may raise to give up."""
    outcome: Future[Store] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while not outcome.done():
        wait()
    return outcome.result()


def connection_error(address: str, port: int) -> OSError | None:
    """Return why the port cannot be reached; None if it can."""
    try:
        socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return error
    return None
