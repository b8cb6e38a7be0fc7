"""The log of experiments is append-only; its view takes the row with most seeds."""

import json

import pytest

from config.errors import ConfigError
from tools.experiment import log
from tools.experiment.settings import ReportConfig

ROW = {"idea": "--x 1", "baseline": "a", "candidate": "b", "verdict": "worse", "seeds": 6, "margin": 0.03}
ROW |= {"difference": 2.0, "low": 1.0, "high": 3.0}


def test_row_with_fewer_seeds_does_not_replace(tmp_path):
    log.append(tmp_path, ROW)
    log.append(tmp_path, ROW | {"seeds": 3, "verdict": "unknown"})
    assert log.read_log(tmp_path) == [ROW]
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2
    log.append(tmp_path, ROW | {"seeds": 9})
    assert [row["seeds"] for row in log.read_log(tmp_path)] == [9]


def test_other_margin_is_another_row(tmp_path):
    log.append(tmp_path, ROW)
    log.append(tmp_path, ROW | {"margin": 0.2, "verdict": "no difference"})
    assert [row["verdict"] for row in log.read_log(tmp_path)] == ["worse", "no difference"]
    assert log.count_candidates(tmp_path, "a") == 1
    table = log.markdown_table(log.read_log(tmp_path))
    assert "| 3% | 6 | worse |" in table and "| 20% | 6 | no difference |" in table


def test_same_row_is_logged_once(tmp_path):
    log.append(tmp_path, ROW | {"time": "1"})
    log.append(tmp_path, ROW | {"time": "2", "cost": {}})
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1


def test_draw_shows_margin_of_each_row(tmp_path, monkeypatch):
    figures = []
    new_figure = log.new_figure
    monkeypatch.setattr(log, "new_figure", lambda *size: figures.append(new_figure(*size)) or figures[-1])
    log.draw([ROW, ROW | {"margin": 0.2, "difference": 1.0, "low": 0.5}], tmp_path / "x.png")
    widths = [bar.get_width() for bar in figures[0].axes[0].patches]
    assert widths == pytest.approx([6.0, 40.0])


@pytest.mark.parametrize(
    "damaged", [{"seeds": "x"}, {"low": None}, {"margin": "a"}, {"difference": [1]}, {"verdict": ...}], ids=str
)
def test_damaged_rows_are_skipped(damaged, tmp_path):
    row = {name: value for name, value in (ROW | damaged).items() if value is not ...}
    (tmp_path / "log.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(ROW)[:20] + "\n" + json.dumps(ROW) + "\n")
    assert log.read_log(tmp_path) == [ROW]
    log.main(ReportConfig(lab=str(tmp_path)))


def test_report_is_printed_without_a_writable_lab(tmp_path, capsys):
    (tmp_path / "report.md").mkdir()
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        log.main(ReportConfig(lab=str(tmp_path)))
    assert capsys.readouterr().out.startswith("| idea |")
