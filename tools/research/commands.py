"""The commands of tools.research: output, errors and exit codes."""

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any

from config.errors import RunError
from config.paths import expand_user_path
from tools.experiment.arm import ArmFailed
from tools.jobs.runner import Failed, Stopped
from tools.research import attempt, confirm, head, log
from tools.research.ledger import create_lab
from tools.research.output import Result
from tools.research.settings import (
    ChainConfig,
    CombineConfig,
    ConfirmConfig,
    DropConfig,
    KeepConfig,
    LogConfig,
    StartConfig,
    TryConfig,
    print_error,
)

EXIT_STOPPED = 75
FUNCTIONS: dict[type[ChainConfig], Callable[[Any], Result]] = {
    StartConfig: head.start,
    TryConfig: attempt.try_idea,
    CombineConfig: attempt.combine,
    KeepConfig: head.keep,
    DropConfig: head.drop,
    ConfirmConfig: confirm.confirm,
    LogConfig: log.log,
}


def main(config: ChainConfig) -> None:
    """Run a command and print its result, with `--json` as one object even if the command fails.

    If stderr is not a terminal, the progress of runs is written to LAB/progress.log.

    Raises:
        ConfigError: a setting or the command is refused.
        RunError: the baseline cannot be trained, or the environment failed.
        SystemExit: with the exit code of the result, or 75 after a signal.
    """
    try:
        result = run(config)
    except BaseException as error:
        if config.print_json:
            print_error(str(error) or type(error).__name__)
        raise
    print(json.dumps(result.facts) if config.print_json else "\n".join(result.lines))
    if result.exit_code:
        raise SystemExit(result.exit_code)


def run(config: ChainConfig) -> Result:
    """Return the result of a command; raise the errors of `main`."""
    lab = expand_user_path("lab", config.lab)
    if isinstance(config, StartConfig):
        create_lab(lab)
    try:
        if sys.stderr.isatty() or not lab.is_dir():
            return FUNCTIONS[type(config)](config)
        with open(lab / "progress.log", "a") as progress, redirect_stderr(progress):
            return FUNCTIONS[type(config)](config)
    except Stopped as stopped:
        return Result({"status": "stopped", "message": str(stopped)}, [str(stopped)], EXIT_STOPPED)
    except Failed as failed:
        raise RunError(f"{failed.job.run.path}: {failed}; log: {failed.job.output}") from None
    except ArmFailed as failed:
        raise RunError(f"the head or the start of the chain: {failed}") from None
    except OSError as error:
        raise RunError(f"{error}; fix this, then rerun the same command to resume") from None
