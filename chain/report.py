"""What the commands share: their output, and how a training ends."""

import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

from chain.ledger import Row
from chain.settings import ChainConfig
from config.errors import RunError
from jobs.runner import Failed, Stopped

EXIT_STOPPED = 75


def print_result(config: ChainConfig, facts: dict[str, Any], lines: list[str]) -> None:
    """Print lines, or one JSON object if JSON is asked for."""
    print(json.dumps(facts) if config.json else "\n".join(lines))


def format_effect(row: Row) -> str:
    """Format the difference of a row with its interval; "" if it has none."""
    if not row["difference"]:
        return ""
    return "{:+.1f}% ({:+.1f} to {:+.1f})".format(*(float(row[name]) for name in ("difference", "low", "high")))


@contextmanager
def training(config: ChainConfig, lab: Path) -> Iterator[None]:
    """Write progress to LAB/progress.log unless a terminal shows it; turn what ends a training into an exit.

    Raises:
        SystemExit: with code 75 after a signal.
        RunError: a run of the baseline failed, or a file cannot be written.
    """
    with nullcontext() if sys.stderr.isatty() else open(lab / "progress.log", "a") as file:
        try:
            with redirect_stderr(file) if file else nullcontext():
                yield
        except Stopped:
            message = "stopped by a signal; rerun the same command to resume"
            print_result(config, {"status": "stopped", "message": message}, [message])
            raise SystemExit(EXIT_STOPPED) from None
        except Failed as failed:
            raise RunError(f"{failed.training.directory}: {failed}; see {failed.training.output}") from None
        except OSError as error:
            raise RunError(f"{error}; mend that, then rerun the same command to resume") from None


class Stopwatch:
    """Time and CPU time of the child processes since its creation."""

    def __init__(self):
        self.begin = self.now()

    def now(self) -> tuple[float, float]:
        """Return the time, and the CPU time of the child processes that have ended, in seconds."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.monotonic(), used.ru_utime + used.ru_stime

    def cells(self) -> dict[str, float]:
        """Return the cells of the ledger for what was spent."""
        return {
            name: now - begin
            for name, now, begin in zip(("seconds", "cpu_seconds"), self.now(), self.begin, strict=True)
        }
