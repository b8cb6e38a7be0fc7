"""Statistics of each block in a step: norms of weights, gradients and activations, and the size of the update."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from distributed.private_torch import foreach_sub
from distributed.sharding import full_tensor
from training.gradients import complete_gradients, trainable_parameters


def total_norm(tensors: Iterable[Tensor]) -> float:
    """Return the L2 norm of all tensors together; they may be sharded."""
    norms = [full_tensor(tensor.detach().float().norm()) for tensor in tensors]
    return torch.stack(norms).norm().item() if norms else 0.0


class BlockStatistics:
    """Records statistics of `blocks` in the steps for which `recording` is set, without changing any of them.

    `metrics` are those of the last recorded step, as `layers/NAME/BLOCK`: the L2 norms `weight_norm` (before the
    update) and `gradient_norm` (as the optimizer uses it), `activation_rms`, the root mean square of the output over
    all processes, and `update_ratio`, the norm of the update divided by that of the weights. A block that is used in
    several places has the mean over them; one that is skipped, as by stochastic depth, has 0.
    """

    def __init__(self, blocks: Iterable[nn.Module], accelerator: Accelerator):
        self.blocks, self.accelerator = list(blocks), accelerator
        self.metrics, self.recording = {}, False
        self.mean_squares: list[list[Tensor]] = [[] for _ in self.blocks]  # since the last update
        for index, block in enumerate(self.blocks):
            # torch.compiler.disable is slow to import, so only where there are blocks to record.
            block.register_forward_hook(partial(torch.compiler.disable(self._record_output), index))

    def _record_output(self, i: int, block: nn.Module, inputs: tuple, out: Tensor | tuple) -> None:
        if self.recording and block.training:
            self.mean_squares[i].append((out[0] if isinstance(out, tuple) else out).detach().float().square().mean())

    @contextmanager
    def record_update(self) -> Iterator[None]:
        """Record the update made inside this context; called by all processes together."""
        recorded, self.mean_squares = self.mean_squares, [[] for _ in self.blocks]
        if not (self.recording and self.blocks):
            yield
            return
        before = [[parameter.detach().clone() for parameter in block.parameters()] for block in self.blocks]
        columns = {"weight_norm": [total_norm(weights) for weights in before]}
        columns["gradient_norm"] = [
            total_norm(complete_gradients(trainable_parameters(block))) for block in self.blocks
        ]
        yield
        # One row for each micro-batch of the global batch, so that the order of addition does not depend on the number
        # of processes; 0 for blocks that a micro-batch skipped.
        device = self.accelerator.device
        rows = nn.utils.rnn.pad_sequence([torch.tensor(values, device=device) for values in recorded])
        rows = cast(Tensor, self.accelerator.gather(self.accelerator.pad_across_processes(rows)))
        columns["activation_rms"] = (rows.sum(dim=0) / (rows != 0).sum(dim=0).clamp(min=1)).sqrt().tolist()
        updates = [
            foreach_sub(list(block.parameters()), weights) for block, weights in zip(self.blocks, before, strict=True)
        ]
        columns["update_ratio"] = [
            total_norm(update) / (norm or 1.0) for update, norm in zip(updates, columns["weight_norm"], strict=True)
        ]
        self.metrics = {f"layers/{name}/{i}": v for name, column in columns.items() for i, v in enumerate(column)}
