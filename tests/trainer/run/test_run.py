"""Reading a run directory, also while a training writes to it."""

import fcntl
import io
import json
import shutil

import pytest

from runtime.config.errors import ConfigError
from tests.conftest import ROOT, train
from trainer.run import metrics_log
from trainer.run.directory import LOCK_FILE, Run, Session, surviving_sessions


def test_reader_of_empty_directory(tmp_path):
    run = Run(tmp_path)
    assert (run.metrics(), run.sessions()) == ([], [])
    assert (run.manifests(), run.status(), run.is_locked()) == ({}, None, False)
    with pytest.raises(ConfigError, match="run: '.*' is not the directory of a run: it has no config.yaml"):
        run.settings  # noqa: B018 - the property raises


def test_reader_sees_lock(tmp_path):
    with open(tmp_path / LOCK_FILE, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert Run(tmp_path).is_locked()
    assert not Run(tmp_path).is_locked()


def test_reader_names_session_with_wrong_type(tmp_path):
    (tmp_path / "sessions.jsonl").write_text('{"step": 0, "threads": "2"}\n')
    with pytest.raises(ConfigError, match="run: .*sessions.jsonl is damaged: threads: Input should be a valid integer"):
        Run(tmp_path).sessions()


def test_reader_names_file_that_cannot_be_read(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match="run: .*metrics.jsonl cannot be read: Is a directory"):
        Run(tmp_path).metrics()


def test_surviving_sessions_drop_retrained_steps():
    sessions = [Session(step) for step in (0, 4, 2, 8)]
    assert surviving_sessions(sessions, 8) == [Session(0), Session(2)], "step 4 was trained again, 8 trained nothing"
    assert surviving_sessions(sessions, 9) == [Session(0), Session(2), Session(8)]
    assert surviving_sessions([Session(3)], 3) == [Session(3)], "a branch that has trained nothing yet"
    assert surviving_sessions([Session(0), Session(0)], 8) == [Session(0)]
    assert surviving_sessions([], 3) == []


@pytest.mark.slow
def test_tokens_of_branches_with_other_sizes(runs):
    """The parents need not be on the disk any more."""
    words = ["--config", ROOT / "tests" / "support" / "tiny_random.yaml", "--out_dir", runs, "--micro_batch_size", 2]
    branch_from, tokens = [], [0]
    for name, (batch_size, seq_len, steps) in {"a": (4, 8, 2), "b": (8, 4, 4), "c": (2, 6, 6)}.items():
        sizes = ["--global_batch_size", batch_size, "--seq_len", seq_len]
        train(*words, *sizes, "--name", name, "--steps", steps - 1, *branch_from)
        train(*words, *sizes, "--name", name, "--steps", steps)  # resumed
        tokens += [tokens[-1] + batch_size * seq_len * count for count in (1, 2)]
        run = Run(runs / name)
        logged = {row["step"]: row["train/tokens"] for row in run.metrics() if "train/tokens" in row}
        assert logged == {steps - 1: tokens[-2], steps: tokens[-1]}
        assert [run.tokens(step) for step in (steps - 1, steps)] == tokens[-2:]
        [(checkpoint, manifest)] = run.manifests().items()
        assert manifest.tokens == tokens[-1]
        branch_from = ["--branch_from", checkpoint]
    shutil.rmtree(runs / "a")
    assert Run(runs / "b").tokens(4) == 2 * 4 * 8 + 2 * 8 * 4


def test_newest_metrics_ignores_unfinished_row(tmp_path):
    run, file = Run(tmp_path), tmp_path / "metrics.jsonl"
    assert run.newest_metrics() == {"step": 0}
    file.write_text('no row\n{"step": 1')
    assert run.newest_metrics() == {"step": 0}
    with open(file, "a") as appended:
        appended.write('2}\n{"step": 13')
    assert run.newest_metrics() == {"step": 12} and run.metrics() == [{"step": 12}]


@pytest.mark.parametrize("length", [10, metrics_log.TAIL_BYTES, 3 * metrics_log.TAIL_BYTES])
def test_newest_metrics_reads_end_of_file(length, tmp_path, monkeypatch):
    """A sweep asks for the newest row of every run several times a second."""
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(10_000):
            print(json.dumps({"step": step, "train/loss": 1.0}), file=file)
        print(json.dumps({"step": 10_000, "name": length * "x"}), file=file)
    parse, lines, num_bytes = metrics_log.parse_object, [], []

    class CountingReader(io.BufferedReader):
        def read(self, size=-1):
            num_bytes.append(size)
            return super().read(size)

    monkeypatch.setattr(metrics_log, "parse_object", lambda line: lines.append(line) or parse(line))
    monkeypatch.setattr(metrics_log, "open", lambda path, _, opener: CountingReader(io.FileIO(path)), raising=False)
    assert Run(tmp_path).newest_metrics() == {"step": 10_000, "name": length * "x"}
    assert len(lines) <= 2 and (length > 10 or num_bytes == [metrics_log.TAIL_BYTES])
