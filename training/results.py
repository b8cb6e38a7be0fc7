"""The results of each step (loss, auxiliary metrics, gradient norm), gathered from all processes.

Three calls per step hide the all-reduce and the copy to the host behind computation:

1. `send`, after the last backward, starts one small all-reduce, which overlaps the clipping of the gradients.
2. `finish`, after the clipping, waits for the all-reduce (with NCCL only the CUDA stream waits), adds the gradient
   norm and starts the copy to the host.
3. `read` returns the result of the previous step, while the device computes the current one. With `wait`, it returns
   the result of the current step. The loop waits only if something depends on that result: a log line, an evaluation,
   a checkpoint, or, if updates may be skipped, every update.

A process that wants all processes to stop says so in the same all-reduce.
"""

import math
import shlex
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import Tensor

from config.errors import RunError
from model.loss import MetricSums

# The loop logs these metrics itself, as train/NAME or val/NAME; a model may not report them.
RESERVED_NAMES = {
    "lr",
    "grad_norm",
    "tokens",
    "skipped",
    "perplexity",
    "entropy",
    "excess_loss",
    "bits_per_byte",
    "bytes",
}

# The columns of `_Pending.rows`, which has one row per process. NUM_TARGETS and GRAD_NORM are global, so only row 0 has
# them. From column MICRO_BATCHES on, a row has the values of one local micro-batch after another: its loss, then the
# sum and the count of each auxiliary metric.
NUM_TARGETS, GRAD_NORM, STOP, MICRO_BATCHES = range(4)


class NonFiniteError(RunError):
    """A loss or a gradient norm is infinite or NaN; `cause` is the message without the remedy."""

    kind = "non_finite"

    def __init__(self, cause: str, remedy: str = ""):
        super().__init__(cause + remedy)
        self.cause = cause


def exact_sum(values: Sequence[float]) -> float:
    """Return the sum, rounded only once; NaN if a value is not finite."""
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan


def mean(sums: Sequence[float], counts: Sequence[float]) -> float:
    """Return exact_sum(sums) / exact_sum(counts); NaN if the count is 0 or a value is not finite."""
    count = exact_sum(counts)
    return exact_sum(sums) / count if count else math.nan


