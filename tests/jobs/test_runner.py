"""Many trainings at once: who takes a run, what it gets of the machine, how it ends, and what a signal does."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from config.errors import RunError
from jobs import runner
from jobs.runner import Failed, Stopped, Training, Trainings
from tests.conftest import ROOT

# In the place of train.py, and of an interpreter that has torch: takes the lock of its run, notes when it begins and
# ends and what it was given, and ends as it is told. It stops on SIGTERM.
FAKE = """
import fcntl, json, os, signal, sys, time
run, how = sys.argv[1:]
os.makedirs(run, exist_ok=True)
lock = open(run + "/.lock", "w")
def note(what):
    with open(os.path.dirname(run) + "/notes", "a") as file:
        print(json.dumps([what, os.path.basename(run), os.environ.get("OMP_NUM_THREADS"),
            os.environ.get("CUDA_VISIBLE_DEVICES"), os.getpid()]), file=file)
def end(state, code, reason=""):
    with open(run + "/status.json", "w") as file:
        json.dump({"state": state, "step": 4, "reason": reason}, file)
    note("ends")
    os._exit(code)
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print(f"train.py: error: {run} is in use: another training is running in it; choose another name")
    os._exit(2)
signal.signal(signal.SIGTERM, lambda *_: end("preempted", 75))
note("begins")
time.sleep({"slowly": 60, "for a moment": 0.6}.get(how, 0))
if how == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "is refused":
    print("train.py: error: optimizer.lr: x must be a number")
    os._exit(2)
