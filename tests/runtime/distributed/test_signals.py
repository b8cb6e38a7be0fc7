"""A signal stops a run after its step, with a checkpoint; the resumed run ends with the same bits."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, TINY_STORIES, assert_same_bits, environment, metrics, tensors, train, train_command
from tests.support import forked
from trainer.checkpoint.manifest import newest_valid

STEPS = 60
ENDLESS = ["--steps", "1000000"]  # no test depends on how far a run has come when a signal reaches it
WAIT_SECONDS = 300  # only a hang takes that long
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
LONG = [*TINY_STORIES, *f"--steps {STEPS} --micro_batch_size 3 --checkpoint.every 1000 --evaluation.every 0".split()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("uninterrupted")
    train(*LONG, "--out_dir", out_dir, "--name", "run", processes=2)
    return out_dir / "run"


def wait_until(condition, is_running):
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert is_running() and time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_steps(is_running, run, steps=5):
    file = run / "metrics.jsonl"
    wait_until(lambda: file.exists() and len(file.read_text().splitlines()) >= steps, is_running)


def start(words, processes, run, steps=5, **env):
    """Return a script in forked processes after its first `steps` logged steps."""
    script, *arguments = map(str, words)
    launch = forked.Launch(script, arguments, processes, environment(**env))
    wait_for_steps(
        lambda: all(process.is_alive() for process in launch.processes) or print(*launch.output()), run, steps
    )
    return launch


def start_launcher(arguments, run, faults, max_restarts=0, **env):
    """Return a real launcher of two processes after five logged steps; `faults`: see tests/programs/faulty_train.py."""
    command = train_command(*arguments, processes=2, max_restarts=max_restarts, script="tests/programs/faulty_train.py")
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(FAULTS=faults, **env),
    )
    wait_for_steps(lambda: process.poll() is None or print(process.communicate()[0]), run)
    return process


def children(pid):
    return [child.pid for child in psutil.Process(pid).children()]


def status(run):
    return json.loads((run / "status.json").read_text())


def test_data_workers_ignore_stop_signals(runs):
    arguments = [*LONG, *ENDLESS, "--data.num_workers", 1, "--out_dir", runs, "--name", "run"]
    launch = start(["train.py", *arguments], 0, runs / "run")
    (process,) = launch.processes
    for pid in (*children(process.pid), process.pid):
        os.kill(pid, signal.SIGTERM)
    assert launch.wait(WAIT_SECONDS) == 75, launch.output()
    assert status(runs / "run")["state"] == "preempted"


def test_signal_saves_and_exits_75(runs):
    launch = start(["train.py", *LONG, *ENDLESS, "--out_dir", runs, "--name", "run"], 0, runs / "run")
    os.kill(launch.processes[0].pid, signal.SIGINT)
    assert launch.wait(WAIT_SECONDS) == 75, launch.output()
    assert launch.output()[1].count("Saving a checkpoint and stopping; a second signal stops at once.") == 1
    assert status(runs / "run")["state"] == "preempted" and 5 <= status(runs / "run")["step"] < 1_000_000
    assert "Training finished." not in launch.output()[0]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_signal_to_launcher_saves_and_resumes(number, runs, uninterrupted):
    arguments = [*LONG, "--out_dir", runs, "--name", "run"]
    process = start_launcher(arguments, runs / "run", "await_signal:1:10", PET_SIGNALS_TO_HANDLE=SIGNALS)
    os.kill(process.pid, number)
    output = process.communicate(timeout=WAIT_SECONDS)[0]
    assert process.returncode == 1, output  # a launcher turns every code into 1
    stopped = status(runs / "run")
    assert stopped["state"] == "preempted" and 5 <= stopped["step"] < STEPS
    done = train(*arguments, processes=2)
    assert f"resumed at step {stopped['step']}" in done.stdout
    assert_same_bits(tensors(runs / "run", STEPS), tensors(uninterrupted, STEPS))
    assert metrics(runs / "run") == metrics(uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(("handled", "outlives"), [(SIGNALS, False), ("SIGTERM,SIGINT", True)])
def test_sighup_under_nohup(handled, outlives, runs):
    """By default torch's launcher catches SIGHUP even under nohup, and forwards it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited by child processes, as from nohup
    faults = "none:1:10" if outlives else "await_signal:1:10"
    try:
        arguments = [*LONG, "--out_dir", runs, "--name", "run"]
        process = start_launcher(arguments, runs / "run", faults, PET_SIGNALS_TO_HANDLE=handled)
    finally:
        signal.signal(signal.SIGHUP, before)
    for pid in (process.pid, *children(process.pid)):
        os.kill(pid, signal.SIGHUP)
    output = process.communicate(timeout=WAIT_SECONDS)[0]
    assert status(runs / "run")["state"] == ("finished" if outlives else "preempted"), output


