"""Processes started by a launcher or by a notebook; and what imports may load."""

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import TCPStore

from model import attention
from runtime.config.errors import ConfigError, RunError
from runtime.distributed import launch, rendezvous
from tests.conftest import ROOT, TINY_STORIES, environment, thinned
from tests.support.forked import free_port, run
from trainer.prepare_model import missing_compiler


def test_windows_is_refused():
    code = "import sys, runpy; sys.modules['fcntl'] = None; runpy.run_path('train.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "Linux and macOS" in done.stderr and "WSL" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_fresh_store_reports_absent_processes(monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "REPORT_AFTER_SECONDS", 0)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(RunError, match=r"process\(es\) \[1, 2\] did not start within 1 s; to train with one process"):
        rendezvous.fresh_store(0, 3, 1)
    assert "still waiting for process(es) [1, 2] to reach 127.0.0.1" in capsys.readouterr().err
    with pytest.raises(RunError, match="process 1 of 2 cannot join the others at MASTER_ADDR:MASTER_PORT 127.0.0.1"):
        rendezvous.fresh_store(1, 2, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_fresh_store_ends_with_the_launcher(rank, monkeypatch):
    """Orphans would wait for `timeout_seconds`; each polls its parent (tests/runtime/distributed/test_signals.py)."""
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(RunError, match="could not be reached .*refused"):  # of process 0, which may not have started
        rendezvous.fresh_store(1, 2, 0.1)
    _store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False) if rank == 1 else None
    checks = iter([False, False, True])
    monkeypatch.setattr(rendezvous, "launcher_is_gone", lambda: next(checks))
    with pytest.raises(RunError, match=f"process {rank} of 2 ends because its launcher has been killed"):
        rendezvous.fresh_store(rank, 2, 600)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # it was killed before this process had begun
    with pytest.raises(RunError, match=f"process {rank} of 2 ends because the launcher at 127.0.0.1 has ended"):
        rendezvous.fresh_store(rank, 2, 600)


def test_fresh_store_reports_foreign_program_at_its_port(monkeypatch):
    with socket.create_server(("", 0)) as foreign:  # accepts connections, and never answers
        port = foreign.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        start = f"cannot join the others at MASTER_ADDR:MASTER_PORT 127.0.0.1:{port}: another program "
        with pytest.raises(RunError, match=f"{start}seems to use the port .*did not answer within 0.1 s"):
            rendezvous.fresh_store(1, 2, 0.1)
        with pytest.raises(RunError, match=f"{start}on this machine uses the port .choose another one"):
            rendezvous.fresh_store(0, 2, 600)


def test_network_interface_leads_to_the_other_machines(monkeypatch):
    """A name that the machine resolves to itself, as Debian's /etc/hosts does, says nothing about its interfaces."""
    addresses = {"lo": "127.0.0.1", "eth0": "192.0.2.1", "ib0": "198.51.100.1"}
    entries = {name: [SimpleNamespace(family=socket.AF_INET, address=each)] for name, each in addresses.items()}
    monkeypatch.setattr(launch.psutil, "net_if_addrs", lambda: entries)
    states = {name: SimpleNamespace(isup=True) for name in addresses}
    monkeypatch.setattr(launch.psutil, "net_if_stats", lambda: states)
    names = {"node-a": "127.0.1.1", "localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1"}
    resolve = lambda name, *_, **__: [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (names[name], 1))]  # noqa: E731
    monkeypatch.setattr(launch.socket, "getaddrinfo", resolve)
    assert launch.network_interface("localhost") == launch.network_interface("127.0.0.1") == "lo"
    message = r"node-a is 127.0.\d.1 on this machine .*set GLOO_SOCKET_IFNAME to .*\(here: eth0, ib0\)"
    with pytest.raises(ConfigError, match=message):
        launch.network_interface("node-a")
    states["ib0"] = SimpleNamespace(isup=False)
    assert launch.network_interface("node-a") == "eth0"
    names["node-a"] = "not an address"
    assert launch.network_interface("node-a") == ""


