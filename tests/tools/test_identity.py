"""Replaying and comparing report that a run was trained by other code."""

import pytest

from tests.conftest import TINY_STORIES, python, thinned, train
from tests.trainer.checkpoint.test_identity import finished, run, tree, under_code  # noqa: F401 - fixtures
from trainer.checkpoint.identity import code_hash


@pytest.mark.parametrize("code", thinned(["0123456789ab", None], 2), ids=["other", "unknown"])
def test_replay_reports_other_code(code, run):  # noqa: F811
    under_code(run, code)
    shown = python(f"python -m tools.replay {run} 1").stdout
    assert shown.count(f"; code 0123456789ab in the run, {code_hash()} here") == (code is not None)
    assert "reproduced bitwise" in shown


@pytest.mark.slow
def test_compare_separates_runs_by_code(tree, tmp_path):  # noqa: F811
    """One line of the model differs and no setting; both versions train with the same seeds."""
    model = tree / "model" / "gpt.py"
    words = [*TINY_STORIES, "--steps", 4, "--out_dir", tmp_path / "runs", "--tracking.wandb", "disabled"]
    line = "std = 0.02"
    assert model.read_text().count(line) >= 1
    for seed in (0, 1):
        train(*words, "--seed", seed, "--name", f"main-{seed}")
    model.write_text(model.read_text().replace(line, "std = 0.03"))
    for seed in (0, 1):
        train(*words, "--seed", seed, "--name", f"branch-{seed}", cwd=tree)
    paths = " ".join(str(tmp_path / "runs" / name) for name in ("main-0", "main-1", "branch-0", "branch-1"))
    shown = python(f"python -m tools.compare {paths} --out null").stdout
    codes = [code_hash(), code_hash(tree)]
    rows = [line.split() for line in shown.splitlines() if line.startswith("code ")]
    assert sorted(row[1:3] for row in rows) == sorted([code, "2"] for code in codes), "two seeds of each"
    done = train(*words, "--seed", 0, "--name", "main-0", cwd=tree)
    assert "Other code: " in done.stdout and "is complete" in done.stdout
