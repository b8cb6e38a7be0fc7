"""Data parallel training by hand: every rank trains a copy of the model on its part of the data, and after each
backward pass all ranks average their gradients with all_reduce. The copies start alike (one seed) and see the same
averages, so they stay alike. DistributedDataParallel does the same, and hides it.

Trains a small convolutional network on MNIST and prints its mean loss in each epoch on each rank, then, at equal
numbers of steps, the losses that the tutorial shows for 60,000 images on two ranks.
"""

import argparse
import os
import random
import tempfile
from itertools import islice
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from examples.mnist import load_mnist

TOTAL_BATCH_SIZE = 128
TUTORIAL_STEPS = 469  # an epoch of 60,000 images
TUTORIAL_LOSSES = {1: "1.33 1.31", 2: "0.55 0.54", 3: "0.43 0.42", 10: "0.228 0.223"}  # epoch: of ranks 0 and 1


class Partition(Dataset):
    """The part of `data` that `indices` select: the dataset of one rank."""

    def __init__(self, data: Dataset, indices: list[int]):
        self.data, self.indices = data, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int):
        return self.data[self.indices[index]]


class DataPartitioner:
    """Shuffles the indices of `data` once, alike on every rank, and cuts them into parts by the fractions `sizes`."""

    def __init__(self, data: Dataset, sizes: list[float], seed: int = 1234):
        self.data, self.parts = data, []
        indices = list(range(len(data)))
        random.Random(seed).shuffle(indices)
        for size in sizes:
            length = int(size * len(data))
            self.parts.append(indices[:length])
            indices = indices[length:]

    def use(self, part: int) -> Partition:
        return Partition(self.data, self.parts[part])


class Net(nn.Module):
    """Images [B, 1, 28, 28] to the logarithms of the probabilities of the ten digits [B, 10]."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, kernel_size=5), nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def average_gradients(model: nn.Module) -> None:
    """Replace every gradient by its mean over the ranks."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= dist.get_world_size()


def train(rank: int, folder: str, args: argparse.Namespace, images: Tensor, labels: Tensor) -> None:
    dist.init_process_group(args.backend, init_method=f"file://{folder}/meet", rank=rank, world_size=args.ranks)
    torch.set_num_threads(1)  # the ranks share the cores
    device = torch.device("cuda", rank) if args.backend == "nccl" else torch.device("cpu")
    torch.cuda.set_device(rank if args.backend == "nccl" else -1)  # -1: leave it
    torch.manual_seed(1234)  # the same on every rank: the copies start alike
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    partition = DataPartitioner(TensorDataset(images, labels), [1 / args.ranks] * args.ranks).use(rank)
    loader = DataLoader(partition, batch_size=TOTAL_BATCH_SIZE // args.ranks, shuffle=True)

    losses = []
    for epoch in range(args.epochs):
        first = len(losses)
        for pixels, digits in islice(loader, args.steps and args.steps - first):
            optimizer.zero_grad()
            loss = F.nll_loss(model(pixels.to(device)), digits.to(device))
            loss.backward()
            average_gradients(model)
            optimizer.step()
            losses.append(loss.item())
        if len(losses) > first:
            print(f"Rank {rank}, epoch {epoch}, loss: {fmean(losses[first:]):.4f}\n", end="", flush=True)

    of_ranks = [None] * args.ranks
    dist.all_gather_object(of_ranks, losses)
    if rank == 0:
        print(beside_the_tutorial(of_ranks, len(labels)), flush=True)
    dist.barrier()  # no rank tears the group down while another still uses it
    dist.destroy_process_group()
    os._exit(0)  # not through the interpreter's exit, where threads of gloo may abort


def beside_the_tutorial(of_ranks: list[list[float]], num_images: int) -> str:
    """The mean losses of each rank over the steps of the tutorial's epochs, as far as they were trained."""
    lines = [f"\nmean loss a rank on {num_images:,} images, and of the tutorial on 60,000 after as many steps"]
    lines[0] += " (fewer images are seen more often: after the first epochs it cannot be compared)"
    for epoch, tutorial in TUTORIAL_LOSSES.items():
        first, last = (epoch - 1) * TUTORIAL_STEPS, epoch * TUTORIAL_STEPS
        if last <= len(of_ranks[0]):
            ours = " ".join(f"{fmean(losses[first:last]):.3f}" for losses in of_ranks)
            lines.append(f"steps {first + 1:4} to {last:4}: {ours:14} tutorial, epoch {epoch:2}: {tutorial}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(f"python -m {__spec__.name}", None, __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: error: {message}\n")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the images (default 10)")
    parser.add_argument("--steps", type=int, help="stop after so many steps")
    parser.add_argument("--data", type=Path, help="folder with the IDX files (default: ylecun/mnist of the Hub)")
    parser.add_argument("--backend", choices=["gloo", "nccl"], help="default: nccl if each rank has a GPU, else gloo")
    args = parser.parse_args()
    if not 1 <= args.ranks <= TOTAL_BATCH_SIZE or args.epochs < 1 or args.steps is not None and args.steps < 1:
        parser.error(f"--ranks must be 1 to {TOTAL_BATCH_SIZE}, --epochs and --steps at least 1")
    gpus = torch.cuda.device_count()
    args.backend = args.backend or ("nccl" if gpus >= args.ranks else "gloo")
    if args.backend == "nccl" and not (dist.is_nccl_available() and gpus >= args.ranks):
        parser.error(f"--backend nccl needs a GPU for each of the {args.ranks} ranks, but {gpus} are here; use gloo")
    try:
        data = load_mnist(args.data)
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (folder, args, *data), nprocs=args.ranks)


if __name__ == "__main__":
    main()
