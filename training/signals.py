"""Stopping on a signal: the first asks for a stop after the running step, the second stops at once."""

import os
import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignal:
    """Remembers that a signal asked this process to stop; `received` is its name, or "" while there is none."""

    def __init__(self) -> None:
        self.received = ""
        for number in STOP_SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame) -> None:
        if self.received:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = signal.Signals(number).name
