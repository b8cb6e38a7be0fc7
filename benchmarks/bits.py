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
from safetensors.torch import load_file

from benchmarks.measure import Group, Program, launch, rows, train, words

QUIET = {"tracking.wandb": "disabled", "evaluation.every": 0}
STORIES = QUIET | {"micro_batch_size": 4, "tracking.log_every": 1, "model.dropout": 0.1}
LARGE = QUIET | {"config": "configs/random_tokens.yaml", "tracking.log_every": 5, "seq_len": 64, "micro_batch_size": 1}
LARGE |= {"model.vocab_size": 512, "model.n_layers": 6, "model.d_model": 384, "model.n_heads": 6, "model.dropout": 0}
MODES = {"default": False, "exact": True}


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """All weights and moments of a run's newest checkpoint."""
    newest = max((run / "checkpoints").iterdir())
    return {name: tensor for file in newest.glob("*.safetensors") for name, tensor in load_file(file).items()}


def compare(one: Path, other: Path) -> dict[str, float | int]:
    """Relative differences of the logged losses and of all weights together, and how many tensors differ in any bit."""
    losses = [(a["train/loss"], b["train/loss"]) for a, b in zip(rows(one), rows(other), strict=True)]
    ours, theirs = tensors(one / "run"), tensors(other / "run")
    weights = [name for name in ours if name.startswith("model.")]
    difference = torch.stack([(ours[name] - theirs[name]).norm() for name in weights]).norm()
    return {
        "largest_loss_difference": max(abs(a / b - 1) for a, b in losses),
        "weight_difference": (difference / torch.stack([theirs[name].norm() for name in weights]).norm()).item(),
        "tensors_that_differ": sum(not torch.equal(ours[name], theirs[name]) for name in ours),
    }


def exactness(options: Namespace) -> Iterator[Group]:
    """What `--exact true` costs, and what it buys.

    Bits: 200 steps of the stories recipe on 1, 2 and 4 processes, with and without `exact`; how far losses and weights
    are apart. Cost: a model of 11 million parameters on 1 and 2 processes with 8 micro-batches each, in time a step and
    peak memory of a process.
    """
    with tempfile.TemporaryDirectory() as folder:

        @cache
        def stories(mode: str, processes: int) -> Path:
            out_dir = Path(folder, f"{mode}{processes}")
            short = {"steps": 2, "schedule.warmup_steps": 0} if options.quick else {"steps": 200}
            train(STORIES | short | {"exact": MODES[mode]}, processes, out_dir, OMP_NUM_THREADS="1")
            return out_dir

        cases = {
            f"{mode}, 1 against {n} processes": lambda mode=mode, n=n: compare(stories(mode, 1), stories(mode, n))
            for mode in MODES
            for n in ((2,) if options.quick else (2, 4))
        }
        yield Group("bits", cases, rounds=1)  # which another round would only repeat

    def cost(mode: str, processes: int) -> dict[str, float]:
        settings = LARGE | {"exact": MODES[mode], "global_batch_size": 8 * processes, "steps": 20}
        measured = train(settings, processes, OMP_NUM_THREADS="1")
        seconds = 8 * processes * LARGE["seq_len"] / measured["tokens_per_second"]
        return {"seconds_a_step": seconds, "peak_mib": measured["peak_mib"]}

    for processes in (1, 2):
        cases = {mode: partial(cost, mode, processes) for mode in MODES}
        yield Group(f"cost, {processes} process(es)", cases, "default")


RECIPE = {"config": "tests/tiny_stories.yaml", "global_batch_size": 12, "evaluation.every": 0}
RECIPE |= {"checkpoint.every": 3, "checkpoint.keep": 2}


def phase(run: Path, since: float) -> str:
    """What a killed process was doing, as far as the run directory tells."""
    if list((run / "checkpoints").glob(".writing-*")):
        return "saving"
    metrics_file = run / "metrics.jsonl"
    return "training" if metrics_file.exists() and metrics_file.stat().st_mtime > since else "starting"


def kill_at_random(out_dir: Path, kills: int, steps: int, minutes: float) -> dict:
    chance, begin, runs = random.Random(0), time.perf_counter(), 0
    tally = Counter(kills=0, starting=0, training=0, saving=0)

    def job(name: str) -> Program:
        settings = RECIPE | {"out_dir": out_dir, "name": name, "steps": steps}
        return Program([*launch(2, "train.py", kills), *words(settings)], OMP_NUM_THREADS="1")

    def more() -> bool:
        return tally["kills"] < kills and time.perf_counter() - begin < 60 * minutes

    def keep_killing(launcher: psutil.Popen, path: Path) -> None:
        last_kill = time.time()
        with suppress(psutil.NoSuchProcess):  # it has just ended
            while more() and launcher.is_running():
                time.sleep(chance.uniform(0, min(10.0, 1.2 * seconds_alone)))
                if victims := [child for child in launcher.children() if "train.py" in " ".join(child.cmdline())]:
                    victim = chance.choice(victims)
                    tally.update(["kills", phase(path, last_kill)])
                    victim.kill()
                    last_kill = time.time()

    with job("left_alone") as program:
        seconds_alone = list(program.lines())[-1][0]
    expected = tensors(out_dir / "left_alone")
    while more():
        runs += 1
        with job(f"run{runs}") as program:
            killer = Thread(target=keep_killing, args=(program.process, out_dir / f"run{runs}"))
            killer.start()
            list(program.lines())
            killer.join()
        ended = tensors(out_dir / f"run{runs}")
        if ended.keys() != expected.keys() or not all(ended[key].equal(expected[key]) for key in expected):
            raise RuntimeError(f"other bits after {dict(tally)}")
    if tally["kills"] < kills:
        raise RuntimeError(f"only {tally['kills']} kills in {minutes} minutes")
    return {**tally, "runs_with_the_same_bits": runs, "minutes": (time.perf_counter() - begin) / 60}


def soak(options: Namespace) -> Iterator[Group]:
    """Kills processes of a run 50 times at random moments, and compares the weights it ends with to one's left alone.

    Every kill is a SIGKILL to a random process of a job of two under `accelerate launch --max_restarts`, at a random
    time after the kill before: while it starts, trains or saves. When a run ends before the kills do, the next one
    begins. It is an error if a run does not end with the same bits, or if 15 minutes were not enough.
    """
    kills, steps = (1, 20) if options.quick else (50, 400)
    with tempfile.TemporaryDirectory() as folder:
        cases = {"killed": partial(kill_at_random, Path(folder), kills, steps, minutes=15)}
        yield Group("two processes", cases, rounds=1)
