"""A ring all-reduce from sends between neighbours: how dist.all_reduce sums a large tensor.

The ranks form a ring and split the tensor into n chunks. Reduce-scatter: in each of n - 1 steps, every rank sends a
chunk to the right and adds the chunk from the left to its own; then each rank has one complete sum. All-gather: in
n - 1 more steps, each rank passes on the complete chunk that it received last. So a rank sends 2 (n - 1) / n of the
tensor, less than twice its size for any number of ranks (Patarasuk and Yuan 2009).
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor

from examples import common


def exchange(chunk: Tensor, incoming: Tensor) -> int:
    """Send `chunk` to the right while receiving `incoming` from the left; return the number of bytes sent."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Both operations start before either is waited for; if all ranks sent first, they would deadlock.
    send = dist.P2POp(dist.isend, chunk, (rank + 1) % ranks)
    receive = dist.P2POp(dist.irecv, incoming, (rank - 1) % ranks)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return chunk.nbytes


def ring_allreduce(tensor: Tensor) -> int:
    """Replace a contiguous tensor by its sum over the ranks; return the number of bytes sent by this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = tensor.view(-1).tensor_split(ranks)  # views; sizes differ by at most one element
    incoming = [torch.empty_like(chunk) for chunk in chunks]
    sent = 0
    for step in range(ranks - 1):
        received = (rank - step - 1) % ranks
        sent += exchange(chunks[(rank - step) % ranks], incoming[received])
        chunks[received].add_(incoming[received])
    for step in range(ranks - 1):
        sent += exchange(chunks[(rank - step + 1) % ranks], chunks[(rank - step) % ranks])
    return sent


def compare(rank: int, init_method: str, args: argparse.Namespace) -> None:
    """Compare with dist.all_reduce on integers, whose sums are exact, and on floats."""
    dist.init_process_group(args.backend, init_method, rank=rank, world_size=args.ranks)
    device = common.select_device(rank, args.backend)
    torch.manual_seed(rank)
    for tensor in (torch.randint(-1000, 1000, (args.elements,)), torch.randn(args.elements)):
        ours, expected = tensor.to(device), tensor.to(device, copy=True)
        sent = ring_allreduce(ours)
        dist.all_reduce(expected)
        difference = (ours - expected).abs().max().item()
        kind = str(tensor.dtype).removeprefix("torch.")
        print(
            f"Rank {rank}, {kind}: sent {sent / tensor.nbytes:.3f} of the tensor; largest difference from "
            f"dist.all_reduce {difference:.1g}\n",
            end="",
            flush=True,
        )
    common.leave()


def main() -> None:
    parser = common.Parser(__spec__.name, __doc__)
    parser.add_argument("--elements", type=common.positive_int, default=10**6, help="tensor size (default 1,000,000)")
    common.spawn(compare, parser.parse())


if __name__ == "__main__":
    main()
