"""Programs that answer requests: they are stopped, end in between, or say nothing."""

import os
import sys
import time
from contextlib import suppress
from typing import Any

import psutil
import pytest

from tools.jobs import runner
from tools.jobs.program import ask

# Answers "3" by {3}; ends at "ends", and at "hangs" starts a process in a session of its own and sleeps.
PROGRAM = """
import os, subprocess, sys, time
print("starting", flush=True)
for line in sys.stdin:
    if line == "ends\\n":
        sys.exit("no such key")
    if line == "hangs\\n":
        other = subprocess.Popen(["sleep", "60"], start_new_session=True)
        print(other.pid, file=open(sys.argv[1], "w"))
        time.sleep(60)
    print("{" + line.strip() + "}", flush=True)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    (tmp_path / "program.py").write_text(PROGRAM)
    return [sys.executable, "-IS", str(tmp_path / "program.py"), str(tmp_path / "process")]


def has_ended(file):
    """Wait until the process is gone whose number is in a file."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(file.read_text()))
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    return True


def test_request_at_which_a_program_ends_has_no_answer_and_others_do(program):
    answered = []
    answers: list[Any] = ask(program, ["1", "ends", "2", "ends"], answered=answered.append)
    first, ended, second, last = answers
    assert (first, second) == ("{1}", "{2}") and answered == [0, 1, 2, 3]
    assert ended.returncode == last.returncode == 1 and ended.stderr == "no such key\n"


def test_silent_program_is_killed(program, tmp_path):
    """With what it has started, also in another session."""
    file = tmp_path / "process"
    silence = lambda: 0.05 if file.exists() and file.read_text() else 60.0  # noqa: E731
    answers: list[Any] = ask(program, ["1", "hangs"], max_silence=silence)
    answer, hung = answers
    assert hung.returncode == -9 and hung.stderr.startswith("no answer within") and answer == "{1}"
    assert has_ended(file)


def test_stop_signal_ends_a_program(program, tmp_path):
    """At once, with what it has started; the answers that there are come back."""
    file = tmp_path / "process"
    start = time.monotonic()
    assert ask(program, ["1", "hangs", "2"], lambda: file.exists() and file.read_text() != "") == ["{1}"]
    assert time.monotonic() - start < 50 and has_ended(file)


def test_program_has_an_environment_and_a_folder_of_its_own(tmp_path):
    code = "import os; print('{' + os.environ['TMPDIR'] + os.getcwd() + os.environ['OMP_NUM_THREADS'] + '}')"
    assert ask([sys.executable, "-c", code], ["1"], folder=tmp_path, TMPDIR="/x") == [f"{{/x{tmp_path}1}}"]
    assert os.environ.get("TMPDIR") != "/x"
