"""What all processes must know of a step, in one small all-reduce, which the host reads one step late.

Reading it at once would make the host wait for the device in every step. That is done only where something depends on
it: before a log line, an evaluation, a save and the end.
"""

import math

import torch
from accelerate import Accelerator

from data.order import GlobalBatches


class NonFiniteError(RuntimeError):
    """The loss or the gradient of a step is infinite or NaN; the message names the step and the samples."""


class StepTotals:
    """Sums over all processes after `step` updates; every process makes one in every step."""

    def __init__(
        self,
        step: int,
        loss: torch.Tensor,
        grad_norm: torch.Tensor,
        next_target_tokens: torch.Tensor | int,
        stop: bool,
        accelerator: Accelerator,
    ):
        """
        Args:
            loss: this process's part of the global loss: the parts of all processes add up to it.
            grad_norm: of the synchronised gradient, so already the same on all processes.
            next_target_tokens: how many targets this process's share of the next global batch has.
            stop: whether a signal asked this process to stop.
        """
        self.step = step
        dtype = torch.float32 if accelerator.device.type == "mps" else torch.float64  # exact counts up to 2**53
        local = torch.zeros(3 + accelerator.num_processes, dtype=dtype, device=accelerator.device)
        local[0], local[1], local[2] = loss, next_target_tokens, stop
        local[3 + accelerator.process_index] = ~loss.isfinite()
        total = accelerator.reduce(local, "sum")
        self.next_target_tokens = total[1]
        self._on_host = torch.cat((total, grad_norm.to(total).reshape(1))).to("cpu", non_blocking=True)
        self._copied = None
        if accelerator.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self, order: GlobalBatches, num_processes: int) -> "StepTotals":
        """Wait for the values: `loss` (of the global batch), `grad_norm` and `stop` (whether to stop, for all alike).

        Raises:
            NonFiniteError: on all processes, where the loss or the gradient norm is infinite or NaN.
        """
        if self._copied is not None:
            self._copied.synchronize()
        self.loss, _, stop, *nonfinite, self.grad_norm = self._on_host.tolist()
        self.stop = stop > 0
        if not (math.isfinite(self.loss) and math.isfinite(self.grad_norm)):
            # A finite loss with an infinite gradient cannot be traced further than to the global batch.
            ranks = [rank for rank in range(num_processes) if nonfinite[rank] or not any(nonfinite)]
            samples = [index for rank in ranks for index in order.indices(self.step - 1, rank, num_processes)]
            raise NonFiniteError(
                f"step {self.step}: loss = {self.loss}, gradient norm = {self.grad_norm}, on process(es) {ranks} with "
                f"the training samples {samples}; nothing was saved since the last checkpoint"
            )
        return self

    def metrics(self, lr: float) -> dict[str, float]:
        """The training metrics of the step, which was made with the learning rate `lr`."""
        return {"train/loss": self.loss, "train/lr": lr, "train/grad_norm": self.grad_norm}
