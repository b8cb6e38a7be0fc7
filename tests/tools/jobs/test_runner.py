"""JobRunner: which process trains a run, its cores or GPU, how it ends, and what a signal does."""

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from runtime.config.errors import RunError
from tests.conftest import ROOT
from tools.jobs import runner
from tools.jobs.runner import Job, JobRunner
from trainer.run.directory import Run

# Replaces train.py, without torch: locks its run, writes its start, environment and end to a file shared by all runs,
# and ends as its argument names. It stops on SIGTERM.
FAKE = """
import fcntl, json, os, signal, subprocess, sys, time
run, how, starts = sys.argv[1:]
os.makedirs(run, exist_ok=True)
lock = open(run + "/.lock", "w")
def note(what):
    with open(os.path.dirname(run) + "/notes", "a") as file:
        print(json.dumps([what, os.path.basename(run), os.environ.get("OMP_NUM_THREADS"),
            os.environ.get("CUDA_VISIBLE_DEVICES"), os.getpid()]), file=file)
def end(state, code, reason="", kind=None):
    with open(run + "/status.tmp", "w") as file:
        json.dump({"state": state, "step": 4, "reason": reason, "kind": kind}, file)
    os.utime(run + "/status.tmp", (1e9, 1e9))  # the clock of the file system is wrong
    os.replace(run + "/status.tmp", run + "/status.json")
    note("end")
    os._exit(code)
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print(f"train.py: error: {run} is in use: another training is running in it; choose another name")
    os._exit(2)
signal.signal(signal.SIGTERM, lambda *_: end("preempted", 75))
note("start")
deadline = time.monotonic() + 60
while open(os.path.dirname(run) + "/notes").read().count('["start"') < int(starts) and time.monotonic() < deadline:
    time.sleep(0.02)
time.sleep({"slowly": 60, "for a moment": 0.6}.get(how, 0))
if how == "ignores signals":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)  # as torch's launcher starts a process
    open(run + "/child", "w").write(str(child.pid))
    note("deaf")
    time.sleep(60)
if how == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "prints nothing":
    os._exit(1)
if how == "is refused":
    print("train.py: error: optimizer.lr: x must be a non-negative number")
    os._exit(2)
ends = {"fails": ("failed", 1, "NonFiniteError: the loss is nan", "non_finite")}
ends["fills the disk"] = "failed", 1, "any words", "disk_full"
ends["fails before a pipe"] = "failed", 0, "NonFiniteError: the loss is nan", "non_finite"
ends["stops before a pipe"] = "preempted", 0
ends["fails under a launcher"] = "preempted", 1
ends["is killed under a launcher"] = "running", 1
ends["loses a process"] = "failed", 1, "any words", "lost_process"
end(*ends.get(how, ("finished", 0)))
"""


@pytest.fixture
def run(tmp_path):
    """Return a function that makes a Job by name and outcome; its `notes` reads the file shared by all runs.

    A training ends only after `starts` trainings have started.
    """
    (tmp_path / "fake.py").write_text(FAKE)

    def training(name, how="at once", starts=1, **others):
        command = (sys.executable, "-S", str(tmp_path / "fake.py"), str(tmp_path / "runs" / name), how, str(starts))
        return Job(Run(tmp_path / "runs" / name), 4, command, **others)

    (tmp_path / "runs").mkdir()
    training.notes = lambda: [json.loads(line) for line in (tmp_path / "runs" / "notes").read_text().splitlines()]
    handlers = {number: signal.getsignal(number) for number in range(1, 16) if number != 9}
    yield training
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_train_divides_cores_and_gpus(run, monkeypatch):
    monkeypatch.setattr(runner, "available_cores", lambda: 6)
    monkeypatch.setattr(runner, "visible_gpus", lambda: ["3", "5"])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    JobRunner(max_running=3).train([run(f"run-{number}", "for a moment", starts=3) for number in range(5)])
    notes, at_once, most = run.notes(), 0, 0
    for what, *_ in notes:
        at_once += 1 if what == "start" else -1
        most = max(most, at_once)
    assert most == 3 and len(notes) == 10
    assert {threads for _, _, threads, *_ in notes} == {"2"}
    assert [gpu for what, _, _, gpu, _ in sorted(notes, key=lambda note: note[1]) if what == "start"][:3] == [
        "3",
        "5",
        "3",
    ]


def test_train_keeps_thread_count_of_the_user(run, monkeypatch):
    monkeypatch.setattr(runner, "visible_gpus", lambda: ["3", "5"])
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    JobRunner(max_running=1).train([run("one")])
    JobRunner(max_running=2).train([run("two")])
    monkeypatch.setattr(runner, "available_cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS")
    JobRunner(max_running=3).train([run("three")])
    JobRunner(max_running=3).train([run("four"), run("five")])
    starts = [note[2:4] for note in sorted(run.notes(), key=lambda note: note[1]) if note[0] == "start"]
    assert starts[2:] == [["7", None], [None, "3"], ["7", "3"]] and {threads for threads, _ in starts[:2]} == {"3"}


