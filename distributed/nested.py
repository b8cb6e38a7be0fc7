"""Trainings that are a part of something else: an audit, a plan, verify.py. All processes call these together."""

import io
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate.utils import gather_object

from distributed.signals import STOP_SIGNALS, Preempted, StopSignal
from distributed.world import is_main_process, num_processes


def broadcast_from_main(value: Any) -> Any:
    """What the main process gives here, on all processes."""
    box = [value]  # which the others find filled
    if num_processes() > 1:
        dist.broadcast_object_list(box)
    return box[0]


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """One folder for all processes, removed when the main one is done with it."""
    with tempfile.TemporaryDirectory(prefix=prefix) if is_main_process() else nullcontext() as folder:
        yield Path(broadcast_from_main(folder))


@contextmanager
def nested_training() -> Iterator[None]:
    """Around a training: it is silent, and after its `stop_after` the whole goes on, once all processes are done.

    A signal, however, asks the whole to stop. Afterwards signals do again what they did before.

    Raises:
        Preempted: on all processes alike, where one of them got a signal.
    """
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        with redirect_stdout(io.StringIO()), suppress(Preempted):
            yield
    finally:
        if not StopSignal.received:  # otherwise a second signal must still find the handler that stops at once
            for number, handler in before.items():
                signal.signal(number, handler)
    if any(gather_object([StopSignal.received])):
        raise Preempted("stopped as asked, before the end")
