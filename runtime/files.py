"""Files and folders: written whole or not at all, and locked against a second writer."""

import errno
import fcntl
import hashlib
import os
import shutil
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import TextIO

import psutil

from runtime.config.errors import ConfigError
from runtime.distributed.signals import Interrupted, never_stop
from runtime.distributed.world import is_main_process

# Errors of file systems without locks, or that cannot fsync a folder, such as some on a network.
NOT_SUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOLCK}
WITHOUT_LOCKS = "MINI_GPT_WITHOUT_LOCKS"
LOCK_NAME = "lock"
CHUNK_BYTES = 2**20  # read at once; takes milliseconds, so a stop is seen at once
PROGRESS_SECONDS = 10


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file so that a crash leaves either the old content or the new, never a part.

    Several processes and threads may replace it at the same time: the last one to finish wins.
    """
    host = socket.gethostname()
    for leftover in path.parent.glob(f"{escape(path.name)}.{escape(host)}-*.tmp"):
        number = leftover.name.rsplit("-", 2)[1]
        if not (number.isdecimal() and psutil.pid_exists(int(number))):  # of a killed process
            leftover.unlink(missing_ok=True)
    temporary = path.with_name(f"{path.name}.{host}-{os.getpid()}-{threading.get_native_id()}.tmp")
    temporary.unlink(missing_ok=True)  # of an earlier process with the same number
    with open(temporary, "xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        flush_to_disk(file.fileno())
    os.replace(temporary, path)
    fsync(path.parent)


def read_user_text(setting: str, path: Path) -> str:
    """Return the text of a file that a user wrote, without the byte order mark that some editors put before UTF-8.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8; the message names `setting` and the file.
    """
    try:
        content = path.read_bytes()
        if b"\0" in content:  # UTF-16, whose ASCII letters are valid UTF-8
            raise ValueError("it has zero bytes, as UTF-16 does")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{setting}: {str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{setting}: {str(path)!r} is not a text in UTF-8: {error}; save it as UTF-8") from None


def open_regular(path: str | Path, flags: int) -> int:
    """Open a file, as `opener` of `open`; raise OSError if it is none, such as a pipe, which would block."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        raise OSError(errno.EINVAL, "Is no regular file")
    return descriptor


def open_no_link(path: str | Path, flags: int) -> int:
    """Do the same; raise OSError also if it is a link, which may lead out of a stranger's folder."""
    return open_regular(path, flags | os.O_NOFOLLOW)


def write_once(path: Path, content: bytes) -> Path:
    """Write a file whose path contains a hash of its content, unless it exists; return the path."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    return path


@contextmanager
def folder_written_atomically(path: Path) -> Iterator[Path]:
    """Yield the path of a folder to create and fill, which is renamed to `path` at the end."""
    temporary = path.with_name(path.name + ".tmp")
    if temporary.is_symlink():
        temporary.unlink()
    shutil.rmtree(temporary, ignore_errors=True)
    yield temporary
    for written in (*temporary.iterdir(), temporary):
        fsync(written)
    os.replace(temporary, path)
    fsync(path.parent)


def move_aside(path: Path) -> Path:
    """Rename a file or folder to the first free name of NAME.old-1, NAME.old-2, ...; return the new path."""
    number = 1
    while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    os.rename(path, aside)
    return aside


def folder_problems(name: str) -> list[str]:
    """List why `name` is neither a folder nor a name on the Hub."""
    path = Path(name)
    if path.is_dir() or path.parent == Path() or not path.parent.is_dir():
        return []
    return [f"{name!r} is not a directory"]


def copy_contents(source: Path, folder: Path) -> None:
    """Copy a folder without modes and times, which cannot be set on some network file systems (EPERM)."""
    for path in (source, *sorted(source.rglob("*"))):
        if path.is_dir():
            (folder / path.relative_to(source)).mkdir()
        else:
            shutil.copyfile(path, folder / path.relative_to(source))


def fsync(path: Path) -> None:
    """Flush a file, or the names in a folder if the file system can, so that it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flush_to_disk(descriptor)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def flush_to_disk(descriptor: int) -> None:
    """Flush an open file, so that it survives a power failure; on macOS os.fsync does not flush the drive's cache."""
    if full_fsync := getattr(fcntl, "F_FULLFSYNC", None):
        with suppress(OSError):  # a file system without it, such as one on a network
            fcntl.fcntl(descriptor, full_fsync)
            return
    os.fsync(descriptor)


def copy_folder_permissions(path: Path) -> None:
    """Make a file readable by those who can read its folder; safetensors creates files only for their owner."""
    with suppress(OSError):  # a file system without such modes
        path.chmod(path.parent.stat().st_mode & 0o666)


def lock(file: TextIO, wait: bool = False) -> bool:
    """Lock an open file until it is closed; if another process has locked it, wait for it or return False.

    Raises:
        ConfigError: its file system has no locks, and MINI_GPT_WITHOUT_LOCKS is not set.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        if os.environ.get(WITHOUT_LOCKS) != "1":
            raise ConfigError(
                f"{Path(file.name).parent}: its file system has no locks ({error.strerror}), which keep two programs "
                "from writing there at once. Mount it with locks (Lustre: -o flock), name a folder elsewhere, or set "
                f"{WITHOUT_LOCKS}=1 in the environment and make sure yourself that only one program writes there"
            ) from None
    return True


@contextmanager
def temporary_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Create a folder in `parent`, and remove it afterwards; first remove those of processes that were killed."""
    for leftover in parent.glob(f"{prefix}*/{LOCK_NAME}"):
        with suppress(OSError), open(leftover, "a", opener=open_no_link) as file:  # another user's, or just removed
            if lock(file) and os.environ.get(WITHOUT_LOCKS) != "1":
                shutil.rmtree(leftover.parent, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as folder,
        open(Path(folder, f"{LOCK_NAME}.tmp"), "w") as file,
    ):
        # Locked before it has the name by which another process finds it.
        lock(file)
        os.replace(file.name, Path(folder, LOCK_NAME))
        yield Path(folder)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content as hexadecimal digits."""
    [digest] = hash_files([path])
    return digest


def hash_files(paths: Sequence[Path], should_stop: Callable[[], bool] = never_stop) -> Iterator[str]:
    """Yield the SHA-256 of each file's content as hexadecimal digits.

    On a slow disk this takes minutes, so the main process prints every PROGRESS_SECONDS how far it is.

    Raises:
        Interrupted: `should_stop()`, which is asked often, is true.
        OSError: a file cannot be read.
    """
    num_bytes, total = 0, sum(path.stat().st_size for path in paths)
    last_progress, chunk = time.monotonic(), memoryview(bytearray(CHUNK_BYTES))
    for path in paths:
        digest = hashlib.sha256()
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(chunk):
                if should_stop():
                    raise Interrupted
                digest.update(chunk[:count])
                num_bytes += count
                if time.monotonic() - last_progress >= PROGRESS_SECONDS and is_main_process():
                    last_progress = time.monotonic()
                    read = f"{num_bytes / 1e9:.1f} of {total / 1e9:.1f} GB"
                    print(f"comparing checksums: {read} read, now {path} ...", file=sys.stderr, flush=True)
        yield digest.hexdigest()
