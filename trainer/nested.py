"""Training as part of other work (tools.plan, verify.py). All processes call these functions together."""

import io
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from pathlib import Path

from accelerate.utils import gather_object

from runtime.distributed.collectives import broadcast_from_main
from runtime.distributed.signals import STOP_SIGNALS, Preempted, StopSignal, set_handler
from runtime.distributed.world import is_main_process


@contextmanager
def shared_temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield one temporary folder for all processes; the main process removes it at the end."""
    with tempfile.TemporaryDirectory(prefix=prefix) if is_main_process() else nullcontext() as folder:
        yield Path(broadcast_from_main(folder))


@contextmanager
def nested_training() -> Iterator[None]:
    """Hide what the training inside prints, and suppress the Preempted that it raises at its `stop_after`.

    A signal to any process raises Preempted on all processes. Without one, the caller's signal handlers are restored.
    """
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        with redirect_stdout(io.StringIO()), suppress(Preempted):
            yield
    finally:
        if not StopSignal.received:  # otherwise StopSignal's handler stays, so that a second signal ends the process
            for number, handler in handlers.items():
                set_handler(number, handler)
    if any(gather_object([StopSignal.received])):
        raise Preempted("stopped by a signal before the end")
