"""The Slurm script starts the launchers, and requeues the job if and only if the state in status.json is preempted."""

import fcntl
import json
import os
import subprocess

import pytest

from tests.conftest import ROOT, thinned

SRUN = """#!/bin/bash
echo "$SRUN_CPUS_PER_TASK" > cpus_per_task
for SLURM_NODEID in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$SLURM_NODEID "$@"; done
"""
SCONTROL = """#!/bin/bash
[ "$1" = show ] && printf 'node-a\\nnode-b\\n'
[ "$1" = requeue ] && echo "$2" >> requeued
exit 0
"""
ACCELERATE = """#!/bin/bash
printf '%s|' "$@" >> launched
echo "$PET_SIGNALS_TO_HANDLE $TORCHELASTIC_SIGNALS_TO_HANDLE $PET_SHUTDOWN_TIMEOUT" >> launched
cat "$CODE/train.py" >> code
[ -z "$LEAVES" ] || { echo "$LEAVES" > "a run/two words/new"; mv "a run/two words/"{new,status.json}; }
exit 1
"""
NVIDIA_SMI = """#!/bin/bash
printf 'GPU 0: NVIDIA H100\\nGPU 1: NVIDIA H100\\n'
"""
ARGUMENTS = ["--config", "configs/mine.yaml", "--out_dir", "a run", "--name", "two words"]


def status(state, kind=None):
    return json.dumps({"state": state, "step": 3, "reason": "was preempted or finished", "kind": kind}) if state else ""


@pytest.fixture
def submit(tmp_path):
    """Return a function that runs the script in a checkout with stand-ins for the commands of Slurm and Accelerate."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "accelerate": ACCELERATE, "nvidia-smi": NVIDIA_SMI}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.yaml").write_text("steps: 7\n")
    (tmp_path / "train.py").write_text("committed\n")
    (tmp_path / "deleted.py").write_text("")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com"]
    for words in (["init", "-q"], ["add", "configs", "train.py", "deleted.py"], ["commit", "-qm", "First"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    (tmp_path / "deleted.py").unlink()
    (tmp_path / "train.py").write_text("first\n")
    (tmp_path / "a run" / "two words").mkdir(parents=True)

    def run(*arguments, leaves="", **variables):
        slurm = {
            "SLURM_JOB_ID": "123456",
            "SLURM_NNODES": "2",
            "SLURM_GPUS_ON_NODE": "4",
            "SLURM_CPUS_PER_TASK": "32",
            "SLURM_JOB_NODELIST": "node-[a-b]",
        }
        path = f"{commands}:{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
        environment = {**os.environ, **slurm, "PATH": path, "PYTHONPATH": str(ROOT), "LEAVES": leaves, **variables}
        script = ROOT / "accelerate_configs" / "slurm.sh"
        command = ["bash", script, *(arguments or ARGUMENTS)]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


ENDS = [
    ("preempted", "failed", "error", 1, False, 4),
    ("", "finished", None, 0, False, 1),
    ("preempted", "preempted", None, 0, True, 1),
    ("", "running", None, 1, False, 4),  # killed
    ("preempted", "failed", "config", 1, False, 1),
    ("preempted", "failed", "non_finite", 1, False, 1),
    ("preempted", "", None, 1, False, 1),  # refused before it wrote a status
    ("", "", None, 1, False, 1),
]


@pytest.mark.parametrize("end", thinned(ENDS, 2), ids=str)
def test_preempted_job_is_requeued(end, tmp_path, submit):
    before, left, kind, exit_code, requeued, attempts = end
    if before:
        (tmp_path / "a run" / "two words" / "status.json").write_text(status(before))
    done = submit(leaves=status(left, kind))
    assert done.returncode == exit_code, done.stderr
    assert (tmp_path / "requeued").exists() == requeued
    assert (tmp_path / "cpus_per_task").read_text() == "32\n"
    assert ("train.py refused to start" in done.stderr) == (not left)
    launched = (tmp_path / "launched").read_text().splitlines()
    for number, line in enumerate(launched):
        for words in (f"--machine_rank|{number % 2}|", "--num_machines|2|", "--num_processes|8|",
                      "--main_process_ip|node-a|", "--main_process_port|23456|", "|--name|two words|"):  # fmt: skip
            assert words in line
        assert line.count("SIGUSR1") == 2
    assert len(launched) == 2 * attempts


def test_requeued_job_continues_with_the_code_of_its_first_attempt(tmp_path, submit):
    code = tmp_path / "runs" / ".code" / "123456"
    submit(leaves=status("preempted"))
    (tmp_path / "train.py").write_text("edited\n")
    (tmp_path / "configs" / "mine.yaml").write_text("stepps: 8\n")  # no attempt of the job reads it
    changes = subprocess.run(["git", "status", "--short"], cwd=code, capture_output=True, text=True).stdout
    assert " D deleted.py\n M train.py\n" in changes  # beside the commit, as in the working tree
    assert (code / "configs" / "mine.yaml").read_text() == "steps: 7\n"
    assert submit(leaves=status("finished")).returncode == 0
    assert (tmp_path / "code").read_text() == "first\n" * 4
    assert (tmp_path / "launched").read_text().count(f"{code}/train.py|--config|{code}/configs/mine.yaml|") == 4
    assert not code.exists()
    assert "mine.yaml: stepps is not a setting" in submit(SLURM_JOB_ID="7").stderr and not code.parent.exists()
    (tmp_path / "configs" / "mine.yaml").write_text("steps: 8\n")
    submit(leaves=status("finished"), SLURM_JOB_ID="7")
    assert (tmp_path / "code").read_text().endswith("first\nedited\nedited\n")


def test_wrong_settings_and_runs_in_use_start_no_node(tmp_path, submit):
    done = submit(*ARGUMENTS, "--stepps", "7")
    assert done.returncode == 2 and "train.py: error: stepps" in done.stderr and "steps" in done.stderr
    with open(tmp_path / "a run" / "two words" / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = submit()
    assert done.returncode == 2 and "a run/two words is in use" in done.stderr
    assert not (tmp_path / "launched").exists()


@pytest.mark.slow
def test_tasks_of_an_array_train_different_runs(tmp_path, submit):
    done = submit(*ARGUMENTS, "--seed", "%a", SLURM_ARRAY_TASK_ID="3")
    assert done.returncode == 2 and "All tasks of this array would train a run/two words" in done.stderr
    submit(*ARGUMENTS[:4], "--name", "seed_%a", "--seed=%a", SLURM_ARRAY_TASK_ID="3")
    assert "|--name|seed_3|--seed=3|" in (tmp_path / "launched").read_text()


@pytest.mark.parametrize("gpus, processes", [("", 4), (NVIDIA_SMI.partition("\n")[0] + "\nexit 9\n", 2)])
def test_gpus_are_counted_where_slurm_does_not(gpus, processes, tmp_path, submit):
    if gpus:
        (tmp_path / "bin" / "nvidia-smi").write_text(gpus)
    submit(SLURM_GPUS_ON_NODE="")
    assert f"--num_processes|{processes}|" in (tmp_path / "launched").read_text()