def test_train_skips_finished_runs_unless_restarted(run):
    for _ in range(2):
        JobRunner(1).train([run("one"), run("one")])
    assert len(run.notes()) == 2
    JobRunner(1).train([run("one", restart=True)])
    assert len(run.notes()) == 4


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("fails", "NonFiniteError: the loss is nan"),
        ("fails before a pipe", "NonFiniteError: the loss is nan"),
        ("is refused", "optimizer.lr: x must be a non-negative number"),
        ("dies", "ended by SIGKILL; out of memory?"),
    ],
)
def test_train_failed_run_stops_the_others(how, message, run):
    with pytest.raises(RunError, match=re.escape(f"bad: {message}")):
        JobRunner(2).train([run("slow", "slowly"), run("bad", how, starts=2), run("later")])
    assert json.loads((run("slow").run.path / "status.json").read_text())["state"] == "preempted"
    assert not run("later").run.path.exists()
    JobRunner(2).train([run("slow"), run("bad"), run("later")])


def test_train_without_until_failure_continues(run):
    """A launch script with a pipe ends with exit code 0 whatever happened."""
    found = JobRunner(2)
    ends = {
        "fails": "failed",
        "fails before a pipe": "failed",
        "fails under a launcher": "stopped",
        "stops before a pipe": "stopped",
        "at once": "finished",
    }
    found.train([run(how, how) for how in ends], until_failure=False)
    assert {job.run.path.name: outcome for job, outcome in found.outcomes.items()} == ends


def test_train_full_disk_raises_run_error(run):
    with pytest.raises(RunError, match="any words; free some space"):
        JobRunner(1).train([run("one", "fills the disk")])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, "No space left on device; free some space"),
        (errno.EDQUOT, "Disk quota exceeded; free some space"),
        (None, "it printed nothing"),
    ],
)
def test_silent_run_on_full_disk_is_found_by_writing(code, message, run, monkeypatch):
    """The free bytes that a file system reports say nothing: BlobFuse reports 0."""

    def write(dir):
        if code is not None:
            raise OSError(code, os.strerror(code))
        return temporary_file(dir=dir)

    temporary_file = runner.tempfile.TemporaryFile
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=10**9, free=0))
    monkeypatch.setattr(runner.tempfile, "TemporaryFile", write)
    with pytest.raises(RunError, match=message):
        JobRunner(1).train([run("one", "prints nothing")])


def test_output_is_written_through_no_link(run, tmp_path):
    (precious := tmp_path / "precious").write_text("mine")
    job = run("one")
    job.output.parent.mkdir(parents=True)
    job.output.symlink_to(precious)
    with pytest.raises(OSError, match="one.log"):
        JobRunner(1).train([job])
    assert precious.read_text() == "mine"


@pytest.mark.parametrize(
    ("how", "message", "killed"),
    [
        ("dies", "SIGKILL", True),
        ("is killed under a launcher", "as if killed; out of memory", True),
        ("loses a process", "any words", True),
        ("fails", "nan", False),
    ],
)
def test_train_killed_run_fails_as_killed(how, message, killed, run):
    """A launcher returns an exit code of its own, but a killed run could not change its status."""
    found = JobRunner(1)
    with pytest.raises(RunError, match=message):
        found.train([run("one", how)])
    assert [failure.killed for failure in found.failures.values()] == [killed]


def test_failure_message_ignores_status_of_earlier_start(run):
    with pytest.raises(RunError):
        JobRunner(1).train([run("one", "fails")])
    os.utime(run("one").run.path / "status.json", (1e9, 1e9))
    with pytest.raises(RunError, match="optimizer.lr: x"):
        JobRunner(1).train([run("one", "is refused")])


def test_train_waits_for_locked_run_then_trains_it(run):
    directory = run("theirs").run.path
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

    other = threading.Thread(target=die, daemon=True)
    other.start()
    JobRunner(1).train([run("theirs"), run("ours")])
    other.join()
    assert started == [False], "the run was started while it was locked"
    assert [name for what, name, *_ in run.notes() if what == "start"] == ["ours", "theirs"]


def test_train_waits_after_losing_the_lock(run, monkeypatch):
    """Another machine takes the lock between the check and the start."""
    directory = run("theirs").run.path
    directory.mkdir()
    held = open(directory / ".lock", "w")
    fcntl.flock(held, fcntl.LOCK_EX)
    looks = []

    def is_locked(reader):
        looks.append(reader)
        if len(looks) > 2:
            held.close()
        return len(looks) == 2

    monkeypatch.setattr(Run, "is_locked", is_locked)
    JobRunner(1).train([run("theirs")])
    assert run("theirs").is_finished() and len(looks) > 2


