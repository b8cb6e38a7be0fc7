"""An audit checks the tokenizer of a run before it trains again."""

import shutil

import pytest

from tests.checkpoint.test_tokenizer_files import DAMAGES, folder, made  # noqa: F401 - fixtures
from tests.conftest import thinned
from tools.replay.audit import checkpoint_problem
from tools.replay.recorded_run import RecordedRun


def audit_problem(run):
    """Return what an audit finds wrong with the newest checkpoint before it trains again."""
    run = RecordedRun(run)
    return checkpoint_problem(run, *next(iter(run.manifests.items())))


@pytest.mark.parametrize("damage", thinned(DAMAGES, 3))
def test_audit_reports_damaged_tokenizer(damage, folder):  # noqa: F811
    do, file = DAMAGES[damage]
    assert audit_problem(folder / "run") == ""
    do(folder / "run" / "tokenizer")
    assert audit_problem(folder / "run").endswith(f"tokenizer is not the tokenizer of this run ({file})")
    shutil.rmtree(folder / "run" / "tokenizer")
    shutil.copytree(folder / "corpus" / "tokenizer", folder / "run" / "tokenizer")
    assert audit_problem(folder / "run") == ""
