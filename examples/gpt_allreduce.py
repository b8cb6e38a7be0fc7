"""A mini-GPT on random tokens in several processes: after backward, the gradients are averaged by hand.

torchrun starts the ranks and sets RANK, LOCAL_RANK and WORLD_SIZE; if you start the script with python, it calls
torchrun. All ranks of gpt_allreduce.py, gpt_ddp.py and gpt_accelerate.py end with the same losses, weights and moments.
"""

import argparse
import os
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from examples import common
from examples.common import BATCH_SIZE, VOCAB_SIZE, ToyRandomDataset
from model.config import GPTConfig
from model.gpt import GPTModel


def average_gradients(model: nn.Module, world_size: int) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size


def train(args: argparse.Namespace) -> tuple[list[float], nn.Module]:
    """Train for args.steps; return the loss of each step, the mean over the ranks, and the model."""
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = common.select_device(local_rank, args.backend)
    dist.init_process_group(args.backend)
    torch.manual_seed(args.seed)  # the same on every rank: the copies start equal
    model = GPTModel(GPTConfig(vocab_size=VOCAB_SIZE, dropout=args.dropout)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)

    dataset = ToyRandomDataset()
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, BATCH_SIZE, sampler=sampler)
    torch.manual_seed(args.seed + 1 + rank)  # dropout differs between ranks
    losses = []
    while len(losses) < args.steps:
        sampler.set_epoch(len(losses) // len(loader))  # otherwise every epoch has the order of the first
        for batch in islice(loader, args.steps - len(losses)):
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()})[1]
            loss.backward()
            average_gradients(model, world_size)
            optimizer.step()
            optimizer.zero_grad()
            mean_loss = loss.detach()
            dist.all_reduce(mean_loss)
            losses.append((mean_loss / world_size).item())
            if rank == 0 and len(losses) % 10 == 0:
                print(f"[step {len(losses)} / {args.steps}] loss = {losses[-1]:.4f}", flush=True)
    common.print_digests(rank, model, optimizer, losses)
    dist.barrier()  # another rank may still use the process group
    dist.destroy_process_group()
    return losses, model


def main() -> None:
    common.run_gpt(train, __spec__.name, __doc__)


if __name__ == "__main__":
    main()
