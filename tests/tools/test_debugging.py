"""The commands and output of docs/debugging.md, on a copy of the repository."""

import re
import shutil
import subprocess

import pytest

from tests.conftest import ROOT, shell

PAGE = (ROOT / "docs" / "debugging.md").read_text()


def test_patch_of_debugging_page_applies(tmp_path):
    (tmp_path / "model").mkdir()
    shutil.copy(ROOT / "model" / "gpt.py", tmp_path / "model" / "gpt.py")
    [patch] = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    command = ["git", "apply", "--check", "--verbose", "-"]
    done = subprocess.run(command, input=patch, cwd=tmp_path, text=True, check=True, capture_output=True)
    assert "offset" not in done.stderr, f"change the line numbers of its header: {done.stderr}"


@pytest.mark.slow
def test_debugging_page_finds_the_offending_sequence(tmp_path):
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    for file in filter(lambda file: (ROOT / file).is_file() and not file.startswith("tests/"), files):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes((ROOT / file).read_bytes())
    [patch] = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    with_patch = ["patch", "-p1", "--fuzz=0"] if shutil.which("patch") else ["git", "apply", "-"]
    for apply in (["git", "apply", "--check", "-"], with_patch):
        subprocess.run(apply, input=patch, cwd=tmp_path, text=True, check=True)
    _, prepare, train, replay = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    message, shown = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)[:2]
    shell(prepare, cwd=tmp_path)
    failed = shell(f"! {train}", cwd=tmp_path)
    assert " ".join(message.split()) in " ".join(failed.stderr.split())
    found = shell(replay, cwd=tmp_path).stdout
    assert shown.splitlines()[:2] == found[found.index("sequences of") :].splitlines()[:2]
    assert [line.split(":")[0] for line in shown.splitlines()] == [
        line.split(":")[0] for line in found[found.index("sequences of") :].splitlines()
    ]
