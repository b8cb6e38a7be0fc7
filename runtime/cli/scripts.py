"""Run a script or tool: parse its command line before importing torch, print errors, return exit codes.

torch takes seconds to import. Therefore a script calls `run_and_exit` before it imports anything else, so that --help
and wrong settings are reported at once. This module imports nothing that imports torch.
"""

import atexit
import gc
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

try:
    import fcntl  # noqa: F401
except ImportError:
    print("error: this runs on Linux and macOS, and on Windows inside WSL (wsl --install)", file=sys.stderr)
    sys.exit(2)

from runtime.cli.output import LossyStream, ignore_failed_prints, printable
from runtime.config.errors import ConfigError, RunError, error_kind
from runtime.config.parser import parse_config, parse_tool
from runtime.distributed.signals import Preempted, ignore_stop_signals, launcher
from runtime.distributed.world import is_main_process, num_processes, process_rank

# Scripts that print only a log, and succeed even if it is lost. The output of the others is their result.
PRINT_A_LOG = ("train", "tools.sweep")
ROOT = Path(__file__).parents[2]

# The class of a script's settings, or a function that parses its command line.
SettingsParser = type | Callable[[list[str]], Any]


def run_and_exit(*arguments: Any, **named: Any) -> None:
    """Call `run_script` with these arguments, and end this process with the exit code that it returns.

    Do nothing where multiprocessing imports the program again, in a child process, for its functions and classes.
    """
    if sys._getframe(1).f_globals["__name__"] != "__mp_main__":
        exit_without_teardown(run_script(*arguments, **named))


def run_in_notebook(script: str, *args: str) -> None:
    """Run `python SCRIPT.py ARGS` in a cell or by notebook_launcher; raise SystemExit unless it succeeds."""
    sys.argv = [f"{script}.py", *args]
    if "MIXED_PRECISION" in os.environ:  # set by notebook_launcher, not read by Accelerate
        os.environ.setdefault("ACCELERATE_MIXED_PRECISION", os.environ["MIXED_PRECISION"])
    if exit_code := run_script(script):
        raise SystemExit(exit_code)


def run_script(
    script: str,
    settings: SettingsParser | None = None,
    needs_torch: bool = True,
    module: str | None = None,
    commands: Mapping[str, tuple[SettingsParser, str]] | None = None,
) -> int:
    """Parse the command line, call `main` of a module with the settings, and print errors.

    Args:
        script: name of the module that is run, such as train or tools.compare.
        settings: default: the settings of train.py.
        needs_torch: whether the module imports torch, which is then reported because it takes seconds.
        module: the module whose `main` is called; default: the script.
        commands: settings and module for each subcommand, the first word of the command line.

    Returns:
        The exit code: 0 done, 2 wrong settings or input, 75 stopped by a signal or stop_after after saving, 130 stopped
        at once by Ctrl-C outside training, 1 anything else.
    """
    # By default Python collects garbage after a few hundred new objects, which took a tenth of the startup: importing
    # torch creates many objects, and none is garbage.
    gc.set_threshold(50_000)
    launcher()  # before torch is imported, which takes seconds in which the launcher may be killed
    ignore_failed_prints()
    program = script if "." in script else f"{script}.py"
    args = sys.argv[1:]
    if commands and args and args[0] in commands:
        (settings, module), args = commands[args[0]], args[1:]
    is_log = False
    try:
        if settings is None:
            config = parse_config(args, num_processes(), program, notify=print_notice)
        elif isinstance(settings, type):
            config = parse_tool(settings, program, args)
        else:
            config = settings(args)
        if needs_torch and is_main_process():
            print(f"{program}: loading torch ...", file=sys.stderr, flush=True)
        is_log = script in PRINT_A_LOG  # not earlier: --help and --print_config print a result
        import_module(module or script).main(config)
    except BaseException as error:
        if exit_code := report(error, program):
            return exit_code
    # The script has succeeded, unless its result was lost.
    sys.stdout.flush()
    failure = sys.stdout.failure if isinstance(sys.stdout, LossyStream) else None
    if failure is None or is_log:
        return 0
    print(f"{program}: error: the output cannot be written: {failure.strerror}", file=sys.stderr)
    return 1


