"""Why a run stops before its last step."""

from collections.abc import Callable

from accelerate.utils import gather_object

from config.errors import RunError
from distributed.signals import Preempted, StopSignal


class StopRequest:
    """Collects the reasons of this process to stop after the running step: signals, and background work that failed.

    Every process sends `is_set` with the metrics of each step, so all of them stop after the same step.
    """

    def __init__(self, signals: StopSignal):
        self._signals = signals
        self._failures: list[Callable[[], bool]] = []
        self._problems: list[Callable[[], str | None]] = []

    def add_failure(self, has_failed: Callable[[], bool]) -> None:
        """Add background work that raises its own error after the stop, such as the writing of a checkpoint."""
        self._failures.append(has_failed)

    def add_problem(self, problem: Callable[[], str | None]) -> None:
        """Add background work whose failure `raise_on_all` reports; the callable returns a message or None."""
        self._problems.append(problem)

    @property
    def is_set(self) -> bool:
        """Whether this process has a reason to stop."""
        return self._signals.received or any(has_failed() for has_failed in self._failures) or bool(self._problem())

    def raise_on_all(self, completed_steps: int) -> None:
        """Raise the problem or the signal of any process on all processes, which call this together.

        Raises:
            RunError: a process has a problem.
            Preempted: a process got a signal.
        """
        reports = gather_object([(self._problem(), self._signals.received)])
        if problems := [problem for problem, _ in reports if problem]:
            raise RunError(f"step {completed_steps + 1}: {problems[0]}")
        if any(received for _, received in reports):
            raise Preempted(f"stopped after step {completed_steps}; run the same command again to resume")

    def _problem(self) -> str | None:
        return next(filter(None, (problem() for problem in self._problems)), None)
