"""One process with a thread per GPU (nn.DataParallel) against one process per GPU (DistributedDataParallel, DDP).

Both make the same updates. Each forward of DataParallel copies the weights to every GPU, and gathers the outputs on the
first one; backward sums the gradients there. Its threads share Python's lock. DDP exchanges only gradients.
Without a GPU for each rank the script runs on the CPU, where DataParallel would only call the model.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from examples import common

BATCH_SIZE, WIDTH, LAYERS, CLASSES = 256, 1024, 4, 10  # the batch is divided among the GPUs
WARMUP_STEPS = 5


def new_model() -> nn.Module:
    """Map [B, WIDTH] to logits [B, CLASSES]."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))


def new_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(BATCH_SIZE, WIDTH), torch.randint(CLASSES, (BATCH_SIZE,))


def train(model: nn.Module, inputs: Tensor, labels: Tensor, steps: int) -> tuple[float, Tensor]:
    """Train on one batch; return the milliseconds of a step and the last loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = 0.0
    for step in range(WARMUP_STEPS + steps):
        if step == WARMUP_STEPS:
            start = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        loss = loss.detach().cpu()  # waits for the GPU
    return 1000 * (time.perf_counter() - start) / steps, loss


def train_ddp(rank: int, init_method: str, args: argparse.Namespace) -> None:
    dist.init_process_group(args.backend, init_method, rank=rank, world_size=args.ranks)
    device = common.select_device(rank, args.backend)
    inputs, labels = (tensor.chunk(args.ranks)[rank].to(device) for tensor in new_batch())
    milliseconds, loss = train(DistributedDataParallel(new_model().to(device)), inputs, labels, args.steps)
    dist.all_reduce(loss := loss.to(device) / args.ranks)
    if rank == 0:
        print(f"{args.ranks} processes, DistributedDataParallel: {milliseconds:.1f} ms per step, loss {loss:.4f}")
    common.leave()


def main() -> None:
    parser = common.Parser(__spec__.name, __doc__)
    parser.add_argument("--steps", type=common.positive_int, default=20, help="steps that are timed (default 20)")
    args = parser.parse()
    if BATCH_SIZE % args.ranks:
        parser.error(f"--ranks {args.ranks} must divide the batch of {BATCH_SIZE}")
    device = common.select_device(0, args.backend)
    gpus = list(range(args.ranks)) if args.backend == "nccl" else []
    model = DataParallel(new_model().to(device), gpus) if gpus else new_model()
    inputs, labels = new_batch()
    milliseconds, loss = train(model, inputs.to(device), labels.to(device), args.steps)
    print(f"1 process, DataParallel: {milliseconds:.1f} ms per step, loss {loss:.4f}", flush=True)
    if not gpus:
        print("There is no GPU for each rank, and on a CPU DataParallel does not divide the batch.", flush=True)
    common.spawn(train_ddp, args)


if __name__ == "__main__":
    main()
