"""Files: written whole or not at all, and read without trust in what is in them."""

import fcntl
import hashlib
import json
import math
import os
import shutil
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TextIO, Union, get_args, get_origin, get_type_hints


def yield_cores() -> None:
    """Leave the cores to training, as a thread that works on files beside it; for the initializer of a pool.

    Where it takes a core from one thread of training, all others wait for that one again and again, and a step takes
    several times as long. On Linux a thread has a priority of its own, elsewhere only the process has.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # no reason not to save
            os.nice(19)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the file by `content` so that a crash leaves either the old or the new, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync(path.parent)


@contextmanager
def folder_written_atomically(path: Path) -> Iterator[Path]:
    """The name of a folder to make, with files in it, which then becomes `path`: there whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    yield temporary
    for written in (*temporary.iterdir(), temporary):
        fsync(written)
    os.replace(temporary, path)
    fsync(path.parent)


def copy_folder(source: Path, path: Path) -> None:
    """Make `path` a copy of a folder of files, whole or not at all; one that is there is left alone."""
    if not path.exists():
        with folder_written_atomically(path) as folder:
            shutil.copytree(source, folder)


def reason_absent(name: str) -> str:
    """Why the name of a folder or of something on the Hub is of neither; "" if it is one's or may be the other's."""
    path = Path(name)
    if path.is_dir() or path.parent == Path() or not path.parent.is_dir():
        return ""
    return f"{name!r} is no directory, and {str(path.parent)!r} is one"


def fsync(path: Path) -> None:
    """Make a file, or the names in a directory, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def share(path: Path) -> None:
    """Let those read a file who can read its folder: safetensors makes files that their owner alone can."""
    with suppress(OSError):  # of a file system without such modes
        path.chmod(path.parent.stat().st_mode & 0o666)


def lock(file: TextIO) -> bool:
    """Take an open file for this process until it is closed; False where another one has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sha256(path: Path) -> str:
    """Of the content of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def finite_or_null(metrics: dict[str, float | str]) -> dict[str, float | str | None]:
    """JSON has no NaN and no infinity: they become null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in metrics.items()
    }


def parse_object(text: str | bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: it is something else.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"no JSON object, but {type(value).__name__}")
    return value


def typed(value: Any, kind: Any, name: str) -> Any:
    """`value`, as a JSON file gave it, as a `kind`: a plain type, a union, dict[str, ...], tuple[...] or a dataclass of
    such. A dataclass ignores keys that it does not know, and takes its default where one is missing.

    Raises:
        ValueError: it is no such thing; says which part, by `name`.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        for one in arguments:
            try:
                return typed(value, one, name)
            except ValueError:
                pass
    elif origin is dict and isinstance(value, dict):
        return {key: typed(item, arguments[1], f"{name}.{key}") for key, item in value.items()}
    elif origin is tuple and isinstance(value, list) and len(value) == len(arguments):
        return tuple(typed(item, one, name) for item, one in zip(value, arguments, strict=True))
    elif is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        if missing := [f.name for f in fields(kind) if f.name not in value and f.default is MISSING]:
            raise ValueError(f"{name} has no {missing[0]}")
        return kind(**{key: typed(value[key], hint, f"{name}.{key}") for key, hint in hints.items() if key in value})
    elif type(value) is kind or (kind is float and type(value) is int):
        return value
    raise ValueError(f"{name} is {str(value)[:40]!r}, which is no {getattr(kind, '__name__', kind)}")
