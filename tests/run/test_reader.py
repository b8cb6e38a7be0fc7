"""Reading a run directory, also while a training writes to it."""

import fcntl
import json

import pytest

from config.errors import ConfigError
from run import metrics_log
from run.lock import LOCK_FILE
from run.metrics_log import RowReader, truncate_after_step
from run.reader import RunReader, Session, surviving_sessions


def test_reader_of_empty_directory(tmp_path):
    run = RunReader(tmp_path)
    assert (run.metrics(), run.generations(), run.sessions()) == ([], [], [])
    assert (run.manifests(), run.status(), run.is_locked()) == ({}, None, False)
    with pytest.raises(ConfigError, match="run: '.*' is not the directory of a run: it has no config.yaml"):
        run.settings  # noqa: B018 - the property raises


def test_reader_sees_lock(tmp_path):
    with open(tmp_path / LOCK_FILE, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert RunReader(tmp_path).is_locked()
    assert not RunReader(tmp_path).is_locked()


def test_reader_names_session_with_wrong_type(tmp_path):
    (tmp_path / "sessions.jsonl").write_text('{"step": 0, "threads": "two"}\n')
    with pytest.raises(ConfigError, match="run: .*sessions.jsonl is damaged: session.threads is 'two'"):
        RunReader(tmp_path).sessions()


def test_reader_names_file_that_cannot_be_read(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match="run: .*metrics.jsonl cannot be read: Is a directory"):
        RunReader(tmp_path).metrics()


def test_surviving_sessions_drop_retrained_steps():
    sessions = [Session(step) for step in (0, 4, 2, 8)]
    assert surviving_sessions(sessions, 8) == [Session(0), Session(2)], "step 4 was trained again, 8 trained nothing"
    assert surviving_sessions(sessions, 9) == [Session(0), Session(2), Session(8)]
    assert surviving_sessions([Session(3)], 3) == [Session(3)], "a branch that has trained nothing yet"
    assert surviving_sessions([Session(0), Session(0)], 8) == [Session(0)]
    assert surviving_sessions([], 3) == []


def parsed_lines(monkeypatch):
    """Record the lines that are parsed from now on."""
    parse, lines = metrics_log.parse_object, []
    monkeypatch.setattr(metrics_log, "parse_object", lambda line: lines.append(line) or parse(line))
    return lines


def test_row_reader_parses_each_line_once(tmp_path, monkeypatch):
    file, lines = tmp_path / "metrics.jsonl", parsed_lines(monkeypatch)
    reader = RowReader(file)
    assert reader.read() == []
    file.write_text('{"step": 1}\n{"step": 2}\nno row\n')
    assert reader.read() == [{"step": 1}, {"step": 2}]
    with open(file, "a") as appended:
        appended.write('{"step": 3}\n')
    del lines[:]
    assert reader.read() == [{"step": 1}, {"step": 2}, {"step": 3}]
    assert list(filter(None, lines)) == ['{"step": 3}']


def test_row_reader_waits_for_rest_of_line(tmp_path):
    file = tmp_path / "metrics.jsonl"
    reader = RowReader(file)
    file.write_text('{"step": 1}\n{"step": 1')
    assert reader.read() == [{"step": 1}]
    with open(file, "a") as appended:
        appended.write('2}\n{"step": 13}')
    assert reader.read() == [{"step": 1}, {"step": 12}, {"step": 13}]


@pytest.mark.parametrize("content", ['{"step": 1}\n', '{"step": 7}\n{"step": 8}\n{"step": 9}\n'])
def test_row_reader_starts_over_after_rewrite_in_place(content, tmp_path):
    file = tmp_path / "metrics.jsonl"
    reader = RowReader(file)
    file.write_text('{"step": 1}\n{"step": 2}\n')
    reader.read()
    file.write_text(content)
    assert reader.read() == [json.loads(line) for line in content.splitlines()]


def test_row_reader_starts_over_after_truncation(tmp_path):
    """A resumed run may log other rows with the same last line."""
    file = tmp_path / "metrics.jsonl"
    reader = RowReader(file)
    file.write_text('{"step": 1, "a": 1}\n{"step": 2}\n')
    reader.read()
    truncate_after_step(file, 0)
    with open(file, "a") as appended:
        appended.write('{"step": 1, "a": 2}\n{"step": 2}\n')
    assert reader.read() == [{"step": 1, "a": 2}, {"step": 2}]
