"""What all processes must know of a step, in one small all-reduce, which the host reads one step late.

Reading it at once would make the host wait for the device in every step. That is done only where something depends on
it: before a log line, an evaluation, a save and the end, and in every step where updates may be skipped.
"""

import math
from collections import deque

import torch
from accelerate import Accelerator
from torch import Tensor

from config import RunError
from data.order import GlobalBatches


class NonFiniteError(RunError):
    """The loss or the gradient of a step is infinite or NaN; the message names the step and the samples."""


class StepTotals:
    """Facts of all processes, exchanged in every step and read later: `loss`, `grad_norm`, `finite` and `stop`."""

    loss: float
    """Of the global batch, in nats a target token."""
    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    finite: bool = True
    """Whether both are finite; False only with `on_nonfinite: skip`, and then the update is to be skipped."""
    stop: bool = False
    """Whether any process was asked to stop; the same on all."""

    skipped: int = 0
    """How many updates of the run were skipped: part of its state."""
    skipped_in_a_row: int = 0
    """How many of them just now, without one between that was not."""

    def __init__(self, order: GlobalBatches, micro_batch_size: int, max_skipped: int, accelerator: Accelerator):
        """At most `max_skipped` updates in a row may be skipped."""
        self.order, self.micro_batch_size, self.accelerator = order, micro_batch_size, accelerator
        self.max_skipped = max_skipped
        self._targets = math.nan  # of the step that is read next, as the exchange before it told
        self._unread: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def exchange(self, step: int, losses: Tensor, grad_norm: Tensor, next_targets: Tensor | int, stop: bool) -> Tensor:
        """Tell all processes what each knows of the update number `step`, without waiting for the result.

        Args:
            losses: this process's micro-batches' parts of the global loss, [accumulation]; all of them add up to it.
            grad_norm: of the synchronised gradient, so already the same on all processes.
            next_targets: the number of target tokens in this process's share of the next global batch.
            stop: whether this process was asked to stop.

        Returns:
            The number of target tokens in the next global batch, 0-dim, on the device.
        """
        device, rank, accumulation = self.accelerator.device, self.accelerator.process_index, len(losses)
        dtype = torch.float32 if device.type == "mps" else torch.float64  # exact counts up to 2**53
        # Every micro-batch has a place of its own, so that the sum of zeros and one number is exact and the host adds
        # the losses up in the same order on any number of processes.
        local = torch.zeros(2 + accumulation * self.accelerator.num_processes, dtype=dtype, device=device)
        local[0], local[1] = next_targets, stop
        local[2 + rank * accumulation : 2 + (rank + 1) * accumulation] = losses
        total = self.accelerator.reduce(local, "sum")
        on_host = torch.cat((total, grad_norm.to(total).reshape(1))).to("cpu", non_blocking=True)
        copied = None
        if device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
        self._unread.append((step, on_host, copied))
        return total[0]

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
            targets, self._targets = self._targets, on_host[0].item()
            _, stop, *losses, self.grad_norm = on_host.tolist()
            self.stop = stop > 0
            self.loss = math.fsum(losses) if all(map(math.isfinite, losses)) else math.nan
            self.finite = math.isfinite(self.loss) and math.isfinite(self.grad_norm)
            self.skipped += not self.finite
            self.skipped_in_a_row = 0 if self.finite else self.skipped_in_a_row + 1
            if self.skipped_in_a_row > self.max_skipped:
                raise NonFiniteError(self._describe(step, losses, targets))

    def _describe(self, step: int, losses: list[float], targets: float) -> str:
        # A finite loss with an infinite gradient cannot be traced further than to the global batch.
        guilty = [i for i, loss in enumerate(losses) if not math.isfinite(loss)] or range(len(losses))
        ranks = sorted({i * self.accelerator.num_processes // len(losses) for i in guilty})
        size, indices = self.micro_batch_size, self.order.indices(step - 1)
        samples = [index for i in guilty for index in indices[i * size : (i + 1) * size]]
        in_a_row = f", {self.skipped_in_a_row} times in a row" if self.skipped_in_a_row > 1 else ""
        return (
            f"step {step}: loss = {self.loss}, gradient norm = {self.grad_norm}{in_a_row}"
            f"{', without one target token in the global batch' if targets == 0 else ''}, on process(es) {ranks} "
            f"whose training samples were {samples}; nothing was saved since the last checkpoint"
        )
