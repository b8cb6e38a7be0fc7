"""Why a run stops before its last step."""

from collections.abc import Callable

from accelerate.utils import gather_object

from config.errors import RunError
from distributed.signals import Preempted


class StopRequest:
    """Collects the reasons of this process to stop after the running step.

    Every process sends `is_set` with the metrics of each step, so all of them stop after the same step. A reason is a
    signal, or background work that failed: a checkpoint that could not be written, a damaged corpus, a data loader
    that has no more batches.
    """

    def __init__(self) -> None:
        self._sources: list[Callable[[], bool]] = []
        self._problems: list[Callable[[], str | None]] = []

    def add_source(self, is_set: Callable[[], bool]) -> None:
        """Add a reason to stop; whoever reports it raises its own error after the stop, or the run is preempted."""
        self._sources.append(is_set)

    def add_problem(self, problem: Callable[[], str | None]) -> None:
        """Add a failure that `raise_on_all` reports to all processes; the callable returns a message or None."""
        self._problems.append(problem)

    @property
    def is_set(self) -> bool:
        """Whether this process has a reason to stop."""
        return any(source() for source in self._sources) or any(problem() for problem in self._problems)

    def raise_on_all(self, completed_steps: int) -> None:
        """Raise the reason of any process on all processes, which call this together; return where there is none.

        Raises:
            RunError: background work of a process failed.
            Preempted: a process got a signal.
        """
        reports = gather_object([(self.is_set, next(filter(None, (problem() for problem in self._problems)), None))])
        if problems := [problem for _, problem in reports if problem]:
            raise RunError(f"step {completed_steps + 1}: {problems[0]}")
        if any(is_set for is_set, _ in reports):
            raise Preempted(f"stopped after step {completed_steps}; run the same command again to resume")
