"""The results of a step: one small all-reduce that overlaps the last backward, read by the host one step late.

Reading a result at once would make the host wait for the device, so `read` returns the one of the step before. The loop
reads it at once only if something depends on it: a log line, an evaluation, a checkpoint or, if updates may be skipped,
every update. The flag that asks all processes to stop travels in the same all-reduce.
"""

import math
import shlex
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import Tensor

from config.errors import RunError
from model.loss import MetricSums

# Metric names (after train/ or val/) that the loop logs itself; a model may not report them.
RESERVED_NAMES = {"lr", "grad_norm", "tokens", "skipped"}
RESERVED_NAMES |= {"perplexity", "entropy", "excess_loss", "bits_per_byte", "bytes"}


class NonFiniteError(RunError):
    """A loss or a gradient norm is infinite or NaN; `cause` is the message without the remedy."""

    def __init__(self, cause: str, remedy: str = ""):
        super().__init__(cause + remedy)
        self.cause = cause


def exact_sum(values: Sequence[float]) -> float:
    """Return the sum, rounded once; NaN if a value is not finite."""
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan


def mean(sums: Sequence[float], counts: Sequence[float]) -> float:
    """Return sum(sums) / sum(counts), both sums rounded once; NaN if the count is 0 or a value is not finite."""
    count = exact_sum(counts)
    return exact_sum(sums) / count if count else math.nan


def fill_slots(buffer: Tensor, values: Sequence[Tensor | float]) -> None:
    """Write numbers and 0-dim tensors to the first slots; `buffer[slot] = value` would synchronise with the GPU."""
    for slot, value in enumerate(values):
        buffer[slot].fill_(value)


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of gathered sums and counts: float64, exact for counts below 2**53; MPS has only float32."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True)
class Result:
    """The result of one step on the host, the same on all processes."""

    means: dict[str, float]
    """`loss` (nats per target token) and the auxiliary metrics of the model, each over the global batch."""
    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    stop: bool
    """Whether any process asked to stop, in this step or in an older one that was read in the same call."""
    finite: bool
    """Whether the training objective and `grad_norm` are finite."""


@dataclass
class _Pending:
    """A step whose result is not on the host yet."""

    completed_steps: int
    rows: Tensor
    """A row for each process, of dtype `sum_dtype`: number of target tokens of the global batch and gradient norm
    (both in row 0 only), whether the process asks to stop, then for each micro-batch its loss and the sum and count of
    each auxiliary metric."""
    all_reduce: "dist.Work | None"
    copied: "torch.Event | None" = None


