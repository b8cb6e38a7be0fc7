"""Run the real scripts in forks of a server process that has imported train.py, with a launcher's environment.

Most of the time of a launched test goes into importing torch, in the launcher and in every process. Tests of launching
itself, and of variables that torch reads when it is imported, start real programs (tests/conftest.py).
"""

import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]
PRELOADED = ["train", "verify", "trainer.checkpoint.tensor_files", "torch._dynamo", "torch.distributed.run"]
PRELOADED += ["transformers.models.gpt2.modeling_gpt2", "transformers.models.qwen3.modeling_qwen3"]
PRELOADED += ["sample"]
PRELOADED += ["datasets", "transformers.tokenization_utils_tokenizers"]  # of data.prepare and of tokenizers
PRELOADED += ["torch.utils.cpp_extension"]  # of tests/fake_cuda
PRELOADED += ["pydantic", "google.protobuf.text_format"]  # of wandb, which itself makes a folder for its process
PRELOADED += ["pandas"]  # which pyarrow imports as soon as it makes an array
PRELOADED += ["tests.support.forked"]
HANG_SECONDS = 1800  # only a hang takes that long; on a busy machine torch.compile took five minutes

# Otherwise an import that asks for GPUs would initialise CUDA, which forks cannot use.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(["tests.support.warm"])  # which imports them all


def free_port() -> int:
    """Return an unused port below those that the system assigns, so that no other socket takes it before its use."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port


def fork_ranks(arguments: list[str]) -> None:
    """Replace torchrun, where a script calls it: `--nproc-per-node=N -m MODULE ...`."""
    ranks = int(next(word.partition("=")[2] for word in arguments if word.startswith("--nproc-per-node=")))
    module, *own = arguments[arguments.index("-m") + 1 :]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    children = []
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            sys.argv = [module, *own]
            runpy.run_module(module, run_name="__main__")
            os._exit(0)
        children.append(child)
    sys.exit(int(any([os.waitpid(child, 0)[1] for child in children])))


class ForkedPopen(subprocess.Popen):
    """Replaces subprocess.Popen in torch's launcher: runs `python -u script arguments` in a fork of the launcher."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *_):
        self.pid, self._child_created = os.fork(), True
        if self.pid:
            return
        try:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)  # a fork inherits the launcher's handlers
            python, unbuffered, script, *arguments = args
            assert (python, unbuffered) == (sys.executable, "-u")
            sys.stdout.reconfigure(write_through=True)
            become(script, arguments, env, (), Path.cwd())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)


def become(
    script: str,
    arguments: list[str],
    environment: dict[str, str],
    files: tuple[str, ...],
    cwd: Path,
) -> None:
    """Run `python script arguments` in this forked process, with its output in the two files.

    The script may be a file, the name of a module or `-c`. Processes started by mp.spawn or torchrun, or by torch's
    launcher for the script `accelerate`, are forks as well.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    os.setpriority = lambda *_: None  # on a busy machine a thread of the lowest priority may write nothing for minutes
    # Data workers start as in any program, not in a server of their own.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep) if "PYTHONPATH" in environment else []
    os.chdir(cwd)
    if "FAKE_CUDA" in environment:
        from tests.fake_cuda import device

        device.install()
    if Path(script).name == "accelerate":
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        subprocess_handler.Popen = ForkedPopen
    if script.endswith(".py") or "/" in script:
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
        return
    import torch.distributed.run
    import torch.multiprocessing

    torch.multiprocessing.spawn = partial(torch.multiprocessing.start_processes, start_method="fork")
    torch.distributed.run.main = fork_ranks
    if script == "-c":
        sys.argv = arguments
        exec(arguments[0], {"__name__": "__main__"})
    else:
        sys.argv = [script, *arguments]
        runpy.run_module(script, run_name="__main__", alter_sys=True)


class Launch:
    """A running script: one process without a launcher (`processes=0`), or several as under a launcher."""

    def __init__(
        self,
        script: str,
        arguments: list[str],
        processes: int,
        environment: dict[str, str],
        terminal: str = "",
        cwd: Path = ROOT,
    ):
        self.directory = tempfile.TemporaryDirectory()
        self.files = tuple(terminal or str(Path(self.directory.name, name)) for name in ("out", "err"))
        launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.processes = []
        for rank in range(max(1, processes)):
            own = dict(environment)
            if processes:
                own = {"ACCELERATE_MIXED_PRECISION": "no", **own, **launched}
                own |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                own |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
            words = (script, arguments, own, self.files, cwd)
            self.processes.append(server.Process(target=become, args=words))
        for process in self.processes:
            process.start()

    def wait(self, timeout_seconds: float) -> int:
        """Return the exit code of one process; of several, 0 if all are 0, else 1 after ending the others."""
        deadline = time.monotonic() + timeout_seconds
        while any(process.is_alive() for process in self.processes):
            failed = any(process.exitcode for process in self.processes)
            if failed or time.monotonic() > deadline:
                self.end()
                if not failed:
                    raise subprocess.TimeoutExpired("forked processes", timeout_seconds, *self.output())
            multiprocessing.connection.wait([p.sentinel for p in self.processes if p.is_alive()], timeout=0.5)
        codes = [process.exitcode for process in self.processes]
        return codes[0] if len(codes) == 1 else int(any(codes))

    def end(self) -> None:
        """End the processes as launchers do: terminate, then kill."""
        for stop in ("terminate", "kill"):
            for process in self.processes:
                if process.is_alive():
                    getattr(process, stop)()
            for process in self.processes:
                process.join(60)

    def output(self) -> tuple[str, str]:
        """Return stdout and stderr so far."""
        return tuple(Path(file).read_text() if Path(file).exists() else "" for file in self.files)


class Popen(Launch):
    """Replaces subprocess.Popen for a command `python script arguments`."""

    def __init__(self, command: list[str], env: dict[str, str] | None = None, stdout=None, **_):
        super().__init__(command[1], list(command[2:]), 0, env or dict(os.environ))
        self.pid, self.returncode = self.processes[0].pid, None
        self.stdout = os.dup(stdout.fileno()) if stdout else None

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        if self.returncode is None and not self.processes[0].is_alive():
            self.returncode = super().wait(timeout_seconds=60)
            if self.stdout:
                os.write(self.stdout, "".join(self.output()).encode())
        return self.returncode

    def wait(self, timeout_seconds: float = 60) -> int:
        """Wait for the process and return its exit code."""
        self.processes[0].join(timeout_seconds)
        return self.poll()


# Replaces the module `subprocess` in code that starts trainings.
SUBPROCESS = SimpleNamespace(Popen=Popen, STDOUT=subprocess.STDOUT, run=subprocess.run)


def run(
    script: str,
    arguments: list[str],
    processes: int,
    environment: dict[str, str],
    cwd: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end."""
    launch = Launch(script, arguments, processes, environment, cwd=cwd)
    returncode = launch.wait(HANG_SECONDS)
    return subprocess.CompletedProcess([script, *arguments], returncode, *launch.output())
