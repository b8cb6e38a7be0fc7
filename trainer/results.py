"""The results of each step (loss, auxiliary metrics, gradient norm), gathered from all processes and read a step later.

The host waits for the device when it reads a value. So the training loop does not read the result of a step until the
device computes the next step. One all-gather sends all values of a step, because every collective has a latency.
`register_names` is called once, before the first step. In each step, `train_step` and then the loop call:

1. `start_gather` after the last backward. The all-gather overlaps the clipping of the gradients.
2. `add_grad_norm` after the clipping. It waits for the all-gather and starts the copy to the host.
3. `latest`, which returns the result of the previous step; or `current`, which waits for the result of the current
   step. The loop waits for it only before a log line, an evaluation, a checkpoint, a comparison of the processes or a
   stop. If updates may be skipped, `train_step` waits before every update.

The all-gather also sends the stop flag: a process that received a signal, or whose checkpoint could not be written
(unless `checkpoint.on_failure` is continue), sets it, and all processes then stop after the same step.
"""

import math
import shlex
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from model.loss import MetricSums
from runtime.config.errors import RunError
from runtime.config.schema import TrainConfig
from runtime.distributed.sharding import full_tensor

# The loop and the evaluation log these metrics themselves, as train/NAME or val/NAME; a model may not report them.
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

# The columns of `_Pending.rows`, which has one row for each process. NUM_TARGETS and GRAD_NORM are the same on all
# processes and are read from row 0. The columns from MICRO_BATCHES on belong to the local micro-batches, one after
# another. Each micro-batch has its loss, and then the sum and the count of each auxiliary metric.
NUM_TARGETS, GRAD_NORM, STOP, MICRO_BATCHES = range(4)


class NonFiniteError(RunError):
    """A loss or a gradient norm is infinite or NaN; `cause` is the message without the remedy."""

    kind = "non_finite"

    def __init__(self, cause: str, remedy: str = ""):
        super().__init__(cause + remedy)
        self.cause = cause


def fsum_or_nan(values: Sequence[float]) -> float:
    """Return the sum, rounded only once and so the same in any order; NaN if a value is not finite."""
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan


def mean(sums: Sequence[float], counts: Sequence[float]) -> float:
    """Return the sum of `sums` divided by the sum of `counts`; NaN if the latter is 0 or a value is not finite."""
    count = fsum_or_nan(counts)
    return fsum_or_nan(sums) / count if count else math.nan


