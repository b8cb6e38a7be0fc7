"""The metrics of a step: one small all-reduce that the host reads one step late.

The message travels beside the last backward of its step: on CPUs such a message takes milliseconds while all cores are
busy. Reading it at once would make the host wait for the device in every step, so it is read after the next step was
dispatched, except where something depends on it: before a log line, an evaluation, a save and the end, and in every
step where updates may be skipped.
"""

import math
import shlex
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import Tensor

from config.errors import RunError
from data.sampler import GlobalBatches

AuxiliaryMetrics = Mapping[str, tuple[Tensor | float, Tensor | float]]
"""(sum, count) of each auxiliary metric of a model, see GPTModel.forward."""

# Names of train/ and val/ that the loop logs itself.
RESERVED_NAMES = {"lr", "grad_norm", "tokens", "skipped", "perplexity", "entropy", "excess_loss", "bits_per_byte"}


class NonFiniteError(RunError):
    """The loss or the gradient norm of a step is infinite or NaN; the message names the step and the samples."""


def mean(sums: Sequence[float], counts: Sequence[float]) -> float:
    """Return sum(sums) / sum(counts), exactly rounded sums; NaN where the count is 0 or a number is not finite."""
    all_finite = all(map(math.isfinite, (*sums, *counts)))
    return math.fsum(sums) / count if all_finite and (count := math.fsum(counts)) else math.nan


@dataclass
class StepResult:
    """Metrics of one step over all processes, on the host."""

    step: int
    """Completed steps: 1 for the first update of a run."""
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
    """A step whose metrics are on their way to the host."""

    step: int
    loss_denominator: float
    message: Tensor
    all_reduce: "dist.Work | None"
    on_host: Tensor = field(init=False)
    copied: "torch.Event | None" = None

    def num_targets(self) -> Tensor:
        """Return the number of target tokens in the global batch, 0-dim, on the device; the host does not wait."""
        if self.all_reduce:
            self.all_reduce.wait()
            self.all_reduce = None
        return self.message[0]

    def copy_to_host(self, grad_norm: Tensor) -> None:
        """Start the copy of the message, with the gradient norm, which is the same on all processes."""
        self.message[-1].fill_(grad_norm)
        on_cuda = self.message.device.type == "cuda"
        self.on_host = self.message.to("cpu", non_blocking=on_cuda)
        self.copied = torch.cuda.current_stream().record_event() if on_cuda else None


