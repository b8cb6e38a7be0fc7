"""Tools on narrow and ASCII terminals, with odd names of runs, on a full disk, and with files that cannot be read."""

import runpy
import shutil
import sys
from contextlib import suppress

import pytest

from tests.conftest import TINY_STORIES, environment, train
from tests.runtime.machine.test_odd_machines import ASCII_SCREEN, BEGIN, foreign  # noqa: F401 - a fixture
from tests.support import forked
from tests.trainer.run.test_directory import FULL_STDOUT

BEGIN_MODULE = BEGIN.replace("run_path(sys.argv[0], ", "run_module(sys.argv[0], alter_sys=True, ")
RUN_MODULE = "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"


@pytest.mark.parametrize(
    "words",
    [
        ["tools.replay", "RUN", "1"],
        pytest.param(["tools.compare", "RUN", "--out", "PLACE/compare.png"], marks=pytest.mark.slow),
        pytest.param(["tools.plot", "RUN"], marks=pytest.mark.slow),
    ],
    ids=lambda words: words[0],
)
def test_tools_work_on_ascii_terminal(words, foreign, tmp_path):  # noqa: F811
    words = [word.replace("RUN", str(foreign)).replace("PLACE", str(tmp_path)) for word in words]
    done = forked.run("-c", [BEGIN_MODULE.format(code=ASCII_SCREEN), *words], 0, environment())
    assert done.returncode == 0 and "Error" not in done.stderr, done.stdout + done.stderr


def test_compare_escapes_control_characters_in_names(foreign, tmp_path):  # noqa: F811
    for name in ("\x1b[31mred\x1b]0;title\x07", "two\nlines", "\x9b2J"):
        shutil.copytree(foreign, tmp_path / name)
        (tmp_path / name / "metrics.jsonl").unlink()  # an unfinished run has a line of its own
    (tmp_path / "\x1b[2Jnone").mkdir()
    done = forked.run("tools.compare", [*map(str, tmp_path.iterdir()), "--out", "null"], 0, environment())
    assert done.returncode == 0, done.stderr
    printed = (done.stdout + done.stderr).replace("\n", "")
    assert printed.isprintable()
    assert all(name in printed for name in ("\\x1b[31mred", "two\\nlines", "\\x1b[2Jnone"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    train(
        *TINY_STORIES,
        *"--steps 4 --evaluation.every 0 --name run --out_dir".split(),
        out_dir := tmp_path_factory.mktemp("f"),
    )
    return out_dir / "run"


@pytest.mark.linux_only
def test_full_stdout_fails_compare(finished):
    words = ["tools.compare", str(finished), "--out", "null"]
    done = forked.run("-c", [FULL_STDOUT + RUN_MODULE, *words], 0, environment())
    assert done.returncode == 1
    assert done.stderr.endswith("tools.compare: error: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize("module", ["tools", "tools.record", "tools.gpu_check", "examples.gpt_ddp"])
def test_texts_of_other_programs_fit_the_terminal(module, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    monkeypatch.delitem(sys.modules, module, raising=False)  # another test may have imported it
    with suppress(SystemExit):
        runpy.run_module(module, run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5 and max(map(len, lines)) <= 80