@pytest.mark.slow
def test_run_stops_with_a_launcher_of_one_process(runs):
    """`accelerate launch` for one process passes no signal on: a SIGTERM ends it, and the script would train on."""
    command = [Path(sys.executable).parent / "accelerate", "launch", "--num_processes", "1", "--num_machines", "1"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", "--cpu", ROOT / "train.py"]
    words = [*command, *LONG, *ENDLESS, "--out_dir", runs, "--name", "run"]
    process = subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment())
    wait_for_steps(lambda: process.poll() is None or print(process.communicate()[0]), runs / "run")
    [script] = children(process.pid)
    process.terminate()
    wait_until(lambda: not psutil.pid_exists(script), lambda: True)
    assert status(runs / "run")["state"] == "preempted" and status(runs / "run")["step"] >= 5
    process.communicate()


def test_second_training_in_a_directory_is_refused(runs):
    arguments = [*LONG, *ENDLESS, "--out_dir", runs, "--name", "run"]
    launch = start(["train.py", *arguments], 0, runs / "run")
    refused = train(*arguments, exit_code=2)
    assert "in use" in refused.stderr and launch.processes[0].is_alive()
    os.kill(launch.processes[0].pid, signal.SIGTERM)
    assert launch.wait(WAIT_SECONDS) == 75


@pytest.mark.slow
def test_restart_need_not_wait_for_orphaned_workers(runs):
    arguments = [*LONG, *ENDLESS, "--data.num_workers", 1, "--out_dir", runs, "--name", "run"]
    launch = start(["train.py", *arguments], 0, runs / "run")
    (process,) = launch.processes
    assert children(process.pid), "workers check every five seconds whether their parent is alive"
    process.kill()
    process.join()
    train(*arguments, "--steps", 2)


SLOW_WANDB = """
import time
import trainer.checkpoint.saver as checkpoint
rename = checkpoint.os.rename
checkpoint.os.rename = lambda *paths: (time.sleep(1.2), rename(*paths))  # two signals within a second count as one
class Settings:
    def __init__(self, **_): pass
class init:
    def __init__(self, **_): pass
    def define_metric(self, *_, **__): pass
    def log(self, _): pass
    def finish(self, exit_code): time.sleep(1)
"""


SLOW_TO_IGNORE_SIGNALS = """
import os, time
from runtime.cli import scripts
ignore = scripts.ignore_stop_signals
scripts.ignore_stop_signals = lambda: (time.sleep(0.5 * int(os.environ["RANK"])), ignore())
scripts.run_and_exit("train")
"""


def test_all_processes_exit_together_after_a_signal(runs, tmp_path):
    """Launchers kill the others when one exits: none may exit while the main process still closes its tracker, nor
    before all ignore the launcher's signal."""
    (tmp_path / "wandb.py").write_text(SLOW_WANDB)
    arguments = [*LONG, *ENDLESS, "--tracking.wandb", "offline", "--out_dir", runs, "--name", "run"]
    launch = start(["-c", SLOW_TO_IGNORE_SIGNALS, *arguments], 2, runs / "run", PYTHONPATH=str(tmp_path))
    for process in launch.processes:
        os.kill(process.pid, signal.SIGTERM)
    launch.wait(WAIT_SECONDS)
    assert status(runs / "run")["state"] == "preempted"
    assert [process.exitcode for process in launch.processes] == [75, 75], launch.output()


