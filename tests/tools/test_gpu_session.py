"""`make test-gpu` in parts: order, resumption and the page, with parts that run in no time."""

import argparse
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tools.benchmark import __main__ as command_line
from tools.benchmark import session


@pytest.fixture
def calls(tmp_path):
    """Run three parts, of 100 seconds at most, with the exit codes that the test sets; return which were called."""

    class Calls:
        parts = {name: session.Part(f"what is {name}?", 100, [name]) for name in ("one", "two", "three")}
        exit_codes = dict.fromkeys(parts, 0)

        def __call__(self, budget_seconds=1000.0):
            called = []

            def run(part, out):
                [name] = part.command
                called.append(name)
                out.with_suffix(".txt").write_text(f"the result of {name}\n")
                out.with_suffix(".log").write_text(f"the log of {name}\n")
                return self.exit_codes[name]

            self.results = session.run_parts(self.parts, tmp_path, budget_seconds, run)
            return called

        def page(self):
            return session.render(self.parts, self.results, tmp_path)

    return Calls()


def test_parts_run_in_order_until_time_is_over(calls):
    assert calls(budget_seconds=0) == ["one"], "the first always runs"
    assert "| two | what is two? | not run |" in calls.page() and "the result of two" not in calls.page()
    assert calls(budget_seconds=150) == ["two", "three"], "each took no time"
    assert calls() == []
    page = calls.page()
    assert page.index("the result of one") < page.index("the result of two") < page.index("the result of three")
    assert page.count("| done, 0 s |") == 3 and "the log of" not in page


def test_failed_part_is_tried_again_after_the_others(calls):
    calls.exit_codes = {"one": 1, "two": session.RUN_AGAIN, "three": 124}
    assert calls() == ["one", "two", "three"]
    page = calls.page()
    assert "| one | what is one? | failed, 0 s |" in page and "the log of one" in page
    assert "| two | what is two? | unfinished, 0 s |" in page and "the log of two" not in page
    assert "| three | what is three? | failed: time limit, 0 s |" in page
    calls.exit_codes["two"] = 0
    assert calls() == ["two", "one", "three"] and calls() == ["one", "three"]


def test_other_gpu_or_command_begins_new_page(calls, monkeypatch):
    calls()
    calls.parts["two"] = calls.parts["two"]._replace(command=["three"])
    assert calls() == ["one", "three", "three"]
    machine = session.tables.machine()
    monkeypatch.setattr(session.tables, "machine", lambda: machine | {"gpu": "NVIDIA Other"})
    assert calls() == ["one", "three", "three"] and calls.page().startswith("# NVIDIA Other, torch ")


def test_part_without_its_corpus_is_named(calls, tmp_path):
    calls.parts["two"] = calls.parts["two"]._replace(needs=tmp_path / "corpus")
    assert calls() == ["one", "three"] and f"| two | what is two? | needs {tmp_path / 'corpus'} |" in calls.page()
    (tmp_path / "corpus").mkdir()
    assert calls() == ["two"]


def test_only_lines_that_matter_are_shown(calls):
    calls.parts["one"] = calls.parts["one"]._replace(shown="nothing like it")
    calls()
    assert "the result of one" not in calls.page() and "the result of two" in calls.page()


def test_part_ends_with_its_programs_at_its_limit(tmp_path):
    """A program that ignores SIGTERM is killed."""
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    part = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {program!r}]); print(p.pid, flush=True)"
    )
    part = session.Part("", 5, [sys.executable, "-c", f"{part}; p.wait()"])
    assert session.run_part(part, tmp_path / "part") == 124
    child = int((tmp_path / "part.txt").read_text())
    for _ in range(100):
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    pytest.fail("the program is still running")


def test_parts_are_valid_commands_within_ten_minutes(monkeypatch, tmp_path):
    """Each is parsed by the program that it starts, and ends in time."""
    options = argparse.Namespace(quick=False, nanogpt=Path("nanoGPT"), corpora=tmp_path)
    monkeypatch.setattr(command_line, "run_case", lambda name, options: parsed.append((name, options)) or ({}, []))
    monkeypatch.setattr(command_line.tables, "section", lambda name: "")
    monkeypatch.setattr(command_line.tables, "render_page", command_line.tables.PAGE.read_text)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    parsed = []
    for name, part in session.build_parts(options).items():
        assert part.limit_seconds <= 590
        if part.command[1:3] == ["-m", "tools.benchmark"]:
            monkeypatch.setattr(sys, "argv", ["tools.benchmark", *part.command[3:]])
            assert command_line.main() == 0
            case, options_of_case = parsed[-1]
            assert case == name and options_of_case.resume and options_of_case.budget_seconds < part.limit_seconds


def test_exit_code_says_whether_to_run_again(monkeypatch, tmp_path, capsys):
    def command(code):
        return [sys.executable, "-c", f"print('printed'); raise SystemExit({code})"]

    def main(**exit_codes):
        parts = {name: session.Part("", 60, command(code)) for name, code in exit_codes.items()}
        monkeypatch.setattr(session, "build_parts", lambda options: parts)
        return session.main()

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(session.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["session", "--out", str(tmp_path / "new" / "folder"), "--budget_seconds", "0"])
    with pytest.raises(SystemExit, match="no GPU was found"):
        main(one=0)
    sys.argv.append("--quick")
    assert main(one=0) == 0 and "\nprinted\n" in capsys.readouterr().out
    assert main(one=0, two=0) == session.RUN_AGAIN, "other parts: begun anew, and two is left"
    assert main(one=0, two=0) == 0
    assert main(one=session.RUN_AGAIN) == session.RUN_AGAIN and main(one=3) == 1
