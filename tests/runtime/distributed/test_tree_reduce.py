"""Runs resumed on another number of processes; with `exact` they end with the same bits."""

from itertools import accumulate

import pytest
import torch
from torch import nn

from runtime.distributed.tree_reduce import TreeSum
from tests.conftest import ROOT, TINY_STORIES, assert_same_run, metrics, rewind, train

STEPS = 8
# 4, then 8, then 12 micro-batches per step: 4 leaves of one micro-batch, 8 of one, 4 of three, which 1, 2 and 4
# processes can divide. With dropout.
GROWING = "--global_batch_size 12 --schedule.batch_warmup_from 4 --schedule.batch_warmup_steps 5".split()
SIZES = [4, 4, 4, 8, 8, 12, 12, 12]
TWELVE = [*TINY_STORIES, *GROWING, "--name", "run"]
EXACT = [*TWELVE, "--exact", "true"]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Directory of an exact run on one process, with OMP_NUM_THREADS=2."""
    out_dir = tmp_path_factory.mktemp("single")
    done = train(*EXACT, "--out_dir", out_dir, OMP_NUM_THREADS="2")
    assert "1 x cpu, 1 thread(s) each" in done.stdout
    assert "4 to 12 sequences = 1 micro-batch x 1 processes x 4 to 12 accumulation" in done.stdout
    assert f"512 in step 1, 1,536 from step 6 on, {128 * sum(SIZES):,} in 8 steps" in done.stdout
    assert [row["train/tokens"] for row in metrics(out_dir / "run")] == [128 * n for n in accumulate(SIZES)]
    return out_dir / "run"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_exact_has_bits_of_one_process(processes, single, runs):
    train(*EXACT, "--out_dir", runs, processes=processes)
    assert_same_run(runs / "run", single, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["--tracking.block_stats true", "--data.facts 300 --seq_len 96"])
def test_exact_run_logs_the_same_on_any_processes(settings, runs):
    for processes in (0, 2, 4):
        words = [*EXACT, *settings.split(), "--name", processes]
        train(*words, "--out_dir", runs, processes=processes)
    assert metrics(runs / "0") == metrics(runs / "2") == metrics(runs / "4")


@pytest.mark.parametrize(
    "last", [pytest.param([(0, 4, 75), (4, STEPS, 0)], marks=pytest.mark.slow), [(0, STEPS, 0)]], ids=str
)
def test_exact_resumes_on_other_process_counts(last, single, runs):
    for processes, until, exit_code in [(2, 2, 1), *last]:
        train(*EXACT, "--stop_after", until, "--out_dir", runs, processes=processes, exit_code=exit_code)
    assert_same_run(runs / "run", single, STEPS)


@pytest.mark.slow
def test_exact_bf16_on_eight_processes(runs):
    arguments = [*TINY_STORIES, "--global_batch_size", 8, "--exact", "true", "--out_dir", runs]
    for processes in (1, 8):
        launch_file = ROOT / "accelerate_configs" / "multi_gpu.yaml"
        train(*arguments, "--name", processes, processes=processes, launch_file=launch_file)
    assert_same_run(runs / "1", runs / "8", STEPS)


@pytest.mark.slow
def test_ddp_process_count_changes_only_rounding(runs, single):
    """Batches, learning rates, loss weights and validation set are the same, also as in the exact run."""
    for processes, last_step_kept in [(4, 4), (2, STEPS)]:
        train(*TWELVE, "--out_dir", runs, processes=processes)
        rewind(runs / "run", last_step_kept)
    for ours, exact in zip(metrics(runs / "run"), metrics(single), strict=True):
        assert ours.keys() == exact.keys() and ours["train/lr"] == exact["train/lr"]
        for name in ours.keys() - {"train/lr", "state/digest"}:
            assert ours[name] == pytest.approx(exact[name], rel=2e-5), (name, ours["step"])


def pairwise(numbers):
    """Sum a list of tensors in a perfect binary tree."""
    if len(numbers) == 1:
        return numbers[0]
    half = len(numbers) // 2
    return pairwise(numbers[:half]) + pairwise(numbers[half:])


@pytest.mark.parametrize("num_micro_batches", [1, 3, 8, 12, 32])
def test_tree_sum_matches_recursive_reference(num_micro_batches):
    network = nn.Linear(50, 1, bias=False)
    tree_sum = TreeSum(list(network.parameters()), rank=0, num_processes=1)
    odd = next(m for m in range(1, num_micro_batches + 1, 2) if (num_micro_batches // m).bit_count() == 1
               and num_micro_batches % m == 0)  # fmt: skip
    for repetition in range(2):  # the first step leaves nothing behind
        inputs = torch.randn(num_micro_batches, 50, generator=torch.Generator().manual_seed(repetition)) * 10
        for one in inputs:
            network(one).sum().backward()
            tree_sum.add_micro_batch(num_micro_batches)
        leaves = [leaf[0] if odd == 1 else (leaf[0] + leaf[1]) + leaf[2] for leaf in inputs.view(-1, odd, 50)]
        assert torch.equal(network.weight.grad[0], pairwise(leaves))
        if num_micro_batches > 3:
            in_a_row = inputs[0].clone()
            for one in inputs[1:]:
                in_a_row += one
            assert not torch.equal(in_a_row, pairwise(leaves)), "these numbers do not depend on the order"
        network.weight.grad = None


def test_exact_refuses_three_processes_and_fsdp(runs):
    done = train(*EXACT, "--out_dir", runs, processes=3, exit_code=1)
    assert "exact: true needs 1, 2, 4, 8, ... processes, but 3 were started" in done.stderr
    done = train(*EXACT, "--out_dir", runs, exit_code=2, ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    assert "exact: true" in done.stderr and "FSDP" in done.stderr
    assert not runs.exists()
