"""Shared by all tests: run the real train.py in real processes, and read the files that it writes."""

import gc
import json
import locale
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads sleep, since other tests need the core
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # without it the Hub's client retries for half a minute
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # torch reads it at the first matrix product
try:
    socket.gethostbyname(socket.gethostname())
except OSError:  # as in some containers: gloo then warns in every process unless its interface is set
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")

import pytest

from tests.support import forked

if TYPE_CHECKING:  # the controller of pytest-xdist imports this file, too, and needs no torch
    import torch

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and so would its programs

ROOT = Path(__file__).parent.parent
CPU_LAUNCH = ROOT / "accelerate_configs" / "cpu.yaml"

# Files that take some seconds, the longest first.
LONGEST = """test_pages test_replay test_race test_cuda_graph test_prepare test_faults test_trackers test_directory
test_using_docs test_examples test_stories test_gpu_training test_chat test_text test_sharding test_gradients
test_confirm test_compare test_verify test_runs test_environment test_ema test_report test_teacher
test_init_from test_training test_plot test_law test_graph_choice test_prepare_model test_signals test_resume
test_export test_sweep test_tree_reduce test_load""".split()
TINY_STORIES = ["--config", str(ROOT / "tests" / "support" / "tiny_stories.yaml")]


def thinned(values: Iterable[object], every: int) -> list[object]:
    """Return parameters of a test, of which `make test` takes only the first of each `every`."""
    slow = pytest.mark.slow
    return [pytest.param(value, marks=slow if index % every else ()) for index, value in enumerate(values)]


@pytest.fixture
def ascii_locale():
    """A locale in which Python reads and writes text files as ASCII."""
    if sys.flags.utf8_mode:
        pytest.skip("Python ignores the locale")
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    yield
    locale.setlocale(locale.LC_CTYPE, before)


