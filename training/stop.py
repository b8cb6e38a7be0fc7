"""Reasons to stop a run before its last step."""

from collections.abc import Callable

from accelerate.utils import gather_object

from config.errors import RunError
from distributed.signals import Preempted, StopSignal


class StopRequest:
    """Collects this process's reasons to stop: signals, and failed background work.

    Every process sends `is_set` with the metrics of each step. All of them read it at the latest one step later, and
    therefore stop after the same step.
    """

    def __init__(self, stop_signal: StopSignal):
        self._stop_signal = stop_signal
        self._conditions: list[Callable[[], bool]] = []
        self._problems: list[Callable[[], str | None]] = []

    def stop_if(self, condition: Callable[[], bool]) -> None:
        """Stop once `condition()` is true; its owner, such as the saver, raises the error after the stop."""
        self._conditions.append(condition)

    def fail_if(self, problem: Callable[[], str | None]) -> None:
        """Stop once `problem()` returns a message, which `raise_on_all` then raises."""
        self._problems.append(problem)

    @property
    def is_set(self) -> bool:
        """True if this process has a reason to stop."""
        failed = any(condition() for condition in self._conditions)
        return self._stop_signal.received or failed or bool(self._problem())

    def raise_on_all(self, completed_steps: int) -> None:
        """Raise the problem or the signal of any process on all processes, which call this together.

        Raises:
            RunError: a process has a problem.
            Preempted: a process got a signal.
        """
        reports = gather_object([(self._problem(), self._stop_signal.received)])
        if problems := [problem for problem, _ in reports if problem]:
            raise RunError(f"step {completed_steps + 1}: {problems[0]}")
        if any(received for _, received in reports):
            raise Preempted(f"stopped after step {completed_steps}; run the same command again to resume")

    def _problem(self) -> str | None:
        return next(filter(None, (problem() for problem in self._problems)), None)
