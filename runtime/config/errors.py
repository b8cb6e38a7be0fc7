"""Errors whose messages are for the user: setting, value, remedy. Programs read their `kind`."""

import errno

# A path of another user, or with a name that is too long, or in a circle of links: not the fault of this program.
UNUSABLE_PATH = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)
FULL_DISK = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)  # also: a file at its size limit, a quota that is used up


class RunError(RuntimeError):
    """A run cannot continue."""

    kind = "error"


class ConfigError(ValueError):
    """A setting or an input that the user must change; the message names it, its value and a remedy."""

    kind = "config"


class OtherRunError(ConfigError):
    """The directory of the run has a run with other settings."""


def error_kind(error: BaseException) -> str:
    """Return what ended a run, in a word for status.json.

    config: a setting or an input must change; non_finite: a loss or gradient is infinite or NaN; disk_full;
    out_of_memory: of the CPU or a GPU; lost_process: a collective operation failed because another process had ended
    or the network is down; error: anything else.
    """
    if isinstance(error, RunError | ConfigError):
        return error.kind
    if isinstance(error, OSError) and error.errno in (*FULL_DISK, *UNUSABLE_PATH):
        return "disk_full" if error.errno in FULL_DISK else "config"
    names = {cls.__name__ for cls in type(error).__mro__}  # by name, to avoid importing torch
    # PyTorch has no type for what its CPU allocator raises, nor for the errors of gloo. These contain the name of its
    # source file, or "pair closure" if another operation had failed before.
    if {"MemoryError", "OutOfMemoryError"} & names or "DefaultCPUAllocator: can't allocate memory" in str(error):
        return "out_of_memory"
    if "DistError" in names or any(words in str(error) for words in ("gloo", "pair closure")):
        return "lost_process"
    return "error"
