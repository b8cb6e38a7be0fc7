"""An experiment is a small diff: each patch of docs/patches is applied to a copy of the repository and trained with."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT, TINY_STORIES, environment, train

TINY = [*TINY_STORIES, "--steps", "4"]
PATCHES = {
    "optimizer_sgd": "--optimizer.name sgd",
    "activation_silu": "--model.mlp silu",
    "schedule_inverse_sqrt": "--schedule.name inverse_sqrt",
    "dataset_counting": "--data.source counting --model.vocab_size 50 --seq_len 16",
}


# To its end, and once more from step 2.
TRAIN_TWICE = """
import shutil, sys
import cli
run = sys.argv.pop(1)
assert cli.call("train") == 0
shutil.copytree(run, run[:-3] + "first")
for step in (3, 4):
    shutil.rmtree(f"{run}/checkpoints/step-0000000{step}")
assert cli.call("train") == 0
"""


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
    words = [str(word) for word in (*TINY, *PATCHES[name].split(), "--out_dir", run.parent, "--name", "run")]
    subprocess.run([sys.executable, "-c", TRAIN_TWICE, str(run), *words], cwd=copy, env=environment(), check=True)
    rows, again = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (run.with_name("first"), run)
    )
    assert len({row["train/loss"] for row in rows}) == 4
    if name == "schedule_inverse_sqrt":
        assert rows[3]["train/lr"] == pytest.approx(0.01 * (2 / 4) ** 0.5)
    assert [row["train/loss"] for row in again] == [row["train/loss"] for row in rows], "it resumes exactly, too"


def test_patches_are_all_tried():
    assert {path.stem for path in (ROOT / "docs" / "patches").glob("*.patch")} == PATCHES.keys()
