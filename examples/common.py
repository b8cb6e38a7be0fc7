"""Code that the examples share: the command line, starting the ranks, MNIST, and the mini-GPT's random tokens."""

import argparse
import gzip
import hashlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.run import main as torchrun
from torch.utils.data import Dataset

from runtime.config.help import wrapped

VOCAB_SIZE, SEQ_LEN, NUM_SAMPLES = 10_000, 32, 1000
BATCH_SIZE = 8  # sequences per rank


class Parser(argparse.ArgumentParser):
    """The options of all examples. Wrong arguments end with one line and exit code 2."""

    def __init__(self, name: str, description: str | None):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(f"python -m {name}", description=wrapped(description or ""), formatter_class=formatter)
        self.add_argument("--ranks", type=positive_int, default=2, help="number of processes (default 2)")
        self.add_argument("--backend", choices=["gloo", "nccl"], help="default: nccl if each rank has a GPU, else gloo")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse(self) -> argparse.Namespace:
        args = self.parse_args()
        ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", args.ranks)), torch.cuda.device_count()
        args.backend = args.backend or ("nccl" if gpus >= ranks else "gloo")
        if args.backend == "nccl" and gpus < ranks:
            self.error(f"--backend nccl needs a GPU for each of the {ranks} ranks, but {gpus} are here; use gloo")
        return args


def positive_int(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


def spawn(train: Callable, args: argparse.Namespace, *arguments) -> None:
    """Start args.ranks processes, each of which calls train(rank, init_method, args, *arguments)."""
    use_loopback()
    with tempfile.TemporaryDirectory() as folder, exit_on_ctrl_c():
        mp.spawn(train, (f"file://{folder}/rendezvous", args, *arguments), nprocs=args.ranks)


@contextmanager
def exit_on_ctrl_c() -> Iterator[None]:
    """Exit with code 130 after Ctrl-C, without the traceback of the process that waits for the ranks."""
    try:
        yield
    except (KeyboardInterrupt, SignalException):
        for rank in mp.active_children():  # it may still wait for another rank, and Python would wait for it
            rank.kill()
        sys.exit(130)


def use_loopback() -> None:
    """Let gloo connect ranks on this machine by the loopback interface, not by what the machine's name resolves to."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def select_device(rank: int, backend: str) -> torch.device:
    """Return the device of a rank, and make its GPU the current one."""
    torch.set_num_threads(1)  # the ranks share the cores
    if backend == "gloo":
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def leave() -> None:
    """Destroy the process group and end the process."""
    dist.barrier()  # another rank may still use the group
    dist.destroy_process_group()
    os._exit(0)  # at the interpreter's exit, threads of gloo may abort


def load_mnist(folder: Path | None, parser: Parser) -> tuple[Tensor, Tensor]:
    """Return normalised images, float32 [N, 1, 28, 28], and labels, int64 [N].

    Args:
        folder: with the original IDX files of the training images or, if they are missing, of the test images. None:
            download ylecun/mnist from the Hub.
        parser: reports an error.
    """
    try:
        if folder is None:
            from datasets import load_dataset  # not needed with --data

            dataset = load_dataset("ylecun/mnist", split="train")
            images, labels = (np.stack([np.asarray(value) for value in dataset[name]]) for name in ("image", "label"))
        else:
            split = "train" if any(folder.glob("train-images-idx3-ubyte*")) else "t10k"
            images = read_idx(folder / f"{split}-images-idx3-ubyte", 28, 28)
            labels = read_idx(folder / f"{split}-labels-idx1-ubyte")
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images, but {len(labels)} labels")
    except Exception as error:  # whatever the library, its HTTP client or gzip raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        parser.error(
            f"--data: MNIST could not be read from {folder or 'the Hub (ylecun/mnist)'} ({reason}); name a folder with "
            "its original files, of which t10k-images-idx3-ubyte.gz and t10k-labels-idx1-ubyte.gz are enough"
        )
    pixels = torch.tensor(images, dtype=torch.float32).unsqueeze(1) / 255
    return (pixels - 0.1307) / 0.3081, torch.tensor(labels, dtype=torch.int64)


def read_idx(file: Path, *shape: int) -> np.ndarray:
    """Read unsigned bytes [N, *shape] after a header of big-endian int32: a magic number, N and the shape."""
    content = file.read_bytes() if file.exists() else gzip.decompress(Path(f"{file}.gz").read_bytes())
    number = int.from_bytes(content[4:8], "big")
    return np.frombuffer(content, dtype=np.uint8, offset=8 + 4 * len(shape)).reshape(number, *shape)


class ToyRandomDataset(Dataset):
    """Random tokens, from which nothing can be learned: the loss stays near ln(10000) = 9.21 in the first epoch."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return `input_ids`, `labels` (the same: the model shifts them) and `attention_mask`, each int64 [T]."""
        input_ids = torch.randint(VOCAB_SIZE, (SEQ_LEN,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": input_ids, "labels": input_ids, "attention_mask": torch.ones_like(input_ids)}


def print_digests(
    rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float] | None = None
) -> None:
    """Print hashes of the bits of all weights, of the optimizer's moments, if it has any, and of the losses."""
    moments = [value for state in optimizer.state.values() for value in state.values() if value is not None]
    digests = {"weights": digest_bits(model.parameters())}
    if moments:
        digests["moments"] = digest_bits(moments)
    if losses:
        digests["losses"] = digest_bits([torch.tensor(losses)])
    shown = ", ".join(f"{name} {digest}" for name, digest in digests.items())
    print(f"Rank {rank} finished: {shown}\n", end="", flush=True)


def digest_bits(tensors: Iterable[Tensor]) -> str:
    """Return a hash, which is the same if and only if all bits are."""
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(tensor.detach().cpu().numpy().tobytes())
    return content.hexdigest()[:16]


def run_gpt(train: Callable, name: str, description: str | None) -> None:
    """Parse the command line, and train, or start the ranks if torchrun has not."""
    parser = Parser(name, description)
    parser.add_argument("--steps", type=positive_int, default=50, help="an epoch has 63 with two ranks (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, data order and dropout (default 0)")
    parser.add_argument("--dropout", type=float, default=0.1, help="default 0.1")
    args = parser.parse()
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout {args.dropout} must be at least 0 and less than 1")
    if "RANK" in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank without a traceback
        _kept = train(args)  # if DDP is freed after its process group, it may hang
        os._exit(0)  # at the interpreter's exit, threads of gloo may abort
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # otherwise torchrun warns
    use_loopback()
    # Without an address, torchrun waits for minutes where the machine's own name does not resolve, as on many Macs.
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    with exit_on_ctrl_c():
        torchrun([*rendezvous, f"--nproc-per-node={args.ranks}", "-m", name, *sys.argv[1:]])
