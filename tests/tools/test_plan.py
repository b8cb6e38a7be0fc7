"""`python -m tools.plan` trains three steps, prints what a run needs, and leaves no file."""

import re
import resource

import pytest

from model.gpt import GPTModel
from runtime.config.parser import parse_config
from tests.conftest import ROOT, TINY_STORIES, environment, tensors, train
from tests.support import forked

PAGE = (ROOT / "docs" / "performance.md").read_text()


@pytest.mark.parametrize("processes", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_plan_prints_what_three_steps_took(runs, tmp_path, processes):
    (temporary := tmp_path / "temporary").mkdir()
    words = [*TINY_STORIES, "--out_dir", runs, "--name", "run", "--model.vocab_size", 266]
    done = train(*words, script="tools.plan", processes=processes, TMPDIR=str(temporary))
    assert not runs.exists() and not list(temporary.iterdir())
    assert "Training finished." not in done.stdout and done.stdout.count("peak memory") == 1
    network = GPTModel(parse_config([*map(str, words)]).model)
    parts = [int(count.replace(",", "")) for count in re.findall(r"^  \w+ +([\d,]+)$", done.stdout, re.MULTILINE)]
    assert f"parameters              {sum(parts):,}\n" in done.stdout and sum(parts) == network.num_parameters()
    assert f"{6 * 128:,} a step, {6 * 128 * 8:,} in 8 steps" in done.stdout
    assert f"{max(1, processes)} on cpu, 1 per replica; " in done.stdout
    flops = network.flops_per_token(128)
    assert f"{flops:,} per token, {flops * 768:.3g} per step, {flops * 768 * 8:.3g} in total" in done.stdout
    seconds, speed, hours = re.search(r"time +(\S+) s per step, (\S+) tokens/s, (\S+) hours", done.stdout).groups()
    speed = float(speed.replace(",", ""))
    assert float(seconds) == pytest.approx(768 / speed, rel=0.01, abs=0.5 / speed)
    assert float(hours) == pytest.approx(768 * 8 / speed / 3600, abs=0.006)
    megabytes = dict(re.findall(r"^(peak memory|checkpoint) +([\d.]+) MB", done.stdout, re.MULTILINE))
    assert 100 < float(megabytes["peak memory"]) < 4000
    train(*words, "--stop_after", 1, exit_code=75)
    size = sum(file.stat().st_size for file in (runs / "run" / "checkpoints" / "step-00000001").iterdir())
    assert float(megabytes["checkpoint"]) == pytest.approx(size / 1e6, abs=0.06) and tensors(runs / "run", 1)


def test_plan_of_a_run_of_two_steps(runs):
    done = train(*TINY_STORIES, "--steps", 2, "--out_dir", runs, script="tools.plan")
    assert "1,536 in 2 steps" in done.stdout and " tokens/s, " in done.stdout


@pytest.mark.slow
def test_plan_counts_memory_of_evaluation(runs):
    """An evaluation of 200 rows takes more memory than a step of six."""
    words = [*TINY_STORIES, "--evaluation.num_samples", 200, "--model.d_model", 64, "--model.d_ff", 256]
    peaks = [
        float(re.search(r"peak memory +([\d,.]+) MB", done.stdout)[1].replace(",", ""))
        for rows in (2, 200)
        for done in [train(*words, "--evaluation.micro_batch_size", rows, "--out_dir", runs, script="tools.plan")]
    ]
    assert peaks[1] > peaks[0] + 30


def test_plan_refuses_settings_and_names_itself(runs):
    refused = train(*TINY_STORIES, "--model.n_heads", "3", script="tools.plan", exit_code=2)
    assert "tools.plan: error: model.d_model" in refused.stderr and "Traceback" not in refused.stderr
    assert train("--help", script="tools.plan").stdout.startswith("usage: tools.plan ")
    assert train("--help").stdout.startswith("usage: train.py ")


LITTLE_MEMORY = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS"), reason="memory cannot be limited")
def test_full_memory_is_one_message(runs):
    words = "tools.plan --micro_batch_size 4096 --global_batch_size 4096 --model.d_model 512 --out_dir".split()
    code = LITTLE_MEMORY.replace("BYTES", str(6 * 2**30))
    done = forked.run("-c", [code, *words, str(runs)], 0, environment())
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "out of memory in process 0" in done.stderr and "a smaller micro_batch_size" in done.stderr
    assert done.stdout.startswith("parameters ")


@pytest.mark.slow
def test_plan_command_of_the_page_works(runs):
    (words,) = re.findall(r"^    python -m tools\.plan (.*)$", PAGE, re.MULTILINE)
    done = train(*words.split(), "--tracking.wandb", "disabled", "--out_dir", runs, script="tools.plan")
    assert "\nFLOPs " in done.stdout and not runs.exists()