def test_launcher_restarts_killed_process_and_forwards_signal(runs):
    """Slurm sends SIGUSR1 before the time limit.

    Without the variable it would kill the launcher and leave its processes. torch reads it as PET_*, before 2.11 as
    TORCHELASTIC_*; accelerate_configs/slurm.sh exports both. The launcher and its processes are forks here.
    """
    run = runs / "run"
    arguments = [*LONG, "--checkpoint.every", 5, "--out_dir", runs, "--name", "run"]
    _, *words = train_command(*arguments, processes=2, max_restarts=3, script="tests/programs/faulty_train.py")
    faults = "await_signal:1:15 await_signal:1:30"  # in the first start and after the restart
    launch = start(words, 0, run, steps=10, PET_SIGNALS_TO_HANDLE=SIGNALS, FAULTS=faults)
    (process,) = launch.processes
    wait_until(lambda: any((run / "checkpoints").glob("step-*")), process.is_alive)
    os.kill(children(process.pid)[-1], signal.SIGKILL)
    sessions = run / "sessions.jsonl"
    wait_until(lambda: sessions.read_text().count("\n") == 2, process.is_alive)
    wait_for_steps(process.is_alive, run, steps=20)
    os.kill(process.pid, signal.SIGUSR1)
    returncode, output = launch.wait(WAIT_SECONDS), "".join(launch.output())
    stopped = status(run)
    assert stopped["state"] == "preempted" and stopped["step"] < STEPS, output
    assert "lost the others in" in output and output.count("resumed at step") == 1, output
    assert returncode == 1, "a signal to the launcher ends the job"
    assert newest_valid(run / "checkpoints")[1].step == stopped["step"]


def test_killed_launcher_stops_its_processes(runs):
    """The launcher and its processes are forks."""
    arguments = [*LONG, *ENDLESS, "--out_dir", runs, "--name", "run"]
    _, *words = train_command(*arguments, processes=2)
    launch = start(words, 0, runs / "run", steps=10)
    (launcher,) = launch.processes
    workers = children(launcher.pid)
    launcher.kill()
    try:
        wait_until(lambda: not any(psutil.pid_exists(pid) for pid in workers), lambda: True)
    finally:
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    stopped = status(runs / "run")
    assert len(workers) == 2 and stopped["state"] == "preempted", launch.output()
    assert newest_valid(runs / "run" / "checkpoints")[1].step == stopped["step"] >= 10
    assert launch.output()[1].count("stopped after step") == 1


@pytest.mark.slow
def test_signal_to_one_process_restarts_all(runs, uninterrupted):
    arguments = [*LONG, "--out_dir", runs, "--name", "run"]
    process = start_launcher(arguments, runs / "run", "await_signal:1:10", max_restarts=1)
    os.kill(children(process.pid)[-1], signal.SIGUSR1)
    output = process.communicate(timeout=WAIT_SECONDS)[0]
    assert process.returncode == 0 and output.count("resumed at step") == 1, output
    assert "stopped after step" in output
    assert_same_bits(tensors(runs / "run", STEPS), tensors(uninterrupted, STEPS))
    assert metrics(runs / "run") == metrics(uninterrupted)


