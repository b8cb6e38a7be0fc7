"""Runs a program that can write into one folder alone, for code that nobody has read: Linux namespaces.

    python tools/experiment/sandbox.py REQUEST PROGRAM [arguments]

REQUEST is a JSON object of paths: see `command`. The program sees all other files read-only, has temporary folders and
shared memory of its own, and sees no other process. All processes that it starts end with it. This needs no rights: a
user namespace grants them, where the system allows it. A second one takes them away again, so that the program cannot
undo this. It keeps the network, unless REQUEST says otherwise.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

# Of <sched.h>, <sys/mount.h> and <linux/mount.h>
NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
READ_ONLY, RECURSIVE, MOUNT_SETATTR, AT_FDCWD = 1, 0x8000, 442, -100
PARENT_DIED = 1  # PR_SET_PDEATHSIG
SIGNAL_BASE = 128  # exit code of a program that a signal ended, as in a shell


def command(
    program: Sequence[str],
    hidden: Iterable[Path],
    kept: Iterable[Path],
    writable: Iterable[Path] = (),
    network: bool = True,
) -> list[str]:
    """Return the command that runs a program in a sandbox.

    Args:
        program: and its arguments.
        hidden: folders that the program sees as empty. In the first one its temporary files are.
        kept: files and folders below hidden ones that it can read.
        writable: folders, also below hidden ones, into which it can write. They are created.
        network: whether it has one.
    """
    paths = {"hidden": hidden, "kept": kept, "writable": writable}
    request = {name: [str(path.resolve()) for path in some] for name, some in paths.items()}
    return [sys.executable, "-IS", __file__, json.dumps(request | {"network": network}), *program]


@cache
def problem() -> str:
    """Return why this system has no sandbox; "" if it has one."""
    if sys.platform != "linux":
        return f"{sys.platform} has no namespaces"
    done = subprocess.run(command(["true"], [], []), capture_output=True, text=True)
    return "" if done.returncode == 0 else next(iter(done.stderr.strip().splitlines()[-1:]), "it does not start")


def is_available() -> bool:
    """Return whether this system has a sandbox; if not, warn once, because the code of ideas then runs without it."""
    if reason := problem():
        warn(reason)
    return not reason


@cache
def warn(reason: str) -> None:
    """Print, once for each reason, that there is no sandbox."""
    print(f"the code of ideas runs without a sandbox, read it first: {reason}", file=sys.stderr)


def call(function: str, *arguments: Any) -> None:
    """Call a function of the C library; raise OSError if it fails."""
    words = [word.encode() if isinstance(word, str) else word for word in arguments]
    if getattr(LIBC, function)(*words) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int = 0) -> None:
    call("mount", source, target, kind, ctypes.c_ulong(flags), None)


def set_read_only(path: str, value: bool) -> None:
    """Make a mount read-only, with all mounts below it, or make a mount writable."""
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY * value, READ_ONLY * (not value), 0, 0)
    call("syscall", MOUNT_SETATTR, AT_FDCWD, path, RECURSIVE * value, attributes, 32)


def enter_namespaces(kinds: int) -> None:
    """Enter new namespaces under the same account."""
    user, group = os.getuid(), os.getgid()
    call("unshare", kinds | NEW_USER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path("/proc/self", name).write_text(text)


def set_up(request: dict[str, Any]) -> None:
    """Mount what a program may see and write; this process is the first one of its PID namespace."""
    call("prctl", PARENT_DIED, signal.SIGKILL)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    for path in request["writable"]:
        os.makedirs(path, exist_ok=True)
    # Opened before they are hidden: a descriptor leads to a folder below a mount, too.
    shown = {path: os.open(path, os.O_PATH) for path in (*request["kept"], *request["writable"])}
    set_read_only("/", True)
    for folder in [*request["hidden"], "/dev/shm"]:
        if os.path.isdir(folder):
            mount("tmpfs", folder, "tmpfs")
    for path, descriptor in sorted(shown.items()):
        if not os.path.exists(path):
            os.makedirs(path if os.path.isdir(f"/proc/self/fd/{descriptor}") else os.path.dirname(path), exist_ok=True)
            if not os.path.exists(path):
                Path(path).touch()
        mount(f"/proc/self/fd/{descriptor}", path, None, MS_BIND)
        set_read_only(path, path not in request["writable"])
    if request["hidden"]:
        folder = os.path.join(request["hidden"][0], "tmp")
        os.makedirs(folder, exist_ok=True)
        os.environ["TMPDIR"] = folder
    mount("proc", "/proc", "proc")


def wait_for(child: int) -> int:
    """Wait for a process while others may end, too; return its exit code."""
    while True:
        process, status = os.wait()
        if process == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else SIGNAL_BASE - code


def end_others() -> None:
    """Kill all other processes of the PID namespace, of which this is the first one; their CPU time becomes its own."""
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.wait()


def fork_and_wait(ignored: Iterable[int]) -> int | None:
    """Return None in a child process, and its exit code in this one, which leaves these signals to it."""
    child = os.fork()
    if not child:
        return None
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    return wait_for(child)


def main(text: str, *program: str) -> int:
    """Run a program in a sandbox; return its exit code."""
    request = json.loads(text)
    signals = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
    folder = os.getcwd()
    enter_namespaces(NEW_MOUNTS | NEW_IPC | NEW_PIDS | (0 if request["network"] else NEW_NETWORK))
    if (code := fork_and_wait(signals)) is not None:
        if (number := code - SIGNAL_BASE) in signal.valid_signals():  # end in the way in which the program ended
            if number in signals:
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        return code
    set_up(request)
    if (code := fork_and_wait(signals)) is not None:
        end_others()
        os._exit(code)
    enter_namespaces(NEW_MOUNTS)  # without the right to change the mounts of the first one
    os.chdir(folder)  # by its path: this process is still in the folder below the mounts, perhaps in a hidden one
    os.execvp(program[0], program)


if __name__ == "__main__":
    LIBC = ctypes.CDLL(None, use_errno=True)
    try:
        sys.exit(main(*sys.argv[1:]))
    except OSError as error:
        sys.exit(f"sandbox: {error}")
