"""What saving a model of 100 million parameters costs a training loop, in the foreground and in the background.

One process. A save is begun, and the steps that follow are timed until the checkpoint is there. Lost is what the save
call took plus what those steps took longer than undisturbed ones. TMPDIR says on which disk.
"""

import shutil
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator

from benchmarks.measure import Group
from config import CheckpointConfig, TrainConfig
from model.config import GPTConfig
from model.gpt import GPTModel
from training import checkpoint
from training.optimizer import build_optimizer


def checkpoint_stall(options: Namespace) -> Iterator[Group]:
    accelerator = Accelerator()
    shape = dict(n_layers=1, d_model=64, n_heads=1) if options.quick else dict(n_layers=12, d_model=768, n_heads=12)
    network = GPTModel(GPTConfig(vocab_size=10_000, d_ff=4 * shape["d_model"], **shape))
    model, optimizer = accelerator.prepare(network, build_optimizer(network, TrainConfig().optimizer))
    tokens = torch.randint(10_000, (1, 64), device=accelerator.device)
    totals, numbers = SimpleNamespace(skipped=0, skipped_in_a_row=0), count(1)

    def step_seconds() -> float:
        start = time.perf_counter()
        accelerator.backward(model(tokens, labels=tokens)[1])
        optimizer.step()
        optimizer.zero_grad()
        if tokens.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    with tempfile.TemporaryDirectory() as folder:

        def case(asynchronous: bool) -> dict:
            settings = replace(TrainConfig(), checkpoint=CheckpointConfig(asynchronous=asynchronous, keep=1))
            saver, number = checkpoint.Saver(Path(folder), settings, accelerator, lambda: None), next(numbers)
            undisturbed = statistics.median(step_seconds() for _ in range(6))
            start = time.perf_counter()
            saver.save(number, model, optimizer, {}, totals)
            lost = call = time.perf_counter() - start
            while saver.pending is not None and not saver.pending.done():
                lost += step_seconds() - undisturbed
            saver.wait()
            total = time.perf_counter() - start
            shutil.rmtree(checkpoint.step_directory(Path(folder), number))
            return {
                **{"call_seconds": call, "lost_seconds": lost, "total_seconds": total, "step_seconds": undisturbed},
                "parameters": network.num_parameters(),
            }

        cases = {"synchronous": lambda: case(False), "asynchronous": lambda: case(True)}
        yield Group("100 million parameters", cases, "synchronous")
