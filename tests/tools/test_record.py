"""tools/record.py: the table of docs/track.md, and training a record again."""

from types import SimpleNamespace

import pytest
import yaml

from tests.conftest import ROOT, TINY_STORIES
from tools import record

RECORDS = yaml.safe_load(record.RECORDS.read_text())


def test_table_shows_records():
    assert f"<!-- records -->\n{record.table(RECORDS)}\n<!-- end -->" in record.PAGE.read_text()
    for name, entry in RECORDS.items():
        assert (ROOT / entry["config"]).exists() and len(entry["excess_loss"]) >= 5, name
        assert entry["tokens"] <= 2_304_000 and entry["parameters"] <= 500_000, "rule 2 of docs/track.md"


@pytest.mark.parametrize("seeds", ["-1", "0", "1"])
def test_measure_needs_two_seeds(seeds, capsys):
    with pytest.raises(SystemExit, match="2"):
        record.main(["tiny", "--measure", seeds])
    assert f"measure: {seeds} must be at least 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("outcome", "exit_code", "message"), [(KeyboardInterrupt, "130", ""), (0, "2", "no excess loss")]
)
def test_record_ends_with_one_message(outcome, exit_code, message, tmp_path, monkeypatch, capsys):
    def run(command, env, **_):
        assert env.items() >= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}.items()
        folder = tmp_path / "tiny-seed-1"
        folder.mkdir()
        (folder / "metrics.jsonl").write_text('{"step": 1, "val/loss": 1.0}\n')
        if outcome:
            raise outcome
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(record, "RUNS", tmp_path)
    monkeypatch.setattr(record.subprocess, "run", run)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(SystemExit, match=exit_code):
        record.main(["tiny", "--measure", "2"])
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_record_repeats_bitwise_or_is_refused(tmp_path, monkeypatch, capsys):
    page, records = tmp_path / "track.md", tmp_path / "track.yaml"
    page.write_text("<!-- records -->\n<!-- end -->\n")
    records.write_text("# Records.\n{}\n")
    for name, value in {"PAGE": page, "RECORDS": records, "RUNS": tmp_path / "runs"}.items():
        monkeypatch.setattr(record, name, value)
    assert record.main(["tiny", "--measure", "2", "--config", TINY_STORIES[1]]) == 0
    entry = yaml.safe_load(records.read_text())["tiny"]
    first, second = entry["excess_loss"]
    table = page.read_text()
    assert first != second and f"{(first + second) / 2:.5f} ±" in table and entry["digest"] in table
    assert record.main(["tiny"]) == 0 and "the same bits" in capsys.readouterr().out
    records.write_text(records.read_text().replace(entry["digest"], "0123456789abcdef"))
    assert record.main(["tiny"]) == 1 and "the record has 0123456789abcdef" in capsys.readouterr().out


@pytest.mark.slow
def test_published_record_has_the_bits_of_this_code(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RUNS", tmp_path)
    assert record.main(["stories_fast"]) == 0
