"""Programs that answer requests: they are stopped, end in between, or say nothing."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import psutil
import pytest

from tools.jobs import runner
from tools.jobs.program import ask

# Answers "3" by {3}; ends at "ends", and at "hangs" starts a process in a session of its own and sleeps. It prints more
# than answers at "prints", and nothing else for a while at "floods".
PROGRAM = """
import os, subprocess, sys, time
print("starting", flush=True)
for line in sys.stdin:
    number, text = line.split()
    if text == "ends":
        sys.exit("no such key")
    if text == "prints":
        print("{debug}", "0 {late}", "99 {early}", "99", number + "{", "", sep="\\n")
    if text == "floods":
        print(os.getpid(), file=open(sys.argv[1], "w"), flush=True)
        for _ in range(1000):
            print("{debug}\\n0 {late}", flush=True)
            time.sleep(0.01)
        sys.exit("it could print for ever")
    if text == "hangs":
        other = subprocess.Popen(["sleep", "60"], start_new_session=True)
        print(other.pid, file=open(sys.argv[1], "w"))
        time.sleep(60)
    print(number, "{" + text + "}", flush=True)
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


def test_lines_that_a_program_prints_are_no_answers(program):
    assert ask(program, ["1", "prints", "2", "prints"]) == ["{1}", "{prints}", "{2}", "{prints}"]


def test_program_that_prints_and_does_not_answer_is_killed(program, tmp_path):
    file = tmp_path / "process"
    silence = lambda: 0.05 if file.exists() and file.read_text() else 60.0  # noqa: E731
    answers: list[Any] = ask(program, ["1", "floods"], max_silence=silence)
    assert answers[0] == "{1}" and answers[1].stderr.startswith("no answer within")


def test_end_of_long_errors_is_kept():
    code = "import sys; sys.exit(10**6 * 'é' + 'the reason')"
    [ended] = ask([sys.executable, "-c", code], ["1"])
    assert isinstance(ended, subprocess.CompletedProcess)
    assert ended.stderr.endswith("éthe reason\n") and len(ended.stderr) < 10**5


def test_stop_signal_ends_a_program(program, tmp_path):
    """At once, with what it has started; the answers that there are come back."""
    file = tmp_path / "process"
    start = time.monotonic()
    assert ask(program, ["1", "hangs", "2"], lambda: file.exists() and file.read_text() != "") == ["{1}"]
    assert time.monotonic() - start < 50 and has_ended(file)


def test_program_has_an_environment_and_a_folder_of_its_own(tmp_path):
    code = "import os; print('0 {' + os.environ['TMPDIR'] + os.getcwd() + os.environ['OMP_NUM_THREADS'] + '}')"
    assert ask([sys.executable, "-c", code], ["1"], folder=tmp_path, TMPDIR="/x") == [f"{{/x{tmp_path}1}}"]
    assert os.environ.get("TMPDIR") != "/x"
