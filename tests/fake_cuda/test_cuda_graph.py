"""`cuda_graph: true` trains the bits of training without it, on the fake devices of README.md and their CUDA graphs.

All runs have dropout. Two processes sum gradients by all-reduce instead of DDP, in the same order.
"""

import functools
import shutil
from itertools import product

import pytest

from tests.conftest import ROOT, TINY_STORIES, environment, metrics, rewind, thinned
from tests.fake_cuda.launch import fake_gpus, train_on_gpus
from tests.support import forked

GRAPH = ["--cuda_graph", "true"]
BATCHES = {
    "whole": "--micro_batch_size 8 --global_batch_size 8",
    "accumulated": "--micro_batch_size 2 --global_batch_size 8",
    "exact": "--micro_batch_size 2 --global_batch_size 8 --exact true",
    "exact, 3 micro-batches a leaf": "--micro_batch_size 2 --global_batch_size 12 --exact true",
    "growing": """--micro_batch_size 2 --global_batch_size 8 --schedule.batch_warmup_from 2
        --schedule.batch_warmup_steps 6""",
}


COMBINATIONS = list(product(("true", "false"), ("muon", "adamw"), BATCHES))[::-1]


def combination(settings):
    compiled, optimizer, batch = settings
    words = f"--compile {compiled} --optimizer.name {optimizer} {BATCHES[batch]} --evaluation.ema_decay 0.9"
    if compiled == "true":  # compiling a second kind of call takes longer than the training
        words += " --model.n_layers 1 --evaluation.every 0"
    return [*words.split(), "--model.dropout", "0.2"]


def train(launch_file, processes, *settings, out_dir, precision="bf16"):
    run = train_on_gpus(launch_file, processes, *settings, out_dir=out_dir, precision=precision)
    assert ("CUDA graph" in run.stdout) == ("--cuda_graph" in settings)
    return run


def assert_same(graphed, run):
    assert metrics(graphed.directory) == metrics(run.directory)


def replays(run):
    return sum(count for (kind, *_), count in run.events.items() if kind == "graph")


@pytest.mark.parametrize("settings", thinned(COMBINATIONS, len(COMBINATIONS)), ids=lambda settings: ", ".join(settings))
def test_one_gpu_trains_same_bits(settings, folder, tmp_path):
    run, graphed = (
        train("one_gpu", 1, *combination(settings), *graph, out_dir=tmp_path / str(len(graph))) for graph in ([], GRAPH)
    )
    assert_same(graphed, run)
    assert replays(graphed) > 0


@pytest.fixture(scope="module")
def two_gpus(folder):
    """Return a run on two GPUs, with and without graphs, with and without `exact`."""

    @functools.cache
    def two_gpus(*settings):
        return train("multi_gpu", 2, *settings, out_dir=folder / "-".join(["two", *settings]))

    return two_gpus


@pytest.mark.slow
def test_two_gpus_train_same_bits_and_launch_graphs(two_gpus):
    graphed = two_gpus(*GRAPH)
    assert_same(graphed, two_gpus())
    steps, processes, micro_batches = 3, 2, 3
    assert replays(graphed) == steps * processes * micro_batches
    assert graphed.of_kind("sync", "copy", "hazard") == {("event", "trainer/results.py")}
    assert not graphed.of_kind("attention"), "no kernel is launched by itself"


@pytest.mark.slow
def test_exact_run_on_two_gpus_has_same_bits(two_gpus, folder):
    exact = ["--exact", "true"]
    one = train("one_gpu", 1, *exact, *GRAPH, out_dir=folder / "exact")
    assert two_gpus(*exact, *GRAPH).digest == two_gpus(*exact).digest == one.digest


@pytest.mark.slow
def test_graph_distils_same_bits_without_synchronisation(two_gpus, folder):
    teacher = ["--teacher.path", str(two_gpus().directory)]
    run, graphed = (
        train("multi_gpu", 2, *teacher, *graph, out_dir=folder / f"distilled-{len(graph)}") for graph in ([], GRAPH)
    )
    assert_same(graphed, run)
    assert "train/teacher_kl" in metrics(run.directory)[-1] and replays(graphed) > 0
    assert run.of_kind("sync", "copy", "hazard") == {("event", "trainer/results.py")}