@pytest.mark.slow
def test_concurrent_commands_divide_the_runs(run, tmp_path):
    program = f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path
        from trainer.run.directory import Run
        from tools.jobs.runner import Job, JobRunner
        runs = [Path({str(tmp_path / "runs")!r}, f"run-{{number}}") for number in range(6)]
        fake = ({sys.executable!r}, "-S", {str(tmp_path / "fake.py")!r})
        JobRunner(1).train([Job(Run(path), 4, (*fake, str(path), "for a moment", "1")) for path in runs])
    """
    both = [subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)]) for _ in range(2)]
    assert [one.wait(timeout=120) for one in both] == [0, 0]
    starts = [(name, pid) for what, name, *_, pid in run.notes() if what == "start"]
    assert sorted(name for name, _ in starts) == [f"run-{number}" for number in range(6)], "each was trained once"


def test_checkpoints_of_finished_runs_are_deleted(run):
    runs = [run("kept"), run("deleted", keep_checkpoints=False), run("unfinished", "fails", keep_checkpoints=False)]
    for job in runs:
        (job.run.path / "checkpoints" / "step-00000004").mkdir(parents=True)
    JobRunner(1).train(runs, until_failure=False)
    assert [(job.run.path / "checkpoints").exists() for job in runs] == [True, False, True]


def test_signal_stops_all_runs(run):
    found = JobRunner(2)

    def send():
        while len(run.notes() if (run("one").run.path.parent / "notes").exists() else ()) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    with pytest.raises(SystemExit, match="75"):
        found.train([run("one", "slowly"), run("two", "slowly"), run("three")])
    sender.join()
    assert {job.run.path.name: outcome for job, outcome in found.outcomes.items()} == dict.fromkeys(
        ("one", "two"), "stopped"
    )
    with pytest.raises(SystemExit, match="75"):
        found.raise_if_stopped()


def is_deaf(run):
    file = run("one").run.path.parent / "notes"
    return file.exists() and '"deaf"' in file.read_text()


def test_overdue_run_is_killed_and_has_failed(run):
    found = JobRunner(1)
    found.overdue = lambda job, seconds: "took too long" if job != run("two") and is_deaf(run) else ""
    found.train([run("one", "ignores signals"), run("two")], until_failure=False)
    assert [found.outcomes[job] for job in (run("one", "ignores signals"), run("two"))] == ["failed", "finished"]
    assert found.failures == {run("one", "ignores signals"): runner.Failure("took too long")}
    child = int((run("one").run.path / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def locked(run):
    """A run whose lock another process holds."""
    run("theirs").run.path.mkdir()
    with open(run("theirs").run.path / ".lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield run("theirs")


def test_locked_run_is_overdue_as_well(run, locked):
    """It is not waited for longer than for a run of this process."""
    found = JobRunner(1)
    found.overdue = lambda job, seconds: "took too long" if job == locked and run("ours").is_finished() else ""
    found.train([locked, run("ours")], until_failure=False)
    assert found.outcomes == {locked: "failed", run("ours"): "finished"}
    message = f"took too long; another process holds {locked.run.path / '.lock'}"
    assert found.failures == {locked: runner.Failure(message)} and not locked.output.exists()
    with pytest.raises(RunError, match="took too long"):
        found.train([locked])


def test_wait_for_a_locked_run_ends_with_the_time(run, locked, capsys):
    """It has no failure, because nobody knows whether it would have ended."""
    found = JobRunner(1)
    found.limit_minutes(0)
    assert [*found.stream([run("ours"), locked])] == [run("ours"), locked]
    assert found.outcomes == {run("ours"): "finished", locked: "locked"} and not found.failures
    assert f"another process holds {locked.run.path / '.lock'}, and the time is spent\n" in capsys.readouterr().err
    with pytest.raises(RunError, match="another process holds"):
        found.train([locked])


def test_overdue_run_whose_lock_is_still_held_has_failed(run, locked, monkeypatch):
    """By a process that it has detached from its own, and that is not killed with it."""
    is_locked = Run.is_locked
    monkeypatch.setattr(Run, "is_locked", lambda reader: bool(found.starts) and is_locked(reader))
    found = JobRunner(1)
    found.overdue = lambda job, seconds: "took too long"
    found.train([replace(locked, command=(sys.executable, "-S", "-c", "import time; time.sleep(60)"))], False)
    assert [*found.failures.values()] == [runner.Failure("took too long")] and [*found.starts.values()] == [1]


def test_run_that_does_not_stop_is_killed(run, capsys):
    found = JobRunner(1)
    found.stop_seconds = 0.1

    def progress():
        if is_deaf(run):
            found._receive(signal.SIGTERM, None)

    with pytest.raises(SystemExit, match="75"):
        list(found.stream([run("one", "ignores signals")], progress=progress))
    assert list(found.outcomes.values()) == ["stopped"]
    assert f"{run('one').run.path}: killed, because it did not stop\n" in capsys.readouterr().err


def test_visible_gpus_reads_the_environment(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-abc")
    assert runner.visible_gpus() == ["1", "GPU-abc"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert runner.visible_gpus() == []


@pytest.mark.parametrize(
    ("load", "terminal", "jobs", "said"),
    [(9.5, True, 2, True), (9.5, True, 1, False), (9.5, False, 2, False), (5.9, True, 2, False)],
)
def test_busy_machine_is_named_on_a_terminal(load, terminal, jobs, said, monkeypatch, capsys):
    """In a log, the summary of each run names it."""
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    JobRunner(jobs)
    line = f"the load is {load} on 4 cores, so {jobs} runs at once are slow; --jobs 1 trains one\n"
    assert capsys.readouterr().err == (line if said else "")
