"""What all processes must know of a step, in one small all-reduce, which the host reads one step late.

It travels beside the last backward of a step: on CPUs such a message takes milliseconds while all cores are busy.
Reading it at once would make the host wait for the device in every step. That is done only where something depends on
it: before a log line, an evaluation, a save and the end, and in every step where updates may be skipped.
"""

import math
import shlex
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from config.errors import RunError
from data.sampler import GlobalBatches

RESERVED_NAMES = {"lr", "grad_norm", "tokens", "skipped", "perplexity", "floor", "bits_per_byte"}  # as train/ or val/


class NonFiniteError(RunError):
    """The loss or the gradient of a step is infinite or NaN; the message names the step and the samples."""


def average(sums: Sequence[float], counts: Sequence[float]) -> float:
    """The sum of `sums` divided by that of `counts`; NaN where nothing was counted, or something is not finite."""
    numbers_are_finite = all(map(math.isfinite, (*sums, *counts)))
    return math.fsum(sums) / count if numbers_are_finite and (count := math.fsum(counts)) else math.nan


class StepTotals:
    """Facts of all processes, exchanged in every step and read later."""

    averages: dict[str, float]
    """`loss`, and what else the model reports (see GPTModel.forward), each over the whole global batch."""
    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    finite: bool = True
    """Whether what was differentiated and `grad_norm` are finite; False only with `on_nonfinite: skip`, and then the
    update is to be skipped."""
    stop: bool = False
    """Whether any process was asked to stop; the same on all."""

    skipped: int = 0
    """How many updates of the run were skipped: part of its state."""
    skipped_in_a_row: int = 0
    """How many of them just now, without one between that was not."""

    def __init__(
        self,
        order: GlobalBatches,
        micro_batch_size: int,
        max_skipped: int,
        accelerator: Accelerator,
        run: Path | None = None,
    ):
        """At most `max_skipped` updates in a row may be skipped. `run` is named where a step cannot go on."""
        self.order, self.micro_batch_size, self.accelerator = order, micro_batch_size, accelerator
        self.max_skipped, self.run = max_skipped, run
        self._on_host = accelerator.device.type == "cpu"
        self._dtype = torch.float32 if accelerator.device.type == "mps" else torch.float64  # exact counts up to 2**53
        self._names: list[str] = []
        self._numbers: list[Tensor | float] = []  # of the micro-batches of this step, one after another
        self._message: Tensor
        self._sending: dist.Work | None = None
        self._targets = math.nan  # of the step that is read next, as the exchange before it told
        self._unread: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def agree_on_names(self, sums: Mapping[str, tuple] = MappingProxyType({})) -> None:
        """What the model reports, from its first forward on: the same names on all processes, and in every `add`.

        Raises:
            RunError: other processes have other names, or one is a name that train.py itself logs.
        """
        of_processes = gather_object([list(sums)])
        self._names = of_processes[0]
        if any(names != self._names for names in of_processes):
            raise RunError(f"the model reports other numbers on each process, which must be the same: {of_processes}")
        if taken := RESERVED_NAMES & sums.keys():
            raise RunError(f"the model reports {', '.join(sorted(taken))}: a name that is logged already; use another")

    def add(self, loss: Tensor, sums: Mapping[str, tuple] = MappingProxyType({})) -> None:
        """Take in a micro-batch: its part of the loss, which all add up to, and its (sum, count) of each name.

        Raises:
            RunError: the names are not those that were agreed on.
        """
        if list(sums) != self._names:
            raise RunError(f"the model reported {self._names} at the start and {list(sums)} now: names must not change")
        for number in (loss.float(), *(number for pair in sums.values() for number in pair)):
            if torch.is_tensor(number):  # a GPU is not asked, for the host would wait for it
                number = number.item() if self._on_host else number.detach().to(self._dtype, copy=True)
            self._numbers.append(number)

    def send(self, next_targets: Tensor | int, stop: bool) -> None:
        """Begin to tell all processes what each knows of this step, beside the backward of its last micro-batch.

        Args:
            next_targets: the number of target tokens in this process's share of the next global batch.
            stop: whether this process was asked to stop.
        """
        rank, count = self.accelerator.process_index, len(self._numbers)
        # Every micro-batch has a place of its own, so that the sum of zeros and one number is exact and the host adds
        # them up in the same order on any number of processes. The last place is the gradient norm's.
        size = 3 + self.accelerator.num_processes * count
        self._message = torch.zeros(size, dtype=self._dtype, device=self.accelerator.device)
        for place, number in ((0, next_targets), (1, stop), *enumerate(self._numbers, 2 + rank * count)):
            self._message[place].fill_(number)  # not by `=`, which copies a plain number and waits for a GPU
        self._numbers = []
        if self.accelerator.num_processes > 1:
            self._sending = dist.all_reduce(self._message, async_op=True)

    def receive(self, step: int, grad_norm: Tensor) -> Tensor:
        """Take what all sent, as that of the update number `step`, without making the host wait for a device.

        Args:
            grad_norm: of the synchronised gradient, so already the same on all processes.

        Returns:
            The number of target tokens in the next global batch, 0-dim, on the device.
        """
        if self._sending:
            self._sending.wait()
        self._message[-1].fill_(grad_norm)
        on_cuda = self.accelerator.device.type == "cuda"
        on_host = self._message.to("cpu", non_blocking=on_cuda)
        copied = torch.cuda.current_stream().record_event() if on_cuda else None
        self._unread.append((step, on_host, copied))
        return self._message[0]

    def read(self, at_once: bool) -> None:
        """Read all but the latest exchange; with `at_once`, or where it is time to stop, the latest too.

        Raises:
            NonFiniteError: on all processes, where the loss or the gradient norm is infinite or NaN, unless such
                updates are skipped; and then, after too many in a row.
        """
        while len(self._unread) > (0 if at_once or self.stop or self.max_skipped else 1):
            step, on_host, copied = self._unread.popleft()
            if copied is not None:
                copied.synchronize()
            targets = self._targets
            self._targets, stopping, *numbers, self.grad_norm = on_host.tolist()
            self.stop = stopping > 0
            numbers_per_micro_batch = 1 + 2 * len(self._names)
            losses, *columns = (numbers[place::numbers_per_micro_batch] for place in range(numbers_per_micro_batch))
            loss = average(losses, [1.0])
            pairs = zip(self._names, columns[::2], columns[1::2], strict=True)
            self.averages = {"loss": loss} | {name: average(sums, counts) for name, sums, counts in pairs}
            self.finite = math.isfinite(loss) and math.isfinite(self.grad_norm)
            self.skipped += not self.finite
            self.skipped_in_a_row = 0 if self.finite else self.skipped_in_a_row + 1
            if self.skipped_in_a_row > self.max_skipped:
                raise NonFiniteError(self._describe(step, losses, targets))

    def _describe(self, step: int, losses: list[float], targets: float) -> str:
        # Where all losses are finite and the gradient is not, any micro-batch of the global batch may be the cause.
        guilty = [i for i, loss in enumerate(losses) if not math.isfinite(loss)] or range(len(losses))
        ranks = sorted({i * self.accelerator.num_processes // len(losses) for i in guilty})
        size, indices = self.micro_batch_size, self.order.indices(step - 1)
        samples = [index for i in guilty for index in indices[i * size : (i + 1) * size]]
        in_a_row = f", {self.skipped_in_a_row} times in a row" if self.skipped_in_a_row > 1 else ""
        without_targets = ", without one target token in the global batch" if targets == 0 else ""
        return (
            f"step {step}: loss = {average(losses, [1.0])}, gradient norm = {self.grad_norm}{in_a_row}"
            f"{without_targets}, on process(es) {ranks} whose training samples were {samples}; "
            "nothing was saved since the last checkpoint. "
            f"To see what happened: python replay.py {shlex.quote(str(self.run))} {step}"
        )
