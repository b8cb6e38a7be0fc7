"""What the commands share: their output, and how a training ends."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from functools import wraps
from pathlib import Path
from typing import Any

from chain.ledger import Row
from chain.settings import ChainConfig
from config.errors import ConfigError, RunError
from jobs.runner import Failed, Stopped

EXIT_STOPPED = 75


def print_result(config: ChainConfig, facts: dict[str, Any], lines: list[str]) -> None:
    """Print lines, or one JSON object if JSON is asked for."""
    print(json.dumps(facts) if config.json else "\n".join(lines))


def with_json_errors(main: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return the function of a command so that with `--json` it prints one object for an error, too."""

    @wraps(main)
    def printing(config: ChainConfig) -> None:
        try:
            main(config)
        except (ConfigError, RunError) as error:
            if config.json:
                print(json.dumps({"status": "error", "message": str(error)}))
            raise

    return printing


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
