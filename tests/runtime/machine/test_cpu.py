"""Number of compute threads of a process."""

import os
import subprocess
import sys

import pytest

from runtime.machine import cores
from runtime.machine.cores import available_cores
from runtime.machine.cpu import threads_to_set
from tests.conftest import ROOT, TINY_STORIES, environment, train_command


@pytest.mark.parametrize(
    ("own", "launcher", "threads"),
    [
        ({}, {}, 8),
        ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}, {}, 4),
        ({"LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}, {}, 8),
        ({"LOCAL_WORLD_SIZE": "16", "OMP_NUM_THREADS": "1"}, {}, 1),
        ({"ACCELERATE_MIXED_PRECISION": "no", "OMP_NUM_THREADS": "1"}, {}, 8),
        ({"OMP_NUM_THREADS": "1"}, {}, None),
        ({"LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1"}, None),
        ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "2"}, None),
    ],
)
def test_threads_to_set_divides_cores_unless_set(own, launcher, threads):
    assert threads_to_set(own, launcher, cores=8) == threads


@pytest.mark.slow
def test_start_block_prints_thread_count(tmp_path):
    """Under a launcher that sets OMP_NUM_THREADS=1, as torchrun and accelerate do."""
    command = train_command(
        *TINY_STORIES, "--steps", 2, "--evaluation.every", 0, "--name", "run", "--out_dir", tmp_path
    )
    launched = {"LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    launcher = f"import os, subprocess; subprocess.run({command}, env={{**os.environ, **{launched}}}, check=True)"
    env = {name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", launcher], cwd=ROOT, env=env, capture_output=True, text=True)
    assert f"1 x cpu, {available_cores()} thread(s) each" in done.stdout, done.stderr


@pytest.mark.parametrize(("script", "cores"), [("echo 4", 4), ("exit 1", 10), ("echo", 10)])
def test_available_cores_of_a_mac(script, cores, monkeypatch, tmp_path):
    """The performance cores of Apple silicon; Intel Macs, where sysctl fails, have cores of one kind."""
    (sysctl := tmp_path / "sysctl").write_text(f'#!/bin/sh\n[ "$*" = "-n hw.perflevel0.physicalcpu" ] && {script}\n')
    sysctl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert available_cores() == cores


QUOTAS = {
    "none": ("0::/job/task", {"job/task/cpu.max": "max 100000", "job/cpu.max": "max 100000"}, 8),
    "of a container": ("0::/", {"cpu.max": "250000 100000"}, 2),
    "below a core": ("0::/", {"cpu.max": "50000 100000"}, 1),
    "above the affinity": ("0::/", {"cpu.max": "1600000 100000"}, 8),
    "of a job around it": ("0::/job/task", {"job/task/cpu.max": "max 100000", "job/cpu.max": "300000 100000"}, 3),
    "outside the namespace": ("0::/../../job", {"cpu.max": "300000 100000"}, 3),
    "version 1": (
        "5:memory:/job\n4:cpuacct,cpu:/job\n0::/",
        {
            "cpu/job/cpu.cfs_quota_us": "400000\n",
            "cpu/job/cpu.cfs_period_us": "100000\n",
            "cpu/cpu.cfs_quota_us": "-1\n",
        },
        4,
    ),
}


@pytest.mark.linux_only
@pytest.mark.parametrize(("lines", "files", "expected"), QUOTAS.values(), ids=QUOTAS)
def test_available_cores_respect_cpu_quotas(lines, files, expected, monkeypatch, tmp_path):
    (tmp_path / "own").write_text(f"{lines}\n")
    for name, content in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(content)
    monkeypatch.setattr(cores, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(cores, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert available_cores() == expected
