"""Unusual machines: each row starts a real program and checks its exit code and output.

A row has environment variables, code that runs before the program (for another terminal encoding, limits or a signal),
the command line, and the expected outcome.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY_STORIES, environment, thinned, train
from tests.support import forked

ONE_STEP = [*TINY_STORIES, *"--steps 2 --micro_batch_size 2 --evaluation.every 0".split()]
ENDLESS = [*ONE_STEP, "--steps", "1000000"]

ASCII_SCREEN = """
sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), encoding="ascii")
sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), encoding="ascii", errors="backslashreplace")
"""
LATIN_SCREEN = ASCII_SCREEN.replace("ascii", "latin-1")


def once_it_trains(action: str) -> str:
    """Return code that runs `action` as soon as the signal handlers are installed."""
    return f"""
import train
made = train.StopSignal
def make():
    stop_signal = made()
    {action}
    return stop_signal
train.StopSignal = make
"""


def signalled(name: str) -> str:
    return once_it_trains(f"os.kill(os.getpid(), signal.{name})")


UNDER_NOHUP = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
WITHOUT_NOHUP = "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # the tests may run under nohup
A_SECOND_OF_PROCESSOR = once_it_trains("resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1, -1))")
LITTLE_MEMORY = """
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**28, -1))
"""
SMALL_FILES = "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))\n"
BEGIN = """
import io, os, resource, runpy, signal, sys, time
{code}
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass
class Row:
    """One start; the output has all of `expected` and none of `forbidden`."""

    env: dict[str, str] = field(default_factory=dict)
    code: str = ""
    words: list[str] = field(default_factory=lambda: ["train.py", *ONE_STEP])
    exit_code: int = 0
    expected: list[str] = field(default_factory=lambda: ["Training finished."])
    forbidden: list[str] = field(default_factory=lambda: ["Traceback"])


PREEMPTED = {"words": ["train.py", *ENDLESS], "exit_code": 75, "expected": ["stopped after step"]}
W_AND_B = [*ONE_STEP, "--tracking.wandb", "offline"]

ROWS = {
    # Environment variables
    "some of the variables that a launcher sets": Row(
        {"WORLD_SIZE": "2", "RANK": "0"},
        words=["train.py", *ONE_STEP, "--global_batch_size", "8"],
        exit_code=2,
        expected=["2 processes, but LOCAL_RANK, MASTER_ADDR, MASTER_PORT not"],
    ),
    "W&B off by its mode": Row(
        {"WANDB_MODE": "disabled"}, words=["train.py", *W_AND_B], expected=["environment variable WANDB_MODE=disabled"]
    ),
    "W&B that needs an account, off": Row(
        {"WANDB_MODE": "disabled", "WANDB_API_KEY": "", "HOME": "/nonexistent"},
        words=["train.py", *ONE_STEP, "--tracking.wandb", "online"],
        expected=["W&B is off by the environment variable WANDB_MODE=disabled", "Training finished."],
    ),
    # Terminals
    "a name that ASCII lacks": Row(
        code=ASCII_SCREEN, words=["train.py", *ONE_STEP, "--name", "Müll"], expected=["M\\xfcll.", "Training finished."]
    ),
    "a name that Latin-1 lacks": Row(
        code=LATIN_SCREEN, words=["train.py", *ONE_STEP, "--name", "中"], expected=["\\u4e2d.", "Training finished."]
    ),
    "an error that ASCII lacks": Row(
        code=ASCII_SCREEN, words=["train.py", *ONE_STEP, "--steps", "ü"], exit_code=2, expected=["steps: \\xfc must be"]
    ),
    # Signals of a terminal, a scheduler or a container
    "a terminal that closes": Row(code=WITHOUT_NOHUP + signalled("SIGHUP"), **PREEMPTED),
    "a terminal that closes, under nohup": Row(code=UNDER_NOHUP + signalled("SIGHUP")),
    "a scheduler's warning": Row(code=signalled("SIGUSR2"), **PREEMPTED),
    "a power failure": Row(code=signalled("SIGPWR"), **PREEMPTED),
    "a limit of processor time": Row(code=A_SECOND_OF_PROCESSOR, **PREEMPTED),
    # Limits
    "memory that the system refuses": Row(
        code=LITTLE_MEMORY,
        words=["train.py", *ONE_STEP, "--model.d_model", "8192", "--model.n_layers", "1"],
        exit_code=1,
        expected=[
            "error: out of memory in process 0, in `",
            "can't allocate memory",
            "Less memory is needed with a smaller micro",
        ],
    ),
    "files that may not be large": Row(code=SMALL_FILES, exit_code=1, expected=["File too large"]),
}


