"""The ring all-reduce, from sends to a neighbour: what dist.all_reduce does for a large tensor.

The ranks sit in a ring and cut the tensor into n chunks. Reduce-scatter: n - 1 times, each sends a chunk to the right
and adds the one that comes from the left to its own, after which each owns one finished sum. All-gather: n - 1 times,
each passes the finished chunk on that it got last. So a rank sends 2 (n - 1) chunks of 1/n of the tensor: less than
twice the tensor, however many ranks there are (Patarasuk and Yuan 2009). Compared here with dist.all_reduce.
"""

import argparse
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor


def exchange(chunk: Tensor, incoming: Tensor) -> int:
    """Send `chunk` to the right while `incoming` is filled from the left; returns the bytes sent."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Both are started before either is waited for: if all ranks sent first, all would wait for ever.
    send = dist.P2POp(dist.isend, chunk, (rank + 1) % ranks)
    receive = dist.P2POp(dist.irecv, incoming, (rank - 1) % ranks)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return chunk.nbytes


def ring_allreduce(tensor: Tensor) -> int:
    """Replace `tensor`, contiguous and of one shape on all ranks, by its sum over them; returns the bytes sent."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = tensor.view(-1).tensor_split(ranks)  # views; sizes differ by at most one element
    incoming = [torch.empty_like(chunk) for chunk in chunks]
    sent = 0
    for step in range(ranks - 1):
        theirs = (rank - step - 1) % ranks
        sent += exchange(chunks[(rank - step) % ranks], incoming[theirs])
        chunks[theirs].add_(incoming[theirs])
    for step in range(ranks - 1):
        sent += exchange(chunks[(rank - step + 1) % ranks], chunks[(rank - step) % ranks])
    return sent


def seconds_of(function, tensor: Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    function(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare(rank: int, folder: str, args: argparse.Namespace) -> None:
    dist.init_process_group(args.backend, init_method=f"file://{folder}/meet", rank=rank, world_size=args.ranks)
    torch.set_num_threads(1)  # the ranks share the cores
    device = torch.device("cuda", rank) if args.backend == "nccl" else torch.device("cpu")
    torch.cuda.set_device(rank if args.backend == "nccl" else -1)  # -1: leave it
    torch.manual_seed(rank)
    for elements in args.elements:
        whole = torch.randint(-1000, 1000, (elements,), device=device)
        for kind, tensor in (("int64", whole), ("float32", torch.randn(elements, device=device))):
            ours, theirs = tensor.clone(), tensor.clone()
            sent = ring_allreduce(ours)
            dist.all_reduce(theirs)
            difference = (ours - theirs).abs().max().item() if elements else 0
            on_rank_0 = ours.clone()
            dist.broadcast(on_rank_0, src=0)
            outcome = [None] * args.ranks
            dist.all_gather_object(outcome, (sent, difference, torch.equal(ours, on_rank_0)))
            if rank == 0:
                all_sent, differences, alike = zip(*outcome, strict=True)
                print(
                    f"{elements:,} x {kind}: all ranks alike: {all(alike)}; differs from dist.all_reduce by at most "
                    f"{max(differences):.1g}; mean bytes sent by a rank {sum(all_sent) / args.ranks:,.1f} "
                    f"= 2(n-1)/n of {tensor.nbytes:,} = {2 * (args.ranks - 1) / args.ranks * tensor.nbytes:,.1f}",
                    flush=True,
                )
    for name, function in (("ring_allreduce", ring_allreduce), ("dist.all_reduce", dist.all_reduce)):
        seconds = sorted(seconds_of(function, whole.float()) for _ in range(5))[2]
        if rank == 0:
            print(f"{name}: {seconds * 1000:.2f} ms for {elements:,} x float32, median of 5", flush=True)
    dist.barrier()  # no rank tears the group down while another still uses it
    dist.destroy_process_group()
    os._exit(0)  # not through the interpreter's exit, where threads of gloo may abort


def main() -> None:
    parser = argparse.ArgumentParser(f"python -m {__spec__.name}", None, __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: error: {message}\n")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    parser.add_argument("--elements", type=int, nargs="+", default=[0, 1, 7, 10**6], help="sizes of the tensors")
    parser.add_argument("--backend", choices=["gloo", "nccl"], help="default: nccl if each rank has a GPU, else gloo")
    args = parser.parse_args()
    if args.ranks < 1 or min(args.elements) < 0:
        parser.error("--ranks must be at least 1, and no --elements below 0")
    gpus = torch.cuda.device_count()
    args.backend = args.backend or ("nccl" if gpus >= args.ranks else "gloo")
    if args.backend == "nccl" and not (dist.is_nccl_available() and gpus >= args.ranks):
        parser.error(f"--backend nccl needs a GPU for each of the {args.ranks} ranks, but {gpus} are here; use gloo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(compare, (folder, args), nprocs=args.ranks)


if __name__ == "__main__":
    main()
