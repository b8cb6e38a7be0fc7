"""Statistics of each block in a step: norms of weights and gradients, activations, and the relative update."""

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
    """Return the L2 norm over all tensors, which may be sharded."""
    norms = [full_tensor(tensor.detach().float().norm()) for tensor in tensors]
    return torch.stack(norms).norm().item() if norms else 0.0


class BlockStatistics:
    """Records statistics of `blocks` in the steps for which `recording` is set; training is not changed by it.

    `metrics` holds those of the last recorded step as `layers/NAME/BLOCK`:

    - weight_norm: L2 norm of the weights before the update.
    - gradient_norm: L2 norm of the gradient after clipping.
    - activation_rms: root mean square of the block's output over all processes, and over all calls if the block is
      called several times in a forward; 0 for a block that was never called, as with stochastic depth.
    - update_ratio: L2 norm of the update divided by weight_norm.
    """

    def __init__(self, blocks: Iterable[nn.Module], accelerator: Accelerator):
        self.blocks, self.accelerator = list(blocks), accelerator
        self.metrics, self.recording = {}, False
        self.mean_squares: list[list[Tensor]] = [[] for _ in self.blocks]  # since the last update
        for index, block in enumerate(self.blocks):
            # Inside the loop, because torch.compiler.disable is slow to import.
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
        # [calls, blocks]: all calls are gathered and then summed, so that the order of addition does not depend on the
        # number of processes; 0 where a block had fewer calls than others.
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
