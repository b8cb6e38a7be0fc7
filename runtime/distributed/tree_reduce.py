"""Sums of gradients over processes in place of DDP: with the same bits on 1, 2, 4, 8, ... processes, or by all-reduce.

Floating-point addition is not associative, and DDP's order of additions depends on the number of processes. TreeSum
makes the micro-batches of a global batch the leaves of one binary tree. Each process sums one subtree; the upper levels
are summed by recursive doubling (Thakur, Rabenseifner and Gropp 2005), in which both partners add the same two tensors,
so all processes end with the same sum.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.private_torch import foreach_add_


class TreeSum:
    """Replaces DDP: call `add_micro_batch` after each backward; after the last one of a step `.grad` is the global sum.

    A global batch of G = m * 2**k micro-batches, m odd, has 2**k leaves. A leaf is the sum of m micro-batches, which
    backward accumulates in order. The number of processes may be any power of two that divides G. Memory per process:
    at most log2(leaves of the process) + 1 partial sums, each the size of the gradients, and one receive buffer.
    """

    def __init__(self, parameters: list[nn.Parameter], rank: int, num_processes: int):
        self.parameters = parameters
        self.rank, self.num_processes = rank, num_processes
        self.num_added = 0
        # Each is the sum of a distinct power of two of leaves, largest first, like the digits of a binary counter.
        self.partial_sums: list[list[Tensor]] = []

    def add_micro_batch(self, num_micro_batches: int) -> None:
        """Move the gradients of one of this process's `num_micro_batches` micro-batches from `.grad` into the tree."""
        micro_batches = num_micro_batches * self.num_processes
        leaves_of_step = micro_batches & -micro_batches  # the largest power of two that divides micro_batches
        self.num_added += 1
        num_leaves, incomplete = divmod(self.num_added, micro_batches // leaves_of_step)
        if incomplete:  # backward adds the other micro-batches of this leaf to `.grad`
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        # Add sums of equal size, as a binary counter carries: as often as 2 divides the number of leaves so far.
        num_carries = (num_leaves & -num_leaves).bit_length() - 1
        for _ in range(num_carries):
            foreach_add_(gradients, self.partial_sums.pop())
        self.partial_sums.append(gradients)
        if self.num_added == num_micro_batches:
            self._add_processes(gradients)
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            self.num_added, self.partial_sums = 0, []

    def _add_processes(self, gradients: list[Tensor]) -> None:
        """Add the sums of all processes to `gradients` in place, by recursive doubling."""
        distance = 1
        while distance < self.num_processes:
            partner = self.rank ^ distance
            received = [torch.empty_like(gradient) for gradient in gradients]
            exchanges = [dist.P2POp(dist.isend, gradient, partner) for gradient in gradients]
            exchanges += [dist.P2POp(dist.irecv, buffer, partner) for buffer in received]
            for work in dist.batch_isend_irecv(exchanges):
                work.wait()
            foreach_add_(gradients, received)
            distance *= 2


class AllReduce:
    """Sums the gradients over the processes by one all-reduce after the last backward of a step."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters, self.num_added = parameters, 0

    def add_micro_batch(self, num_micro_batches: int) -> None:
        """Count a micro-batch, whose gradients backward has accumulated; after the last one, sum over the processes."""
        self.num_added += 1
        if self.num_added == num_micro_batches:
            self.num_added = 0  # the next step may have another number, with batch warm-up
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            parts = flat.split([gradient.numel() for gradient in gradients])
            for parameter, part in zip(self.parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter)
