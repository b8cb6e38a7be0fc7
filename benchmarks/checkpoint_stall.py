"""What saving a model of 100 million parameters costs a training loop, in the foreground and in the background.

    python -m benchmarks.checkpoint_stall [--layers 12] [--saves 2] [--repeats 2]

One process. A save is begun, and the steps that follow are timed until the checkpoint is there. Lost is what the save
call took plus what those steps took longer than undisturbed ones.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator

from benchmarks import record
from config import CheckpointConfig, TrainConfig
from model.config import GPTConfig
from model.gpt import GPTModel
from training import checkpoint
from training.optimizer import build_optimizer


class NothingSkipped:
    """In place of the loop's totals."""

    skipped = skipped_in_a_row = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--saves", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--directory", help="on the disk to measure; default: the system's temporary directory")
    arguments = parser.parse_args()
    accelerator = Accelerator()
    config = GPTConfig(vocab_size=10_000, n_layers=arguments.layers, d_model=768, n_heads=12, d_ff=3072)
    network = GPTModel(config)
    model, optimizer = accelerator.prepare(network, build_optimizer(network, TrainConfig().optimizer))
    input_ids = torch.randint(10_000, (1, 64), device=accelerator.device)

    def step() -> float:
        start = time.perf_counter()
        accelerator.backward(model(input_ids, labels=input_ids)[1])
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    directory = Path(tempfile.mkdtemp(dir=arguments.directory))
    measured: dict[str, dict[str, list[float]]] = {}
    try:
        for _ in range(arguments.repeats):
            for mode in ("synchronous", "asynchronous"):
                settings = CheckpointConfig(asynchronous=mode == "asynchronous", keep=1)
                saver = checkpoint.Saver(directory, replace(TrainConfig(), checkpoint=settings), accelerator)
                undisturbed = statistics.median(step() for _ in range(6))
                for number in range(1, arguments.saves + 1):
                    start = time.perf_counter()
                    saver.save(number, model, optimizer, {}, NothingSkipped)
                    call = time.perf_counter() - start
                    lost = call
                    while saver.pending is not None and not saver.pending.done():
                        lost += step() - undisturbed
                    saver.wait()
                    figures = measured.setdefault(mode, {"call_seconds": [], "lost_seconds": [], "total_seconds": []})
                    for name, value in [("call_seconds", call), ("lost_seconds", lost),
                                        ("total_seconds", time.perf_counter() - start)]:  # fmt: skip
                        figures[name].append(value)
                    shutil.rmtree(checkpoint.step_directory(directory, number))
    finally:
        shutil.rmtree(directory)
    medians = {
        mode: {name: round(statistics.median(values), 3) for name, values in figures.items()}
        for mode, figures in measured.items()
    }
    ratio = medians["asynchronous"]["lost_seconds"] / medians["synchronous"]["lost_seconds"]
    record.save(
        "checkpoint_stall",
        {
            "parameters": network.num_parameters(),
            "step_seconds": round(undisturbed, 3),
            "threads": torch.get_num_threads(),
            **medians,
            "lost_asynchronous_over_synchronous": round(ratio, 3),
        },
    )


if __name__ == "__main__":
    main()
