"""Which bits a run ends with: on other numbers of processes, and after its processes were killed."""

import random
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from threading import Thread

import psutil
import torch

from benchmarks.measure import Group, Program, launch, train
from benchmarks.programs import QUIET, STORIES, TINY, random_tokens
from checkpoint.unshard import whole_tensors
from run.load import find_checkpoint
from run.metrics_log import read_rows

SMALL = STORIES | QUIET | {"evaluation.every": 0, "micro_batch_size": 4, "tracking.log_every": 1, "model.dropout": 0.1}
LARGE = {"n_layers": 6, "n_heads": 6, "d_model": 384}
KILLED = {"config": "tests/tiny_stories.yaml", "global_batch_size": 12, "evaluation.every": 0}
KILLED |= {"checkpoint.every": 3, "checkpoint.keep": 2}
MODES = {"default": {"exact": False}, "exact": {"exact": True}}


def exactness(options: Namespace) -> Iterator[Group]:
    """What `--exact true` buys, 200 steps of the stories recipe on 1, 2 and 4 processes: how far logged losses and all
    weights together are apart, relatively, and how many tensors differ in any bit; and what it costs, of a model of 11
    million parameters with 8 micro-batches a process, in time a step and peak memory of a process."""
    short = {"steps": 2, "schedule.warmup_steps": 0} if options.quick else {"steps": 200}
    with tempfile.TemporaryDirectory() as folder:

        @cache
        def stories(mode: str, processes: int) -> Path:
            out_dir = Path(folder, f"{mode}{processes}")
            train(SMALL | short | MODES[mode], processes, out_dir, OMP_NUM_THREADS="1")
            return out_dir / "run"

        def compared(mode: str, processes: int) -> dict[str, float | int]:
            runs = stories(mode, 1), stories(mode, processes)
            rows = zip(*(read_rows(run / "metrics.jsonl") for run in runs), strict=True)
            losses = [(one["train/loss"], other["train/loss"]) for one, other in rows]
            ours, theirs = (whole_tensors(*find_checkpoint(run)) for run in runs)
            names = [name for name in ours if name.startswith("model.")]
            one, other = (torch.cat([state[name].flatten() for name in names]) for state in (ours, theirs))
            return {
                "largest_loss_difference": max(abs(a / b - 1) for a, b in losses),
                "weight_difference": ((one - other).norm() / other.norm()).item(),
                "tensors_that_differ": sum(not torch.equal(ours[name], theirs[name]) for name in ours),
            }

        counts = (2,) if options.quick else (2, 4)
        cases = {f"{m}, 1 against {n} processes": partial(compared, m, n) for m in MODES for n in counts}
        yield Group("bits", cases, rounds=1)  # which another round would only repeat
    for processes in (1, 2):
        settings = random_tokens(64, 1, 20, 5, **(TINY if options.quick else LARGE))
        settings |= {"global_batch_size": 8 * processes}
        cases = {mode: partial(train, settings | how, processes, OMP_NUM_THREADS="1") for mode, how in MODES.items()}
        yield Group(f"cost, {processes} process(es)", cases, "default")


def soak(options: Namespace) -> Iterator[Group]:
    """Kills processes 50 times: by SIGKILL a random one of two under `accelerate launch --max_restarts`, at a random
    time after the kill before. When a run ends before the kills do, the next one begins. It is an error if a run does
    not end with the bits of one that was left alone."""
    kills, steps = (1, 20) if options.quick else (50, 400)
    chance, tally = random.Random(0), Counter(kills=0, starting=0, training=0, saving=0, runs_with_the_same_bits=0)

    def keep_killing(launcher: psutil.Popen, run: Path, pause_seconds: float) -> None:
        last_kill = time.time()
        with suppress(psutil.NoSuchProcess):  # it has just ended
            while pause_seconds and tally["kills"] < kills and launcher.is_running():
                time.sleep(chance.uniform(0, pause_seconds))
                if victims := [child for child in launcher.children() if "train.py" in " ".join(child.cmdline())]:
                    log, saves = run / "metrics.jsonl", list((run / "checkpoints").glob(".writing-*"))
                    trains = log.exists() and log.stat().st_mtime > last_kill
                    chance.choice(victims).kill()
                    tally.update(["kills", "saving" if saves else "training" if trains else "starting"])
                    last_kill = time.time()

    def trainable_parameters(run: Path, pause_seconds: float = 0.0) -> tuple[float, dict[str, torch.Tensor]]:
        settings = KILLED | {"out_dir": run.parent, "name": run.name, "steps": steps}
        with Program(launch(settings, 2, max_restarts=kills), OMP_NUM_THREADS="1") as program:
            killer = Thread(target=keep_killing, args=(program.process, run, pause_seconds))
            killer.start()
            seconds = list(program.lines())[-1][0]
            killer.join()
        return seconds, whole_tensors(*find_checkpoint(run))

    def case() -> dict[str, float | int]:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            seconds, expected = trainable_parameters(Path(folder, "left_alone"))
            for run in (f"run{number}" for number in range(kills) if tally["kills"] < kills):
                _, ended = trainable_parameters(Path(folder, run), min(10.0, 1.2 * seconds))
                if not all(ended[name].equal(tensor) for name, tensor in expected.items()):
                    raise RuntimeError(f"other bits after {dict(tally)}")
                tally["runs_with_the_same_bits"] += 1
        return {**tally, "minutes": (time.perf_counter() - begin) / 60}

    yield Group("two processes", {"killed": case}, rounds=1)
