"""Code that nobody has read can write into the folder of its run alone, and leaves no process behind."""

import os
import subprocess
import sys

import pytest

from tools.experiment import sandbox

pytestmark = pytest.mark.skipif(bool(sandbox.problem()), reason=f"no sandbox here: {sandbox.problem()}")


@pytest.fixture
def folders(tmp_path):
    """Return the folder of an experiment with two runs, a secret and a config, and a folder of code."""
    for name in ("experiment/runs/mine", "experiment/runs/other", "experiment/configs", "code"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "experiment" / "experiment.json").write_text("secret")
    (tmp_path / "experiment" / "configs" / "a.yaml").write_text("a: 1")
    (tmp_path / "code" / "train.py").write_text("x = 1")
    return tmp_path


def run(folders, script, **options):
    experiment = folders / "experiment"
    kept, writable = [experiment / "configs" / "a.yaml"], [experiment / "runs" / "mine"]
    command = sandbox.command(["sh", "-c", script], [experiment], kept, writable, **options)
    return subprocess.run(command, cwd=folders, capture_output=True, text=True)


def test_run_writes_into_its_folder_and_temporary_ones_alone(folders):
    script = """
        for file in experiment/runs/mine/file $TMPDIR/file /dev/shm/file /dev/null; do
            echo mine > $file || echo refused $file
        done
        for file in code/train.py code/new.py experiment/configs/a.yaml /var/tmp/mini-gpt-x $HOME/mini-gpt-x; do
            (echo forged > $file) 2> /dev/null && echo wrote $file
        done
        cat experiment/configs/a.yaml; ls experiment experiment/runs
        echo forged > experiment/results.jsonl; echo forged > experiment/runs/other/file
    """
    done = run(folders, script)
    assert done.stdout.split() == ["a:", "1experiment:", "configs", "runs", "tmp", "experiment/runs:", "mine"], done
    assert (folders / "experiment" / "runs" / "mine" / "file").read_text() == "mine\n"
    assert (folders / "code" / "train.py").read_text() == "x = 1" and not (folders / "code" / "new.py").exists()
    assert not (folders / "experiment" / "results.jsonl").exists()
    assert not [*(folders / "experiment" / "runs" / "other").iterdir()]
    assert run(folders, "ls $TMPDIR /dev/shm").stdout.count("file") == 0, (
        "each program has temporary folders of its own"
    )


def test_program_cannot_leave_the_sandbox(folders):
    script = """
        mount -o remount,rw,bind / ; umount experiment; umount /proc
        unshare -rm sh -c 'mount -o remount,rw,bind / ; umount experiment; echo x > code/new.py; cat experiment/*.json'
        echo forged > code/new.py; cat experiment/experiment.json
    """
    done = run(folders, script)
    assert "secret" not in done.stdout and not (folders / "code" / "new.py").exists()


def test_program_that_starts_in_a_hidden_folder_does_not_see_it(folders):
    experiment = folders / "experiment"
    command = sandbox.command(["sh", "-c", "pwd; ls; cat experiment.json"], [experiment], [], [])
    done = subprocess.run(command, cwd=experiment, capture_output=True, text=True)
    assert done.stdout.split() == [str(experiment), "tmp"], done


def test_processes_end_with_the_program(folders):
    """One that trains on after its run, in a session of its own and deaf to signals."""
    done = run(folders, "echo begun; (trap '' HUP TERM; setsid sleep 987654) > /dev/null 2>&1 &")
    assert done.stdout == "begun\n" and done.returncode == 0
    assert subprocess.run(["pgrep", "-f", "sleep 98765[4]"], capture_output=True).returncode == 1
    assert run(folders, "ls -d /proc/[0-9]* | wc -l").stdout.strip() in "23456", "it sees no other process"
    queues = run(folders, "readlink /proc/self/ns/ipc").stdout.strip()
    assert queues.startswith("ipc:") and queues != os.readlink("/proc/self/ns/ipc"), "nor its shared memory and queues"


def test_processes_that_nobody_waited_for_cost_their_seconds(folders):
    """A child that computes for a second in a session of its own, and outlives the program."""
    script = """
import os, time
read, write = os.pipe()
if not os.fork():
    os.setsid()
    while time.process_time() < 0.5: pass
    os.write(write, b"x")
    time.sleep(1000)
os.read(read, 1)
"""
    process = subprocess.Popen(sandbox.command([sys.executable, "-ISc", script], [folders / "experiment"], [], []))
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0 and usage.ru_utime + usage.ru_stime >= 0.5


def test_program_ends_with_its_runner(folders):
    """One that is killed cannot end it."""
    command = sandbox.command(["sh", "-c", "echo ready; sleep 30; echo survived"], [folders / "experiment"], [], [])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "ready\n"
    process.kill()
    assert process.communicate()[0] == "", "of all that have the pipe"


@pytest.mark.parametrize(
    ("script", "code"), [("exit 75", 75), ("kill -9 $$", -9), ("kill -15 $$", -15), ("kill -2 $$", -2)]
)
def test_exit_code_is_that_of_the_program(script, code, folders):
    assert run(folders, script).returncode == code


def test_network_is_left_out_if_asked(folders):
    script = "grep -c : /proc/net/dev"
    assert int(run(folders, script, network=False).stdout) == 1, "the loopback device alone"


def test_signals_reach_the_program(folders):
    """A scheduler signals the process group; the program saves, and its exit code tells."""
    script = "trap 'echo saved; exit 75' TERM; echo ready; while true; do sleep 0.05; done"
    command = sandbox.command(["sh", "-c", script], [folders / "experiment"], [], [])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout and process.stdout.readline() == "ready\n"
    subprocess.run(["kill", "-TERM", "--", f"-{process.pid}"], check=True)
    assert process.communicate()[0] == "saved\n" and process.returncode == 75
