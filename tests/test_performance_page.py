"""docs/performance.md says what the results say, and every result says where it comes from."""

import json

import pytest

from benchmarks import tables
from benchmarks.record import RESULTS


def test_the_tables_are_those_of_the_results():
    assert tables.page() == tables.PAGE.read_text(), "run python -m benchmarks.tables"


def test_a_changed_result_changes_the_page(monkeypatch, tmp_path):
    record = json.loads((RESULTS / "memory.json").read_text())
    record["figures"]["loss in chunks"]["peak_mib"] = 123_456
    (tmp_path / "memory.json").write_text(json.dumps(record))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert "| loss in chunks | 123,456 |" in tables.page()


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_names_machine_versions_and_command(path):
    record = json.loads(path.read_text())
    assert record["command"].startswith("python ") and record["figures"]
    assert {"cpu", "cores", "memory_gib"} <= record["machine"].keys()
    assert {"python", "torch", "accelerate", "git_commit"} <= record["versions"].keys()