class StepMetrics:
    """Sends the metrics of each step (`dispatch`) and reads them later (`read`)."""

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
        """Count no skipped updates yet.

        Args:
            batches: sample indices of every global batch, named in the error about a step that is not finite.
            micro_batch_size: sequences.
            device: the device on which the metrics are summed over the processes.
            rank: the data-parallel rank of this process.
            num_processes: data-parallel processes.
            max_skipped: updates that may be skipped in a row because their loss or gradient is not finite.
            run_directory: named in the remedy of that error.
        """
        self.batches, self.micro_batch_size, self.device = batches, micro_batch_size, device
        self.rank, self.num_processes = rank, num_processes
        self.max_skipped, self.run_directory = max_skipped, run_directory
        self.skipped = self.skipped_in_a_row = 0  # updates; part of the state of a run
        self._names: list[str] = []
        self._pending: deque[PendingStep] = deque()
        self._newest: StepResult | None = None

    def register_names(self, auxiliary: AuxiliaryMetrics) -> None:
        """Fix the names of the auxiliary metrics from the model's first forward; called by all processes together.

        Raises:
            RunError: processes have different names, or a name is one that the loop logs itself.
        """
        names = gather_object([list(auxiliary)]) if self.num_processes > 1 else [list(auxiliary)]
        self._names = names[0]
        if any(other != self._names for other in names):
            raise RunError(f"the model reports different metrics on each process; they must be the same: {names}")
        if taken := sorted(RESERVED_NAMES & auxiliary.keys()):
            raise RunError(f"the model reports {', '.join(taken)}: a name that is logged already; use another")

    def dispatch(
        self,
        step: int,
        outputs: Sequence[tuple[Tensor, AuxiliaryMetrics]],
        num_targets: Tensor,
        loss_denominator: float,
        stop: bool = False,
    ) -> PendingStep:
        """Start the all-reduce of a step's metrics; call it before the backward of the last micro-batch.

        Args:
            step: completed steps after this one.
            outputs: of each micro-batch the summed loss divided by `loss_denominator`, and the auxiliary metrics.
            num_targets: target tokens in the local micro-batches, 0-dim int64.
            loss_denominator: constant that each loss was divided by.
            stop: whether this process has a reason to stop.

        Raises:
            RunError: the names of the auxiliary metrics are not those that were registered.
        """
        numbers: list[Tensor | float] = []
        for loss, auxiliary in outputs:
            if list(auxiliary) != self._names:
                raise RunError(f"the model reported {self._names} at first and {list(auxiliary)} now; names must stay")
            numbers += [loss.detach(), *(number for pair in auxiliary.values() for number in pair)]
        # Every number has its own slot: the sum of zeros and one number is exact, and the host adds the numbers
        # in the same order on any number of processes. The last place is the gradient norm's.
        exact = torch.float32 if self.device.type == "mps" else torch.float64  # counts are exact up to 2**53
        message = torch.zeros(3 + self.num_processes * len(numbers), dtype=exact, device=self.device)
        first = 2 + self.rank * len(numbers)
        for place, number in ((0, num_targets), (1, stop), *enumerate(numbers, first)):
            message[place].fill_(number)  # `message[place] = number` would synchronise with the GPU
        work = dist.all_reduce(message, async_op=True) if self.num_processes > 1 else None
        self._pending.append(PendingStep(step, loss_denominator, message, work))
        return self._pending[-1]

    def read(self, now: bool = False) -> StepResult | None:
        """Read all steps but the last dispatched one; with `now`, or where updates may be skipped, that one too.

        Returns:
            The result of the newest step that was read so far; None before the first.

        Raises:
            NonFiniteError: on all processes, where the loss or the gradient norm is infinite or NaN, unless such
                updates are skipped, and then after too many in a row.
        """
        stop = False
        while len(self._pending) > (0 if now or stop or self.max_skipped else 1):
            self._newest = self._read_oldest()
            self._newest.stop = stop = self._newest.stop or stop
        return self._newest

    def _read_oldest(self) -> StepResult:
        pending = self._pending.popleft()
        if pending.copied is not None:
            pending.copied.synchronize()
        num_targets, stop, *numbers, grad_norm = pending.on_host.tolist()
        numbers_per_micro_batch = 1 + 2 * len(self._names)
        losses, *columns = (numbers[place::numbers_per_micro_batch] for place in range(numbers_per_micro_batch))
        loss = mean(losses, [1.0]) * pending.loss_denominator / num_targets if num_targets else math.nan
        pairs = zip(self._names, columns[::2], columns[1::2], strict=True)
        means = {"loss": loss} | {name: mean(sums, counts) for name, sums, counts in pairs}
        # The training objective decides, not a "loss" that the model reports in its place.
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        result = StepResult(pending.step, means, grad_norm, stop > 0, finite)
        self.skipped += not finite
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if self.skipped_in_a_row > self.max_skipped:
            raise NonFiniteError(self._explain(pending.step, losses, loss, grad_norm, num_targets))
        return result

    def _explain(self, step: int, losses: list[float], loss: float, grad_norm: float, num_targets: float) -> str:
        # Where all losses are finite and the gradient is not, any micro-batch of the global batch may be the cause.
        suspects = [i for i, value in enumerate(losses) if not math.isfinite(value)] or range(len(losses))
        ranks = sorted({i * self.num_processes // len(losses) for i in suspects})
        size, indices = self.micro_batch_size, self.batches.indices(step - 1)
        samples = [index for i in suspects for index in indices[i * size : (i + 1) * size]]
        in_a_row = f", {self.skipped_in_a_row} times in a row" if self.skipped_in_a_row > 1 else ""
        without_targets = ", no target token in the global batch" if num_targets == 0 else ""
        return (
            f"step {step}: loss = {loss}, gradient norm = {grad_norm}{in_a_row}{without_targets}, on process(es) "
            f"{ranks} whose training samples were {samples}; nothing was saved since the last checkpoint. "
            f"To inspect the step: python replay.py {shlex.quote(str(self.run_directory))} {step}"
        )
