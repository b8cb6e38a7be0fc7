"""Stopping on a signal: the first asks for a stop after the running step, the second stops at once."""

import os
import signal
import time
from contextlib import suppress

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME_SIGNAL_SECONDS = 1.0


class Preempted(Exception):
    """The run stopped on a signal, after saving; started again, it goes on."""


def ignore_stop_signals() -> None:
    """From now on no signal that asks for a stop does anything to this process."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopSignal:
    """Remembers whether a signal asked this process to stop."""

    received = False  # since the newest one was made; launch/nested.py asks after it is gone

    def __init__(self) -> None:
        StopSignal.received = False
        self.first_seconds = 0.0
        for number in STOP_SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame) -> None:
        # Ctrl-C comes twice within a moment: once from the terminal, once forwarded by the launcher.
        if self.received and time.monotonic() - self.first_seconds > SAME_SIGNAL_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self.received:
            StopSignal.received, self.first_seconds = True, time.monotonic()
            if int(os.environ.get("RANK", 0)) == 0:
                with suppress(OSError):  # not by print, which may be what was interrupted
                    os.write(2, b"\nStopping after this step; again to stop at once.\n")