@pytest.mark.parametrize("name", thinned(ROWS, 4))
def test_unusual_machine_works_or_is_reported(name, runs, tmp_path):
    row = ROWS[name]
    if row.code == LITTLE_MEMORY and sys.platform != "linux":
        pytest.skip("the limit is not enforced")
    named = [] if "--name" in row.words else ["--name", "run"]
    words = [*row.words, "--out_dir", str(runs), *named]
    done = forked.run("-c", [BEGIN.format(code=row.code), *words], 0, environment(**row.env))
    printed = done.stdout + done.stderr
    assert done.returncode == row.exit_code, printed
    assert all(words in printed for words in row.expected), printed
    assert not any(words in printed for words in row.forbidden), printed
    if row.exit_code == 75:
        status = json.loads((runs / "run" / "status.json").read_text())
        assert status["state"] == "preempted"
        saved = [int(path.name.removeprefix("step-")) for path in (runs / "run" / "checkpoints").glob("step-*")]
        assert max(saved, default=0) == status["step"]
    if "W&B is off" in printed:
        assert not (runs / "run" / "wandb").exists()


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A run with a name that is not ASCII."""
    out_dir = tmp_path_factory.mktemp("foreign")
    train(*ONE_STEP, "--evaluation.every", "2", "--out_dir", out_dir, "--name", "Müll")
    return out_dir / "Müll"


@pytest.mark.parametrize(
    "words",
    [
        ["sample.py", "RUN", "--max_new_tokens", "3"],
        ["evaluate.py", "RUN"],
        ["export.py", "RUN", "PLACE/Müll"],
    ],
    ids=lambda words: words[0],
)
def test_scripts_work_on_ascii_terminal(words, foreign, tmp_path):
    words = [word.replace("RUN", str(foreign)).replace("PLACE", str(tmp_path)) for word in words]
    done = forked.run("-c", [BEGIN.format(code=ASCII_SCREEN), *words], 0, environment())
    assert done.returncode == 0 and "Error" not in done.stderr, done.stdout + done.stderr


@pytest.mark.slow
def test_pythonioencoding_ascii_works(runs):
    """Set by the environment variable, not by replacing the streams."""
    done = train(*ONE_STEP, "--out_dir", runs, "--name", "Müll", cwd=Path(ROOT, "."), PYTHONIOENCODING="ascii")
    assert "Training finished." in done.stdout


@pytest.mark.parametrize(
    "name", ["\x1b[31mred\x1b]0;title\x07", "two\nlines", "\u202eback", "\x9b2J"], ids=["escape", "line", "bidi", "c1"]
)
def test_control_characters_in_names_are_escaped(name, tmp_path):
    (tmp_path / name).mkdir()
    done = forked.run("evaluate.py", [str(tmp_path / name)], 0, environment())
    assert done.returncode == 2 and done.stderr.replace("\n", "").isprintable()
    assert ascii(name)[1:-1] in done.stderr


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no commit to be known")
def test_git_commit_of_foreign_clone_is_recorded(runs):
    """Git refuses such a clone by default, for example in a container."""
    train(*ONE_STEP, "--out_dir", runs, "--name", "run", GIT_TEST_ASSUME_DIFFERENT_OWNER="1")
    start = json.loads((runs / "run" / "sessions.jsonl").read_text())
    assert len(start["git_commit"].removesuffix("-dirty")) == 40
