"""Run a program that answers requests, each by a line; a stop signal ends it. This module does not import torch."""

import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from tools.jobs import runner

MAX_ERROR_BYTES = 2**16  # of the end of what a program prints on stderr


def read_end(errors: IO[bytes]) -> str:
    """Return the end of what a program has printed into a file."""
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - MAX_ERROR_BYTES))
    return errors.read().decode(errors="replace")


def run_program(
    command: Sequence[str],
    text: str,
    folder: Path | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    answered: Callable[[str], bool] = lambda line: False,
    max_silence: Callable[[], float] = lambda: math.inf,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program on one thread, and kill it after a stop signal.

    It runs in a session of its own, because Ctrl-C is for the command to handle.

    Args:
        command: the program and its arguments.
        text: its standard input.
        folder: in which it runs; None: that of this process.
        is_stopped: whether a stop signal was received.
        answered: called with each line of its output, as soon as it is printed; returns whether it is an answer.
        max_silence: seconds without an answer after which it is killed; its last error then says so.
        environment: variables besides those of this process.
    """
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    # Files cannot fill up as pipes do.
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.NamedTemporaryFile("r", errors="replace") as output,
        tempfile.TemporaryFile() as errors,
    ):
        given.write(text)
        given.seek(0)
        with open(output.name, "w") as written:
            process = subprocess.Popen(
                command,
                stdin=given,
                stdout=written,
                stderr=errors,
                cwd=folder,
                env=variables,
                start_new_session=True,
            )
        printed, problem, last_answer = "", "", time.monotonic()
        try:
            while True:
                has_ended = process.poll() is not None
                more = output.read()
                lines = (printed.rpartition("\n")[2] + more).split("\n")[:-1]
                printed += more
                for line in lines:
                    if answered(line):
                        last_answer = time.monotonic()
                if has_ended or is_stopped():
                    break
                if (seconds := time.monotonic() - last_answer) > max_silence():
                    problem = f"no answer within {seconds:.0f} seconds"
                    break
                time.sleep(runner.POLL_SECONDS)
        finally:
            if process.poll() is None:
                runner.kill_with_children(process.pid)
            exit_code = process.wait()
        return subprocess.CompletedProcess(command, exit_code, printed, problem or read_end(errors))


def ask(
    command: Sequence[str],
    requests: Sequence[str],
    is_stopped: Callable[[], bool] = lambda: False,
    answered: Callable[[int], None] = lambda index: None,
    **options: Any,
) -> list[str | subprocess.CompletedProcess[str]]:
    """Return the answer to each request, an object of JSON, by a program that reads a request from each line.

    A request follows its number and a space, and so does its answer: other lines that the program prints are none.
    Where the program ends or is silent for too long, the request that it was busy with has the ended process instead
    of an answer, and another process answers the others. After a stop signal the answers that there are come back.

    Args:
        command: the program and its arguments.
        requests: each a line.
        is_stopped: whether a stop signal was received.
        answered: called with the index of each request that has its answer.
        options: those of `run_program`.
    """
    answers: list[str | subprocess.CompletedProcess[str]] = []

    def read(line: str) -> bool:
        number, _, answer = line.partition(" ")
        is_answer = number == str(len(answers)) and answer.startswith("{") and len(answers) < len(requests)
        if is_answer:
            answers.append(answer)
            answered(len(answers) - 1)
        return is_answer

    numbered = [f"{number} {request}\n" for number, request in enumerate(requests)]
    while len(answers) < len(requests) and not is_stopped():
        text = "".join(numbered[len(answers) :])
        done = run_program(command, text, is_stopped=is_stopped, answered=read, **options)
        if len(answers) < len(requests) and not is_stopped():
            answers.append(done)
            answered(len(answers) - 1)
    return answers
