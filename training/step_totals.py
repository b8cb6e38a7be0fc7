"""What all processes must know of a step, in one small all-reduce, which the host reads one step late.

Reading it at once would make the host wait for the device in every step. That is done only where something depends on
it: before a log line, an evaluation, a save and the end.
"""

import math
from collections import deque

import torch
from accelerate import Accelerator
from torch import Tensor

from data.order import GlobalBatches


class NonFiniteError(RuntimeError):
    """The loss or the gradient of a step is infinite or NaN; the message names the step and the samples."""


class StepTotals:
    """Sums over all processes, exchanged after every step and read later: `loss`, `grad_norm` and `stop`."""

    loss: float
    """Of the global batch, in nats a target token."""
    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    stop: bool = False
    """Whether a signal asked any process to stop; the same on all."""

    def __init__(self, order: GlobalBatches, accelerator: Accelerator):
        self.order, self.accelerator = order, accelerator
        self._unread: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def exchange(self, step: int, loss: Tensor, grad_norm: Tensor, next_targets: Tensor | int, stop: bool) -> Tensor:
        """Add up over all processes what they know after `step` updates, without waiting for the result.

        Args:
            loss: this process's part of the global loss; the parts of all processes add up to it.
            grad_norm: of the synchronised gradient, so already the same on all processes.
            next_targets: the number of target tokens in this process's share of the next global batch.
            stop: whether a signal asked this process to stop.

        Returns:
            The number of target tokens in the next global batch, 0-dim, on the device.
        """
        device = self.accelerator.device
        dtype = torch.float32 if device.type == "mps" else torch.float64  # exact counts up to 2**53
        local = torch.zeros(3 + self.accelerator.num_processes, dtype=dtype, device=device)
        local[0], local[1], local[2] = loss, next_targets, stop
        local[3 + self.accelerator.process_index] = ~loss.isfinite()
        total = self.accelerator.reduce(local, "sum")
        on_host = torch.cat((total, grad_norm.to(total).reshape(1))).to("cpu", non_blocking=True)
        copied = None
        if device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
        self._unread.append((step, on_host, copied))
        return total[1]

    def read(self, at_once: bool) -> None:
        """Read all but the latest exchange; with `at_once`, or where it is time to stop, the latest too.

        Raises:
            NonFiniteError: on all processes, where the loss or the gradient norm is infinite or NaN.
        """
        while len(self._unread) > (0 if at_once or self.stop else 1):
            step, on_host, copied = self._unread.popleft()
            if copied is not None:
                copied.synchronize()
            self.loss, _, stop, *nonfinite, self.grad_norm = on_host.tolist()
            self.stop = stop > 0
            if not (math.isfinite(self.loss) and math.isfinite(self.grad_norm)):
                raise NonFiniteError(self._describe(step, nonfinite))

    def _describe(self, step: int, nonfinite: list[float]) -> str:
        # A finite loss with an infinite gradient cannot be traced further than to the global batch.
        ranks = [rank for rank, flag in enumerate(nonfinite) if flag or not any(nonfinite)]
        samples = [i for rank in ranks for i in self.order.indices(step - 1, rank, len(nonfinite))]
        return (
            f"step {step}: loss = {self.loss}, gradient norm = {self.grad_norm}, on process(es) {ranks} whose "
            f"training samples were {samples}; nothing was saved since the last checkpoint"
        )
