"""The command line of the scripts at the top: settings first and torch after, messages, and the exit codes.

torch takes seconds to import. So a script hands itself to `run` before it imports anything; --help and a wrong setting
are then answered at once. This module imports nothing that imports torch.
"""

import atexit
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TextIO

try:
    import fcntl  # noqa: F401
except ImportError:
    print("error: this runs on Linux and macOS, and on Windows inside WSL (wsl --install)", file=sys.stderr)
    sys.exit(2)

from cli.arguments import parse_config, parse_tool
from config import ConfigError, RunError
from launch.signals import Preempted, ignore_stop_signals
from launch.world import is_main_process, num_processes

PRINT_A_LOG = ("train", "sweep")  # and what all others print is what they are for
# What Open MPI, then MPICH and Intel MPI, then MVAPICH call what torch and Accelerate know by these names.
MPI_NAMES = {
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK"),
}
ROOT = Path(__file__).parent.parent
OWN_FOLDERS = [ROOT / part for part in ("", "analysis", "cli", "data", "launch", "model", "run", "training")]


def run_and_exit(script: str, kind: type | None = None, needs_torch: bool = True) -> NoReturn:
    """End this process with what `run_script` returns."""
    exit_without_teardown(run_script(script, kind, needs_torch))


def run_script(script: str, kind: type | None = None, needs_torch: bool = True) -> int:
    """Run `main` of the module `script` with the settings of the command line, and say what went wrong.

    The settings are those of a training, or a `kind`.

    Returns:
        The exit code: 0 done, 2 wrong settings or input, 75 stopped as asked (a signal, stop_after) after saving,
        130 stopped at once by Ctrl-C, where no training was under way, 1 anything else.
    """
    # Else Python looks for garbage at every 700th new object, and through all that torch brings: a tenth of the start.
    gc.set_threshold(50_000)
    ignore_failed_prints()
    only_a_log = False
    try:
        normalize_environment(os.environ)
        if planned := script == "train" and "--plan" in sys.argv:
            sys.argv.remove("--plan")
        config = parse_tool(kind, f"{script}.py") if kind else parse_config(num_processes=num_processes())
        if needs_torch and is_main_process():
            print(f"{script}.py: loading torch ...", file=sys.stderr, flush=True)
        only_a_log = script in PRINT_A_LOG and not planned
        import_module("analysis.plan" if planned else script).main(config)
    except SystemExit as exit_:  # --help and --print_config
        if exit_.code:
            return int(exit_.code)
    except (ConfigError, RunError) as error:
        let_main_process_fail_first()
        print(f"{script}.py: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except Preempted as preempted:
        from accelerate import PartialState

        PartialState().wait_for_everyone()  # a launcher that sees one process end kills the others
        ignore_stop_signals()  # it may do so before this one has left, too
        if is_main_process():
            print(preempted, file=sys.stderr)
        return 75
    except KeyboardInterrupt:
        if is_main_process():
            print(f"{script}.py: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        traceback.print_exc()
        print(explain_lost_process(error), file=sys.stderr)
        return 1
    sys.stdout.flush()
    if sys.stdout.failure is None or only_a_log:
        return 0
    print(f"{script}.py: error: what it prints cannot be written: {sys.stdout.failure.strerror}", file=sys.stderr)
    return 1


def exit_without_teardown(exit_code: int) -> NoReturn:
    """End the process without tearing the process group down: threads of gloo may then hang or change the exit code."""
    atexit._run_exitfuncs()
    ignore_failed_prints()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def normalize_environment(environment: MutableMapping[str, str]) -> None:
    """Make processes that mpirun or notebook_launcher has started ones like all others; before anything reads them.

    Raises:
        ConfigError: they cannot find each other.
    """
    if "MIXED_PRECISION" in environment:  # notebook_launcher's name for it, which nobody reads
        environment.setdefault("ACCELERATE_MIXED_PRECISION", environment["MIXED_PRECISION"])
    if "WORLD_SIZE" not in environment:
        told = {name: environment[key] for name, keys in MPI_NAMES.items() for key in keys if key in environment}
        if int(told.get("WORLD_SIZE", 1)) == 1:
            return
        told = {"LOCAL_RANK": told["RANK"], "LOCAL_WORLD_SIZE": told["WORLD_SIZE"], "MASTER_PORT": "29500", **told}
        if told["LOCAL_WORLD_SIZE"] == told["WORLD_SIZE"]:
            told["MASTER_ADDR"] = "127.0.0.1"
        environment |= told | dict(environment)
    needed = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        if not (value := environment.get(name, "1")).isdecimal() or int(value) >= 2**16:
            raise ConfigError(f"{name}: {value!r} of the environment is no whole number below 65,536")
    if not int(environment.get("RANK", 0)) < int(environment["WORLD_SIZE"]):
        raise ConfigError(
            f"RANK: {environment.get('RANK', 0)} of the environment, but WORLD_SIZE is {environment['WORLD_SIZE']}; "
            "ranks are counted from 0"
        )
    if int(environment["WORLD_SIZE"]) > 1 and (missing := [name for name in needed if name not in environment]):
        raise ConfigError(
            f"WORLD_SIZE: {environment['WORLD_SIZE']} processes, but {', '.join(missing)} of the environment is not "
            "set; MASTER_ADDR and MASTER_PORT are where the others reach process 0"
        )


class _ForgivingStream:
    """A stream to which writing cannot fail: what nobody reads is dropped, and `failure` says what has no room."""

    def __init__(self, stream: TextIO | None):
        self._stream = stream or open(os.devnull, "w")
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        with self._remembering():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._remembering():
            self._stream.flush()

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            pass  # the reader has left, as `head` does
        except OSError as error:
            self.failure = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def ignore_failed_prints() -> None:
    """From now on no print fails: a pipe that nobody reads, or a log on a full disk, is no reason to stop training."""
    if not isinstance(sys.stdout, _ForgivingStream):
        sys.stdout, sys.stderr = _ForgivingStream(sys.stdout), _ForgivingStream(sys.stderr)


def let_main_process_fail_first() -> None:
    """Wait, where another process than the main one found an error, which the main one most likely found as well.

    A launcher stops all processes as soon as one fails, so the main one's message is the only one. A process that is
    still there after the wait is the only one with the error, as on a machine that cannot see `out_dir`.
    """
    if not is_main_process():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(30)


def explain_lost_process(error: Exception) -> str:
    """What to print below the traceback of `error` where a collective operation failed, else nothing."""
    from torch.distributed import DistError

    # gloo says where it failed, but for the second of two exchanges under way when the first was given up.
    of_gloo = any(words in str(error) for words in ("gloo", "pair closure"))
    if not isinstance(error, DistError) and not of_gloo:
        return ""
    here = next(
        f for f in reversed(traceback.extract_tb(error.__traceback__)) if Path(f.filename).parent in OWN_FOLDERS
    )
    return (
        f"train.py: error: process {os.environ.get('RANK', 0)} lost the others in `{here.line}` "
        f"({Path(here.filename).name}, line {here.lineno}): {str(error).splitlines()[0]}\n"
        "A process died or hangs, or a network link is cut (timeout_seconds says how long to wait). Started again, the "
        "run goes on from its newest checkpoint."
    )
