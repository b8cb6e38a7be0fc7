"""The choice of `cuda_graph: null`: a trial in a child process decides whether a run uses a CUDA graph.

Nothing is captured in the process of the run before the trial has succeeded. After a failed capture torch does not
restore its memory allocator and random generator (see the comment in `CUDAGraph::reset` of its CUDAGraph.cpp), so a
later allocation or dropout may raise. The child takes this state with it when it ends.
"""

import math
import multiprocessing
import os
import pickle
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import combinations
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor

from data.loader import Batch, BatchLoader
from data.sampler import BatchSizes
from model.gpt import build_on_meta_device
from model.loss import count_targets
from runtime.config.errors import error_kind
from runtime.config.schema import TrainConfig
from runtime.distributed.collectives import broadcast_from_main
from runtime.distributed.launch import LAUNCH_VARIABLE, join_launch
from trainer.cuda_graph import GraphChoice
from trainer.gradients import fill_missing_gradients, loss_scale
from trainer.run.directory import Run
from trainer.run.resolve import resolve
from trainer.state import TrainState

# The GPU runs the kernels of larger models more slowly than the host launches them.
MAX_PARAMETERS = 50_000_000
# A trial takes seconds, which fewer micro-batches would not save.
MIN_MICRO_BATCHES = 2_000
MAX_SECONDS = 300
MAX_SECONDS_TO_END = 10  # a process that waits for a broken driver ends neither by itself nor when it is killed


BuildState = Callable[..., TrainState]
"""build_state of train.py."""


def choose_graph(
    config: TrainConfig,
    accelerator: Accelerator,
    step: int,
    build_state: BuildState,
    stop_requested: Callable[[], bool],
) -> GraphChoice:
    """Choose whether a run that starts at `step` uses a CUDA graph; called by all processes together.

    With `cuda_graph: null` a trial decides, where a graph may help. It builds its state with `build_state`. It ends
    early if `stop_requested()` becomes true, so that a run has time to save after a signal.
    """
    if config.cuda_graph is not None:
        return GraphChoice(config.cuda_graph)
    sizes = BatchSizes.from_config(config)
    sequences = sizes.sequences_before(config.steps) - sizes.sequences_before(step)
    may_help = (
        accelerator.device.type == "cuda"
        and accelerator.distributed_type != DistributedType.FSDP
        and not config.activation_checkpointing
        and sequences >= MIN_MICRO_BATCHES * config.micro_batch_size * accelerator.num_processes
        and build_on_meta_device(config.model).num_parameters() < MAX_PARAMETERS
    )
    if not may_help:
        return GraphChoice(False)
    # The child has one process, whatever the number of this run: a graph contains no communication. It must end before
    # the other processes stop waiting for its result.
    timeout_seconds = min(MAX_SECONDS, config.timeout_seconds / 2)
    build = partial(build_for_trial, build_state, config, step)
    trial = try_in_child(build, stop_requested, timeout_seconds) if accelerator.is_main_process else None
    return GraphChoice(*broadcast_from_main(trial))


def build_for_trial(build_state: BuildState, config: TrainConfig, step: int) -> tuple[TrainState, list[Batch]]:
    """Build a state with a CUDA graph, and load two micro-batches; called in the child process.

    The trial captures a graph of the first micro-batch and checks the gradients that the graph computes for the second.
    If step `step` has only one micro-batch, the second one is from the next step.
    """
    run = Run.from_config(config)
    config, corpus, pretrained = resolve(config.replace(cuda_graph=True), run)
    accelerator = Accelerator(**join_launch(config))
    state = build_state(config, run, accelerator, pretrained, use_graph=True)
    loader = BatchLoader(corpus.train, corpus.global_batches(config), config.micro_batch_size, accelerator.device)
    return state, [*loader.load(step), *loader.load(step + 1)][:2]


def try_in_child(
    build: Callable[[], tuple[TrainState, list[Batch]]], stop_requested: Callable[[], bool], timeout_seconds: float
) -> tuple[bool, str]:
    """Return whether a graph works, and how well or why not."""
    print("trying a CUDA graph in a child process ...", file=sys.stderr, flush=True)
    context = multiprocessing.get_context("spawn")  # a fork could not use CUDA
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run_trial, args=(sender, build))
    try:
        child.start()
    except Exception as error:  # of the system, of pickle, or because this process may have no children
        return False, f"the child process cannot start: {error}"
    sender.close()  # so that the end of the child ends the wait
    deadline = time.monotonic() + timeout_seconds
    try:
        while not receiver.poll(min(1.0, timeout_seconds)):
            if stop_requested():
                return False, "the run is asked to stop"
            if time.monotonic() >= deadline:
                return False, f"the trial took more than {timeout_seconds:g} s"
        result = receiver.recv()
        child.join(MAX_SECONDS_TO_END)  # killed, it would leave semaphores, which Python reports when the run ends
        return result
    except (EOFError, OSError):  # OSError: in the middle of the result
        child.join(MAX_SECONDS_TO_END)
        return False, f"the trial ended with exit code {child.exitcode}"
    finally:
        child.kill()
        child.join(MAX_SECONDS_TO_END)


