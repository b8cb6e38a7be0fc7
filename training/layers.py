"""What happens in every block of a step: the norms of its weights, gradients and activations, and how far it moves."""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from training.gradients import trained
from training.optimizer import gathered


def _note_mean_square(mean_squares: deque[Tensor], block: nn.Module, inputs: tuple, output: Tensor | tuple) -> None:
    if block.training:
        mean_squares.append((output[0] if isinstance(output, tuple) else output).detach().float().square().mean())


def total_norm(tensors: Iterable[Tensor]) -> float:
    """L2 norm of all tensors together, which may be sharded."""
    norms = [gathered(tensor.detach().float().norm()) for tensor in tensors]
    return torch.stack(norms).norm().item() if norms else 0.0


class LayerStatistics:
    """Watches updates of `blocks`, whose outputs it notes in training, and changes nothing; without blocks, nothing.

    `metrics` are those of the last update that was watched, as `layers/NAME/BLOCK`: the L2 norms `weight_norm` (before
    the update) and `gradient_norm` (as the optimizer sees it), the root mean square `activation_rms` of the output over
    all processes, and `update_ratio`, the norm of the update divided by that of the weights.
    """

    def __init__(self, blocks: Iterable[nn.Module], num_micro_batches: int, accelerator: Accelerator):
        self.blocks, self.accelerator = list(blocks), accelerator
        self.metrics: dict[str, float] = {}
        self.mean_squares = [deque[Tensor](maxlen=num_micro_batches) for _ in self.blocks]
        for block, mean_squares in zip(self.blocks, self.mean_squares, strict=True):
            # torch.compiler.disable takes long to import what it needs: only where there is something to watch.
            block.register_forward_hook(partial(torch.compiler.disable(_note_mean_square), mean_squares))

    @contextmanager
    def watch(self, now: bool) -> Iterator[None]:
        """Around the update of a step, with `now`; called by all processes together."""
        if not now or not self.blocks:
            yield
            return
        before = [[parameter.detach().clone() for parameter in block.parameters()] for block in self.blocks]
        columns = {"weight_norm": [total_norm(weights) for weights in before]}
        columns["gradient_norm"] = [total_norm(p.grad for p in trained(block)) for block in self.blocks]
        yield
        # A row for every micro-batch of the global batch, so that they are added in one order however many processes.
        mean_squares = torch.stack([torch.stack(tuple(of_block)) for of_block in self.mean_squares], dim=1)
        columns["activation_rms"] = self.accelerator.gather(mean_squares).mean(dim=0).sqrt().tolist()
        moved = [[p - old for p, old in zip(block.parameters(), olds, strict=True)]
                 for block, olds in zip(self.blocks, before, strict=True)]  # fmt: skip
        ratios = zip(moved, columns["weight_norm"], strict=True)
        columns["update_ratio"] = [total_norm(move) / (norm or 1.0) for move, norm in ratios]
        self.metrics = {f"layers/{name}/{i}": v for name, column in columns.items() for i, v in enumerate(column)}
