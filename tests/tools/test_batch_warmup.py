"""A run with batch warmup is audited, replayed and planned like any other."""

import re

import pytest

from tests.conftest import metrics, python, train
from tests.training.test_batch_warmup import RECIPE, SIZES

pytestmark = pytest.mark.slow


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


def test_plan_counts_tokens_of_batch_warmup(runs):
    shown = train(*RECIPE, "--exact", "true", "--out_dir", runs, processes=2, script="tools.plan").stdout
    assert "1 to 3 micro-batch(es) of 1 per step" in shown and " tokens/s, measured over a few steps" in shown
    tokens = sum(SIZES) * 128
    assert f"256 in step 1, 768 from step 5 on, {tokens:,} in 8 steps" in shown
    per_token, per_step, total = re.search(r"FLOPs +([\d,]+) per token, (.*) per step, (.*) in total", shown).groups()
    flops = int(per_token.replace(",", ""))
    assert (per_step, total) == (f"{flops * 6 * 128:.3g}", f"{flops * tokens:.3g}")