def environment(**extra: str) -> dict[str, str]:
    """Environment variables of a user's shell, without those of pytest and make, and one thread per process."""
    own = "ACCELERATE_", "TORCHELASTIC", "CUBLAS_", "WANDB_", "MAKE", "MFLAGS"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return {**inherited, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", **extra}


def train_command(
    *arguments: str | Path,
    processes: int = 0,
    launch_file: Path = CPU_LAUNCH,
    max_restarts: int = 0,
    script: str = "train.py",
) -> list[str]:
    """`python train.py` for processes=0, else `accelerate launch` with so many processes."""
    launcher = [sys.executable]
    if processes:
        bin_directory = Path(sys.executable).parent
        launcher = [sys.executable, bin_directory / "accelerate", "launch", "--config_file", launch_file]
        launcher += ["--num_processes", processes, "--max_restarts", max_restarts]
    return [str(word) for word in (*launcher, script, *arguments)]


def train(
    *arguments: str | Path,
    processes: int = 0,
    launch_file: Path = CPU_LAUNCH,
    max_restarts: int = 0,
    faults: str = "",
    exit_code: int = 0,
    cwd: Path = ROOT,
    script: str = "train.py",
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """Run train.py to its end and check its exit code; with `faults`, those of tests/programs/faulty_train.py.

    In forked processes (tests/support/forked.py), unless something asks for a real launcher.
    """
    if faults:
        script, env = "tests/programs/faulty_train.py", {**env, "FAULTS": faults}
    if max_restarts or launch_file != CPU_LAUNCH or cwd != ROOT:
        command = train_command(
            *arguments, processes=processes, launch_file=launch_file, max_restarts=max_restarts, script=script
        )
        done = subprocess.run(
            command, cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=forked.HANG_SECONDS
        )
    else:
        words = [str(word) for word in arguments]
        done = forked.run(script, words, processes, environment(**env))
    assert done.returncode == exit_code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def python(command: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `python SCRIPT ...`, `python -m MODULE ...` or `accelerate launch ... SCRIPT ...` as a page shows it, in
    forks, and check that it succeeds."""
    program, *words = shlex.split(command)
    processes = 0
    if program == "accelerate":
        index = next(index for index, word in enumerate(words) if word.endswith(".py") or word == "-m")
        started = what_is_started(*words[1:index])
        processes = int(started.get("WORLD_SIZE", 0))
        env = {name: value for name, value in started.items() if os.environ.get(name) != value} | env
        words = words[index:]
    else:
        assert program == "python"
    if words[0] == "-m":
        words = words[1:]
    script, *arguments = words
    done = forked.run(script, arguments, processes, environment(**env), cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def what_is_started(*flags: str) -> dict[str, str]:
    """The environment of the processes that `accelerate launch FLAGS train.py` starts, by Accelerate's own code."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    args, *_ = _validate_launch_command(launch_command_parser().parse_args([*flags, "train.py"]))
    if args.cpu or not (args.use_fsdp or args.use_megatron_lm or args.multi_gpu):
        return prepare_simple_launcher_cmd_env(args)[1]
    local = int(args.num_processes) // args.num_machines
    started = {"WORLD_SIZE": str(local * args.num_machines), "LOCAL_WORLD_SIZE": str(local)}
    started |= {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    return prepare_multi_gpu_env(args) | started


def commands(page: str) -> list[str]:
    """The lines of all blocks of commands that a page shows, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if not line.startswith("#")]


def shell(command: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a page shows it, with .venv activated, and check that it succeeds."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=cwd,
        env=environment(PATH=path, **env),
        capture_output=True,
        text=True,
        timeout=forked.HANG_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


OWN_SESSION = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}


def interrupt_after(text: str, process: subprocess.Popen[str], timeout: float) -> str:
    """Send SIGINT to an OWN_SESSION, as a terminal does, once a process prints a text; return what they print then."""
    try:
        while text not in process.stdout.readline():
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        return process.communicate(timeout=timeout)[0]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def metrics(run: Path) -> list[dict[str, float]]:
    """Rows of metrics.jsonl from step 1 on, without metrics that depend on the clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > 0]  # 0 is the initial evaluation
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


def tensors(run: Path, step: int) -> "dict[str, torch.Tensor]":
    """All weights and moments of a checkpoint."""
    from safetensors.torch import load_file

    files = (run / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def train_state(model, optimizer, skipped: tuple[int, int] = (0, 0)) -> SimpleNamespace:
    """The part of a TrainState that a checkpoint contains."""
    return SimpleNamespace(network=model, model=model, optimizer=optimizer, results=SimpleNamespace(skipped=skipped))


def rewind(run: Path, step: int) -> None:
    """Remove the checkpoints after a step, as if the run had been killed there."""
    for path in (run / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


def assert_same_bits(ours: "dict[str, torch.Tensor]", theirs: "dict[str, torch.Tensor]") -> None:
    """Check that both have the same tensors, bit for bit."""
    import torch

    assert ours.keys() == theirs.keys() and len(ours) > 10
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, f"{len(different)} of {len(ours)} tensors differ, such as {different[0]}"


def assert_same_run(ours: Path, theirs: Path, step: int) -> None:
    """Check that two runs have the same weights, moments and metrics, bit for bit."""
    assert_same_bits(tensors(ours, step), tensors(theirs, step))
    assert metrics(ours) == metrics(theirs)


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from all tests but those marked `cuda`: the others check bits of the CPU."""
    gc.disable()  # until the tests are collected: imports make no garbage
    if "cuda" not in config.getoption("markexpr").replace("not cuda", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if sys.platform == "darwin":  # a process that has used MPS cannot fork, and the tests fork
            os.environ["ACCELERATE_USE_CPU"] = "true"


def pytest_collection_finish() -> None:
    """Collect garbage from now on, and never what the imports made."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long files first, so that no worker waits for one at the end, and skip what only Linux can run."""
    for item in items:
        if sys.platform != "linux" and item.get_closest_marker("linux_only"):
            item.add_marker(pytest.mark.skip(reason="needs Linux"))
    items.sort(key=lambda item: (*LONGEST, item.path.stem).index(item.path.stem))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed the global generators, so that no test depends on the tests before it."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """An empty directory for `--out_dir`."""
    return tmp_path / "runs"


@pytest.fixture(scope="module")
def in_process():
    """Restore what scripts change in this process: threads, streams, environment variables and signal handlers."""
    import torch

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    threads, streams, variables = torch.get_num_threads(), (sys.stdout, sys.stderr), dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(threads)
    sys.stdout, sys.stderr = streams
    for number, handler in handlers.items():
        signal.signal(number, handler)
