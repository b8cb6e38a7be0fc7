"""Model parallelism: the layers of one mini-GPT lie on several devices, each of which holds and trains its share.

First as the tutorials write it, in one process: forward hands the activations to the next device, autograd hands their
gradients back, and all devices but one always wait. Then as a pipeline of one process a stage: the batch is cut into m
micro-batches, so that stages work at the same time and wait only at the start or the end: (p - 1) / (m + p - 1) of the
time with p stages. This "bubble" is measured for GPipe (all forwards, then all backwards; Huang et al. 2019) and 1F1B.
"""

import argparse
import copy
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from model.config import GPTConfig
from model.gpt import GPTModel

CONFIG = GPTConfig(vocab_size=256, n_layers=8, dropout=0.0)
BATCH_SIZE, SEQ_LEN = 32, 128


class Stage(nn.Module):
    """Some layers of a model: tokens [B, T] into the first stage, [B, T, C] between stages, logits [B, T, V] out."""

    def __init__(self, model: GPTModel, index: int, stages: int, device: torch.device):
        super().__init__()
        model, share, self.device = copy.deepcopy(model), len(model.blocks) // stages, device
        self.embeddings = nn.ModuleList([model.token_embedding, model.position_embedding] if index == 0 else [])
        self.blocks = model.blocks[index * share : (index + 1) * share]
        self.output = nn.Sequential(*[model.final_norm, model.lm_head] if index == stages - 1 else [])
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.device)  # the backward of this copy takes the gradients to the device before
        if self.embeddings:
            tokens, positions = self.embeddings
            x = tokens(x) + positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x, None, None)
        return self.output(x)


def timed(compute):
    def wrapper(stage: "TimedStage", *args, **kwargs):
        start = time.perf_counter()
        result = compute(stage, *args, **kwargs)
        if stage.device.type == "cuda":
            torch.cuda.synchronize(stage.device)
        stage.busy_seconds += time.perf_counter() - start
        return result

    return wrapper


class TimedStage(PipelineStage):
    """Adds up the seconds in which the stage computes; in the rest of a step it waits or communicates."""

    busy_seconds = 0.0
    forward_one_chunk = timed(PipelineStage.forward_one_chunk)
    backward_one_chunk = timed(PipelineStage.backward_one_chunk)


def loss_of(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten())


def train(module: nn.Module, compute_loss, steps: int, device: torch.device) -> list[float]:
    """Train on random tokens [B, T], given to `compute_loss` on `device`; returns the loss of each step."""
    optimizer, losses = torch.optim.AdamW(module.parameters(), lr=3e-4), []
    for step in range(steps):
        torch.manual_seed(step)
        loss = compute_loss(torch.randint(CONFIG.vocab_size, (BATCH_SIZE, SEQ_LEN)).to(device))
        if loss.requires_grad:  # a pipeline has done its own backward
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_pipelines(rank: int, folder: str, args: argparse.Namespace, model: GPTModel, unsplit: GPTModel) -> None:
    dist.init_process_group(args.backend, init_method=f"file://{folder}/meet", rank=rank, world_size=args.ranks)
    torch.set_num_threads(1)  # the ranks share the cores
    device = torch.device("cuda", rank) if args.backend == "nccl" else torch.device("cpu")
    torch.cuda.set_device(rank if args.backend == "nccl" else -1)  # -1: leave it
    for schedule_class in (ScheduleGPipe, Schedule1F1B):
        stage = TimedStage(Stage(model, rank, args.ranks, device), rank, args.ranks, device)
        schedule, bubbles = schedule_class(stage, args.micro_batches, loss_fn=loss_of), []

        def pipeline_loss(tokens: Tensor, stage=stage, schedule=schedule, bubbles=bubbles) -> Tensor:
            stage.busy_seconds, losses = 0.0, []
            dist.barrier()
            start = time.perf_counter()
            schedule.step(*[tokens] * stage.is_first, target=tokens if stage.is_last else None, losses=losses)
            seconds, of_stages = time.perf_counter() - start, [None] * args.ranks
            dist.all_gather_object(of_stages, ([loss.item() for loss in losses], stage.busy_seconds, seconds))
            losses, busy, wall = zip(*of_stages, strict=True)
            bubbles.append(1 - sum(busy) / len(busy) / max(wall))
            return torch.tensor(losses[-1]).mean()

        loss = train(stage.submod, pipeline_loss, args.steps, device)[-1]
        pairs = zip(stage.submod.parameters(), Stage(unsplit, rank, args.ranks, device).parameters(), strict=True)
        difference = torch.tensor(max((ours - theirs).abs().max().item() for ours, theirs in pairs), device=device)
        dist.all_reduce(difference, op=dist.ReduceOp.MAX)
        if rank == 0:
            formula = (args.ranks - 1) / (args.micro_batches + args.ranks - 1)
            print(f"{schedule_class.__name__}: last loss {loss:.6f}, weights differ by {difference:.0e}", end="; ")
            print(f"bubble {torch.tensor(bubbles).median():.1%}, by the formula {formula:.1%}", flush=True)
    dist.barrier()  # no rank tears the group down while another still uses it
    dist.destroy_process_group()
    os._exit(0)  # not through the interpreter's exit, where threads of gloo may abort


def main() -> None:
    parser = argparse.ArgumentParser(f"python -m {__spec__.name}", None, __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: error: {message}\n")
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4, 8), help="devices, stages of the pipeline")
    parser.add_argument("--steps", type=int, default=10, help="training steps (default 10)")
    parser.add_argument("--micro-batches", type=int, default=4, choices=(2, 4, 8, 16, 32), help="default 4")
    parser.add_argument("--backend", choices=["gloo", "nccl"], help="default: nccl if each rank has a GPU, else gloo")
    args = parser.parse_args()
    if args.steps < 1 or args.micro_batches < args.ranks:
        parser.error("--steps must be at least 1, --micro-batches at least --ranks")
    gpus = torch.cuda.device_count()
    args.backend = args.backend or ("nccl" if gpus >= args.ranks else "gloo")
    if args.backend == "nccl" and not (dist.is_nccl_available() and gpus >= args.ranks):
        parser.error(f"--backend nccl needs a GPU for each of the {args.ranks} ranks, but {gpus} are here; use gloo")
    devices = [torch.device("cuda", i) if args.backend == "nccl" else torch.device("cpu") for i in range(args.ranks)]
    torch.manual_seed(0)
    model = GPTModel(CONFIG)
    unsplit = copy.deepcopy(model).to(devices[0])
    losses = train(unsplit, lambda tokens: unsplit(tokens, labels=tokens)[1], args.steps, devices[0])
    split = nn.Sequential(*(Stage(model, i, args.ranks, device) for i, device in enumerate(devices)))
    of_split = train(split, lambda tokens: loss_of(split(tokens), tokens.to(devices[-1])), args.steps, devices[0])
    where = "" if args.backend == "nccl" else " (the CPU stands in for each device: no GPU for each is here)"
    print(f"Unsplit: last loss {losses[-1]:.6f}\nSplit in one process{where}: last loss {of_split[-1]:.6f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train_pipelines, (folder, args, model, unsplit.cpu()), nprocs=args.ranks)


if __name__ == "__main__":
    main()
