"""The metrics of a step: one small all-reduce whose result the host usually reads one step late.

The all-reduce overlaps the last backward of its step, because on busy CPUs it takes milliseconds. Reading the result at
once would make the host wait for the device, so it is read after the next step was launched. It is read at once only if
something depends on it: a log line, an evaluation, a checkpoint or, if updates may be skipped, every update.
"""

import math
import shlex
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import Tensor

from config.errors import RunError
from data.corpus import MetricSums
from data.sampler import GlobalBatches

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


@dataclass
class StepMetrics:
    """Metrics of one step over all processes, on the host."""

    means: dict[str, float]
    """`loss` (nats per target token) and the auxiliary metrics of the model, each over the global batch."""
    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    stop: bool
    """Whether any process has a reason to stop."""
    finite: bool
    """Whether the training objective and `grad_norm` are finite."""


@dataclass
class PendingStep:
    """A step whose metrics are not on the host yet."""

    completed_steps: int
    """Including this one: 1 for the first update of a run."""
    loss_divisor: float
    buffer: Tensor
    """Slots of dtype `sum_dtype`: number of target tokens; number of processes that request a stop; for each
    micro-batch of the global batch its summed loss divided by `loss_divisor`, and the sum and count of each auxiliary
    metric; gradient norm."""
    all_reduce: "dist.Work | None"
    on_host: Tensor = field(init=False)
    copied: "torch.Event | None" = field(init=False)

    def wait_for_num_targets(self) -> Tensor:
        """Wait for the all-reduce and return the number of target tokens in the global batch, 0-dim, on the device.

        With NCCL only the CUDA stream waits, not the host.
        """
        if self.all_reduce:
            self.all_reduce.wait()
            self.all_reduce = None
        return self.buffer[0]

    def copy_to_host(self, grad_norm: Tensor) -> None:
        """Store the gradient norm, the same on all processes, in the last slot, and start copying the buffer."""
        self.buffer[-1].fill_(grad_norm)
        on_cuda = self.buffer.device.type == "cuda"
        self.on_host = self.buffer.to("cpu", non_blocking=on_cuda)
        self.copied = torch.cuda.current_stream().record_event() if on_cuda else None