class Results:
    """Sends the results of each step (`send`, `finish`) and reads them later (`read`).

    Attributes:
        skipped: updates skipped since step 0, and in a row up to the last step read; checkpoints contain both.
    """

    def __init__(
        self,
        rank: int,
        num_processes: int,
        device: torch.device,
        max_skipped: int = 0,
        run_directory: Path | None = None,
    ):
        """Start without pending steps and without skipped updates.

        Args:
            rank: the data-parallel rank of this process.
            num_processes: data-parallel processes.
            device: where the results are summed over the processes.
            max_skipped: updates that may be skipped in a row because their loss or gradient is not finite.
            run_directory: for the replay command in NonFiniteError.
        """
        self.rank, self.num_processes, self.device = rank, num_processes, device
        self.max_skipped, self.run_directory = max_skipped, run_directory
        self.skipped: tuple[int, int] = (0, 0)
        self._names: list[str] = []
        self._pending: deque[_Pending] = deque()
        self._newest: Result | None = None

    def register_names(self, auxiliary: MetricSums) -> None:
        """Record the names of the auxiliary metrics that the first forward returned; called by all processes together.

        Raises:
            RunError: processes have different names, or a name is one that the loop logs itself.
        """
        names = gather_object([list(auxiliary)]) if self.num_processes > 1 else [list(auxiliary)]
        self._names = names[0]
        if any(other != self._names for other in names):
            raise RunError(f"the model reports different metrics on each process; they must be the same: {names}")
        if taken := sorted(RESERVED_NAMES & auxiliary.keys()):
            raise RunError(
                f"the model reports {', '.join(taken)}: the training loop logs these names itself; use others"
            )

    @torch.no_grad()
    def send(self, completed_steps: int, outputs: Sequence[tuple[Tensor, MetricSums]], stop: bool) -> None:
        """Start the all-reduce of a step's losses and metrics; call it before the backward of the last micro-batch.

        Args:
            completed_steps: including this one.
            outputs: for each local micro-batch the summed loss divided by the number of targets of the global batch,
                0-dim, and the auxiliary metrics.
            stop: whether this process asks all processes to stop.

        Raises:
            RunError: the names of the auxiliary metrics are not those that were registered.
        """
        values: list[Tensor | float] = [0, 0, stop]
        for loss, auxiliary in outputs:
            if list(auxiliary) != self._names:
                names = f"{self._names} at first and {list(auxiliary)} now"
                raise RunError(f"the model reported {names}; the names must not change")
            values += [loss, *(value for pair in auxiliary.values() for value in pair)]
        # Each process fills its own row, so the all-reduce only gathers and rounds nothing; the host adds the values in
        # the same order on any number of processes.
        rows = torch.zeros(self.num_processes, len(values), dtype=sum_dtype(self.device), device=self.device)
        fill_slots(rows[self.rank], values)
        work = dist.all_reduce(rows, async_op=True) if self.num_processes > 1 else None
        self._pending.append(_Pending(completed_steps, rows, work))

    @torch.no_grad()
    def finish(self, num_targets: Tensor, grad_norm: Tensor) -> None:
        """Add the global number of targets and the gradient norm, both 0-dim, and start the copy to the host."""
        pending = self._pending[-1]
        if pending.all_reduce is not None:
            pending.all_reduce.wait()  # with NCCL only the CUDA stream waits, not the host
        fill_slots(pending.rows[0], [num_targets, grad_norm])
        on_cuda = self.device.type == "cuda"
        pending.rows = pending.rows.to("cpu", non_blocking=on_cuda)
        pending.copied = torch.cuda.current_stream().record_event() if on_cuda else None

    def read(self, wait: bool = False) -> Result | None:
        """Return the newest result: with `wait` that of the last step, otherwise of the step before; None at first.

        If an older result asks to stop, the last step is waited for too, so that all processes stop after it.

        Raises:
            NonFiniteError: on all processes, if the loss or the gradient norm of a step is infinite or NaN; if such
                updates are skipped, after more than `max_skipped` in a row.
        """
        stop = False
        while len(self._pending) > 1 or (self._pending and (wait or stop)):
            self._newest = self._read_oldest(stop)
            stop = self._newest.stop
        return self._newest

    def _read_oldest(self, stop: bool) -> Result:
        pending = self._pending.popleft()
        if pending.copied is not None:
            pending.copied.synchronize()
        num_targets, grad_norm = pending.rows[0, :2].tolist()
        stop = stop or bool(pending.rows[:, 2].any())
        # A line for each micro-batch of the global batch: its loss, then a sum and a count for each name.
        losses, *columns = pending.rows[:, 3:].reshape(-1, 1 + 2 * len(self._names)).T.tolist()
        loss = exact_sum(losses)
        sums_and_counts = zip(self._names, columns[::2], columns[1::2], strict=True)
        means = {"loss": loss} | {name: mean(sums, counts) for name, sums, counts in sums_and_counts}
        # Test the training objective, even if the model reports an auxiliary metric "loss", which is then in `means`.
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        total, in_a_row = self.skipped
        self.skipped = (total + (not finite), 0 if finite else in_a_row + 1)
        if self.skipped[1] > self.max_skipped:
            step, times = pending.completed_steps, self.skipped[1]
            # If all losses are finite and the gradient is not, any process may be the cause.
            suspects = [i for i, value in enumerate(losses) if not math.isfinite(value)] or range(len(losses))
            ranks = sorted({i * self.num_processes // len(losses) for i in suspects})
            in_a_row = f", {times} times in a row" if times > 1 else ""
            without_targets = "" if num_targets else ", no target token in the global batch"
            raise NonFiniteError(
                f"step {step}: loss = {loss}, gradient norm = {grad_norm}{in_a_row}{without_targets}, in micro-batches "
                f"of process(es) {ranks}",
                "; no checkpoint contains this step. To inspect the step: "
                f"python -m tools.replay {shlex.quote(str(self.run_directory))} {step}",
            )
        return Result(means, grad_norm, stop, finite)
