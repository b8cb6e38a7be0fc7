"""A mini-GPT on random tokens in several processes: Accelerate chooses the device and wraps the model.

torchrun starts the ranks and tells each who it is in RANK, LOCAL_RANK and WORLD_SIZE; started with plain python, the
script calls torchrun itself. Random tokens hold nothing to learn: the loss begins near ln(10000) = 9.21 and falls only
when samples return. The last line holds digests of all losses and weights: the other two gpt_*.py print the same.
"""

import argparse
import hashlib
import os
import socket
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.distributed.run import main as torchrun
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from model.config import GPTConfig
from model.gpt import GPTModel

VOCAB_SIZE, SEQ_LEN, NUM_SAMPLES, BATCH_SIZE = 10_000, 32, 1000, 8  # the batch is that of one rank


class ToyRandomDataset(Dataset):
    """Uniformly random tokens; sample i is a function of i, so that every rank would read the same one."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`input_ids`, `labels` (equal: the model shifts them) and `attention_mask` (ones), each int64 [T]."""
        input_ids = torch.randint(VOCAB_SIZE, (SEQ_LEN,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": input_ids, "labels": input_ids, "attention_mask": torch.ones_like(input_ids)}


def train(args: argparse.Namespace) -> tuple[list[float], nn.Module]:
    """Train for args.steps; returns the loss of each step, which is the mean over the ranks, and the model."""
    ddp = DistributedDataParallelKwargs(find_unused_parameters=False)
    accelerator = Accelerator(cpu=args.backend == "gloo", kwargs_handlers=[ddp])
    rank, world_size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    torch.manual_seed(args.seed)  # the same on every rank: the copies start alike
    model = GPTModel(GPTConfig(VOCAB_SIZE, dropout=args.dropout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)  # not the loader, whose sampler shards already

    dataset = ToyRandomDataset()
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, BATCH_SIZE, sampler=sampler)
    torch.manual_seed(args.seed + 1 + rank)  # dropout differs from rank to rank
    losses = []
    while len(losses) < args.steps:
        sampler.set_epoch(len(losses) // len(loader))  # or every epoch would have the order of the first
        for batch in loader:
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()})[1]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if rank == 0 and len(losses) % 10 == 0:
                print(f"[step {len(losses)} / {args.steps}] loss = {losses[-1]:.4f}", flush=True)
            if len(losses) == args.steps:
                break
    if rank == 0:
        weights = b"".join(weight.cpu().numpy().tobytes() for weight in model.state_dict().values())
        print(f"Training finished. losses {digest(repr(losses).encode())} weights {digest(weights)}", flush=True)
    accelerator.wait_for_everyone()  # no rank tears the group down while another still uses it
    accelerator.end_training()
    return losses, model


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def main() -> None:
    name = __spec__.name
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(f"python -m {name}", description=__doc__, formatter_class=formatter)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: error: {message}\n")
    parser.add_argument("--ranks", type=int, default=2, help="processes that torchrun starts (default 2)")
    parser.add_argument("--steps", type=int, default=50, help="an epoch has 63 on two ranks (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the order of the data and the dropout")
    parser.add_argument("--dropout", type=float, default=0.1, help="default 0.1")
    parser.add_argument("--backend", choices=["gloo", "nccl"], help="default: nccl if each rank has a GPU, else gloo")
    parser.add_argument("--port", type=int, default=0, help="where the ranks meet (default 0: any free port)")
    args = parser.parse_args()
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", args.ranks)), torch.cuda.device_count()
    args.backend = args.backend or ("nccl" if gpus >= ranks else "gloo")
    if ranks < 1 or args.steps < 1 or not 0 <= args.dropout < 1:
        parser.error("--ranks and --steps must be at least 1, --dropout at least 0 and less than 1")
    if args.backend == "nccl" and not (dist.is_nccl_available() and gpus >= ranks):
        parser.error(f"--backend nccl needs a GPU for each of the {ranks} ranks, but {gpus} are here; use gloo")
    if "RANK" in os.environ:
        _kept = train(args)  # DDP that is freed after its group may wait for ever
        os._exit(0)  # not through the interpreter's exit, where threads of gloo may abort
    try:
        socket.create_server(("127.0.0.1", args.port)).close()
    except (OSError, OverflowError) as error:
        parser.error(f"--port {args.port} cannot be used ({error}); 0 takes a free one")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun would, which also warns at length
    meeting_point = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{args.port}"]
    torchrun([*meeting_point, f"--nproc-per-node={ranks}", "-m", name, *sys.argv[1:]])


if __name__ == "__main__":
    main()
