"""Precision and code identify a run: resuming reports a difference."""

import json
import shutil
from dataclasses import replace

import pytest

from checkpoint.identity import (
    ROOT,
    code_hash,
    compare_facts,
    compare_summation_order,
    training_sources,
)
from checkpoint.manifest import read_manifest
from tests.conftest import TINY_STORIES, metrics, train

RECIPE = [*TINY_STORIES, "--evaluation.every", 0, "--steps"]


@pytest.fixture
def tree(tmp_path):
    """Copy of the code, outside git."""
    names = ["*.py", "*/*.py", "data/*/*.py", "configs/*", "accelerate_configs/*", "README.md", "tests/support/*.yaml"]
    for file in {file for name in names for file in ROOT.glob(name)}:
        copy = tmp_path / "tree" / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    return tmp_path / "tree"


def test_code_hash_covers_training_code(tree):
    packages = "model config distributed cli data training checkpoint run".split()
    files = sorted([tree / "train.py", *(file for package in packages for file in (tree / package).rglob("*.py"))])
    assert set(files) <= set(training_sources(tree))
    before = code_hash(tree)
    assert before == code_hash() and len(before) == 12
    for file in (files[0], *(tree / package / "new.py" for package in packages), files[-1]):
        file.write_text("X = 1\n")
        assert code_hash(tree) != before, file
        before = code_hash(tree)


def test_code_hash_excludes_docs_tests_and_tools(tree):
    before = code_hash(tree)
    for file in ("README.md", "tests/conftest.py", "verify.py"):
        (tree / file).write_text("changed")
    (tree / "tools" / "plot").mkdir(parents=True, exist_ok=True)
    (tree / "tools" / "plot" / "style.py").write_text("changed")
    (tree / "notes.py").write_text("import train")
    assert code_hash(tree) == before


def test_training_sources_follow_imports_of_fork(tree):
    """A module at the root and a package in nested folders, both imported inside a function."""
    with open(tree / "model" / "gpt.py", "a") as file:
        file.write("\n\ndef mine():\n    import kernels.fast\n")
    (tree / "kernels" / "cpu").mkdir(parents=True)
    (tree / "kernels" / "fast.py").write_text("from tricks import trick\n")
    (tree / "kernels" / "cpu" / "own.py").write_text("")
    (tree / "tricks.py").write_text("")
    names = {str(path.relative_to(tree)) for path in training_sources(tree)}
    assert {"kernels/fast.py", "kernels/cpu/own.py", "tricks.py"} <= names
    before = code_hash(tree)
    (tree / "tricks.py").rename(tree / "trick.py")
    assert code_hash(tree) != before


@pytest.mark.parametrize(
    "line",
    ["import os, my_trick", "import my_trick as trick", "import os; import my_trick.part", "if True: import my_trick"],
)
def test_training_sources_include_every_form_of_import(line, tree):
    with open(tree / "model" / "gpt.py", "a") as file:
        file.write(f"\n{line}\n")
    (tree / "my_trick.py").write_text("")
    assert tree / "my_trick.py" in training_sources(tree)


@pytest.mark.parametrize("name", ["export.py", "tools/export.py"])
def test_training_sources_exclude_scripts_by_full_path(name, tree):
    """A module of a package may have the name of a script."""
    before = code_hash(tree)
    (tree / "data" / name).parent.mkdir(exist_ok=True)
    (tree / "data" / name).write_text("")
    assert tree / "data" / name in training_sources(tree)
    assert code_hash(tree) != before


def test_training_sources_keep_file_that_is_not_python(tree):
    (tree / "data" / "broken.py").write_text("import (")
    assert tree / "data" / "broken.py" in training_sources(tree)


def test_compare_facts_names_code_and_precision():
    then = {"code": "a", "mixed_precision": "no", "processes": 1}
    assert compare_facts(then, then | {"code": "b"}) == ["code"]
    assert compare_facts(then, then | {"mixed_precision": "bf16"}) == ["mixed_precision"]
    assert compare_facts(then, then | {"processes": 2}) == []


def test_compare_summation_order_depends_on_exact():
    then, now = {"processes": 1, "threads": None, "shards": 1}, {"processes": 2, "threads": 2, "shards": 1}
    assert compare_summation_order(then, now, exact=False) == ["processes"], "a GPU has no threads to compare"
    assert compare_summation_order(then, now, exact=True) == []


# Starts under other code, simulated by editing the recorded hash.


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("finished")
    train(*RECIPE, 4, "--out_dir", out_dir, "--name", "run", "--schedule.name", "constant")
    return out_dir / "run"


@pytest.fixture
def run(finished, runs):
    shutil.copytree(finished, runs / "run")
    return runs / "run"


def under_code(run, code):
    """Rewrite the recorded code hash of a run; None removes it."""
    for checkpoint in (run / "checkpoints").iterdir():
        manifest = read_manifest(checkpoint)
        facts = {name: fact for name, fact in manifest.provenance.items() if name != "code"}
        replace(manifest, provenance=facts | ({"code": code} if code else {})).write(checkpoint)
    rows = [json.loads(line) for line in (run / "sessions.jsonl").read_text().splitlines()]
    rows = [
        {name: fact for name, fact in row.items() if name != "code"} | ({"code": code} if code else {}) for row in rows
    ]
    (run / "sessions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_session_and_checkpoint_record_code_hash(finished):
    (start,) = map(json.loads, (finished / "sessions.jsonl").read_text().splitlines())
    manifest = read_manifest(finished / "checkpoints" / "step-00000004")
    assert start["code"] == manifest.provenance["code"] == code_hash()


@pytest.mark.parametrize("code", ["0123456789ab", None, ...], ids=["other", "unknown", "same"])
def test_resume_reports_other_code_in_one_line(code, run):
    if code is not ...:
        under_code(run, code)
    command = [*RECIPE, 5, "--schedule.name", "constant", "--out_dir", run.parent]
    checkpoint = run / "checkpoints" / "step-00000004"
    for words in (["--name", "run"], ["--name", "branch", "--branch_from", checkpoint]):
        done = train(*command, *words)
        messages = [line for line in done.stdout.splitlines() if line.startswith("Other code: ")]
        assert (
            len(messages) == (code == "0123456789ab")
            and [row["step"] for row in metrics(run.parent / words[1])][-1] == 5
        )
        if messages:
            assert (
                messages[0].startswith(f"Other code: {checkpoint} was trained by {code}") and code_hash() in messages[0]
            )
