"""Random damage to the files of a run: a tool works, or prints one message and exits with code 2."""

import random

import pytest

from tests.config.test_parser_fuzz import CASES, damage_a_copy, damaged, files, use, used  # noqa: F401 - a fixture
from tools.compare import CompareConfig
from tools.jobs.runner import JobRunner
from tools.plot import save_loss_curve
from tools.replay import ReplayConfig
from tools.sweep import SweepConfig

TOOLS = {
    "tools.compare": (CompareConfig, "RUN FOLDER/runs/run --out null", "tools.compare"),
    "tools.replay": (ReplayConfig, "RUN 3 --num_sequences 1", "tools.replay"),
    "tools.sweep": (SweepConfig, "--config FOLDER/recipe.yaml --name run --out_dir RUN/..", "tools.sweep"),
}


def outcome(tool, run, folder, out):
    kind, words, module = TOOLS[tool]
    return use(tool, kind, words, run, folder, out, module)


@pytest.fixture(autouse=True)
def no_training(monkeypatch):
    monkeypatch.setattr(JobRunner, "train", lambda *_, **__: None)


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_read_undamaged_run(tool, used, tmp_path):  # noqa: F811
    exit_code, _, errors, _ = outcome(tool, used / "runs" / "run", used, tmp_path)
    assert exit_code == 0, errors


@pytest.mark.parametrize("seed", CASES)
def test_tools_read_damaged_run_or_refuse(seed, used, tmp_path):  # noqa: F811
    tool = list(TOOLS)[seed % len(TOOLS)]
    run, victim = damage_a_copy(used, tmp_path, random.Random(seed))
    before = files(run)
    exit_code, _, errors, _ = outcome(tool, run, used, tmp_path / "out")
    assert files(run) == before, "a tool that only reads has written"
    assert "Traceback" not in errors
    assert exit_code == 0 or errors.count(f"{tool}: error:") == 1 and exit_code == 2, (tool, victim, errors)


@pytest.mark.parametrize("seed", CASES)
def test_loss_curve_of_damaged_metrics_is_drawn(seed, used, tmp_path):  # noqa: F811
    rows = (used / "runs" / "run" / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(damaged(rows, random.Random(seed)))
    assert save_loss_curve(tmp_path).read_bytes().startswith(b"\x89PNG")