def test_fresh_store_ignores_dead_processes(monkeypatch):
    """A launcher's store still has the keys that the processes had written before it restarted them."""
    port = free_port()
    launcher_store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def start():
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(rendezvous.fresh_store, 0, 2, 20)
            time.sleep(0.2)  # process 0 may find the question of a dead process 1 before the new one asks
            stores = first, pool.submit(rendezvous.fresh_store, 1, 2, 20)
            stores = [store.result() for store in stores]
        stores[0].set("address", "of this start")
        assert stores[1].get("address") == b"of this start"
        return stores[0]

    first, second = start(), start()
    second.delete_key("address")
    assert first.check(["address"]) and not second.check(["address"])
    assert launcher_store.num_keys() > 0


NOTEBOOK = f"""
from accelerate import notebook_launcher
from runtime.cli.scripts import run_in_notebook
words = [*{TINY_STORIES!r}, "--name", "run", "--out_dir", OUT, *MORE]
notebook_launcher(run_in_notebook, ("train", *words), PROCESSES, mixed_precision="bf16", use_port=PORT)
print("next cell")
"""


def run_notebook(runs, processes, *more):
    """Run the cell in a fork; several processes are forks of it, as in a notebook."""
    variables = f"OUT, PROCESSES, PORT, MORE = {str(runs)!r}, {processes}, {str(free_port())!r}, {more}"
    return run("-c", [variables + NOTEBOOK], 0, environment())


@pytest.mark.slow
def test_notebook_launcher_trains_on_two_processes(runs):
    done = run_notebook(runs, 2)
    assert done.returncode == 0 and done.stdout.endswith("next cell\n"), done.stdout + done.stderr
    assert "2 x cpu" in done.stdout and "precision: bf16" in done.stdout and "Training finished." in done.stdout


@pytest.mark.parametrize("processes", thinned([2, 1], 2))
@pytest.mark.parametrize(
    "more, message",
    [
        (("--optimizer.lr", "-1"), "train.py: error: optimizer.lr: -1 must be a non-negative number"),
        (("--stop_after", "2"), "stopped after step 2; run the same command"),
    ],
    ids=["wrong", "stopped"],
)
def test_failed_notebook_cell_prints_one_message(more, message, processes, runs):
    """Only the first of two processes prints it."""
    done = run_notebook(runs, processes, *more)
    assert done.returncode and "next cell" not in done.stdout
    assert (done.stdout + done.stderr).count(message) == 1 and done.stderr.count("train.py: error") < 2, done.stderr


@pytest.mark.parametrize("machines", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_gloo_uses_the_interface_of_master_addr(machines, runs):
    code = f"import os; os.environ['LOCAL_WORLD_SIZE'] = str({2 // machines}); from runtime.cli import scripts\n"
    code += "scripts.run_script('train'); print(os.environ.get('GLOO_SOCKET_IFNAME'))"
    done = run("-c", [code, *TINY_STORIES, "--steps", "2", "--out_dir", str(runs)], 2, environment())
    assert "2 x cpu" in done.stdout, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "lo"


def test_missing_compiler_without_triton(monkeypatch):
    monkeypatch.setattr(attention, "HAS_TRITON", False)
    assert missing_compiler(torch.device("cuda")) == "no Triton"
    assert missing_compiler(torch.device("cpu")) != "no Triton"


def test_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(attention, "HAS_TRITON", True)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CXX", "c++-99")
    assert missing_compiler(torch.device("cpu")) == "no compiler: c++-99"
    assert missing_compiler(torch.device("cuda")) == "no compiler: gcc or clang"


@pytest.mark.slow
def test_importing_train_loads_no_slow_packages():
    slow = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint", "torch._dynamo")
    slow += ("transformers", "datasets", "wandb", "matplotlib", "export")
    code = f"import sys, train, model.hf; print([name for name in sys.modules if name.startswith({slow})])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr


@pytest.mark.slow
def test_imports_do_not_initialise_cuda():
    """Forks of a process that has initialised CUDA cannot use it; notebooks and tests/support/forked.py fork."""
    code = "import torch; torch.cuda.is_available = torch.cuda.device_count = torch.cuda.init = lambda: 1 / 0\n"
    code += "import train, verify, sample, export, evaluate, trainer.checkpoint.tensor_files"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
