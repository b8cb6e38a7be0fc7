"""Data parallelism by hand: each rank trains a copy of the model on its part of the data, and after each backward
pass all ranks average their gradients with all_reduce. The copies start equal (one seed) and apply the same gradients,
so they stay equal. DistributedDataParallel does the same. With --average parameters, each rank applies its own
gradients, and the ranks average the weights instead.

The network and its hyperparameters are those of PyTorch's tutorial "Writing Distributed Applications with PyTorch".
"""

import argparse
import random
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from examples import common

GLOBAL_BATCH_SIZE = 128


class DataPartitioner:
    """Shuffles the indices of `data`, in the same order on every rank, and splits them by the fractions `sizes`."""

    def __init__(self, data: Dataset, sizes: list[float], seed: int = 1234):
        self.data, self.partitions = data, []
        indices = list(range(len(data)))
        random.Random(seed).shuffle(indices)
        for size in sizes:
            length = int(size * len(data))
            self.partitions.append(indices[:length])
            indices = indices[length:]

    def use(self, partition: int) -> Subset:
        return Subset(self.data, self.partitions[partition])


class Net(nn.Module):
    """Maps images [B, 1, 28, 28] to log-probabilities of the ten digits [B, 10]."""

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


def average_parameters(model: nn.Module) -> None:
    """Replace every weight by its mean over the ranks. The moments of the optimizer stay different."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.data, op=dist.ReduceOp.SUM)
        parameter.data /= dist.get_world_size()


def train(rank: int, init_method: str, args: argparse.Namespace, images: Tensor, labels: Tensor) -> None:
    dist.init_process_group(args.backend, init_method, rank=rank, world_size=args.ranks)
    device = common.select_device(rank, args.backend)
    torch.manual_seed(1234)  # the same on every rank: the copies start equal
    model = Net().to(device)
    if args.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    partition = DataPartitioner(TensorDataset(images, labels), [1 / args.ranks] * args.ranks).use(rank)
    loader = DataLoader(partition, batch_size=GLOBAL_BATCH_SIZE // args.ranks, shuffle=True)
    print(f"Rank {rank} trains on {len(partition)} of {len(images)} images\n", end="", flush=True)

    for epoch in range(args.epochs):
        losses = []
        for step, (pixels, digits) in enumerate(loader, epoch * len(loader) + 1):
            optimizer.zero_grad()
            loss = F.nll_loss(model(pixels.to(device)), digits.to(device))
            loss.backward()
            if args.average == "gradients":
                average_gradients(model)
            optimizer.step()
            if args.average == "parameters" and step % args.every == 0:
                average_parameters(model)
            losses.append(loss.item())
        print(f"Rank {rank}, epoch {epoch}, loss: {sum(losses) / len(losses):.4f}\n", end="", flush=True)
    common.print_digests(rank, model, optimizer)  # of its own copy; the losses differ, as the images do
    common.leave()


def main() -> None:
    parser = common.Parser(__spec__.name, __doc__)
    parser.add_argument("--epochs", type=common.positive_int, default=10, help="passes over the images (default 10)")
    parser.add_argument("--data", type=Path, help="folder with MNIST's files (default: download ylecun/mnist)")
    parser.add_argument("--average", choices=["gradients", "parameters"], default="gradients", help="default gradients")
    parser.add_argument("--every", type=common.positive_int, default=1, help="average parameters every N steps")
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd", help="default sgd, with momentum 0.5")
    args = parser.parse()
    if args.ranks > GLOBAL_BATCH_SIZE:
        parser.error(f"--ranks {args.ranks} must be at most {GLOBAL_BATCH_SIZE}, the global batch size")
    if args.every > 1 and args.average == "gradients":
        parser.error(f"--every {args.every} needs --average parameters: gradients are averaged in each step")
    common.spawn(train, args, *common.load_mnist(args.data, parser))


if __name__ == "__main__":
    main()
