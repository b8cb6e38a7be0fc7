"""Data parallelism with DistributedDataParallel (DDP): each rank trains a copy of the model on its part of the data.

mp.spawn starts the ranks and init_process_group connects them. DistributedSampler gives each rank its part of the
images. DDP averages the gradients over the ranks while backward computes them, so all copies stay equal.

nn.DataParallel needs one line and one process, but it is slower: Python's lock lets one thread run at a time, each
forward copies the weights to every GPU, and outputs and gradients are gathered on the first GPU.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from examples import common

BATCH_SIZE = 64  # images per rank


def new_model() -> nn.Module:
    """Map images [B, 1, 28, 28] to the logits of the ten digits [B, 10]."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def train(rank: int, init_method: str, args: argparse.Namespace, images: Tensor, labels: Tensor) -> None:
    dist.init_process_group(args.backend, init_method, rank=rank, world_size=args.ranks)
    device = common.select_device(rank, args.backend)
    model = DistributedDataParallel(new_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dataset = TensorDataset(images, labels)
    sampler = DistributedSampler(dataset, args.ranks, rank, shuffle=True)
    loader = DataLoader(dataset, BATCH_SIZE, sampler=sampler)
    print(f"Rank {rank} trains on {len(sampler)} of {len(dataset)} images in each epoch\n", end="", flush=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # otherwise every epoch has the order of the first
        losses = []
        for pixels, digits in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(pixels.to(device)), digits.to(device))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"Rank {rank}, epoch {epoch}, loss: {sum(losses) / len(losses):.4f}\n", end="", flush=True)
    common.print_digests(rank, model, optimizer)  # of its own copy; the losses differ, as the images do
    common.leave()


def main() -> None:
    parser = common.Parser(__spec__.name, __doc__)
    parser.add_argument("--epochs", type=common.positive_int, default=5, help="passes over the images (default 5)")
    parser.add_argument("--data", type=Path, help="folder with MNIST's files (default: download ylecun/mnist)")
    args = parser.parse()
    common.spawn(train, args, *common.load_mnist(args.data, parser))


if __name__ == "__main__":
    main()
