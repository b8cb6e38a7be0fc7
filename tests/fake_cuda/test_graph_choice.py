"""`cuda_graph: null` on the fake devices of README.md: a trial decides, and no decision changes or ends a run."""

import re

import pytest

from tests.conftest import ROOT, TINY_STORIES, metrics
from tests.fake_cuda.launch import fake_gpus
from tests.support import forked

pytestmark = pytest.mark.slow  # each starts the program of a trial, which imports torch

# A fork of train.py. The child process of the trial imports it too, and has its devices from tests/fake_cuda/site.
PROGRAM = """
import os
import torch
from runtime.cli.scripts import run_and_exit
from model.gpt import Block
from trainer import graph_choice
from trainer.cuda_graph import GraphedMicroBatch

graph_choice.MIN_MICRO_BATCHES = 0
is_capturing = torch.cuda.is_current_stream_capturing
forward, replay = Block.forward, GraphedMicroBatch.__call__

def changed_forward(block, x_BTC, *arguments):
    {in_forward}
    return forward(block, x_BTC, *arguments)

def changed_replay(graph, *arguments):
    outputs = replay(graph, *arguments)
    {after_replay}
    return outputs

Block.forward, GraphedMicroBatch.__call__ = changed_forward, changed_replay
{more}
run_and_exit("train")
"""
WORKS = "on, its gradients have the same bits as without it"
REFUSED = "off, the forward or the backward cannot be captured, PROGRAM:14: "
# What the fork changes, and the line that the run prints.
TRIALS = {
    "agrees": ({}, WORKS),
    "capture raises": (
        {"in_forward": "if is_capturing(): raise RuntimeError('CUDA error: an unknown operation')"},
        REFUSED + "CUDA error: an unknown operation",
    ),
    "reads on host": (
        {"in_forward": "assert x_BTC.square().mean().item() < 1e9"},
        REFUSED + "CUDA error: operation not permitted when stream is capturing",
    ),
    "one gradient is wrong": (
        {"after_replay": "graph.parameters[5].grad[3] += 1"},
        "off, the gradient of blocks.0.attention.q_proj.bias differs by 1.0e+00 from N, without a graph by 0.0e+00 "
        "at most",
    ),
    "memory": (
        {"in_forward": "if is_capturing(): raise torch.OutOfMemoryError('CUDA out of memory: 2 GiB')"},
        f"off, memory does not suffice: {REFUSED.removeprefix('off, ')}CUDA out of memory: 2 GiB",
    ),
    "random on host": (
        {"in_forward": "np.random.random()", "more": "import numpy as np"},
        "off, the forward draws random numbers on the host, and a graph would use the same ones in every step",
    ),
    "dies": (  # and is the first process that Linux kills where memory runs out: oom_score_adj is 1000
        {"in_forward": "if is_capturing(): os._exit(int(open('/proc/self/oom_score_adj').read()) // 100)"},
        "off, the trial ended with exit code 10",
    ),
    "takes too long": ({"more": "graph_choice.MAX_SECONDS = 0.5"}, "off, the trial took more than 0.5 s"),
}


@pytest.fixture(scope="module")
def without(folder):
    """Return a run without a graph."""
    return run(folder, "--cuda_graph", "false")[0]


def run(out_dir, *settings, processes=0, **changes):
    """Return the metrics of a run of the fork, and what it says of CUDA graphs."""
    program = out_dir / "program.py"
    parts = {"in_forward": "pass", "after_replay": "pass", "more": ""}
    program.write_text(PROGRAM.format(**parts | changes))
    site = f"{ROOT / 'tests/fake_cuda/site'}:{ROOT}"
    words = [*TINY_STORIES, *settings, "--name", "run", "--checkpoint.every", "8", "--out_dir", str(out_dir)]
    done = forked.run(str(program), words, processes, fake_gpus(2, PYTHONPATH=site, ACCELERATE_MIXED_PRECISION="bf16"))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"CUDA graph: (.*)", done.stdout.replace(str(program), "PROGRAM"))
    assert ("trying a CUDA graph" in done.stderr) == (lines != []) == ("false" not in settings)
    assert (", CUDA graph\n" in done.stdout or ", CUDA graph," in done.stdout) == (lines[:1] == [WORKS])
    return metrics(out_dir / "run"), [re.sub(r"from [\d.e+-]+,", "from N,", line) for line in lines]


@pytest.mark.parametrize("name", TRIALS)
def test_trial_changes_nothing_and_is_reported(name, without, tmp_path):
    changes, line = TRIALS[name]
    assert run(tmp_path, **changes) == (without, [line])


# In the run, not in the trial, every call is a new capture, and after so many calls of blocks an allocation fails.
LACKS_MEMORY = """
from weakref import ref
inputs = []
def allocate(x_BTC):
    if is_capturing() and __name__ == "__main__":
        inputs.append(ref(x_BTC))
        if len(inputs) > {fails_after}:
            raise torch.OutOfMemoryError("CUDA out of memory: 2 GiB")
    assert is_capturing() or len(inputs) <= {fails_after} or inputs[-1]() is None, "the memory of the capture is free"
"""


@pytest.mark.parametrize("fails_after, processes", [(0, 0), (15, 0), (0, 2)], ids=["first", "later", "two processes"])
def test_run_lacks_memory_for_graph(fails_after, processes, without, folder, tmp_path):
    """The first capture of a run, or one in the middle of a step, needs too much memory."""
    changes = {
        "in_forward": "allocate(x_BTC)",
        "after_replay": "graph.captured_for = graph.captured_for if __name__ == '__mp_main__' else None",
        "more": LACKS_MEMORY.format(fails_after=fails_after),
    }
    rows, lines = run(tmp_path, processes=processes, **changes)
    if processes:
        (tmp_path / "without").mkdir()
        without = run(tmp_path / "without", "--cuda_graph", "false", processes=processes)[0]
    line = f"off from here on, memory does not suffice: {REFUSED.removeprefix('off, ')}CUDA out of memory: 2 GiB"
    assert rows == without
    assert lines[0] == WORKS and len(lines) == 1 + max(1, processes)
    assert {re.sub(r"PROGRAM:\d+", "PROGRAM:14", other) for other in lines[1:]} == {line}


@pytest.mark.parametrize("settings", [[], ["--exact", "true"]], ids=["DDP", "exact"])
def test_two_processes_try_once(settings, folder, tmp_path):
    rows = []
    for graph in (["--cuda_graph", "false"], []):
        (tmp_path / f"{len(graph)}").mkdir()
        rows.append(run(tmp_path / f"{len(graph)}", *settings, *graph, processes=2))
    (without, _), (tried, lines) = rows
    assert tried == without and lines == [WORKS]
