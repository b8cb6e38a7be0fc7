"""A run with batch warmup is resumed and verified like any other."""

import pytest

from tests.conftest import TINY_STORIES, assert_same_bits, environment, metrics, tensors, train
from tests.support import forked

STEPS, SIZES = 8, [2, 2, 4, 4, 6, 6, 6, 6]
GROWING = "--schedule.batch_warmup_from 2 --schedule.batch_warmup_steps 4".split()
RECIPE = [*TINY_STORIES, *GROWING, "--checkpoint.every", 1, "--name", "run"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run on two processes, saved after every step."""
    out_dir = tmp_path_factory.mktemp("runs")
    train(*RECIPE, "--out_dir", out_dir, processes=2)
    return out_dir / "run"


def test_batch_warmup_resumes_bitwise_at_every_stage(run, runs):
    for until, exit_code in [(1, 1), (3, 1), (4, 1), (STEPS, 0)]:
        train(*RECIPE, "--stop_after", until, "--out_dir", runs, processes=2, exit_code=exit_code)
    assert_same_bits(tensors(runs / "run", STEPS), tensors(run, STEPS))
    assert metrics(runs / "run") == metrics(run)


def test_batch_warmup_is_fixed_and_must_divide(run):
    for name, value in [("batch_warmup_from", 1), ("batch_warmup_steps", 5)]:
        done = train(*RECIPE, f"--schedule.{name}", value, "--out_dir", run.parent, exit_code=2)
        assert f"schedule.{name}: " in done.stderr and f" in the run, {value} now" in done.stderr
    done = train(*RECIPE, "--out_dir", run.parent, processes=3, exit_code=1)
    assert "schedule.batch_warmup_from: 2 is not a multiple of micro_batch_size * processes = 1 * 3 = 3" in done.stderr
    assert "numbers of processes that can split it: 1, 2" in done.stderr


def test_branch_may_change_batch_warmup(run, runs):
    """The batch grows from 1, by 1 at steps 2, 4, 5, 7 and 8."""
    begin = ["--branch_from", run / "checkpoints" / "step-00000003", "--schedule.batch_warmup_from", 1]
    train(*RECIPE, *begin, "--schedule.batch_warmup_steps", 8, "--steps", 8, "--out_dir", runs)
    tokens = [row["train/tokens"] for row in metrics(runs / "run")]
    assert [later - earlier for earlier, later in zip(tokens, tokens[1:], strict=False)] == [
        128 * n for n in (3, 4, 4, 5)
    ]


LOG_RECOMPILES = """
import torch
torch._logging.set_logs(recompiles=True)
from runtime.cli import scripts
scripts.run_and_exit("train")
"""


def test_batch_warmup_does_not_recompile(runs):
    words = "--compile true --evaluation.every 0 --steps 5 --check_replicas_every 0 --model.n_layers 1".split()
    command = [LOG_RECOMPILES, *map(str, RECIPE), *words, "--out_dir", str(runs)]
    done = forked.run("-c", command, 0, environment())
    assert done.returncode == 0 and "compile: each block" in done.stdout
    assert "ecompil" not in done.stdout + done.stderr
