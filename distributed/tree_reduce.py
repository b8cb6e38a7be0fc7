"""Gradients with the same bits on 1, 2, 4, 8, ... processes: one fixed tree of additions for every number of them.

Floating-point addition is not associative: DDP, whose order of additions depends on the number of processes, gives
other bits on each. Here the micro-batches of a global batch are the leaves of one binary tree. Every process owns a
whole subtree, adds that up alone, and the upper levels are added by recursive doubling (Thakur, Rabenseifner and
Gropp 2005), in which partners add the same two numbers and so need no further exchange.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


class TreeSum:
    """Takes DDP's place: call `add_micro_batch` after every backward; after the last, `.grad` is the global sum.

    G micro-batches, G = m * 2**k with odd m, make 2**k leaves of m micro-batches each, which backward itself adds up
    in their order. So any power of two that divides G may be the number of processes. A process holds at most
    log2(leaves of the process) + 1 partial sums, each the size of the gradients, and one more to receive.
    """

    def __init__(self, parameters: list[nn.Parameter], rank: int, num_processes: int):
        self.parameters = parameters
        self.rank, self.num_processes = rank, num_processes
        self.num_added = 0
        self.partial_sums: list[list[Tensor]] = []  # of distinct powers of two of leaves, like the digits of a counter

    def add_micro_batch(self, accumulation: int) -> None:
        """Add what the last backward left in `.grad`, of one of the `accumulation` micro-batches that every process has
        in this step."""
        micro_batches = accumulation * self.num_processes
        leaves_of_step = micro_batches & -micro_batches  # the largest power of two that divides it
        self.num_added += 1
        num_leaves, in_leaf = divmod(self.num_added, micro_batches // leaves_of_step)
        if in_leaf:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        # As often as 2 divides the number of leaves so far: sums of equal size are added, as a binary counter carries.
        num_carries = (num_leaves & -num_leaves).bit_length() - 1
        for _ in range(num_carries):
            torch._foreach_add_(gradients, self.partial_sums.pop())
        self.partial_sums.append(gradients)
        if self.num_added == accumulation:
            self._add_processes(gradients)
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            self.num_added, self.partial_sums = 0, []

    def _add_processes(self, gradients: list[Tensor]) -> None:
        distance = 1
        while distance < self.num_processes:
            partner = self.rank ^ distance
            received = [torch.empty_like(gradient) for gradient in gradients]
            exchanges = [dist.P2POp(dist.isend, gradient, partner) for gradient in gradients]
            exchanges += [dist.P2POp(dist.irecv, buffer, partner) for buffer in received]
            for work in dist.batch_isend_irecv(exchanges):
                work.wait()
            torch._foreach_add_(gradients, received)
            distance *= 2
