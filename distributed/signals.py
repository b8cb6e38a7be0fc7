"""Stopping after a step: on a first signal, or if the launcher is gone; a second signal ends the process."""

import os
import signal
import time
from contextlib import suppress
from types import FrameType

from distributed.world import is_main_process

# Sent by terminals (SIGINT by Ctrl-C, SIGHUP when they close), schedulers (SIGTERM; SIGUSR1 or SIGUSR2 some time before
# the time limit; SIGXCPU at a limit of processor time) and containers (SIGTERM, SIGPWR). SIGQUIT (Ctrl-\) keeps its
# default: it ends a process that does not respond.
NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGPWR")
STOP_SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))  # macOS has no SIGPWR
REPEAT_SECONDS = 1.0


class Preempted(Exception):
    """The run stopped early and has saved; the same command resumes it."""


def ignore_stop_signals() -> None:
    """Ignore all stop signals in this process from now on."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def signals_to_catch() -> list[signal.Signals]:
    """Return the stop signals, without SIGHUP if it is ignored, as under `nohup`."""
    under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (under_nohup and number == signal.SIGHUP)]


class StopSignal:
    """Records whether this process has received a stop signal, or its launcher has been killed."""

    received = False  # a class attribute, reset by each new object: distributed/nested.py reads it after training

    def __init__(self) -> None:
        StopSignal.received = False
        # Only torch's launcher: a shell is another parent, which ends before a run that `nohup` keeps.
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._first_time = 0.0
        for number in signals_to_catch():
            signal.signal(number, self._receive)

    def requested(self) -> bool:
        """Return whether this process shall stop after this step."""
        # A launcher that is killed with SIGKILL cannot stop its processes, which would train on without it.
        if self._launcher not in (None, os.getppid()):
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