class MetricsQueue:
    """Sends the metrics of each step (`dispatch`) and reads them later (`read`).

    Attributes:
        num_skipped: updates skipped since step 0.
        num_skipped_in_a_row: updates skipped in a row, up to the last step read. Checkpoints contain both numbers.
    """

    def __init__(
        self,
        batches: GlobalBatches,
        micro_batch_size: int,
        device: torch.device,
        rank: int = 0,
        num_processes: int = 1,
        max_skipped: int = 0,
        run_directory: Path | None = None,
    ):
        """Start with no pending steps and no skipped updates.

        Args:
            batches: global batches; NonFiniteError lists their sample indices.
            micro_batch_size: sequences.
            device: the device on which the metrics are summed over the processes.
            rank: the data-parallel rank of this process.
            num_processes: data-parallel processes.
            max_skipped: updates that may be skipped in a row because their loss or gradient is not finite.
            run_directory: for the replay command in NonFiniteError.
        """
        self.batches, self.micro_batch_size, self.device = batches, micro_batch_size, device
        self.rank, self.num_processes = rank, num_processes
        self.max_skipped, self.run_directory = max_skipped, run_directory
        self.num_skipped = 0
        self.num_skipped_in_a_row = 0
        self._names: list[str] = []
        self._pending: deque[PendingStep] = deque()
        self._last_read: StepMetrics | None = None

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

    def dispatch(
        self,
        completed_steps: int,
        outputs: Sequence[tuple[Tensor, MetricSums]],
        local_targets: Tensor,
        loss_divisor: float,
        stop: bool = False,
    ) -> PendingStep:
        """Start the all-reduce of a step's metrics; call it before the backward of the last micro-batch.

        Args:
            completed_steps: including this one.
            outputs: for each micro-batch the summed loss divided by `loss_divisor`, and the auxiliary metrics.
            local_targets: number of target tokens in the local micro-batches, 0-dim int64.
            loss_divisor: number by which each summed loss was divided, because the number of targets is not known
                before the all-reduce (see train_step).
            stop: whether this process has a reason to stop.

        Raises:
            RunError: the names of the auxiliary metrics are not those that were registered.
        """
        values: list[Tensor | float] = []
        for loss, auxiliary in outputs:
            if list(auxiliary) != self._names:
                names = f"{self._names} at first and {list(auxiliary)} now"
                raise RunError(f"the model reported {names}; the names must not change")
            values += [loss, *(value for pair in auxiliary.values() for value in pair)]
        # Losses and auxiliary metrics go into slots of this process alone, and the first two slots sum integers, so the
        # all-reduce rounds nothing. The host adds the values in the same order on any number of processes.
        num_slots = 3 + self.num_processes * len(values)
        buffer = torch.zeros(num_slots, dtype=sum_dtype(self.device), device=self.device)
        fill_slots(buffer, (local_targets, stop))
        fill_slots(buffer[2 + self.rank * len(values) :], values)
        work = dist.all_reduce(buffer, async_op=True) if self.num_processes > 1 else None
        self._pending.append(PendingStep(completed_steps, loss_divisor, buffer, work))
        return self._pending[-1]

    def read(self, wait: bool = False) -> StepMetrics | None:
        """Read pending results, oldest first.

        The newest one stays pending, so that the host does not wait for the device, unless `wait` is true or an older
        result requests a stop.

        Returns:
            The last result read, now or earlier; None if there is none yet. Its `stop` is true if it, or
            an older result that was read in the same call, requests a stop.

        Raises:
            NonFiniteError: on all processes, if the loss or the gradient norm of a step is infinite or NaN; if such
                updates are skipped, after more than `max_skipped` in a row.
        """
        stop = False
        while len(self._pending) > 1 or (self._pending and (wait or stop)):
            self._last_read = self._read_oldest()
            stop = stop or self._last_read.stop
            self._last_read.stop = stop
        return self._last_read

    def _read_oldest(self) -> StepMetrics:
        pending = self._pending.popleft()
        if pending.copied is not None:
            pending.copied.synchronize()
        num_targets, stop, *values, grad_norm = pending.on_host.tolist()
        stride = 1 + 2 * len(self._names)  # a micro-batch has its loss, then a sum and a count for each name
        losses, *columns = (values[offset::stride] for offset in range(stride))
        loss = exact_sum(losses) * pending.loss_divisor / num_targets if num_targets else math.nan
        sums_and_counts = zip(self._names, columns[::2], columns[1::2], strict=True)
        means = {"loss": loss} | {name: mean(sums, counts) for name, sums, counts in sums_and_counts}
        # Test the training objective, even if the model reports an auxiliary metric "loss", which is then in `means`.
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        result = StepMetrics(means, grad_norm, stop > 0, finite)
        self.num_skipped += not finite
        self.num_skipped_in_a_row = 0 if finite else self.num_skipped_in_a_row + 1
        if self.num_skipped_in_a_row > self.max_skipped:
            step = pending.completed_steps
            raise NonFiniteError(
                self._cause(step, losses, loss, grad_norm, num_targets),
                "; no checkpoint contains this step. To inspect the step: "
                f"python replay.py {shlex.quote(str(self.run_directory))} {step}",
            )
        return result

    def _cause(self, step: int, losses: list[float], loss: float, grad_norm: float, num_targets: float) -> str:
        # If all losses are finite and the gradient is not, any micro-batch of the global batch may be the cause.
        suspects = [i for i, value in enumerate(losses) if not math.isfinite(value)] or range(len(losses))
        ranks = sorted({i * self.num_processes // len(losses) for i in suspects})
        size, indices = self.micro_batch_size, self.batches.indices(step - 1)
        samples = [index for i in suspects for index in indices[i * size : (i + 1) * size]]
        in_a_row = f", {self.num_skipped_in_a_row} times in a row" if self.num_skipped_in_a_row > 1 else ""
        without_targets = ", no target token in the global batch" if num_targets == 0 else ""
        return (
            f"step {step}: loss = {loss}, gradient norm = {grad_norm}{in_a_row}{without_targets}, in micro-batches "
            f"of process(es) {ranks} with the training samples {samples}"
        )