@pytest.mark.slow
def test_second_signal_ends_the_process(runs, tmp_path):
    """The second one arrives during the save that the first one requested, which would take an hour."""
    (tmp_path / "wandb.py").write_text(
        "import os, time\nrename = os.rename\n"
        "os.rename = lambda *paths: time.sleep(3600) if 'writing' in str(paths[0]) else rename(*paths)\n"
    )
    arguments = [*LONG, *ENDLESS, "--tracking.wandb", "offline", "--out_dir", runs, "--name", "run"]
    launch = start(["train.py", *arguments], 0, runs / "run", PYTHONPATH=str(tmp_path))
    (process,) = launch.processes
    os.kill(process.pid, signal.SIGTERM)
    checkpoints = runs / "run" / "checkpoints"
    wait_until(lambda: list(checkpoints.glob(".writing-*/manifest.json")), process.is_alive)
    time.sleep(1.5)  # two signals within a second count as one
    os.kill(process.pid, signal.SIGTERM)
    assert launch.wait(WAIT_SECONDS) == -signal.SIGTERM


@pytest.mark.slow
def test_killed_run_resumes_with_same_bits(runs, uninterrupted):
    """After kill -9 of one process in a step, the next start ends with the bits of an uninterrupted run."""
    arguments = [*LONG, "--checkpoint.every", 2, "--out_dir", runs, "--name", "run"]
    process = start_launcher(arguments, runs / "run", "await_signal:1:10")
    os.kill(children(process.pid)[-1], signal.SIGKILL)
    process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode != 0
    assert status(runs / "run")["state"] != "finished"
    train(*arguments, processes=2)
    assert_same_bits(tensors(runs / "run", STEPS), tensors(uninterrupted, STEPS))
    assert metrics(runs / "run") == metrics(uninterrupted)


SIGNALLED = """
import os, runpy, signal, sys, train
made = train.StopSignal
def make():
    stop_signal = made()
    if os.environ.get("RANK") in (None, "1"):
        os.kill(os.getpid(), signal.SIGINT)
    return stop_signal
train.StopSignal = make
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def assert_signal_stops(code, words, processes, temporary):
    """Check that a signal in the first training of a script stops it, and that it leaves no temporary files."""
    launch = forked.Launch("-c", [code, *words], processes, environment(TMPDIR=str(temporary)))
    for process in launch.processes:
        process.join(WAIT_SECONDS)
    assert {process.exitcode for process in launch.processes} == {75}, launch.output()
    output, errors = launch.output()
    assert "FAIL" not in output and "holds" not in output
    assert "stopped by a signal before the end\n" in errors and "Traceback" not in errors
    assert not list(temporary.iterdir())


@pytest.mark.slow
def test_signal_stops_nested_training(runs, tmp_path):
    """The signal goes to the process that is not the main one."""
    (temporary := tmp_path / "temporary").mkdir()
    assert_signal_stops(SIGNALLED, ["verify.py", *TINY_STORIES, "--out_dir", str(runs)], 2, temporary)
    assert not list(runs.glob("*"))


def test_ctrl_c_after_nested_training_interrupts():
    """Also in slow code without a training, such as the import of torch; with one line."""
    code = """
import os, signal, sys, time, train
from runtime.cli import scripts
from trainer.nested import nested_training
from runtime.distributed.signals import Preempted, StopSignal
def at_once(_):
    with nested_training():
        StopSignal()
        raise Preempted("after stop_after")
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
scripts.import_module = at_once
sys.argv = ["train.py"]
scripts.run_and_exit("train")
"""
    done = forked.run("-c", [code], 0, environment())
    assert done.returncode == 130, done.stderr
    assert done.stderr.endswith("train.py: interrupted\n") and "Traceback" not in done.stderr


def test_training_in_another_thread_ignores_signals(runs):
    """Python allows signal handlers in the main thread alone; Streamlit and Ray train in others."""
    code = f"""
import sys, threading
import torch
import train
from runtime.config.parser import parse_config
config = parse_config([*{TINY_STORIES!r}, "--steps", "2", "--data.num_workers", "1", "--out_dir", {str(runs)!r}])
thread = threading.Thread(target=train.main, args=(config,))
thread.start()
thread.join()
"""
    done = forked.run("-c", [code], 0, environment())
    assert done.returncode == 0 and "Training finished." in done.stdout, done.stdout + done.stderr
    assert not done.stderr, done.stderr
