"""Tools and `make test-gpu` on the fake devices of tests/fake_cuda."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT, TINY_STORIES
from tests.fake_cuda import device
from tests.fake_cuda.conftest import folder  # noqa: F401 - a fixture
from tests.fake_cuda.launch import fake_gpus
from tests.fake_cuda.test_gpu_scripts import outcome, programs, run  # noqa: F401 - a fixture
from tests.support import forked
from tools import gpu_check
from trainer.checkpoint.provenance import provenance

COMPARISONS = ["nccl", "equal bits", "equal losses", "kill and resume"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("folder")]


def test_replay_reproduces_step(run):  # noqa: F811
    shown = outcome("tools.replay", run, 8)
    assert "reproduced bitwise" in shown, shown


def test_experiment_gives_each_run_a_gpu(tmp_path):
    words = ["--optimizer.lr 0.02", *TINY_STORIES, "--jobs", "2", "--rounds", "1", "--runs", "4", "--json", "true"]
    command = [sys.executable, "-m", "tools.experiment", *words, "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=programs(2), capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["runs"] == 4 and result["failed"] == 0, done.stdout + done.stderr
    logs = [file.read_text() for file in tmp_path.glob("*/runs/logs/*.log")]
    assert len(logs) == 4 and all("1 x NVIDIA H100" in log for log in logs), logs


def test_gpu_target_is_rehearsed(tmp_path):
    """`make test-gpu` in miniature: every part has a result; a second call runs none again."""
    command = ["make", "test-gpu", f"ARGS=--quick --minutes 40 --report {tmp_path / 'report.json'}"]
    for call in (1, 2):
        done = subprocess.run(command, cwd=ROOT, env=programs(1), capture_output=True, text=True, timeout=3000)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        assert done.stdout.count("has a result") == (0 if call == 1 else 3)
    results = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert results["tests"]["holds"] and results["tests"]["tests"]["passed"] > 1
    assert all("tokens_per_second" in case for case in results["cuda_graph, 11m_256"]["figures"].values())


def run_forked(program, *more):
    """Replace Program.run, without the start of an interpreter for each process."""
    script, *words = program.command[1:]
    if script == "-m":
        assert words[0] == "torch.distributed.run" and words[3:] == ["-m", "tools.gpu_check", "nccl", "--quick"]
        done = forked.run("tools.gpu_check", ["nccl", "--quick"], 2, fake_gpus(2))
    else:
        done = forked.run(script, [*words, *more], 0, fake_gpus(2))
    assert done.returncode == 0, done.stdout + done.stderr
    return [(0.0, line) for line in done.stdout.splitlines()]


def test_several_gpus_are_rehearsed(tmp_path, monkeypatch):
    """`make test-gpus` in miniature: comparisons hold, and the report has no name of this machine."""
    monkeypatch.setattr(gpu_check.torch.cuda, "device_count", lambda: 2)
    facts = {"gpus": 2, "gpu": device.NAME, "driver": "", "versions": provenance()}
    monkeypatch.setattr(gpu_check, "machine", lambda: facts)
    monkeypatch.setattr(gpu_check.Program, "run", run_forked)
    start = SimpleNamespace(Popen=lambda command, **_: forked.Popen(command, fake_gpus(2)), DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(gpu_check, "subprocess", start)
    report = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", f"gpu_check several --quick --minutes 40 --report {report}".split())
    assert gpu_check.main() == 0
    results, text = json.loads(report.read_text())["parts"], report.read_text()
    assert [*results] == [*COMPARISONS, "DDP on 1", "DDP on 2", "FSDP2 on 2"]
    assert all(results[name]["holds"] for name in COMPARISONS), text
    assert results["kill and resume"]["resumed_at_step"][0] >= 2, "the newest complete checkpoint"
    assert results["DDP on 2"]["tokens_per_second"] > 0
    assert not [name for name in (str(ROOT), str(tmp_path), f"{Path.home()}/", socket.gethostname()) if name in text]
