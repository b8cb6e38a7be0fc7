"""What happens in every block of a step: the norms of its weights, gradients and activations, and how far it moves."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from distributed.sharding import full_tensor
from training.gradients import trainable_parameters


def total_norm(tensors: Iterable[Tensor]) -> float:
    """L2 norm of all tensors together, which may be sharded."""
    norms = [full_tensor(tensor.detach().float().norm()) for tensor in tensors]
    return torch.stack(norms).norm().item() if norms else 0.0


class LayerStatistics:
    """Watches updates of `blocks` in the steps for which `noting` is set, and changes nothing; without blocks, nothing.

    `metrics` are those of the last update that was watched, as `layers/NAME/BLOCK`: the L2 norms `weight_norm` (before
    the update) and `gradient_norm` (as the optimizer sees it), the root mean square `activation_rms` of the output over
    all processes, and `update_ratio`, the norm of the update divided by that of the weights. Where a block stands in
    several places, its output is that in all of them; where it is left out, as by stochastic depth, it has none.
    """

    def __init__(self, blocks: Iterable[nn.Module], accelerator: Accelerator):
        self.blocks, self.accelerator = list(blocks), accelerator
        self.metrics, self.noting = {}, False
        self.mean_squares: list[list[Tensor]] = [[] for _ in self.blocks]  # since the last update
        for index, block in enumerate(self.blocks):
            # torch.compiler.disable takes long to import what it needs: only where there is something to watch.
            block.register_forward_hook(partial(torch.compiler.disable(self._note), index))

    def _note(self, i: int, block: nn.Module, inputs: tuple, out: Tensor | tuple) -> None:
        if self.noting and block.training:
            self.mean_squares[i].append((out[0] if isinstance(out, tuple) else out).detach().float().square().mean())

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around the update of a step; called by all processes together."""
        noted, self.mean_squares = self.mean_squares, [[] for _ in self.blocks]
        if not (self.noting and self.blocks):
            yield
            return
        before = [[parameter.detach().clone() for parameter in block.parameters()] for block in self.blocks]
        columns = {"weight_norm": [total_norm(weights) for weights in before]}
        columns["gradient_norm"] = [total_norm(p.grad for p in trainable_parameters(block)) for block in self.blocks]
        yield
        # A row for every micro-batch of the global batch, so that they are added in one order however many processes;
        # with zeros for the blocks that were left out in some.
        rows = nn.utils.rnn.pad_sequence([torch.tensor(of_block, device=self.accelerator.device) for of_block in noted])
        rows = self.accelerator.gather(self.accelerator.pad_across_processes(rows))
        columns["activation_rms"] = (rows.sum(dim=0) / (rows != 0).sum(dim=0).clamp(min=1)).sqrt().tolist()
        updates = [
            torch._foreach_sub(list(block.parameters()), weights)
            for block, weights in zip(self.blocks, before, strict=True)
        ]
        columns["update_ratio"] = [
            total_norm(update) / (norm or 1.0) for update, norm in zip(updates, columns["weight_norm"], strict=True)
        ]
        self.metrics = {f"layers/{name}/{i}": v for name, column in columns.items() for i, v in enumerate(column)}
