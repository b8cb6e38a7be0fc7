"""`make test-gpu` in parts: order, resumption and the page, with parts that run in no time."""

import argparse
import json
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tools.benchmark import __main__ as command_line
from tools.benchmark import tables

OPTIONS = argparse.Namespace(quick=False, nanogpt=Path("nanoGPT"), budget_seconds=1000.0)


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run a session of three cases, of 100 seconds at most, with these exit codes; return which were called."""
    monkeypatch.setattr(command_line, "PARTS", dict.fromkeys(("one", "two", "three"), 100))
    monkeypatch.setattr(command_line, "CORPORA", {})
    monkeypatch.setattr(command_line, "LOGS", tmp_path / "runs" / "gpu")

    def call(budget_seconds=1000.0, nanogpt="nanoGPT", **exit_codes):
        called = []

        def run(command, out, limit_seconds):
            assert command[1:3] == ["-m", "tools.benchmark"] and "--resume" in command and limit_seconds >= 100
            called.append(out.name)
            call.commands.append(command)
            Path(f"{out}.txt").write_text(f"the result of {out.name}\n")
            Path(f"{out}.log").write_text(f"the log of {out.name}\n")
            return exit_codes.get(out.name, 0)

        monkeypatch.setattr(command_line, "STARTED", time.monotonic())
        options = argparse.Namespace(quick=False, nanogpt=Path(nanogpt), budget_seconds=budget_seconds)
        call.exit_code, call.page = command_line.run_session(options, run), capsys.readouterr().out
        return called

    call.commands = []
    return call


def test_parts_run_in_order_until_time_is_over(call):
    assert call(budget_seconds=0) == ["one"] and call.exit_code == 75, "the first always runs"
    assert "## two: not run" in call.page and "the result of two" not in call.page
    assert call(budget_seconds=150) == ["two", "three"] and call.exit_code == 0, "each took no time"
    assert call.commands[-1][-1] in ("49", "50"), "no group of a part starts that may end too late"
    assert call() == []
    assert call.page.index("result of one") < call.page.index("result of two") < call.page.index("result of three")
    assert call.page.count(": done\n") == 3 and "the log of" not in call.page


def test_failed_part_is_tried_again_after_the_others(call):
    assert call(one=1, two=75, three=124) == ["one", "two", "three"] and call.exit_code == 1
    assert "## one: failed\n" in call.page and "the log of one" in call.page
    assert "## two: unfinished\n" in call.page and "the log of two" not in call.page
    assert "## three: failed: time limit\n" in call.page
    assert call(one=1, three=124) == ["two", "one", "three"] and call(two=1) == ["one", "three"]
    assert call.exit_code == 0


def test_other_gpu_or_arguments_begin_new_page(call, monkeypatch):
    call()
    assert call(nanogpt="elsewhere") == ["one", "two", "three"] and call(nanogpt="elsewhere") == []
    machine = tables.machine()
    monkeypatch.setattr(tables, "machine", lambda: machine | {"gpu": "NVIDIA Other"})
    assert call(nanogpt="elsewhere") == ["one", "two", "three"] and call.page.startswith("# NVIDIA Other, torch ")


def test_part_without_its_corpus_is_named(call, tmp_path, monkeypatch):
    monkeypatch.setattr(command_line, "CORPORA", {"two": tmp_path / "corpus"})
    assert call() == ["one", "three"] and f"## two: needs {tmp_path / 'corpus'}\n" in call.page
    assert call.exit_code == 0
    (tmp_path / "corpus").mkdir()
    assert call() == ["two"]


@pytest.mark.slow
def test_part_ends_with_its_programs_at_its_limit(tmp_path):
    """A program that ignores SIGTERM is killed."""
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    part = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {program!r}]); print(p.pid, flush=True)"
    )
    assert command_line.run_part([sys.executable, "-c", f"{part}; p.wait()"], tmp_path / "part", 5) == 124
    child = int((tmp_path / "part.txt").read_text())
    for _ in range(100):
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    pytest.fail("the program is still running")


def test_parts_are_valid_commands_within_ten_minutes(monkeypatch, tmp_path):
    """Each is parsed by the program that it starts, and a group of it ends in time."""
    assert max(command_line.PARTS.values()) < 590
    monkeypatch.setattr(command_line, "run_case", lambda name, options: parsed.append((name, options)) or ({}, []))
    monkeypatch.setattr(tables, "section", lambda name: "")
    monkeypatch.setattr(tables, "update_page", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(command_line, "LOGS", tmp_path)
    monkeypatch.setattr(command_line, "CORPORA", {name: tmp_path for name in command_line.CORPORA})
    commands, parsed = [], []

    def run(command, out, limit_seconds):
        commands.append(command)
        Path(f"{out}.txt").touch()
        return 0

    monkeypatch.setattr(command_line, "STARTED", time.monotonic())
    assert command_line.run_session(OPTIONS, run) == 0
    monkeypatch.setattr(command_line.torch.cuda, "is_available", lambda: True)
    for command in commands:
        monkeypatch.setattr(sys, "argv", ["tools.benchmark", *command[3:]])
        assert command_line.main() == 0
    assert [name for name, _ in parsed] == list(command_line.PARTS)
    assert all(options.resume and options.nanogpt for _, options in parsed)
    rounds = {name: options.rounds for name, options in parsed}
    assert rounds == dict.fromkeys(command_line.PARTS, 3) | {"bits": 1, "tests": 1, "curve": 1}, "no median of two"


@pytest.mark.slow
def test_session_needs_gpu_or_quick(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command_line, "LOGS", tmp_path / "new" / "folder")
    monkeypatch.setattr(command_line, "PARTS", {"generation": 100})
    monkeypatch.setattr(command_line.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["tools.benchmark", "session"])
    with pytest.raises(SystemExit, match="no GPU was found"):
        command_line.main()
    sys.argv.append("--quick")
    assert command_line.main() == 0 and '"ours": {' in capsys.readouterr().out
    assert json.loads((command_line.LOGS / "state.json").read_text())["exit_codes"] == {"generation": 0}
