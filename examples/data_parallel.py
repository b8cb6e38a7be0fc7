"""One process with a thread per device (nn.DataParallel) against one process per device (DistributedDataParallel, DDP).

Both make the same updates. Each forward of DataParallel copies the weights to every device, and gathers the outputs on
the first one; backward sums the gradients there. Its threads share Python's lock. DDP exchanges only gradients.
nn.DataParallel needs a GPU for each thread, so the script also takes its four steps by hand, on any devices.
"""

import argparse
import copy
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.func import functional_call
from torch.nn.parallel import DataParallel, DistributedDataParallel

from examples import common

BATCH_SIZE, WIDTH, LAYERS, CLASSES = 256, 1024, 4, 10  # the batch is divided among the devices


class DataParallelByHand(nn.Module):
    """Maps [B, WIDTH] to logits [B, CLASSES] as nn.DataParallel does."""

    def __init__(self, module: nn.Module, devices: list[torch.device], num_bytes: Counter):
        super().__init__()
        self.module, self.devices, self.num_bytes = module, devices, num_bytes
        self.replicas = [copy.deepcopy(module) for _ in devices]  # each thread calls one, with weights copied below

    def forward(self, inputs: Tensor) -> Tensor:
        # 1. Split the batch among the devices.
        parts = [part.to(device) for part, device in zip(inputs.chunk(len(self.devices)), self.devices, strict=True)]
        # 2. Copy the weights to each device, in every forward. Autograd sums the gradients of the copies.
        weights = dict(self.module.named_parameters())
        copies = [{name: weight.to(device, copy=True) for name, weight in weights.items()} for device in self.devices]
        for weight in (weight for copied in copies[1:] for weight in copied.values()):
            self.num_bytes["weights"] += weight.nbytes
            weight.register_hook(self.count_gradient)
        # 3. Compute, with a thread for each device.
        with ThreadPoolExecutor(len(parts)) as threads:
            outputs = list(threads.map(functional_call, self.replicas, copies, parts))
        # 4. Gather the outputs on the first device.
        return torch.cat([output.to(self.devices[0]) for output in outputs])

    def count_gradient(self, gradient: Tensor) -> None:
        self.num_bytes["gradients"] += gradient.nbytes


def new_model() -> nn.Module:
    """Map [B, WIDTH] to logits [B, CLASSES]."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))


def new_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(BATCH_SIZE, WIDTH), torch.randint(CLASSES, (BATCH_SIZE,))


def train(model: nn.Module, inputs: Tensor, labels: Tensor, steps: int) -> Tensor:
    """Train on one batch; return the last loss."""
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    return loss.detach()


def train_ddp(rank: int, init_method: str, args: argparse.Namespace) -> None:
    dist.init_process_group(args.backend, init_method, rank=rank, world_size=args.ranks)
    device = common.select_device(rank, args.backend)
    inputs, labels = (tensor.chunk(args.ranks)[rank].to(device) for tensor in new_batch())
    model, num_bytes = DistributedDataParallel(new_model().to(device)), Counter()

    def count_and_average(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        num_bytes["gradients"] += bucket.buffer().nbytes
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, count_and_average)
    loss = train(model, inputs, labels, args.steps)
    dist.all_reduce(loss := loss / args.ranks)
    if rank == 0:
        report("DistributedDataParallel", f"{args.ranks} processes", loss, len(inputs), num_bytes, args.steps)
    common.leave()


def report(name: str, workers: str, loss: Tensor, rows: int, num_bytes: Counter, steps: int) -> None:
    print(f"{name}, {workers}: last loss {loss:.4f}")
    if num_bytes:
        sizes = [f"{total / steps / 1e6:.1f} MB of {kind}" for kind, total in num_bytes.items()]
        print("  exchanged in each step:", ", ".join(sizes))
    print(f"  rows whose loss the first device computes: {rows} of {BATCH_SIZE}", flush=True)


def main() -> None:
    parser = common.Parser(__spec__.name, __doc__)
    parser.add_argument("--steps", type=common.positive_int, default=20, help="training steps (default 20)")
    args = parser.parse()
    if BATCH_SIZE % args.ranks:
        parser.error(f"--ranks {args.ranks} must divide the batch of {BATCH_SIZE}")
    has_gpus, num_bytes = args.backend == "nccl", Counter()
    devices = [torch.device("cuda", i) if has_gpus else torch.device("cpu") for i in range(args.ranks)]
    common.select_device(0, args.backend)
    models = {"DataParallel by hand": DataParallelByHand(new_model().to(devices[0]), devices, num_bytes)}
    if has_gpus:
        models["nn.DataParallel"] = DataParallel(new_model().to(devices[0]), devices)
    for name, model in models.items():
        loss = train(model, *(tensor.to(devices[0]) for tensor in new_batch()), args.steps)
        report(name, f"1 process, {args.ranks} threads", loss, BATCH_SIZE, num_bytes, args.steps)
        num_bytes.clear()  # those of nn.DataParallel are the same, but are not counted
    common.spawn(train_ddp, args)


if __name__ == "__main__":
    main()
