"""Waiting for the next batch: never for ever, and never longer than whoever asks for a stop will wait."""

import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing import active_children
from multiprocessing.queues import Queue
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.utils.data import DataLoader

from config.errors import RunError
from distributed.signals import StopSignal, ignore_stop_signals

POLL_SECONDS = 0.2
SHARED = "/dev/shm"  # where tensors lie that one process gives to another
LONGEST_TMPDIR = 75  # a socket's path has room for 107 bytes, and Python's names in that folder take 32


def start_worker(worker_id: int) -> None:
    """Called first in each process that loads data.

    Whoever signals all processes at once must not stop the training without its data. And a batch that cannot be sent
    ends the process: Python would print why and go on, while the training waits for that batch.
    """
    ignore_stop_signals()
    Queue._on_queue_feeder_error = staticmethod(_end_process)


def _end_process(error: Exception, batch: Any) -> None:
    traceback.print_exc()
    os._exit(1)


class LoaderCheck:
    """Whether the processes that load data still bring it; all processes together learn it if those of one do not."""

    def __init__(self, accelerator: Accelerator, timeout_seconds: int, stop_signal: StopSignal):
        self.rank, self.stop_signal = accelerator.process_index, stop_signal
        self.timeout_seconds = timeout_seconds / 2  # others wait in a collective operation, which must not time out
        self.problem: str | None = None

    @property
    def failed(self) -> bool:
        """Whether no more batches come to this process; then all should come to `require_batches` soon."""
        return self.problem is not None

    def batches(self, loader: DataLoader) -> Iterator[Any]:
        """What the loader gives. It ends early where a batch is late and a stop was asked for, and where one is later
        than half of `timeout_seconds` or cannot come any more, which is then the `problem`."""
        if loader.num_workers == 0:
            yield from loader
            return
        handler, others = signal.getsignal(signal.SIGCHLD), active_children()
        try:
            batches = iter(loader)
        except OSError as error:  # there is no room for its queues
            self._fail(loader, f"cannot start the processes that load data: {error}")
            return
        # torch would tell of a dead process by an error in the midst of whatever training does. It is also found below.
        signal.signal(signal.SIGCHLD, handler)
        workers = [process for process in active_children() if process not in others]
        # In a thread: the loader has a timeout too, but not for all that it waits for.
        thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        try:
            while (batch := self._next(batches, thread, loader)) is not None:
                yield batch
        finally:
            thread.shutdown(wait=False)
            for process in workers:  # at its end Python would wait for them, for ever if one hangs
                process.kill()

    def require_batches(self, done: int) -> None:
        """Called by all processes together, after `done` steps.

        Raises:
            RunError: on all of them, where batches come no more to one.
        """
        if problems := [problem for problem in gather_object([self.problem]) if problem]:
            raise RunError(f"step {done + 1}: {problems[0]}")

    def _next(self, batches: Iterator[Any], thread: ThreadPoolExecutor, loader: DataLoader) -> Any:
        """The next batch; None if there is none."""
        start, batch = time.monotonic(), thread.submit(next, batches, None)
        while not wait([batch], POLL_SECONDS).done:
            if self.stop_signal.received:
                return None
            if time.monotonic() - start > self.timeout_seconds:
                self._fail(loader, f"waited {self.timeout_seconds:g} s for a batch from the processes that load data")
                return None
        try:
            return batch.result()
        except (RuntimeError, OSError, EOFError) as error:
            if str(error).startswith("Caught "):  # raised by the data set, and sent here with its traceback
                raise
            self._fail(loader, f"lost one of the processes that load data: {error}")
            return None

    def _fail(self, loader: DataLoader, problem: str) -> None:
        memory = f", {shutil.disk_usage(SHARED).free / 1e6:,.1f} MB are free" if os.path.isdir(SHARED) else ""
        self.problem = (
            f"process {self.rank} {problem} (data.num_workers: {loader.num_workers}; what these said stands above). "
            f"Usual causes: a TMPDIR of more than {LONGEST_TMPDIR} bytes (it is {tempfile.gettempdir()}), no room in "
            f"{SHARED} (docker run --shm-size{memory}), a slow disk. With --data.num_workers 0 there are no such "
            "processes"
        )
