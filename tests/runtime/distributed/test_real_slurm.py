"""A real Slurm of two nodes on one machine: a job that is stopped is requeued and resumes with the code it began with.

The nodes are network namespaces with host names of their own. It needs root and Debian's packages slurmctld, slurmd,
slurm-client and munge.
"""

import os
import shutil
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY_STORIES, assert_same_run, environment, train
from tests.runtime.distributed.test_nodes import ADDRESSES, nodes  # noqa: F401 - a fixture
from trainer.run.directory import Run

pytestmark = pytest.mark.slow
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
STEPS = 60
WORDS = [*TINY_STORIES, *f"--steps {STEPS} --checkpoint.every 1000 --evaluation.every 0 --name run".split()]
CONFIGURATION = """
ClusterName=test
SlurmctldHost={first}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/linear
ReturnToService=2
"""


@pytest.fixture
def slurm(nodes):  # noqa: F811
    """Start the daemons; return a function that runs a command of Slurm on the first node, in a checkout."""
    path = f"{Path('.venv', 'bin').resolve()}:{os.environ['PATH']}:/usr/sbin:/sbin"
    if missing := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        pytest.skip(f"needs Slurm on this machine, which lacks {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("the daemons of Slurm need root")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # Slurm's sockets need short paths
    (folder / "state").mkdir()
    lines = [CONFIGURATION.format(first=nodes[0], address=ADDRESSES[0], folder=folder)]
    for node, address in zip(nodes, ADDRESSES, strict=True):
        (folder / f"spool-{node}").mkdir()
        lines.append(f"NodeName={node} NodeAddr={address} NodeHostname={node} CPUs={os.cpu_count()}\n")
        others = "".join(f"{a} {n}\n" for n, a in zip(nodes, ADDRESSES, strict=True) if n != node)
        (folder / f"hosts-{node}").write_text(f"127.0.0.1 localhost\n127.0.1.1 {node}\n{others}")  # as Debian's
    lines.append(f"PartitionName=all Nodes={','.join(nodes)} Default=YES\n")
    (folder / "slurm.conf").write_text("".join(lines))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # that of version 2 needs systemd
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o400)
    munge = ["munged", "--foreground", "--force", f"--key-file={folder}/key", f"--socket={folder}/munge.socket"]
    munge += [f"--{kind}-file={folder}/munge.{kind}" for kind in ("pid", "log", "seed")]
    settings = environment(PATH=path, SLURM_CONF=str(folder / "slurm.conf"))
    daemons = [subprocess.Popen(munge, env=settings)]

    def on(node, *command):
        script = 'hostname "$0"; mount --bind "$1" /etc/hosts; shift; exec "$@"'
        named = ["unshare", "--mount", "--uts", "sh", "-c", script, node, folder / f"hosts-{node}", *command]
        return ["nsenter", f"--net=/run/netns/{node}", *map(str, named)]

    def run(*command, cwd=ROOT):
        done = subprocess.run(on(nodes[0], *command), env=settings, cwd=cwd, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        wait_for(lambda: (folder / "munge.socket").exists())
        daemons.append(subprocess.Popen(on(nodes[0], "slurmctld", "-D"), env=settings, stderr=subprocess.DEVNULL))
        for node in nodes:
            daemons.append(subprocess.Popen(on(node, "slurmd", "-D"), env=settings, stderr=subprocess.DEVNULL))
        idle = on(nodes[0], "sinfo", "--noheader", "--states=idle", "--format=%D")
        wait_for(lambda: subprocess.run(idle, env=settings, capture_output=True, text=True).stdout.strip() == "2")
        yield run
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(60)
        shutil.rmtree(folder)


def wait_for(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def checkout(folder):
    """Clone this repository with its uncommitted changes."""
    subprocess.run(["git", "clone", "-q", "--no-checkout", ROOT, folder], check=True)
    subprocess.run(["git", "reset", "-q"], cwd=folder, check=True)
    files = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True).stdout
    for name in filter(None, files.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def test_stopped_jobs_resume_with_their_code(slurm, runs, tmp_path):
    tree = checkout(tmp_path / "checkout")
    run = Run(runs / "run")

    def is_training(attempt):
        sessions = run.sessions()
        return len(sessions) == attempt and run.newest_metrics()["step"] >= sessions[-1].step + 3

    options = [f"--output={tmp_path}/log", "--nodes=2", "--gpus-per-node=0", "--parsable"]
    job = slurm("sbatch", *options, "accelerate_configs/slurm.sh", *WORDS, "--out_dir", runs, cwd=tree).strip()

    def state():
        return slurm("squeue", "--noheader", "--format=%T", f"--jobs={job}").strip()

    def log():
        return (tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""

    for attempt, stop in enumerate([("scancel", "--signal=USR1"), ("scontrol", "requeue")], start=1):
        wait_for(partial(is_training, attempt))
        if attempt == 1:  # an error for a process that would import it
            (tree / "train.py").write_text("raise SystemExit('edited')\n")
        slurm(*stop, job)
        wait_for(lambda: state() == "PENDING")
        assert run.status().state == "preempted", log()
        slurm("scontrol", "update", f"JobId={job}", "StartTime=now+3seconds")  # not after two minutes
    wait_for(lambda: run.status().state == "finished")
    assert log().count("resumed at step") == 2 and "edited" not in log(), log()
    assert len({session.code for session in run.sessions()}) == 1
    train(*WORDS, "--out_dir", runs / "alone", processes=2, ACCELERATE_MIXED_PRECISION="bf16")
    assert_same_run(run.path, runs / "alone" / "run", STEPS)
