"""Gradients in buckets, as in DistributedDataParallel: a full bucket is all-reduced while backward computes the rest.

Backward computes the gradients of the last layers first, so buckets are filled from the last parameter to the first.
The script trains with one bucket, with DDP's default sizes and with one bucket per parameter. It prints how many
all-reduces start before the last gradient is computed and how long a step waits for them after its backward, and
writes a timeline of the last step. All end with gpt_ddp.py's bits. The sum itself is left to dist.all_reduce, as DDP
does; ring_allreduce.py shows how one can be computed.
"""

import argparse
import os
import tempfile
import time
from contextlib import nullcontext
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import profile, record_function
from torch.utils.data import DataLoader, DistributedSampler

from examples import common
from examples.common import BATCH_SIZE, VOCAB_SIZE, ToyRandomDataset
from model.config import GPTConfig
from model.gpt import GPTModel

# Sizes in bytes at which the first bucket is full, and each later one.
SIZES = {"one bucket": (2**62, 2**62), "default sizes": (2**20, 25 * 2**20), "one bucket per parameter": (1, 1)}


class Buckets:
    """Averages the gradients of a model over the ranks."""

    def __init__(self, model: nn.Module, first_size: int, other_size: int):
        self.buckets, self.bucket_of = [[]], {}
        for parameter in reversed(list(model.parameters())):
            size = first_size if len(self.buckets) == 1 else other_size
            if sum(other.nbytes for other in self.buckets[-1]) >= size:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
            self.bucket_of[parameter] = len(self.buckets) - 1
            parameter.register_post_accumulate_grad_hook(self.count)
        self.missing, self.started, self.num_early = [len(bucket) for bucket in self.buckets], [], 0

    def count(self, parameter: Tensor) -> None:
        """Start the all-reduce of the buckets that are full, in an order that is the same on all ranks."""
        self.missing[self.bucket_of[parameter]] -= 1
        while (index := len(self.started)) < len(self.buckets) and self.missing[index] == 0:
            flat = torch.cat([parameter.grad.flatten() for parameter in self.buckets[index]])
            self.started.append((flat, dist.all_reduce(flat, async_op=True)))
            self.num_early += any(self.missing)  # backward has not computed the last gradient yet

    def wait(self) -> None:
        """Wait for the sums, and copy the means into the gradients."""
        for bucket, (flat, work) in zip(self.buckets, self.started, strict=True):
            work.wait()
            means = (flat / dist.get_world_size()).split([parameter.numel() for parameter in bucket])
            for parameter, mean in zip(bucket, means, strict=True):
                parameter.grad.copy_(mean.view_as(parameter))
        self.missing, self.started = [len(bucket) for bucket in self.buckets], []


def now(device: torch.device) -> float:
    """Return the time in milliseconds, on a GPU when its computation has ended; communication may still run."""
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    return 1000 * time.perf_counter()


def train(args: argparse.Namespace) -> None:
    """Train for args.steps with each kind of buckets."""
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = common.select_device(local_rank, args.backend)
    dist.init_process_group(args.backend)
    dataset = ToyRandomDataset()
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, BATCH_SIZE, sampler=sampler)
    for kind, sizes in SIZES.items():
        torch.manual_seed(args.seed)  # the same on every rank: the copies start equal
        model = GPTModel(GPTConfig(vocab_size=VOCAB_SIZE, dropout=args.dropout)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
        buckets = Buckets(model, *sizes)
        torch.manual_seed(args.seed + 1 + rank)  # dropout differs between ranks
        losses, times = [], []
        while len(losses) < args.steps:
            sampler.set_epoch(len(losses) // len(loader))
            for batch in islice(loader, args.steps - len(losses)):
                loss = model(**{name: tensor.to(device) for name, tensor in batch.items()})[1]
                with profile() if len(losses) == args.steps - 1 else nullcontext() as timeline:
                    times.append([now(device)])
                    with record_function("backward"):
                        loss.backward()
                        times[-1].append(now(device))
                    with record_function("wait for the all-reduces"):
                        buckets.wait()
                        times[-1].append(now(device))
                optimizer.step()
                optimizer.zero_grad()
                mean_loss = loss.detach()
                dist.all_reduce(mean_loss)
                losses.append((mean_loss / world_size).item())
        common.print_digests(rank, model, optimizer, losses)
        if rank == 0:
            file = f"{tempfile.mkdtemp()}/{kind.replace(' ', '_')}.json"
            timeline.export_chrome_trace(file)
            start, middle, end = (sum(column) / len(column) for column in zip(*times[1:-1] or times, strict=True))
            timing = f"backward {middle - start:.1f} ms, then {end - middle:.1f} ms of waiting"
            early = f"{buckets.num_early // args.steps} of {len(buckets.buckets)} all-reduces start during the backward"
            print(f"{kind}: {early}; {timing}; timeline in {file}", flush=True)
    dist.barrier()  # another rank may still use the process group
    dist.destroy_process_group()


def main() -> None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler logs its start and stop
    common.run_gpt(train, __spec__.name, __doc__)


if __name__ == "__main__":
    main()
