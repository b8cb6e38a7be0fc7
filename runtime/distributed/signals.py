"""Stopping after a step: on a first signal, or if the launcher is gone; a second signal ends the process."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType

import psutil

from runtime.distributed.world import is_main_process

# Sent by terminals (SIGINT by Ctrl-C, SIGHUP when they close), schedulers (SIGTERM; SIGUSR1 or SIGUSR2 some time before
# the time limit; SIGXCPU at a limit of processor time) and containers (SIGTERM, SIGPWR). SIGQUIT (Ctrl-\) keeps its
# default: it ends a process that does not respond.
NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGPWR")
STOP_SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))  # macOS has no SIGPWR
REPEAT_SECONDS = 1.0


class Preempted(Exception):
    """The run stopped early and has saved; the same command resumes it."""


class Interrupted(Exception):
    """All processes have agreed to leave a long computation, because one of them was asked to stop."""


def never_stop() -> bool:
    """Return False: the default of long functions that ask whether to stop."""
    return False


@cache
def launcher() -> int | None:
    """Return the process that started this one, if it is torch's launcher or `accelerate launch`.

    The first call must be early (runtime/cli/scripts.py): the parent changes when the launcher is killed. Without a
    launcher the parent may be a shell, which ends before a run that `nohup` keeps.

    For one process, `accelerate launch` only starts the script and waits, and passes no signal on: a SIGTERM ends it,
    and the script would train on without it.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return os.getppid()
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # set by accelerate launch, and by users
        with suppress(psutil.Error):
            if any(Path(word).name.startswith("accelerate") for word in psutil.Process(os.getppid()).cmdline()):
                return os.getppid()
    return None


os.register_at_fork(after_in_child=launcher.cache_clear)


def launcher_is_gone() -> bool:
    """Return whether the launcher has ended: one that is killed with SIGKILL cannot stop its processes."""
    return launcher() not in (None, os.getppid())


def set_handler(number: int, handler: Callable | int | None) -> None:
    """Set the handler of a signal; in another thread than the main one do nothing, because Python does not allow it.

    A run in such a thread, as in Streamlit or Ray, trains as any other, but no signal makes it save and stop.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(number, handler)


def ignore_stop_signals() -> None:
    """Ignore all stop signals in this process from now on."""
    for number in STOP_SIGNALS:
        set_handler(number, signal.SIG_IGN)


def signals_to_catch() -> list[signal.Signals]:
    """Return the stop signals, without SIGHUP if it is ignored, as under `nohup`."""
    under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (under_nohup and number == signal.SIGHUP)]


class StopSignal:
    """Records whether this process has received a stop signal, or its launcher has been killed."""

    received = False  # a class attribute, reset by each new object: trainer/nested.py reads it after training

    def __init__(self) -> None:
        StopSignal.received = False
        self._first_time = 0.0
        for number in signals_to_catch():
            set_handler(number, self._receive)

    def requested(self) -> bool:
        """Return whether this process should stop after this step."""
        if launcher_is_gone():
            StopSignal.received = True
        return self.received

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # Ctrl-C arrives twice: from the terminal, and forwarded by the launcher. The kernel repeats SIGXCPU.
        is_repeat = number == signal.SIGXCPU or time.monotonic() - self._first_time <= REPEAT_SECONDS
        if self.received and not is_repeat:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self.received:
            StopSignal.received, self._first_time = True, time.monotonic()
            if is_main_process():
                with suppress(OSError):  # os.write: the signal may have interrupted a print
                    os.write(2, b"\nSaving a checkpoint and stopping; a second signal stops at once.\n")
