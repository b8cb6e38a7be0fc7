"""An experiment is a small diff: each patch of docs/patches is applied to a copy of the repository and trained with."""

import json
import shutil
import subprocess

import pytest

from tests.conftest import ROOT, TINY_STORIES, train

TINY = [*TINY_STORIES, "--steps", "4"]
PATCHES = {
    "optimizer_sgd": "--optimizer.name sgd",
    "activation_silu": "--model.mlp silu",
    "schedule_inverse_sqrt": "--schedule.name inverse_sqrt",
    "dataset_counting": "--data.source counting --model.vocab_size 50 --seq_len 16",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name != "optimizer_sgd" else name for name in PATCHES],
)
def test_patch_applies_and_trains(name, tmp_path):
    patch = ROOT / "docs" / "patches" / f"{name}.patch"
    changed = [line for line in patch.read_text().splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert 0 < len(changed) < 15
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "tests", "__pycache__"))
    train(*TINY, *PATCHES[name].split(), "--out_dir", tmp_path / "before", exit_code=2, cwd=copy)
    subprocess.run(["patch", "--strip=1", f"--input={patch}"], cwd=copy, check=True, capture_output=True)
    run = tmp_path / "runs" / "run"
    train(*TINY, *PATCHES[name].split(), "--out_dir", run.parent, "--name", "run", cwd=copy)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len({row["train/loss"] for row in rows}) == 4
    if name == "schedule_inverse_sqrt":
        assert rows[3]["train/lr"] == pytest.approx(0.01 * (2 / 4) ** 0.5)
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    shutil.rmtree(run / "checkpoints" / "step-00000003")
    train(*TINY, *PATCHES[name].split(), "--out_dir", run.parent, "--name", "run", cwd=copy)
    again = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/loss"] for row in again] == [row["train/loss"] for row in rows], "it resumes exactly, too"


def test_patches_are_all_tried():
    assert {path.stem for path in (ROOT / "docs" / "patches").glob("*.patch")} == PATCHES.keys()
