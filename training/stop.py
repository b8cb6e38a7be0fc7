"""Reasons to stop a run before its last step."""

from collections.abc import Callable

from accelerate.utils import gather_object

from distributed.signals import Preempted, StopSignal


class StopRequest:
    """Collects this process's reasons to stop: signals, and failed background work.

    Every process sends `is_set` with the metrics of each step. All of them read it at the latest one step later, and
    therefore stop after the same step.
    """

    def __init__(self, stop_signal: StopSignal):
        self._stop_signal = stop_signal
        self._conditions: list[Callable[[], bool]] = []

    def stop_if(self, condition: Callable[[], bool]) -> None:
        """Stop once `condition()` is true; its owner, such as the saver, raises the error after the stop."""
        self._conditions.append(condition)

    @property
    def is_set(self) -> bool:
        """True if this process has a reason to stop."""
        return self._stop_signal.received or any(condition() for condition in self._conditions)

    def raise_on_all(self, completed_steps: int) -> None:
        """Raise Preempted on all processes, which call this together, if any of them got a signal."""
        if any(gather_object([self._stop_signal.received])):
            raise Preempted(f"stopped after step {completed_steps}; run the same command again to resume")
