"""Stopping on a signal: the first asks for a stop after the running step, the second stops at once."""

import os
import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Preempted(Exception):
    """The run stopped on a signal, after saving; started again, it goes on."""


class StopSignal:
    """Remembers whether a signal asked this process to stop."""

    def __init__(self) -> None:
        self.received = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame) -> None:
        if self.received:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = True
