"""Statistics of each block in a step: norms of weights and gradients, activations, and the relative update."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from runtime.distributed.sharding import full_tensor
from runtime.private_torch import foreach_norm, foreach_sub
from trainer.cuda_graph import GraphedMicroBatch
from trainer.gradients import fill_missing_gradients, trainable_parameters
from trainer.results import mean


def group_norms(groups: Sequence[Iterable[Tensor]]) -> Tensor:
    """Return the L2 norm over the tensors of each group, [groups], with one all-reduce if they are sharded."""
    tensors = [[tensor.detach().float() for tensor in group] for group in groups]
    if not any(tensors):
        return torch.zeros(len(groups))
    norms = full_tensor(torch.stack(foreach_norm([tensor for group in tensors for tensor in group])))
    return torch.stack([part.norm() for part in norms.split([len(group) for group in tensors])])


def total_norm(tensors: Iterable[Tensor]) -> float:
    """Return the L2 norm over all tensors, which may be sharded."""
    return group_norms([tensors]).item()


class BlockStatistics:
    """Statistics of `blocks` in the steps that are recorded (`record`), without changing training.

    `metrics` holds the statistics of the last recorded step as `layers/NAME/BLOCK`; it is empty if no step was recorded
    or its update was skipped:

    - weight_norm: L2 norm of the weights before the update.
    - gradient_norm: L2 norm of the gradient after clipping.
    - activation_rms: root mean square of the block's output over all processes, and over all calls if the block is
      called several times in a forward; 0 for a block that was never called, as with stochastic depth.
    - update_ratio: L2 norm of the update divided by weight_norm.
    """

    def __init__(self, blocks: Iterable[nn.Module] = (), optimizer: torch.optim.Optimizer | None = None):
        """Add hooks: to the optimizer, which measure the norms, and to the blocks, which measure their outputs.

        `optimizer` is torch's, not Accelerate's wrapper, which has no hooks. Without blocks nothing is measured.
        """
        self.blocks = list(blocks)
        self.metrics: dict[str, float] = {}
        self.recording = False
        self._mean_squares: list[list[Tensor]] = []  # of each block's outputs in this step
        self._before: list[list[Tensor]] = []  # weights before the update
        self._norms: dict[str, Tensor] = {}
        for index, block in enumerate(self.blocks):
            # In the loop, because torch.compiler.disable is slow to import and not needed without blocks.
            block.register_forward_hook(partial(torch.compiler.disable(self._record_output), index))
        if self.blocks and optimizer is not None:
            optimizer.register_step_pre_hook(self._before_update)
            optimizer.register_step_post_hook(self._after_update)

    @contextmanager
    def record(self, enabled: bool, graph: GraphedMicroBatch | None = None) -> Iterator[None]:
        """Record the step that is taken inside this context, if `enabled`; called by all processes together.

        A recorded step pauses `graph`, which would not run the hooks of the blocks.
        """
        self.recording = enabled and bool(self.blocks)
        if self.recording:
            self.metrics, self._mean_squares = {}, [[] for _ in self.blocks]
        if graph:
            graph.is_paused = self.recording
        try:
            yield
        finally:
            self.recording = False
            if graph:
                graph.is_paused = False

    def _record_output(self, i: int, block: nn.Module, inputs: tuple, out: Tensor | tuple) -> None:
        if self.recording and block.training:
            self._mean_squares[i].append((out[0] if isinstance(out, tuple) else out).detach().float().square().mean())

    def _before_update(self, *_) -> None:
        if self.recording:
            self._before = [[parameter.detach().clone() for parameter in block.parameters()] for block in self.blocks]
            gradients = [fill_missing_gradients(trainable_parameters(block)) for block in self.blocks]
            self._norms = {"weight_norm": group_norms(self._before)}
            self._norms["gradient_norm"] = group_norms(gradients)

    def _after_update(self, *_) -> None:
        if not self.recording:
            return
        pairs = zip(self.blocks, self._before, strict=True)
        updates = group_norms([foreach_sub(list(block.parameters()), old) for block, old in pairs])
        norms, self._before = self._norms | {"update_ratio": updates}, []
        device = norms["weight_norm"].device  # norms of no tensors, if all are frozen, are on the CPU
        columns = dict(zip(norms, torch.stack([norm.to(device) for norm in norms.values()]).tolist(), strict=True))
        pairs = zip(columns["update_ratio"], columns["weight_norm"], strict=True)
        columns["update_ratio"] = [update / (weight or 1.0) for update, weight in pairs]
        # All calls are gathered and then added, so that the sum does not depend on the number of processes.
        squares = [square for calls in self._mean_squares for square in calls]
        mean_squares = iter(torch.stack(squares).tolist() if squares else [])
        gathered = gather_object([[[next(mean_squares) for _ in calls] for calls in self._mean_squares]])
        calls_of_block = [sum(per_process, []) for per_process in zip(*gathered, strict=True)]
        columns["activation_rms"] = [math.sqrt(mean(calls, [len(calls)])) if calls else 0.0 for calls in calls_of_block]
        self.metrics = {f"layers/{name}/{i}": v for name, column in columns.items() for i, v in enumerate(column)}
