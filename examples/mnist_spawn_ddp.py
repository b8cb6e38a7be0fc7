"""The first rung: mp.spawn starts the ranks, init_process_group joins them, DistributedSampler deals out the images,
and DistributedDataParallel (DDP) averages the gradients while backward computes them.

Why not nn.DataParallel, which needs one line and no ranks? It is one process with a thread a GPU: Python's lock lets
one thread run at a time, the weights are copied to every GPU in each forward, and the outputs and gradients are
gathered on the first. DDP copies the weights once, and then sends only gradients. Where two GPUs are, the time of a
step of both is measured at the end.
"""

import argparse
import os
import socket
import time
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from examples.mnist import load_mnist

BATCH_SIZE = 64  # of one rank
TIMED_STEPS = 50


def new_model() -> nn.Module:
    """Images [B, 1, 28, 28] to the logits of the ten digits [B, 10]."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def milliseconds_a_step(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Mean time of a training step of `model` on one batch, after some steps to warm up."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(10 + TIMED_STEPS):
        if step == 10:
            torch.cuda.synchronize()
            start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / TIMED_STEPS * 1000


def train(rank: int, args: argparse.Namespace, images: Tensor, labels: Tensor) -> None:
    dist.init_process_group(args.backend, rank=rank, world_size=args.ranks)  # meets at MASTER_ADDR and MASTER_PORT
    torch.set_num_threads(1)  # the ranks share the cores
    device = torch.device("cuda", rank) if args.backend == "nccl" else torch.device("cpu")
    torch.cuda.set_device(rank if args.backend == "nccl" else -1)  # -1: leave it
    model = DistributedDataParallel(new_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dataset = TensorDataset(images, labels)
    sampler = DistributedSampler(dataset, args.ranks, rank, shuffle=True)
    loader = DataLoader(dataset, BATCH_SIZE, sampler=sampler)

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # or every epoch would have the order of the first
        total, batches = 0.0, 0
        for pixels, digits in islice(loader, args.steps and args.steps - step):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(pixels.to(device)), digits.to(device))
            loss.backward()
            optimizer.step()
            total, batches, step = total + loss.item(), batches + 1, step + 1
        if batches:
            print(f"Rank {rank}, epoch {epoch}, loss: {total / batches:.4f}\n", end="", flush=True)

    if args.backend == "nccl" and args.ranks > 1:
        ddp = milliseconds_a_step(model, images[:BATCH_SIZE].to(device), labels[:BATCH_SIZE].to(device))
        if rank == 0:
            print(f"DistributedDataParallel: {ddp:.2f} ms a step", flush=True)
    dist.barrier()  # no rank tears the group down while another still uses it
    dist.destroy_process_group()
    os._exit(0)  # not through the interpreter's exit, where threads of gloo may abort


def main() -> None:
    parser = argparse.ArgumentParser(f"python -m {__spec__.name}", None, __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: error: {message}\n")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the images (default 5)")
    parser.add_argument("--steps", type=int, help="stop after so many steps")
    parser.add_argument("--data", type=Path, help="folder with the IDX files (default: ylecun/mnist of the Hub)")
    parser.add_argument("--backend", choices=["gloo", "nccl"], help="default: nccl if each rank has a GPU, else gloo")
    parser.add_argument("--port", type=int, default=0, help="where the ranks meet (default 0: any free port)")
    args = parser.parse_args()
    if min(args.ranks, args.epochs, 1 if args.steps is None else args.steps) < 1:
        parser.error("--ranks, --epochs and --steps must be at least 1")
    gpus = torch.cuda.device_count()
    args.backend = args.backend or ("nccl" if gpus >= args.ranks else "gloo")
    if args.backend == "nccl" and not (dist.is_nccl_available() and gpus >= args.ranks):
        parser.error(f"--backend nccl needs a GPU for each of the {args.ranks} ranks, but {gpus} are here; use gloo")
    try:
        listener = socket.create_server(("127.0.0.1", args.port))
    except (OSError, OverflowError) as error:
        parser.error(f"--port {args.port} cannot be used ({error}); 0 takes a free one")
    try:
        images, labels = load_mnist(args.data)
    except ValueError as error:
        parser.error(str(error))

    # This process serves the ranks' store on the open socket, as torchrun does: no other program can take the port.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    mp.spawn(train, (args, images, labels), nprocs=args.ranks)
    if args.backend == "nccl" and args.ranks > 1:
        batch = [tensor[: BATCH_SIZE * args.ranks].to("cuda:0") for tensor in (images, labels)]
        replicated = nn.DataParallel(new_model().to("cuda:0"), device_ids=list(range(args.ranks)))
        print(f"DataParallel: {milliseconds_a_step(replicated, *batch):.2f} ms a step")
    else:
        print("DataParallel was not measured against it: that takes two GPUs.")


if __name__ == "__main__":
    main()
