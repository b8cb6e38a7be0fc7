"""The Slurm script starts the launchers, and requeues the job if and only if the state in status.json is preempted."""

import json
import os
import subprocess

import pytest

from tests.conftest import ROOT

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
[ -z "$LEAVES" ] || { echo "$LEAVES" > "$RUN/status.json.tmp"; mv "$RUN/status.json.tmp" "$RUN/status.json"; }
exit 1
"""


def status(state):
    return json.dumps({"state": state, "step": 3, "reason": "was preempted or finished"}) if state else ""


@pytest.mark.parametrize(
    "before, left, exit_code, requeued",
    [
        ("", "finished", 0, False),
        ("preempted", "preempted", 0, True),
        ("preempted", "finished", 0, False),
        ("preempted", "failed", 1, False),
        ("", "running", 1, False),
        ("preempted", "", 1, False),  # refused before it wrote a status
        ("finished", "", 1, False),
        ("", "", 1, False),
    ],
)
def test_preempted_job_is_requeued(before, left, exit_code, requeued, tmp_path):
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "accelerate": ACCELERATE}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    run = tmp_path / "a run"
    run.mkdir()
    if before:
        (run / "status.json").write_text(status(before))
    slurm = {
        "SLURM_JOB_ID": "123456",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": "32",
        "SLURM_JOB_NODELIST": "node-[a-b]",
    }
    environment = {**os.environ, **slurm, "PATH": f"{commands}:{os.environ['PATH']}", "RUN": str(run)}
    environment["LEAVES"] = status(left)
    script = ROOT / "accelerate_configs" / "slurm.sh"
    arguments = ["--config", "configs/stories.yaml", "--name", "two words"]
    done = subprocess.run(["bash", script, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == exit_code, done.stderr
    assert (tmp_path / "requeued").exists() == requeued
    assert (tmp_path / "cpus_per_task").read_text() == "32\n"
    assert ("RUN is not out_dir/name of the run" in done.stderr) == (not left)
    launched = (tmp_path / "launched").read_text().splitlines()
    for node, line in enumerate(launched):
        for words in (f"--machine_rank|{node}|", "--num_machines|2|", "--num_processes|8|", "--main_process_ip|node-a|",
                      "--main_process_port|23456|", "--max_restarts|3|train.py|", "|--name|two words|"):  # fmt: skip
            assert words in line
        assert line.count("SIGUSR1") == 2
    assert len(launched) == 2