def _run_trial(sender: Connection, build: Callable[[], tuple[TrainState, list[Batch]]]) -> None:
    with suppress(OSError):  # if the memory of the machine runs out, Linux kills this process, not that of the run
        Path("/proc/self/oom_score_adj").write_text("1000")
    for name in filter(LAUNCH_VARIABLE.fullmatch, list(os.environ)):
        del os.environ[name]
    with open(os.devnull, "w") as nowhere:
        for output in (1, 2):
            os.dup2(nowhere.fileno(), output)
    try:
        sender.send(compare(*build()))
    except Exception as error:
        reason = str(error).removeprefix("cuda_graph: true: ").partition("\n")[0].partition("; ")[0]
        is_full = error_kind(error.__cause__ or error) == "out_of_memory"
        sender.send((False, f"memory does not suffice: {reason}" if is_full else reason or type(error).__name__))


def compare(state: TrainState, batches: list[Batch]) -> tuple[bool, str]:
    """Capture a graph of one micro-batch and compare its gradients of another with those without a graph."""
    first, second = batches
    assert state.graph, "built with cuda_graph: true"
    names = [
        "the loss",
        *(f"the gradient of {name}" for name, p in state.network.named_parameters() if p.requires_grad),
    ]
    scale = loss_scale(state.accelerator.mixed_precision, step=0, skipped=6)  # 2**10 in fp16

    draws_on_host = False

    def gradients(compute: Callable[..., tuple], batch: Batch) -> list[Tensor]:
        """Return the loss and the gradients of a micro-batch."""
        nonlocal draws_on_host
        state.seed_micro_batch(step=0, index=int(batch is second), num_micro_batches=2)
        before = host_generators()
        loss, _ = compute(batch, count_targets(batch["labels"], state.network.predicts_next_token), scale)
        draws_on_host = host_generators() != before
        return [loss, *fill_missing_gradients(state.parameters)]

    # Weights that are zero at the start, as with zero_init, would make the gradients of others zero.
    with torch.no_grad():
        for parameter in state.parameters:
            parameter.add_(torch.randn_like(parameter), alpha=0.02)

    # An optimizer step allocates the optimizer's state. The graph's memory stays allocated during an evaluation, and
    # while the gradients without a graph are computed. So what fits here fits in the run.
    gradients(state.graph.forward_backward, first)
    state.optimizer.step()
    state.optimizer.zero_grad()
    gradients(state.graph, first)  # captures
    state.optimizer.step()  # if it replaces the memory of a weight, a replay uses the old one
    state.optimizer.zero_grad()
    captured = state.graph.graph
    if state.config.evaluation.every:
        copies = math.ceil(state.config.evaluation.micro_batch_size / state.config.micro_batch_size)
        state.model.eval()
        with torch.no_grad():
            state.model(**{name: torch.cat([rows] * copies) for name, rows in first.items()}, num_items_in_batch=1.0)
        state.model.train()
    results = []
    for compute in (state.graph, *[state.graph.forward_backward] * 3):
        results.append(gradients(compute, second))
        state.optimizer.zero_grad()
    if state.graph.graph is not captured:
        reason = "the shapes of the batches differ, or the forward changes a number that is an attribute of a module"
        return False, f"{reason}, so every call is another graph"
    # With Python's randomness the gradients without a graph scatter, so that any graph would agree with them.
    if draws_on_host:  # in the last call, without a graph
        return False, "the forward draws random numbers on the host, and a graph would use the same ones in every step"

    has_same_bits = True
    for name, replayed, *computed in zip(names, *results, strict=True):
        if all(torch.equal(replayed, one) for one in computed):
            continue
        has_same_bits = False
        # Without `exact` some kernels of a GPU add in another order each time.
        spread = max(float((one - other).norm()) for one, other in combinations(computed, 2))
        error = float((replayed - computed[0]).norm())
        if state.config.exact or not error <= 2 * spread:  # also if it is NaN
            size = float(computed[0].norm())
            return False, f"{name} differs by {error:.1e} from {size:.1e}, without a graph by {spread:.1e} at most"
    return True, f"its gradients {'have the same bits as' if has_same_bits else 'scatter like those'} without it"


def host_generators() -> bytes:
    """Return the states of the random generators of the host, which a replay does not advance."""
    return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().numpy()))
