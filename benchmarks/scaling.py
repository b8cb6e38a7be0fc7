"""What two processes are worth on two cores, and what DDP is worth: python -m benchmarks.scaling [--quick]

Processes: tokens per second of train.py with two processes of one thread against one process of two threads, on the
same global batches. DDP: seconds a step with two processes of one thread, against gradients that are averaged by hand
after backward, and how much of the communication is hidden behind computation. By hand each tensor is sent on its own;
DDP with one bucket for all sends as late, but at once, so it tells what sending together gives from what sending early
gives. All for three sizes of model, by turns; about four minutes on two cores. docs/overlap_ddp.png shows a step of the
largest.
"""

import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from benchmarks import record
from benchmarks.measure import ROOT, alternate, arguments, pictures, training_tokens_per_second
from config import OptimizerConfig
from examples.overlap import WAYS, Intervals, average_gradients, draw, hidden, lanes
from model.config import GPTConfig
from model.gpt import GPTModel
from training.compute import prepare_cpu
from training.optimizer import build_optimizer

ROWS, SEQ_LEN = 8, 128  # of a global batch
BY_HAND, _, DEFAULT = WAYS
OF_PROCESSES = {"1 process": (0, "2"), "2 processes": (2, "1")}  # as `launch` counts them, and the threads of each


@dataclass
class Size:
    """A model, and how many steps of it take some seconds."""

    n_layers: int
    d_model: int
    n_heads: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.n_layers} x {self.d_model}"

    def shape(self) -> dict[str, int | float]:
        shape = {"vocab_size": 512, "n_layers": self.n_layers, "d_model": self.d_model, "n_heads": self.n_heads}
        return {**shape, "d_ff": 4 * self.d_model, "dropout": 0.0}


SIZES = [Size(2, 128, 4, steps=100), Size(4, 256, 4, steps=25), Size(6, 384, 6, steps=10)]
QUICK_SIZES = [Size(1, 16, 2, steps=10), Size(2, 16, 2, steps=10)]


def throughput_case(size: Size, processes: int, threads: str) -> Callable[[], float]:
    settings = {
        "config": "configs/random_tokens.yaml", "steps": size.steps, "seq_len": SEQ_LEN, "global_batch_size": ROWS,
        "micro_batch_size": ROWS // max(1, processes), "tracking.log_every": size.steps // 5,
        "tracking.wandb": "disabled",
        **{f"model.{name}": value for name, value in size.shape().items()},
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return lambda: training_tokens_per_second(*words, processes=processes, OMP_NUM_THREADS=threads)


def measure_processes(sizes: list[Size], rounds: int) -> dict[str, dict[str, float]]:
    """Tokens per second of both ways to use two cores, and their ratio, for each size."""
    cases = {
        f"{size.name}, {way}": throughput_case(size, *launched)
        for size in sizes
        for way, launched in OF_PROCESSES.items()
    }
    medians = alternate(cases, rounds)
    figures = {}
    for size in sizes:
        one, two = (medians[f"{size.name}, {way}"] for way in OF_PROCESSES)
        figures[size.name] = {
            "one_process_two_threads_tokens_per_second": round(one),
            "two_processes_one_thread_tokens_per_second": round(two),
            "two_processes_over_one": round(two / one, 3),
        }
    return figures


class Training:
    """A rank's share of a training, by DDP as train.py sets it up or with gradients averaged by hand."""

    def __init__(self, size: Size, way: str, rank: int):
        torch.manual_seed(0)
        self.model = GPTModel(GPTConfig(**size.shape()))
        self.by_hand = way == BY_HAND
        if not self.by_hand:
            self.model = DistributedDataParallel(self.model, bucket_cap_mb=WAYS[way], gradient_as_bucket_view=True)
        self.optimizer = build_optimizer(self.model, OptimizerConfig())
        torch.manual_seed(1 + rank)
        self.tokens = torch.randint(512, (ROWS // dist.get_world_size(), SEQ_LEN))
        self.step()  # DDP arranges its buckets after its first backward

    def step(self) -> None:
        self.model(self.tokens, labels=self.tokens)[1].backward()
        if self.by_hand:
            average_gradients(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds_a_step(self, steps: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - start) / steps

    def timeline(self) -> tuple[Intervals, Intervals]:
        dist.barrier()
        with profile() as profiled:
            self.step()
        return lanes(profiled.events())


def compare(size: Size, rank: int, rounds: int) -> tuple[dict[str, dict], dict[str, tuple[Intervals, Intervals]]]:
    """Seconds a step of each way and how much of its communication is hidden; and a timeline of each."""
    trainings = {way: Training(size, way, rank) for way in WAYS}
    steps = max(1, size.steps // 10)
    medians = alternate({way: lambda t=t: t.seconds_a_step(steps) for way, t in trainings.items()}, rounds)
    timelines = {way: [training.timeline() for _ in range(3)] for way, training in trainings.items()}
    figures = {
        way: {
            "seconds_a_step": round(seconds, 5),
            "share_hidden": round(statistics.median(hidden(*timeline) for timeline in timelines[way]), 3),
            "over_default_buckets": round(seconds / medians[DEFAULT], 3),
        }
        for way, seconds in medians.items()
    }
    return figures, {way: seen[-1] for way, seen in timelines.items()}


def compare_all(rank: int, folder: str, picture: Path, sizes: list[Size], rounds: int) -> None:
    """One rank of a launch that measures all sizes; rank 0 leaves its figures in `folder` and draws the last."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    prepare_cpu()
    torch.set_num_threads(1)
    figures = {}
    with contextlib.redirect_stderr(io.StringIO()) if rank else contextlib.nullcontext():
        for size in sizes:
            figures[size.name], timelines = compare(size, rank, rounds)
    if rank == 0:
        Path(folder, "figures.json").write_text(json.dumps(figures))
        with contextlib.redirect_stdout(io.StringIO()):  # stdout is for the figures
            draw(timelines, picture)
    dist.barrier()  # no rank tears the group down while another still uses it
    dist.destroy_process_group()
    os._exit(0)  # not through the interpreter's exit, where threads of gloo may abort


def measure_ddp(picture: Path, sizes: list[Size], rounds: int) -> dict[str, dict[str, float]]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler has nothing to say to a reader
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(compare_all, (folder, picture, sizes, rounds), nprocs=2)
        return json.loads(Path(folder, "figures.json").read_text())


def main() -> None:
    quick = arguments(__doc__).quick
    sizes = QUICK_SIZES if quick else SIZES
    with pictures(ROOT / "docs", quick) as folder:
        figures = {
            "sequences_a_step": ROWS,
            "seq_len": SEQ_LEN,
            "ddp": measure_ddp(folder / "overlap_ddp.png", sizes, rounds=2 if quick else 11),
            "processes": measure_processes(sizes[: 1 if quick else None], rounds=1 if quick else 3),
        }
    record.save("scaling", figures, quick)


if __name__ == "__main__":
    main()