ends = {"fails": ("failed", 1, "RunError: the loss is nan")}
ends["fills the disk"] = "failed", 1, "OSError: [Errno 28] No space left on device"
ends["reaches the file size limit"] = "failed", 1, "OSError: [Errno 27] File too large"
ends["exceeds the quota"] = "failed", 1, "SafetensorError: I/O error: Disk quota exceeded (os error 122)"
ends["lacks room for a save"] = "failed", 1, "SaveError: 33.00 MB are needed, but 1.00 MB are free"
ends["fails under a launcher"] = "preempted", 1
end(*ends.get(how, ("finished", 0)))
"""


@pytest.fixture
def run(tmp_path):
    """A training of this name that goes on like this; `notes` are those of all."""
    (tmp_path / "fake.py").write_text(FAKE)

    def training(name, how="at once", **others):
        command = (sys.executable, "-S", str(tmp_path / "fake.py"), str(tmp_path / "runs" / name), how)
        return Training(tmp_path / "runs" / name, 4, command, **others)

    (tmp_path / "runs").mkdir()
    training.notes = lambda: [json.loads(line) for line in (tmp_path / "runs" / "notes").read_text().splitlines()]
    handlers = {number: signal.getsignal(number) for number in range(1, 16) if number != 9}
    yield training
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_as_many_at_once_as_asked_each_with_its_share(run, monkeypatch):
    monkeypatch.setattr(runner, "cores", lambda: 6)
    monkeypatch.setattr(runner, "gpus", lambda: ["3", "5"])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    Trainings(at_once=3).train([run(f"run-{number}", "for a moment") for number in range(5)])
    notes, at_once, most = run.notes(), 0, 0
    for what, *_ in notes:
        at_once += 1 if what == "begins" else -1
        most = max(most, at_once)
    assert most == 3 and len(notes) == 10
    assert {threads for _, _, threads, *_ in notes} == {"2"}
    assert [gpu for what, _, _, gpu, _ in sorted(notes, key=lambda note: note[1]) if what == "begins"][:3] == [
        "3",
        "5",
        "3",
    ]


def test_one_at_a_time_has_the_whole_machine_and_a_user_who_says_otherwise_is_heard(run, monkeypatch):
    monkeypatch.setattr(runner, "gpus", lambda: ["3", "5"])
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    Trainings(at_once=1).train([run("one")])
    Trainings(at_once=2).train([run("two")])
    monkeypatch.setattr(runner, "cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS")
    Trainings(at_once=3).train([run("three")])
    Trainings(at_once=3).train([run("four"), run("five")])
    begun = [note[2:4] for note in sorted(run.notes(), key=lambda note: note[1]) if note[0] == "begins"]
    assert begun[2:] == [["7", None], [None, "3"], ["7", "3"]] and {threads for threads, _ in begun[:2]} == {"3"}


def test_what_is_finished_is_not_started_but_if_it_shall_again(run):
    for _ in range(2):
        Trainings(1).train([run("one"), run("one")])
    assert len(run.notes()) == 2
    Trainings(1).train([run("one", again=True)])
    assert len(run.notes()) == 4


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("fails", "RunError: the loss is nan"),
        ("is refused", "optimizer.lr: x must be a number"),
        ("dies", "ended by SIGKILL, as where memory is out"),
    ],
)
def test_one_that_fails_stops_the_others_which_go_on_later(how, message, run):
    with pytest.raises(Failed) as failed:
        Trainings(2).train([run("slow", "slowly"), run("bad", how), run("later")])
    assert str(failed.value) == message and failed.value.training.directory.name == "bad"
    assert json.loads((run("slow").directory / "status.json").read_text())["state"] == "preempted"
    assert not run("later").directory.exists()
    Trainings(2).train([run("slow"), run("bad"), run("later")])


def test_or_not(run):
    found = Trainings(2)
    found.train([run("bad", "fails"), run("asked", "fails under a launcher"), run("good")], until_failure=False)
    assert {training.directory.name: outcome for training, outcome in found.outcomes.items()} == {
        "bad": "failed",
        "asked": "stopped",
        "good": "finished",
    }


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("fills the disk", "No space left on device"),
        ("reaches the file size limit", "File too large"),
        ("exceeds the quota", "Disk quota exceeded"),
        ("lacks room for a save", "MB are free"),
    ],
)
def test_train_full_disk_raises_run_error(how, message, run):
    with pytest.raises(RunError, match=f"{message}.*; with room there"):
        Trainings(1).train([run("one", how)])


def test_train_killed_run_fails_as_killed(run):
    with pytest.raises(Failed, match="SIGKILL") as failed:
        Trainings(1).train([run("one", "dies")])
    assert failed.value.killed


def test_the_status_of_an_older_start_is_not_taken_for_that_of_this_one(run):
    with pytest.raises(Failed):
        Trainings(1).train([run("one", "fails")])
    os.utime(run("one").directory / "status.json", (1e9, 1e9))
    with pytest.raises(Failed, match="optimizer.lr: x"):
        Trainings(1).train([run("one", "is refused")])


def test_a_run_of_another_machine_is_left_to_it_and_taken_over_when_that_has_died(run):
    directory = run("theirs").directory
    directory.mkdir()
    held = open(directory / ".lock", "w")
    fcntl.flock(held, fcntl.LOCK_EX)

    started = []

    def die():
        while not run("ours").is_finished():
            time.sleep(0.02)
        time.sleep(0.5)
        started.append(run("theirs").output.exists())
        held.close()

    other = threading.Thread(target=die)
    other.start()
    Trainings(1).train([run("theirs"), run("ours")])
    other.join()
    assert started == [False], "nobody tries while it is theirs"
    assert [name for what, name, *_ in run.notes() if what == "begins"] == ["ours", "theirs"]


def test_who_loses_the_race_for_a_run_waits_for_it(run, monkeypatch):
    """Between our look and its lock another machine took it."""
    directory = run("theirs").directory
    directory.mkdir()
    held = open(directory / ".lock", "w")
    fcntl.flock(held, fcntl.LOCK_EX)
    looks = []

    def is_in_use(training):
        looks.append(training)
        if len(looks) > 2:
            held.close()
        return False

    monkeypatch.setattr(Training, "is_in_use", is_in_use)
    Trainings(1).train([run("theirs")])
    assert run("theirs").is_finished() and len(looks) > 2


@pytest.mark.slow
def test_two_commands_share_the_work(run, tmp_path):
    program = f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path
        from jobs.runner import Training, Trainings
        runs = [Path({str(tmp_path / "runs")!r}, f"run-{{number}}") for number in range(6)]
        fake = ({sys.executable!r}, "-S", {str(tmp_path / "fake.py")!r})
        Trainings(1).train([Training(path, 4, (*fake, str(path), "for a moment")) for path in runs])
    """
    both = [subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)]) for _ in range(2)]
    assert [one.wait(timeout=120) for one in both] == [0, 0]
    begun = [(name, pid) for what, name, *_, pid in run.notes() if what == "begins"]
    assert sorted(name for name, _ in begun) == [f"run-{number}" for number in range(6)], "each was trained once"


def test_a_signal_stops_all_and_they_go_on_later(run):
    found = Trainings(2)

    def send():
        while len(run.notes() if (run("one").directory.parent / "notes").exists() else ()) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(Stopped):
        found.train([run("one", "slowly"), run("two", "slowly"), run("three")])
    sender.join()
    assert {training.directory.name: outcome for training, outcome in found.outcomes.items()} == dict.fromkeys(
        ("one", "two"), "stopped"
    )
    with pytest.raises(Stopped):
        found.check()


def test_gpus_are_those_that_the_user_left(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-abc")
    assert runner.gpus() == ["1", "GPU-abc"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert runner.gpus() == []
