"""Provenance of a result: the commit and the uncommitted changes."""

import subprocess

import pytest

from trainer.checkpoint.provenance import provenance, uncommitted_changes


def git(directory, *words, **options):
    own = ["-c", "user.name=me", "-c", "user.email=me@here"]
    return subprocess.run(["git", *own, *words], cwd=directory, check=True, capture_output=True, **options).stdout


def contents(directory):
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*.py")}


@pytest.fixture(params=[".", "inner"], ids=["own repository", "folder of a larger one"])
def code(request, tmp_path):
    """Folder of the code, in a git repository with one commit."""
    code = tmp_path / request.param
    git(tmp_path, "init")
    for name, text in {".gitignore": "runs/", "loop.py": "one\n\ntwo\n\n", "runs/old.py": "not of the code"}.items():
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text(text)
    (tmp_path / "secrets.env").write_text("KEY=1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    return code


def test_uncommitted_changes_restore_the_code(code, tmp_path):
    """The patch, applied to the commit in that folder, restores the code that ran, new files included."""
    assert uncommitted_changes(code) is None
    (code / "loop.py").write_text("three\n\ntwo\n\n")
    (code / "data").mkdir()
    for name in ("mine.py", "größe von x.py"):
        (code / "data" / name).write_text("new\n\n")
    expected, changes = contents(code), uncommitted_changes(code)
    git(code, "stash", "--include-untracked")
    assert contents(code) != expected and b"runs" not in changes
    git(code, "apply", *([] if code == tmp_path else ["--directory=inner"]), "-", input=changes)
    assert contents(code) == expected


CONFIGURATIONS = ["diff.external=true", "color.ui=always", "diff.noprefix=true", "diff.mnemonicPrefix=true"]
CONFIGURATIONS += ["diff.own.textconv=tr a-z A-Z <", "diff.own.command=true"]


@pytest.mark.parametrize("code", ["."], indirect=True)
@pytest.mark.parametrize("setting", [*CONFIGURATIONS, "diff.context=0", "GIT_DIFF_OPTS=-u0"])
def test_uncommitted_changes_apply_whatever_git_is_configured_to_print(setting, code, monkeypatch):
    name, value = setting.split("=")
    if name.isupper():
        monkeypatch.setenv(name, value)
    else:
        git(code, "config", name, value)
    (code / ".git" / "info" / "attributes").write_text("*.py diff=own\n")
    (code / "loop.py").write_text("three\n\ntwo\n\n")
    (code / "new.py").write_text("new\n")
    expected, changes = contents(code), uncommitted_changes(code)
    git(code, "stash", "--include-untracked")
    git(code, "apply", "-", input=changes)
    assert contents(code) == expected


@pytest.mark.parametrize("code", ["."], indirect=True)
def test_uncommitted_changes_have_every_new_file_that_counts_as_code(code, monkeypatch):
    """Kernels and tables, too, with bytes that are not UTF-8; not the notes beside them, and nothing large."""
    files = {"kernels/fused.cu": b"// gr\xf6\xdfe\n", "table.json": b"[1]\n"}
    others = {"notes.txt": b"x\n", "kernels/weights.bin": b"1" * 99}
    (code / "train.py").write_text("import kernels\nopen('table.json')\n")
    (code / "kernels").mkdir()
    for name, content in (files | others).items():
        (code / name).write_bytes(content)
    (code / "loop.py").write_bytes(b"# gr\xf6\xdfe\n")
    monkeypatch.setattr("trainer.checkpoint.provenance.MAX_NEW_FILE_BYTES", 50)
    changes = uncommitted_changes(code)
    git(code, "stash", "--include-untracked")
    git(code, "apply", "-", input=changes)
    assert (code / "loop.py").read_bytes() == b"# gr\xf6\xdfe\n"
    assert {name: (code / name).read_bytes() for name in files | others if (code / name).exists()} == files


@pytest.mark.parametrize("code", ["inner"], indirect=True)
def test_uncommitted_changes_leave_out_the_outer_repository(code):
    (code.parent / "secrets.env").write_text("KEY=secret\n")
    (code.parent / "other.py").write_text("new")
    assert uncommitted_changes(code) is None
    (code / "loop.py").write_text("changed\n")
    changes = uncommitted_changes(code)
    assert b"changed" in changes
    assert b"secret" not in changes and b"other.py" not in changes


@pytest.mark.parametrize("code", ["inner"], indirect=True)
def test_commit_is_dirty_only_for_code_changes(code):
    commit = git(code, "rev-parse", "HEAD").decode().strip()
    (code.parent / "secrets.env").write_text("KEY=secret\n")
    assert provenance(code)["git_commit"] == commit
    (code / "loop.py").write_text("changed\n")
    assert provenance(code)["git_commit"] == commit, "read once"
    provenance.cache_clear()
    assert provenance(code)["git_commit"] == f"{commit}-dirty"


def test_provenance_outside_git_has_no_commit(tmp_path):
    assert provenance(tmp_path)["git_commit"] is None
    assert uncommitted_changes(tmp_path) is None
