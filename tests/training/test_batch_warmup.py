"""A run with batch warmup is resumed, audited, replayed, planned and verified like any other."""

import re

import pytest

from tests.conftest import TINY_STORIES, assert_same_bits, environment, metrics, python, tensors, train
from tests.support import forked

STEPS, SIZES = 8, [2, 2, 4, 4, 6, 6, 6, 6]
GROWING = "--schedule.batch_warmup_from 2 --schedule.batch_warmup_steps 4".split()
RECIPE = [*TINY_STORIES, *GROWING, "--name", "run"]

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


def test_batch_warmup_run_is_audited_and_replayed(runs):
    train(*RECIPE, "--exact", "true", "--checkpoint.every", 2, "--out_dir", runs, processes=2)
    shown = python(f"python -m tools.replay {runs / 'run'} --audit 99").stdout
    assert len(re.findall(r"^PASS .* bitwise identical$", shown, re.MULTILINE)) == 4
    for step in (2, 3):
        shown = python(f"python -m tools.replay {runs / 'run'} {step}", CXX="/nonexistent").stdout
        row = metrics(runs / "run")[step - 1]
        assert f"of {SIZES[step - 1]} with the highest loss" in shown and "reproduced bitwise (1 digest(s))" in shown
        fp32 = [float(figure) for figure in re.search(r"fp32 +([\d.]+) +([\d.]+)$", shown, re.MULTILINE).groups()]
        assert fp32 == pytest.approx([row["train/loss"], row["train/grad_norm"]], abs=1e-6)


@pytest.mark.parametrize("processes", [1, 2])
def test_verify_passes_with_batch_warmup(processes, runs):
    """The reference loop counts the tokens of each batch."""
    done = forked.run("verify.py", [*map(str, RECIPE), "--out_dir", str(runs)], processes, environment())
    assert done.returncode == 0 and done.stdout.count("PASS") >= 9, done.stdout + done.stderr


def test_plan_counts_tokens_of_batch_warmup(runs):
    shown = train(*RECIPE, "--exact", "true", "--out_dir", runs, processes=2, script="tools.plan").stdout
    assert "1 to 3 micro-batch(es) of 1 per step" in shown and " tokens/s, measured over a few steps" in shown
    tokens = sum(SIZES) * 128
    assert f"256 in step 1, 768 from step 5 on, {tokens:,} in 8 steps" in shown
    per_token, per_step, total = re.search(r"FLOPs +([\d,]+) per token, (.*) per step, (.*) in total", shown).groups()
    flops = int(per_token.replace(",", ""))
    assert (per_step, total) == (f"{flops * 6 * 128:.3g}", f"{flops * tokens:.3g}")


LOG_RECOMPILES = """
import torch
torch._logging.set_logs(recompiles=True)
from cli import scripts
scripts.run_and_exit("train")
"""


def test_batch_warmup_does_not_recompile(runs):
    words = "--compile true --evaluation.every 0 --steps 5 --check_replicas_every 0 --model.n_layers 1".split()
    command = [LOG_RECOMPILES, *map(str, RECIPE), *words, "--out_dir", str(runs)]
    done = forked.run("-c", command, 0, environment())
    assert done.returncode == 0 and "compiled" in done.stdout
    assert "ecompil" not in done.stdout + done.stderr
