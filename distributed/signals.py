"""Stopping on a signal: the first asks for a stop after the running step, the second stops at once."""

import os
import signal
import time
from contextlib import suppress

# What asks a program to end: terminals (SIGINT by Ctrl-C, SIGHUP when they close), schedulers (SIGTERM, SIGUSR1 or
# SIGUSR2 some time before the limit, SIGXCPU at a limit of processor time) and containers (SIGTERM, SIGPWR). SIGQUIT
# (Ctrl-\) is left to end at once a process that does not answer.
NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGPWR")
STOP_SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))  # macOS has no SIGPWR
SAME_SIGNAL_SECONDS = 1.0


class Preempted(Exception):
    """The run stopped on a signal, after saving; started again, it goes on."""


def ignore_stop_signals() -> None:
    """From now on no signal that asks for a stop does anything to this process."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def signals_to_catch() -> list[signal.Signals]:
    """The stop signals, without SIGHUP where it is ignored: `nohup` says that the end of a terminal is no reason."""
    under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (under_nohup and number == signal.SIGHUP)]


class StopSignal:
    """Remembers whether a signal asked this process to stop."""

    received = False  # since the newest one was made; distributed/nested.py asks after it is gone

    def __init__(self) -> None:
        StopSignal.received = False
        self.first_seconds = 0.0
        for number in signals_to_catch():
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame) -> None:
        # Ctrl-C comes twice within a moment: once from the terminal, once forwarded by the launcher. And the kernel
        # repeats SIGXCPU every second.
        repeated = number == signal.SIGXCPU or time.monotonic() - self.first_seconds <= SAME_SIGNAL_SECONDS
        if self.received and not repeated:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self.received:
            StopSignal.received, self.first_seconds = True, time.monotonic()
            if int(os.environ.get("RANK", 0)) == 0:
                with suppress(OSError):  # not by print, which may be what was interrupted
                    os.write(2, b"\nStopping after this step; again to stop at once.\n")
