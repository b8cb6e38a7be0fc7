"""Tools and `make test-gpu` on the fake devices of tests/fake_cuda."""

import json
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT, TINY_STORIES
from tests.fake_cuda.conftest import folder  # noqa: F401 - a fixture
from tests.fake_cuda.test_gpu_scripts import outcome, programs, run  # noqa: F401 - a fixture

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("folder")]


def test_replay_reproduces_step(run):  # noqa: F811
    shown = outcome("tools.replay", run, 8)
    assert "reproduced bitwise" in shown, shown


def test_experiment_gives_each_run_a_gpu(tmp_path):
    words = ["--optimizer.lr 0.02", *TINY_STORIES, "--jobs", "2", "--max_seeds", "3", "--json", "true"]
    words += ["--lab", str(tmp_path)]
    command = [sys.executable, "-m", "tools.experiment", *words]
    done = subprocess.run(command, cwd=ROOT, env=programs(2), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["verdict"] != "failed"


def test_gpu_target_is_rehearsed():
    """`make test-gpu`: the tests marked `cuda` are found, and every case is measured in miniature."""
    command = ["make", "test-gpu", "ARGS=--quick"]
    done = subprocess.run(command, cwd=ROOT, env=programs(2), capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert re.search(r"[1-9]\d* passed", done.stdout) and '"tokens_per_second"' in done.stdout