def print_notice(notice: str) -> None:
    """Print a line to stderr, once for all processes."""
    if is_main_process():
        print(notice, file=sys.stderr, flush=True)


def report(error: BaseException, program: str) -> int:
    """Print the exception that ended a script, in one line if its cause is known, and return the exit code."""
    match error:
        case SystemExit():  # --help and --print_config
            return int(error.code or 0)
        case KeyboardInterrupt():
            if is_main_process():
                print(f"{program}: interrupted", file=sys.stderr)
            return 130
        case Preempted():
            exit_together()
            if is_main_process():
                print(error, file=sys.stderr)
            return 75
        case ConfigError() | RunError():
            message, is_shared = str(error), True
        case OSError() if error_kind(error) == "config":
            message, is_shared = f"{error.filename}: {error.strerror}", True
        case Exception() if error_kind(error) == "out_of_memory":
            message, is_shared = explain_full_memory(error), False
        case Exception() if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            message, is_shared = explain_failed_compilation(error), True
        case _:
            traceback.print_exception(error)
            message = explain_lost_process(error) if error_kind(error) == "lost_process" else ""
            is_shared = False
    if is_shared:
        let_main_process_fail_first()
    if message:
        print(f"{program}: error:", printable(message, kept="\n"), file=sys.stderr)
    return 2 if error_kind(error) == "config" else 1


def exit_together() -> None:
    """Return when all processes have saved and ignore signals; called by all together.

    When one process ends, a launcher stops the others with a signal, which would change their exit codes.
    """
    from accelerate import PartialState

    PartialState().wait_for_everyone()
    ignore_stop_signals()
    PartialState().wait_for_everyone()


def exit_without_teardown(exit_code: int) -> NoReturn:
    """End the process without destroying the process group: its gloo threads might hang or change the exit code."""
    atexit._run_exitfuncs()
    ignore_failed_prints()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def let_main_process_fail_first() -> None:
    """Wait in the other processes, so that an error of all processes is printed once, by the main process.

    A launcher stops all processes as soon as one fails. A process that still runs after the wait is the only one with
    the error, such as one whose machine lacks `out_dir`.
    """
    if not is_main_process():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(30)


def explain_lost_process(error: BaseException) -> str:
    """Return the message below the traceback of a failed collective operation."""
    return (
        f"process {process_rank()} lost the others in {own_line(error)}: {str(error).splitlines()[0]}\n"
        "A process died or hangs, or a network link is down (timeout_seconds limits the wait). Rerun the same command "
        "to resume from the newest checkpoint."
    )


def explain_full_memory(error: Exception) -> str:
    """Return the message instead of the traceback of an out-of-memory error."""
    reason = f": {str(error).splitlines()[0]}" if str(error) else ""
    return (
        f"out of memory in process {process_rank()}, in {own_line(error)}{reason}\n"
        "Less memory is needed with a smaller micro_batch_size, evaluation.micro_batch_size, seq_len or model, with "
        "activation_checkpointing, or on more processes with accelerate_configs/fsdp2.yaml. Rerun the same command to "
        "resume from the newest checkpoint."
    )


def explain_failed_compilation(error: Exception) -> str:
    """Write the traceback of torch.compile's error to a file and return what to print instead."""
    # torch adds two lines about its own logs.
    own = re.compile("TORCHDYNAMO_VERBOSE|TORCH_LOGS")
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not own.search(line)]
    with tempfile.NamedTemporaryFile("w", prefix="torch-compile-", suffix=".log", delete=False) as log:
        traceback.print_exc(file=log)
    return (
        f"compile: torch.compile failed: {lines[-1] if lines else type(error).__name__}\n"
        f"All of its output is in {log.name}. Train without it, more slowly, with --compile false."
    )


def own_line(error: BaseException) -> str:
    """Return the innermost line of this repository's code in the traceback of an error, with its file and number."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    frame = next(f for f in frames if f.filename.startswith(f"{ROOT}/") and "site-packages" not in f.filename)
    return f"`{frame.line}` ({Path(frame.filename).name}, line {frame.lineno})"
