"""Two nodes: network namespaces of this machine, connected by a virtual cable that can be cut."""

import shutil
import socket
import subprocess
import time
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from tests.conftest import (
    ROOT,
    TINY_STORIES,
    assert_same_run,
    environment,
    train,
    train_command,
)

pytestmark = pytest.mark.slow
STEPS = 300
LONG = [*TINY_STORIES, *f"--steps {STEPS} --checkpoint.every 10 --evaluation.every 0 --name run".split()]
ADDRESSES = ["10.77.0.1", "10.77.0.2"]


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def nodes():
    """Names of two network namespaces whose `eth0` are connected."""
    names = [f"node-{uuid4().hex[:6]}" for _ in ADDRESSES]
    try:
        for name in names:
            ip("netns", "add", name)
        cable = ["link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1]]
        ip(*cable)
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        pytest.skip(f"network namespaces are not allowed here: {reason}")
    yield names
    for name in names:
        subprocess.run(["ip", "netns", "delete", name])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("uninterrupted")
    train(*LONG, "--out_dir", out_dir, processes=2)
    return out_dir / "run"


def launch(nodes, *arguments, max_restarts=0, master=ADDRESSES[0]):
    """Start one process on each node with the shipped launch file."""
    command = train_command(
        *LONG, *arguments, processes=2, launch_file=ROOT / "accelerate_configs" / "multi_node.yaml",
        max_restarts=max_restarts,
    )  # fmt: skip
    script = command.index("train.py")
    launchers = []
    for rank, node in enumerate(nodes):
        this_node = ["--machine_rank", str(rank), "--main_process_ip", master, "--mixed_precision", "no"]
        launchers.append(
            subprocess.Popen(
                ["ip", "netns", "exec", node, *command[:script], *this_node, *command[script:]],
                cwd=ROOT,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return launchers


def wait_for_checkpoint(run, step, launchers):
    """Wait for a checkpoint of this step or a later one."""
    deadline = time.monotonic() + 300
    while max((int(path.name[5:]) for path in run.glob("checkpoints/step-????????")), default=0) < step:
        assert all(launcher.poll() is None for launcher in launchers), [each.communicate()[0] for each in launchers]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def end(launchers):
    outputs = [launcher.communicate(timeout=300)[0] for launcher in launchers]
    return [launcher.returncode for launcher in launchers], outputs


def test_cut_link_ends_all_then_run_resumes(nodes, uninterrupted, runs):
    launchers = launch(nodes, "--out_dir", runs, "--timeout_seconds", 20)
    wait_for_checkpoint(runs / "run", 20, launchers)
    ip("-n", nodes[0], "link", "set", "eth0", "down")
    exit_codes, outputs = end(launchers)
    assert exit_codes == [1, 1]
    for rank, output in enumerate(outputs):
        if "train.py: error: a checkpoint was not written within 20 s" in output:  # cut while one was being written
            continue
        assert f"train.py: error: process {rank} lost the others in" in output, output
        assert "Timed out waiting 20000ms" in output or "Application timeout caused pair closure" in output
    ip("-n", nodes[0], "link", "set", "eth0", "up")
    exit_codes, outputs = end(launch(nodes, "--out_dir", runs))
    assert exit_codes == [0, 0] and "resumed at step" in outputs[0], outputs
    assert_same_run(runs / "run", uninterrupted, STEPS)


def test_killed_process_restarts_both_nodes(nodes, uninterrupted, runs):
    launchers = launch(nodes, "--out_dir", runs, "--timeout_seconds", 20, max_restarts=2)
    for killed, step in [(1, 20), (0, 120)]:
        wait_for_checkpoint(runs / "run", step, launchers)
        psutil.Process(launchers[killed].pid).children()[0].kill()
    exit_codes, outputs = end(launchers)
    assert exit_codes == [0, 0] and outputs[0].count("resumed at step") == 2, outputs
    assert_same_run(runs / "run", uninterrupted, STEPS)


def test_debian_hosts_file(nodes, uninterrupted, runs):
    """The first node resolves its own name to 127.0.1.1, which the other cannot reach."""
    folders = [Path("/etc/netns", node) for node in nodes]  # `ip netns exec` mounts their files over those of /etc
    try:
        for folder, address in zip(folders, ["127.0.1.1", ADDRESSES[0]], strict=True):
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n{address} node-a\n")
        exit_codes, outputs = end(launch(nodes, "--out_dir", runs, "--timeout_seconds", 20, master="node-a"))
    finally:
        for folder in folders:
            shutil.rmtree(folder)
    assert exit_codes == [0, 0], outputs
    assert_same_run(runs / "run", uninterrupted, STEPS)
