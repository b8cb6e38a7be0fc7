"""A run with batch warmup is replayed and planned like any other."""

import re

import pytest

from tests.conftest import python, train
from tests.trainer.test_batch_warmup import RECIPE, SIZES

pytestmark = pytest.mark.slow


def test_exact_batch_warmup_replays_on_one_process(runs):
    train(*RECIPE, "--exact", "true", "--checkpoint.every", 2, "--out_dir", runs, processes=2)
    for step, num_steps in ((2, 2), (5, 1)):
        shown = python(f"python -m tools.replay {runs / 'run'} {step}").stdout
        assert f"sequences of step {step}: {SIZES[step - 1]}, 0 of them not finite" in shown
        assert f"reproduced bitwise ({num_steps} digest(s))" in shown and "; processes 2 in the run, 1 here" in shown


def test_plan_counts_tokens_of_batch_warmup(runs):
    shown = train(*RECIPE, "--exact", "true", "--out_dir", runs, processes=2, script="tools.plan").stdout
    assert "1 to 3 micro-batch(es) of 1 per step" in shown and " tokens/s, " in shown
    tokens = sum(SIZES) * 128
    assert f"256 in step 1, 768 from step 5 on, {tokens:,} in 8 steps" in shown
    per_token, per_step, total = re.search(r"FLOPs +([\d,]+) per token, (.*) per step, (.*) in total", shown).groups()
    flops = int(per_token.replace(",", ""))
    assert (per_step, total) == (f"{flops * 6 * 128:.3g}", f"{flops * tokens:.3g}")