@pytest.mark.slow
@pytest.mark.parametrize("before, after", [(GRAPH, []), ([], GRAPH)], ids=["graph first", "graph last"])
def test_resumes_with_and_without_graph(before, after, two_gpus, folder):
    out_dir = folder / f"resumed-{len(after)}"
    rewind(shutil.copytree(two_gpus(*before).directory, out_dir / "run"), 4)
    resumed = train("multi_gpu", 2, *after, out_dir=out_dir)
    assert "resumed at step 4 from" in resumed.stdout
    assert resumed.digest == two_gpus(*before).digest


@pytest.mark.slow
def test_block_statistics_are_recorded_without_graph(folder, tmp_path):
    statistics = ["--tracking.block_stats", "true"]
    run, graphed = (
        train("one_gpu", 1, *statistics, *graph, out_dir=tmp_path / str(len(graph))) for graph in ([], GRAPH)
    )
    assert_same(graphed, run)
    assert "layers/activation_rms/1" in metrics(graphed.directory)[-1]
    assert replays(graphed) > 0, "in steps that log nothing"


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "tools").exists(), reason="tools/ was removed")
def test_step_is_replayed_on_cpu(folder, tmp_path):
    graphed = train("one_gpu", 1, *GRAPH, out_dir=tmp_path, precision="no")
    done = forked.run("tools.replay", [str(graphed.directory), "6"], 0, environment())
    assert done.returncode == 0 and "device cuda in the run, cpu here" in done.stdout, done.stderr


RECAPTURED = """
import train
from runtime.cli.scripts import run_and_exit
from model.gpt import GPTModel
train_step = train.train_step
def with_other_lengths_and_dropout(state, step, micro_batches, *arguments, **more):
    state.network.blocks[1].dropout.p = 0.1 * (step // 3)
    lengths = (128, 64, 64, 128, 96, 128)
    batches = [{name: rows[:, :n] for name, rows in batch.items()} for n, batch in zip(lengths, micro_batches)]
    train_step(state, step, batches, *arguments, **more)
train.train_step = with_other_lengths_and_dropout
forward = GPTModel.forward
def with_metric(model, **inputs):
    output, tokens = forward(model, **inputs), inputs["input_ids"]
    return output._replace(metrics={"mean_token": (tokens.sum(), float(tokens.numel()))})
GPTModel.forward = with_metric
train.loss_scale = lambda precision, step, skipped: 2.0 ** (step % 3)  # as fp16 after an overflow
run_and_exit("train")
"""
READS_ON_HOST = """
from runtime.cli.scripts import run_and_exit
from model.gpt import Block
forward = Block.forward
def read_on_host(block, x_BTC, *arguments):
    if x_BTC.square().mean().item() < 1e9:
        return forward(block, x_BTC, *arguments)
Block.forward = read_on_host
run_and_exit("train")
"""


def run_fork(source, program, *arguments):
    """Run a fork of train.py on one GPU."""
    program.write_text(source)
    words = [*TINY_STORIES, *arguments, "--name", "run", "--checkpoint.every", "8", "--out_dir"]
    return forked.run(str(program), [*words, str(program.parent)], 0, fake_gpus(1))


@pytest.mark.slow
def test_graph_is_captured_again(folder, tmp_path):
    """For other lengths, loss scales and numbers in the model, each of which would change bits."""
    rows = []
    for name, graph in {"eager": [], "graphed": GRAPH}.items():
        (tmp_path / name).mkdir()
        done = run_fork(RECAPTURED, tmp_path / name / "program.py", *graph)
        assert done.returncode == 0, done.stderr
        rows.append(metrics(tmp_path / name / "run"))
    assert rows[0] == rows[1]


def test_value_read_on_host_gives_one_message(folder, tmp_path):
    program = tmp_path / "program.py"
    done = run_fork(READS_ON_HOST, program, *GRAPH)
    message = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "cuda_graph: true: the forward or the backward cannot be captured" in message
    assert f"{program}:6: CUDA error: operation not permitted when stream is capturing; set it to false" in message
