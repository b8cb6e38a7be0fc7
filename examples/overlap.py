"""What DistributedDataParallel does behind loss.backward(): it puts gradients into buckets, and as soon as all of a
bucket are there, it starts their all-reduce, which runs while backward computes the gradients of earlier layers.

Trains a mini-GPT in three ways: gradients averaged by hand after backward, by DDP with one bucket for all, and by DDP
with buckets of its default size, 25 MiB (without bucket_cap_mb, the first would have 1 MiB). A picture shows when rank
0 computes and when it communicates in the last step. After every step, parameters and optimizer moments must have the
same digest on all ranks.
"""

import argparse
import hashlib
import os
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.autograd import DeviceType
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from model.config import GPTConfig
from model.gpt import GPTModel

CONFIG = GPTConfig(vocab_size=2000, n_layers=6, n_heads=6, d_model=384, d_ff=1536, dropout=0.0)
ROWS, SEQ_LEN = 4, 64  # of one rank
WAYS = {"by hand, after backward": None, "DDP, one bucket": 10_000, "DDP, default buckets": 25}  # MiB a bucket
Intervals = list[tuple[float, float]]  # disjoint and in order


def union(intervals: Intervals) -> Intervals:
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def hidden(compute: Intervals, communication: Intervals) -> float:
    """The share of the time of communication in which there is computation as well."""
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in compute for b in communication)
    return both / sum(end - start for start, end in communication)


def lanes(events: list) -> tuple[Intervals, Intervals]:
    """When a profiled step computed and when it communicated, in milliseconds from its first event."""
    if kernels := [event for event in events if event.device_type == DeviceType.CUDA]:
        named = [(event, "nccl" in event.name) for event in kernels]
    else:  # c10d's own operators are neither: they only start the communication, or wait for it
        operators = ("gloo:", "aten::", "autograd::engine::evaluate_function")
        named = [(event, event.name.startswith("gloo:")) for event in events if event.name.startswith(operators)]
    start = min(event.time_range.start for event, _ in named)
    both = [], []
    for event, communicates in named:
        both[communicates].append(((event.time_range.start - start) / 1000, (event.time_range.end - start) / 1000))
    return union(both[0]), union(both[1])


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of all bits of the parameters and moments."""
    moments = (value for state in optimizer.state.values() for value in state.values())
    content = hashlib.blake2b(digest_size=8)
    for tensor in (*model.parameters(), *moments):
        content.update(tensor.detach().cpu().numpy().tobytes())
    return content.hexdigest()


def train(rank: int, folder: str, args: argparse.Namespace) -> None:
    dist.init_process_group(args.backend, init_method=f"file://{folder}/meet", rank=rank, world_size=args.ranks)
    torch.set_num_threads(1)  # the ranks share the cores
    device = torch.device("cuda", rank) if args.backend == "nccl" else torch.device("cpu")
    torch.cuda.set_device(rank if args.backend == "nccl" else -1)  # -1: leave it
    timelines = {}
    for way, bucket_cap_mb in WAYS.items():
        torch.manual_seed(0)
        network = GPTModel(CONFIG).to(device)
        model = DistributedDataParallel(network, bucket_cap_mb=bucket_cap_mb) if bucket_cap_mb else network
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        torch.manual_seed(1 + rank)
        for step in range(args.steps):
            tokens = torch.randint(CONFIG.vocab_size, (ROWS, SEQ_LEN)).to(device)
            with profile() if step == args.steps - 1 else nullcontext() as profiled:
                model(tokens, labels=tokens)[1].backward()
                if model is network:
                    average_gradients(model)
                optimizer.step()
            optimizer.zero_grad()
            digests = [None] * args.ranks
            dist.all_gather_object(digests, digest(model, optimizer))
            if len(set(digests)) > 1:
                raise RuntimeError(f"{way}: the ranks have come apart: {digests}")
        compute, communication = timelines[way] = lanes(profiled.events())
        if rank == 0:
            share, took = hidden(compute, communication), max(compute[-1][1], communication[-1][1])
            print(f"{way}: {took:.0f} ms, {share:.0%} of the all-reduce overlaps; weights {digests[0]} on all ranks")
    if rank == 0:
        draw(timelines, args.out)
    dist.barrier()  # no rank tears the group down while another still uses it
    dist.destroy_process_group()
    os._exit(0)  # not through the interpreter's exit, where threads of gloo may abort


def draw(timelines: dict[str, tuple[Intervals, Intervals]], file: Path) -> None:
    from matplotlib.figure import Figure  # here, because only one rank draws, and without pyplot: no window is opened

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    all_axes = figure.subplots(len(timelines), sharex=True)
    for axes, (way, (compute, communication)) in zip(all_axes, timelines.items(), strict=True):
        for height, intervals, color in ((1, compute, "#0072B2"), (0, communication, "#D55E00")):
            axes.broken_barh([(start, end - start) for start, end in intervals], (height - 0.4, 0.8), color=color)
        axes.set(yticks=[0, 1], yticklabels=["all-reduce", "compute"])
        axes.set_title(f"{way}: {hidden(compute, communication):.0%} of the all-reduce overlaps", fontsize=10)
    all_axes[-1].set_xlabel("milliseconds from the start of the step, on rank 0")
    figure.savefig(file, dpi=100)
    print(f"Timeline: {file}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(f"python -m {__spec__.name}", None, __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: error: {message}\n")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    parser.add_argument("--steps", type=int, default=4, help="of each way, the last one profiled (default 4)")
    parser.add_argument("--out", type=Path, default=Path("overlap.png"), help="the picture (default overlap.png)")
    parser.add_argument("--backend", choices=["gloo", "nccl"], help="default: nccl if each rank has a GPU, else gloo")
    args = parser.parse_args()
    if args.ranks < 2 or args.steps < 2 or args.out.suffix != ".png" or not args.out.resolve().parent.is_dir():
        needed = "--ranks must be at least 2, --steps at least 2, because DDP makes its buckets after the first"
        parser.error(f"{needed}, --out a .png in a folder that is there")
    gpus = torch.cuda.device_count()
    args.backend = args.backend or ("nccl" if gpus >= args.ranks else "gloo")
    if args.backend == "nccl" and not (dist.is_nccl_available() and gpus >= args.ranks):
        parser.error(f"--backend nccl needs a GPU for each of the {args.ranks} ranks, but {gpus} are here; use gloo")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler has nothing to say to a reader
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (folder, args), nprocs=args.ranks)


if __name__ == "__main__":
    main()
