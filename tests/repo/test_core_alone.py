"""`make core` copies the trainer without tools/, benchmarks/ and examples/; the copy trains, and its tests pass."""

import json
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT, environment
from tests.repo.test_make import copy_files, make
from tools.core import CHINESE_NOTE, LEFT_OUT, NOTE

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only tracked files are copied")
PYTHON = f"PYTHON={sys.executable}"


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    out = tmp_path_factory.mktemp("core") / "copy"
    done = make("core", ROOT, f"OUT={out}", PYTHON)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    if (ROOT / ".venv").exists():
        (out / ".venv").symlink_to(ROOT / ".venv")
    return out


@pytest.mark.parametrize("folder", ["used", "file", ""])
def test_core_refuses_used_and_missing_folder(folder, tmp_path):
    (tmp_path / "used").mkdir()
    files = [tmp_path / "used" / "mine.txt", tmp_path / "file"]
    for file in files:
        file.write_text("mine")
    done = make("core", ROOT, f"OUT={folder and tmp_path / folder}", PYTHON)
    message, of_make = done.stderr.splitlines()
    assert done.returncode == 2 and not done.stdout and of_make.startswith("make: ***")
    assert message.startswith("make core: error: OUT: ") and "name a new one" in message
    assert sorted(file for file in tmp_path.rglob("*") if file.is_file()) == sorted(files)


@pytest.mark.parametrize("words", [[], ["--colour"], ["new", "other"]], ids=str)
def test_core_takes_one_folder_and_no_option(words, tmp_path):
    command = [sys.executable, ROOT / "tools/core.py", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("make core: error: OUT: ")
    assert not list(tmp_path.iterdir())


def git(directory, *arguments):
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=directory, check=True, capture_output=True)


README = """# Title

Train, or [test an
idea](docs/experiments.md#one-idea) of [yours](docs/data.md).

| to | read |
|---|---|
| test | [ideas](docs/experiments.md), [track](docs/track.md) |
| prepare | [data](docs/data.md), [track](docs/track.md) |
"""


def test_core_takes_tracked_files_of_working_tree(tmp_path):
    copy_files(repository := tmp_path / "repository", "tools/core.py")
    texts = {"README.md": README, "docs/data.md": "# Data\n", "docs/experiments.md": "# Ideas\n", "train.py": "old\n"}
    for name, text in (texts | {"deleted.py": "", "tests/tools/test_plot.py": ""}).items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    for command in ("init --quiet", "add .", "commit --quiet -m all"):
        git(repository, *command.split())
    (repository / "train.py").write_text("new\n")
    (repository / "deleted.py").unlink()
    (repository / "runs").mkdir()
    (repository / "runs" / "status.json").write_text("{}")
    subprocess.run([sys.executable, "tools/core.py", tmp_path / "copy"], cwd=repository, check=True)

    copied = {str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*") if path.is_file()}
    assert copied == {"README.md", "docs/data.md", "train.py"}
    assert (tmp_path / "copy" / "train.py").read_text() == "new\n"
    assert (tmp_path / "copy" / "docs" / "data.md").read_text() == "# Data\n"
    title, *note, rest = (tmp_path / "copy" / "README.md").read_text().split("\n", 4)
    assert title == "# Title" and note[1].startswith("> This is the trainer alone") and "-dirty" in note[1]
    assert rest.startswith("\nTrain, or test an\nidea of [yours](docs/data.md).\n")
    assert rest.endswith("|---|---|\n| prepare | [data](docs/data.md), track |\n")


def test_core_has_nothing_left_out(core):
    assert not [name for name in LEFT_OUT.split() if not (ROOT / name).exists() or (core / name).exists()]
    for page in core.rglob("*.md"):
        text = page.read_text()
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (page.parent / link).exists(), f"{page}: {link}"
        if re.search(r"-m tools\b|`(tools|benchmarks|examples)/", text):
            note = CHINESE_NOTE if page.name == "README.zh-CN.md" else NOTE
            assert note.partition("{")[0] in text, page


def test_core_has_only_targets_that_work(core):
    targets = re.findall(r"^make ([\w-]+) ", make("help", core, check=True).stdout, re.M)
    assert {"train", "verify", "test", "lint"} < set(targets)
    assert not {"law", "record", "trial", "core", "test-repo", "bench"} & set(targets)
    for target in targets:
        printed = make(target, core, "--dry-run", check=True).stdout
        assert not re.search(r"-m tools|(?<!--ignore )tests/(tools|repo)", printed), printed


@pytest.mark.slow
def test_core_trains_and_resumes_after_kill(core, tmp_path):
    def run(name, script="train.py", **env):
        settings = ["--config", "tests/support/tiny_stories.yaml", "--checkpoint.every", "1"]
        settings += ["--out_dir", tmp_path, "--name", name]
        command = [sys.executable, script, *settings]
        return subprocess.run(command, cwd=core, env=environment(**env), capture_output=True, text=True)

    uninterrupted = run("uninterrupted")
    assert uninterrupted.stdout.endswith("Training finished.\n"), uninterrupted.stdout + uninterrupted.stderr
    assert run("killed", "tests/programs/faulty_train.py", FAULTS="kill:0:5").returncode == -9
    resumed = run("killed")
    assert re.search("resumed at step [1-4] ", resumed.stdout), resumed.stdout  # the last save may have been incomplete
    assert resumed.stdout.endswith("Training finished.\n"), resumed.stderr
    files = (tmp_path / name / "metrics.jsonl" for name in ("uninterrupted", "killed"))
    digests = [[json.loads(row)["state/digest"] for row in file.read_text().splitlines()] for file in files]
    assert digests[0] == digests[1] and len(digests[0]) >= 8


def run_tests(core, *arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *arguments]
    return subprocess.run(command, cwd=core, env=environment(), capture_output=True, text=True)


@pytest.mark.slow
def test_core_tests_are_collected(core):
    done = run_tests(core, "--collect-only")
    assert done.returncode == 0 and "error" not in done.stdout.lower().splitlines()[-1], done.stdout[-5000:]
    assert int(re.search(r"(\d+)/\d+ tests collected|(\d+) tests collected", done.stdout)[1]) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["model", "data", "runtime/config", "trainer", "repo"])
def test_core_tests_pass(folder, core):
    done = run_tests(core, "--tb=short", f"tests/{folder}")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
