"""The command line of the scripts at the top: settings first and torch after, messages, and the exit codes.

torch takes seconds to import. So a script hands its name to `run_and_exit` before it imports anything, and --help or a
wrong setting is answered at once. This module imports nothing that imports torch.
"""

import atexit
import gc
import os
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import NoReturn

try:
    import fcntl  # noqa: F401
except ImportError:
    print("error: this runs on Linux and macOS, and on Windows inside WSL (wsl --install)", file=sys.stderr)
    sys.exit(2)

from cli.output import ignore_failed_prints, printable_lines
from config.errors import ConfigError, RunError
from config.parser import parse_config, parse_tool
from distributed.environment import normalize_environment
from distributed.signals import Preempted, ignore_stop_signals
from distributed.world import is_main_process, num_processes

# What these print is a log, without which they have done their work all the same. All others are there to print.
PRINT_A_LOG = ("train", "sweep")
ROOT = Path(__file__).parent.parent
SOURCE_DIRS = {path.parent for pattern in ("*.py", "*/*.py", "data/*/*.py") for path in ROOT.glob(pattern)}


def run_and_exit(
    script: str, kind: type | None = None, needs_torch: bool = True, module: str | None = None
) -> NoReturn:
    """End this process with what `run_script` returns."""
    exit_without_teardown(run_script(script, kind, needs_torch, module))


def run_in_notebook(script: str, *words: str) -> None:
    """Run `python SCRIPT.py WORDS` in a cell, or by notebook_launcher, which drops whatever its function returns.

    Raises:
        SystemExit: it has failed, or stopped as asked; with the exit code, after the message.
    """
    sys.argv = [f"{script}.py", *words]
    if exit_code := run_script(script):
        raise SystemExit(exit_code)


def run_script(script: str, kind: type | None = None, needs_torch: bool = True, module: str | None = None) -> int:
    """Run `main` of a module, which is called `script` if none is named, with the settings of the command line, and say
    what went wrong.

    The settings are those of a training, or a `kind`.

    Returns:
        The exit code: 0 done, 2 wrong settings or input, 75 stopped as asked (a signal, stop_after) after saving,
        130 stopped at once by Ctrl-C, where no training was under way, 1 anything else.
    """
    # By default Python looks for garbage after every 700 new objects. The import of torch makes many, none of which is
    # garbage, and the search took a tenth of the start.
    gc.set_threshold(50_000)
    ignore_failed_prints()
    only_a_log = False
    try:
        normalize_environment(os.environ)
    except ConfigError as error:  # every process says it: which is the main one cannot be told
        print(f"{script}.py: error: {error}", file=sys.stderr)
        return 2
    try:
        if planned := script == "train" and "--plan" in sys.argv:
            sys.argv.remove("--plan")
        config = parse_tool(kind, f"{script}.py") if kind else parse_config(num_processes=num_processes())
        if needs_torch and is_main_process():
            print(f"{script}.py: loading torch ...", file=sys.stderr, flush=True)
        only_a_log = script in PRINT_A_LOG and not planned
        import_module("checks.plan" if planned else module or script).main(config)
    except SystemExit as exit_:  # --help and --print_config
        if exit_.code:
            return int(exit_.code)
    except (ConfigError, RunError) as error:
        let_main_process_fail_first()
        print(f"{script}.py: error: {printable_lines(error)}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except Preempted as preempted:
        from accelerate import PartialState

        # A launcher that sees one process end stops the others: none ends before all are done, and then no signal of
        # the launcher may change the exit code.
        PartialState().wait_for_everyone()
        ignore_stop_signals()
        if is_main_process():
            print(preempted, file=sys.stderr)
        return 75
    except KeyboardInterrupt:
        if is_main_process():
            print(f"{script}.py: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if is_memory_error(error):
            print(f"{script}.py: error: {explain_full_memory(error)}", file=sys.stderr)
            return 1
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

    # gloo's errors name its source file. Of two exchanges under way, the second only says that its pair was closed.
    of_gloo = any(words in str(error) for words in ("gloo", "pair closure"))
    if not isinstance(error, DistError) and not of_gloo:
        return ""
    return (
        f"train.py: error: process {os.environ.get('RANK', 0)} lost the others in {own_line(error)}: "
        f"{str(error).splitlines()[0]}\n"
        "A process died or hangs, or a network link is cut (timeout_seconds says how long to wait). Started again, the "
        "run goes on from its newest checkpoint."
    )


def is_memory_error(error: Exception) -> bool:
    """Whether the CPU or a GPU had no memory left."""
    of_cpu = isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)
    return of_cpu or type(error).__name__ == "OutOfMemoryError"  # torch's, which need not be imported for this


def explain_full_memory(error: Exception) -> str:
    """What to print in the place of a traceback where memory was full."""
    reason = f": {str(error).splitlines()[0]}" if str(error) else ""
    return (
        f"no memory left in process {os.environ.get('RANK', 0)}, in {own_line(error)}{reason}\n"
        "What takes less: a smaller micro_batch_size, evaluation.micro_batch_size, seq_len or model, "
        "activation_checkpointing, or more processes with accelerate_configs/fsdp2.yaml. Started again, the run goes "
        "on from its newest checkpoint."
    )


def own_line(error: Exception) -> str:
    """The innermost line of this repository that an error went through, and where it stands."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    here = next(frame for frame in frames if Path(frame.filename).parent in SOURCE_DIRS)
    return f"`{here.line}` ({Path(here.filename).name}, line {here.lineno})"
