"""Programs that the tests of examples/ run in other processes: python reference_examples.py gpt|ring ...

gpt OUT_FILE STEPS, under torchrun: the DDP example on the batches that train.py reads. ring: the ring all-reduce on 2
to 5 processes, its sends counted from outside.
"""

import argparse
import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from data.sampler import BatchSizes, GlobalBatches
from data.synthetic.random_tokens import RandomTokensDataset
from examples import gpt_ddp, ring_allreduce


class OrderOfTrain:
    """Replaces DistributedSampler: samples of this process in global batches 0, 1, 2, ..."""

    def __init__(self, dataset, num_replicas, rank, shuffle, seed):
        self.order = GlobalBatches(len(dataset), BatchSizes(8 * num_replicas), seed)
        self.steps = len(dataset) // (8 * num_replicas)
        self.rank, self.num_replicas = rank, num_replicas

    def __len__(self):
        return 8 * self.steps

    def __iter__(self):
        for step in range(self.steps):
            yield from self.order.indices(step, self.rank, self.num_replicas)

    def set_epoch(self, epoch):
        assert epoch == 0


def gpt(out_file, steps):
    gpt_ddp.ToyRandomDataset = lambda: RandomTokensDataset("train", 1000, 0, 32, 10_000)
    gpt_ddp.DistributedSampler = OrderOfTrain
    losses, model = gpt_ddp.train(argparse.Namespace(backend="gloo", seed=0, dropout=0.0, steps=int(steps)))
    torch.save((losses, model.module.state_dict()), out_file)
    os._exit(0)  # DDP that is freed after its group may wait for ever


def ring(rank, folder, ranks, out):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    sent = []
    real = dist.P2POp

    def counted(operation, tensor, peer):
        if operation is dist.isend:
            sent.append((tensor.nbytes, peer))
        return real(operation, tensor, peer)

    dist.P2POp = counted
    torch.manual_seed(rank)
    for shape in [(), (0,), (1,), (2,), (3,), (7,), (60,), (1009,), (20, 30, 4)]:
        for dtype in (torch.int64, torch.float32, torch.float64):
            ours = (torch.randn(shape) * 100).to(dtype)
            theirs = ours.clone()
            sent.clear()
            returned = ring_allreduce.ring_allreduce(ours)
            counted_bytes = sum(size for size, _ in sent)
            dist.all_reduce(theirs)
            everyone = [None] * ranks
            dist.all_gather_object(everyone, (ours.tolist(), counted_bytes, returned, {to for _, to in sent}))
            error = (ours.double() - theirs.double()).abs().max().item() if ours.numel() else 0.0
            if rank == 0:
                values, counts, returns, neighbours = zip(*everyone, strict=True)
                row = dict(ranks=ranks, dtype=str(dtype), numel=ours.numel(), nbytes=ours.nbytes, error=error)
                row |= dict(alike=all(value == values[0] for value in values), sent=counts, returned=returns)
                row |= dict(neighbours=[sorted(to) for to in neighbours])
                with open(out, "a") as file:
                    file.write(json.dumps(row) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "gpt":
        gpt(*sys.argv[2:])
    else:
        for ranks in (2, 3, 4, 5):
            with tempfile.TemporaryDirectory() as folder:
                mp.start_processes(ring, (folder, ranks, sys.argv[2]), nprocs=ranks, start_method="fork")