def fill_slots(buffer: Tensor, values: Sequence[Tensor | float]) -> None:
    """Write numbers and 0-dim tensors to the first elements of a 1-dim buffer, without waiting for the device."""
    for slot, value in enumerate(values):
        buffer[slot].fill_(value)  # `buffer[slot] = value` would copy a number from the host, which waits for the GPU


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of gathered values: float64, exact for counts below 2**53; MPS supports float32 at most."""
    return torch.float32 if device.type == "mps" else torch.float64


class Skipped(NamedTuple):
    """Numbers of updates that were skipped because their loss or gradient was not finite."""

    total: int = 0
    in_a_row: int = 0
    """Length of the current streak, as of the last step that was read."""


@dataclass(frozen=True)
class Result:
    """The result of a step on the host; it is the same on all processes."""

    means: dict[str, float]
    """Means over the global batch: `loss`, in nats per target token, and the auxiliary metrics of the model."""
    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    stop: bool
    """Whether any process asked all processes to stop: in this step, or in the step before if both are read at once."""
    finite: bool
    """Whether the training objective and `grad_norm` are finite."""


@dataclass
class _Pending:
    """A step whose result the host has not read yet."""

    completed_steps: int
    rows: Tensor
    """[processes, columns], dtype `sum_dtype`; see NUM_TARGETS for the columns."""
    all_gather: dist.Work | None
    copied: torch.Event | None = None
    """Recorded after the copy to the host, if that is asynchronous."""


class Results:
    """Gathers the results of each step from all processes; see the top of this file for the order of the calls.

    Attributes:
        skipped: the skipped updates since step 0; checkpoints contain them.
    """

    def __init__(
        self,
        rank: int,
        num_processes: int,
        device: torch.device,
        max_skipped_in_a_row: int = 0,
        run_directory: Path | None = None,
    ):
        """Start without pending results and without skipped updates.

        Args:
            rank: the data-parallel rank of this process.
            num_processes: the number of data-parallel processes.
            device: the device of the model and of the all-gather.
            max_skipped_in_a_row: the largest number of consecutive updates that `train_step` may skip because the loss
                or the gradient is infinite or NaN. With 0, the first such step raises NonFiniteError.
            run_directory: shown in the replay command of NonFiniteError.
        """
        self.rank, self.num_processes, self.device = rank, num_processes, device
        self.max_skipped_in_a_row, self.run_directory = max_skipped_in_a_row, run_directory
        self.skipped = Skipped()
        self._names: list[str] = []
        self._pending: deque[_Pending] = deque()
        self._newest: Result | None = None

    @classmethod
    def from_config(cls, config: TrainConfig, accelerator: Accelerator, run_directory: Path) -> "Results":
        """Return the results of a run; unless `on_nonfinite` is skip, the first non-finite loss or gradient raises."""
        limit = config.max_skipped_in_a_row if config.on_nonfinite == "skip" else 0
        return cls(accelerator.process_index, accelerator.num_processes, accelerator.device, limit, run_directory)

    def register_names(self, auxiliary: MetricSums) -> None:
        """Register the names of the metrics that the first forward returned; called by all processes together.

        Raises:
            RunError: the names or their order differ between processes, or a name is in RESERVED_NAMES.
        """
        names = gather_object([list(auxiliary)]) if self.num_processes > 1 else [list(auxiliary)]
        self._names = names[0]
        if any(other != self._names for other in names):
            raise RunError(
                f"the model reports different metrics on each process; names and order must be the same: {names}"
            )
        if taken := sorted(RESERVED_NAMES & auxiliary.keys()):
            raise RunError(
                f"the model reports {', '.join(taken)}: the training loop logs these names itself; use others"
            )

    @torch.no_grad()
    def start_gather(
        self, completed_steps: int, outputs: Sequence[tuple[Tensor, MetricSums]], num_targets: Tensor, stop: bool
    ) -> None:
        """Start to gather the losses and metrics of a step from all processes.

        Args:
            completed_steps: the number of steps including this one.
            outputs: for each local micro-batch the loss (0-dim: its sum divided by `num_targets`) and the auxiliary
                metrics.
            num_targets: the number of target tokens in the global batch, 0-dim.
            stop: whether this process asks all processes to stop.

        Raises:
            RunError: the names of the auxiliary metrics are not those that were registered, in the same order.
        """
        # List the values of this process.
        values: list[Tensor | float] = []
        for loss, auxiliary in outputs:
            if list(auxiliary) != self._names:
                names = f"{self._names} at first and {list(auxiliary)} now"
                raise RunError(f"the model reported {names}; names and order must not change")
            values += [loss, *(value for pair in auxiliary.values() for value in pair)]

        row = torch.zeros(MICRO_BATCHES + len(values), dtype=sum_dtype(self.device), device=self.device)
        row[NUM_TARGETS].fill_(num_targets)
        row[STOP].fill_(stop)
        fill_slots(row[MICRO_BATCHES:], values)

        # Gather the rows instead of adding them on the device: the host adds the micro-batches, with the same result on
        # any number of processes (fsum_or_nan).
        rows, all_gather = row[None], None  # [processes, columns]
        if self.num_processes > 1:
            rows = row.new_empty(self.num_processes, len(row))
            all_gather = dist.all_gather(list(rows), row, async_op=True)
        self._pending.append(_Pending(completed_steps, rows, all_gather))

    @torch.no_grad()
    def add_grad_norm(self, grad_norm: Any) -> None:
        """Add the gradient norm, 0-dim, to the results of the step, and start their copy to the host.

        With FSDP2 the norm is a DTensor.
        """
        pending = self._pending[-1]
        if pending.all_gather is not None:
            pending.all_gather.wait()  # with NCCL only the CUDA stream waits, with gloo the host
        pending.rows[0, GRAD_NORM].fill_(full_tensor(grad_norm))

        # The copy from a GPU is asynchronous, into pinned memory; the event tells the host when it is complete.
        on_cuda = self.device.type == "cuda"
        pending.rows = pending.rows.to("cpu", non_blocking=on_cuda)
        pending.copied = torch.cuda.current_stream().record_event() if on_cuda else None

    def latest(self) -> Result | None:
        """Return the newest result that needs no waiting for the current step; None in the first step.

        It is the result of the previous step, or that of the current step if `current` has been called in this step.

        Raises:
            NonFiniteError: see `current`.
        """
        return self._read_all_but(1)

    def current(self) -> Result:
        """Wait for the result of the current step and return it.

        Raises:
            NonFiniteError: on all processes, if the loss or the gradient norm of more than `max_skipped_in_a_row`
                consecutive steps is infinite or NaN.
        """
        result = self._read_all_but(0)
        assert result is not None, "a step has been taken"
        return result

    def _read_all_but(self, num_left: int) -> Result | None:
        """Read the oldest pending steps until `num_left` are left; return the newest result that has been read."""
        stop = False
        while len(self._pending) > num_left:
            result = self._read_oldest()
            stop = stop or result.stop
            self._newest = replace(result, stop=stop)
        return self._newest

    def _read_oldest(self) -> Result:
        """Read the oldest pending step, count skipped updates, and raise NonFiniteError if there are too many."""
        pending = self._pending.popleft()
        if pending.copied is not None:
            pending.copied.synchronize()  # the host waits here until the device has computed the gradient norm
        rows = pending.rows
        num_targets, grad_norm = rows[0, NUM_TARGETS].item(), rows[0, GRAD_NORM].item()
        stop = bool(rows[:, STOP].any())

        # Split the rows into micro-batches, in the order of the global batch: [micro-batches, 1 + 2 * metrics].
        micro_batches = rows[:, MICRO_BATCHES:].reshape(-1, 1 + 2 * len(self._names))
        losses, *sums_and_counts = micro_batches.T.tolist()

        # Add up the micro-batches. The training objective decides whether the step is finite. `means["loss"]` may be
        # another value: a metric of the model that is named "loss" replaces it.
        objective = fsum_or_nan(losses)
        sums, counts = sums_and_counts[::2], sums_and_counts[1::2]
        means = {"loss": objective} | dict(zip(self._names, map(mean, sums, counts), strict=True))
        finite = math.isfinite(objective) and math.isfinite(grad_norm)

        # Count skipped updates.
        total, in_a_row = self.skipped
        self.skipped = Skipped(total, 0) if finite else Skipped(total + 1, in_a_row + 1)
        if self.skipped.in_a_row > self.max_skipped_in_a_row:
            raise self._non_finite_error(pending.completed_steps, losses, grad_norm, num_targets)
        return Result(means, grad_norm, stop, finite)

    def _non_finite_error(
        self, completed_steps: int, losses: Sequence[float], grad_norm: float, num_targets: float
    ) -> NonFiniteError:
        # If all losses are finite but the gradient is not, any process may be the cause.
        suspects = [i for i, loss in enumerate(losses) if not math.isfinite(loss)] or range(len(losses))
        # Every process has equally many micro-batches.
        ranks = sorted({i * self.num_processes // len(losses) for i in suspects})
        in_a_row = self.skipped.in_a_row
        repeated = f", {in_a_row} times in a row" if in_a_row > 1 else ""
        without_targets = "" if num_targets else ", no target token in the global batch"
        return NonFiniteError(
            f"step {completed_steps}: loss = {fsum_or_nan(losses)}, gradient norm = {grad_norm}{repeated}"
            f"{without_targets}, in micro-batches of process(es) {ranks}",
            "; no checkpoint contains this step. To inspect the step: "
            f"python -m tools.replay {shlex.quote(str(self.run_directory))} {completed_steps}",
        )