def fill_slots(buffer: Tensor, values: Sequence[Tensor | float]) -> None:
    """Write numbers and 0-dim tensors to the first elements of a 1-dim buffer.

    `buffer[slot] = value` would copy numbers from the CPU, which synchronises with the GPU.
    """
    for slot, value in enumerate(values):
        buffer[slot].fill_(value)


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of gathered values: float64, exact for counts below 2**53; MPS supports float32 at most."""
    return torch.float32 if device.type == "mps" else torch.float64


class Skipped(NamedTuple):
    """Numbers of updates that were skipped because their loss or gradient was not finite."""

    total: int = 0
    consecutive: int = 0
    """Length of the current streak, as of the last step that was read."""


@dataclass(frozen=True)
class Result:
    """The result of a step on the host; it is the same on all processes."""

    means: dict[str, float]
    """Means over the global batch: `loss`, in nats per target token, and the auxiliary metrics of the model."""
    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    stop: bool
    """True if any process asked all to stop in a step that this `read` covers."""
    finite: bool
    """Whether the training objective and `grad_norm` are finite."""


@dataclass
class _Pending:
    """A step whose result the host has not read yet."""

    completed_steps: int
    rows: Tensor
    """[processes, columns], dtype `sum_dtype`; see NUM_TARGETS for the columns."""
    all_reduce: "dist.Work | None"
    copied: "torch.Event | None" = None
    """Recorded after the copy to the host, if that is asynchronous."""


class Results:
    """Gathers the results of each step from all processes (`send`, `finish`, `read`).

    Attributes:
        skipped: the skipped updates since step 0; checkpoints contain them.
    """

    def __init__(
        self,
        rank: int,
        num_processes: int,
        device: torch.device,
        max_consecutive_skips: int = 0,
        run_directory: Path | None = None,
    ):
        """Start without pending results and without skipped updates.

        Args:
            rank: the data-parallel rank of this process.
            num_processes: the number of data-parallel processes.
            device: the device of the model and of the all-reduce.
            max_consecutive_skips: the number of consecutive updates that may be skipped because the loss or the
                gradient is not finite.
            run_directory: shown in the replay command of NonFiniteError.
        """
        self.rank, self.num_processes, self.device = rank, num_processes, device
        self.max_consecutive_skips, self.run_directory = max_consecutive_skips, run_directory
        self.skipped = Skipped()
        self._names: list[str] = []
        self._pending: deque[_Pending] = deque()
        self._newest: Result | None = None

    def register_names(self, auxiliary: MetricSums) -> None:
        """Register the names of the metrics that the first forward returned; called by all processes together.

        Raises:
            RunError: the names differ between processes, or the loop itself logs a metric of that name.
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
        """Start the all-reduce of a step's losses and metrics.

        Args:
            completed_steps: the number of steps including this one.
            outputs: for each local micro-batch the loss (0-dim: its sum divided by the number of targets of the global
                batch) and the auxiliary metrics.
            stop: whether this process asks all processes to stop.

        Raises:
            RunError: the names of the auxiliary metrics are not those that were registered.
        """
        values: list[Tensor | float] = []
        for loss, auxiliary in outputs:
            if list(auxiliary) != self._names:
                names = f"{self._names} at first and {list(auxiliary)} now"
                raise RunError(f"the model reported {names}; the names must not change")
            values += [loss, *(value for pair in auxiliary.values() for value in pair)]
        # Each process fills its own row and the others are 0, so the all-reduce gathers the rows without rounding. The
        # host adds the values, in the same order on any number of processes.
        shape = self.num_processes, MICRO_BATCHES + len(values)
        rows = torch.zeros(shape, dtype=sum_dtype(self.device), device=self.device)
        rows[self.rank, STOP].fill_(stop)
        fill_slots(rows[self.rank, MICRO_BATCHES:], values)
        all_reduce = dist.all_reduce(rows, async_op=True) if self.num_processes > 1 else None
        self._pending.append(_Pending(completed_steps, rows, all_reduce))

    @torch.no_grad()
    def finish(self, num_targets: Tensor, grad_norm: Tensor) -> None:
        """Add the global number of targets and the gradient norm, both 0-dim, and start the copy to the host."""
        pending = self._pending[-1]
        if pending.all_reduce is not None:
            pending.all_reduce.wait()
        pending.rows[0, NUM_TARGETS].fill_(num_targets)
        pending.rows[0, GRAD_NORM].fill_(grad_norm)
        on_cuda = self.device.type == "cuda"
        pending.rows = pending.rows.to("cpu", non_blocking=on_cuda)
        pending.copied = torch.cuda.current_stream().record_event() if on_cuda else None

    def read(self, wait: bool = False) -> Result | None:
        """Return the newest result, or None if there is none yet.

        With `wait`, it is the result of the current step. Otherwise it is the result of the previous step; if that
        asks to stop, the current step is read too, so that all processes stop after it.

        Raises:
            NonFiniteError: on all processes, if the loss or the gradient norm of more than `max_consecutive_skips`
                consecutive steps is infinite or NaN.
        """
        stop = False
        while len(self._pending) > 1 or (self._pending and (wait or stop)):
            self._newest = self._read_oldest(stop)
            stop = self._newest.stop
        return self._newest

    def _read_oldest(self, stop: bool) -> Result:
        """Read the oldest pending step, count skipped updates, and raise NonFiniteError if there are too many."""
        pending = self._pending.popleft()
        if pending.copied is not None:
            pending.copied.synchronize()
        rows: list[list[float]] = pending.rows.tolist()
        num_targets, grad_norm = rows[0][NUM_TARGETS], rows[0][GRAD_NORM]
        stop = stop or any(row[STOP] for row in rows)
        # One value per micro-batch of the global batch, in their order, in each of these lists.
        values, columns = [value for row in rows for value in row[MICRO_BATCHES:]], 1 + 2 * len(self._names)
        losses, *metrics = (values[column::columns] for column in range(columns))
        loss = exact_sum(losses)
        sums_and_counts = zip(self._names, metrics[::2], metrics[1::2], strict=True)
        # A metric "loss" of the model replaces the training objective in `means`, but not in the test below.
        means = {"loss": loss} | {name: mean(sums, counts) for name, sums, counts in sums_and_counts}
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        total, consecutive = self.skipped
        total, consecutive = (total, 0) if finite else (total + 1, consecutive + 1)
        self.skipped = Skipped(total, consecutive)
        if consecutive > self.max_consecutive_skips:
            step = pending.completed_steps
            # If all losses are finite but the gradient is not, any process may be the cause.
            suspects = [i for i, value in enumerate(losses) if not math.isfinite(value)] or range(len(losses))
            ranks = sorted({i * self.num_processes // len(losses) for i in suspects})
            repeated = f", {consecutive} times in a row" if consecutive > 1 else ""
            without_targets = "" if num_targets else ", no target token in the global batch"
            raise NonFiniteError(
                f"step {step}: loss = {loss}, gradient norm = {grad_norm}{repeated}{without_targets}, in micro-batches "
                f"of process(es) {ranks}",
                "; no checkpoint contains this step. To inspect the step: "
                f"python -m tools.replay {shlex.quote(str(self.run_directory))} {step}",
            )
        return Result(means, grad_norm, stop, finite)
