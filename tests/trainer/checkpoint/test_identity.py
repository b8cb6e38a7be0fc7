"""Precision and code identify a run: resuming reports a difference."""

import json
import shutil
import sys
from dataclasses import replace

import pytest

from tests.conftest import TINY_STORIES, metrics, thinned, train
from trainer.checkpoint.identity import (
    ROOT,
    code_hash,
    compare_facts,
    compare_summation_order,
    training_code,
)
from trainer.checkpoint.manifest import read_manifest

RECIPE = [*TINY_STORIES, "--evaluation.every", 0, "--steps"]


@pytest.fixture
def tree(tmp_path):
    """Copy of the code, outside git."""
    names = ["*.py", "*/*.py", "*/*/*.py", "configs/*", "accelerate_configs/*", "README.md", "tests/support/*.yaml"]
    for file in {file for name in names for file in ROOT.glob(name)}:
        copy = tmp_path / "tree" / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    return tmp_path / "tree"


def test_code_hash_covers_training_code(tree):
    packages = "model runtime data trainer/checkpoint trainer/run".split()
    files = [tree / "train.py", *(file for package in packages for file in (tree / package).rglob("*.py"))]
    before = code_hash(tree)
    assert before == code_hash() and len(before) == 12
    assert set(files) <= training_code(tree).keys()
    for file in (tree / "train.py", tree / "data" / "text.py"):
        append(file, "# changed")
        assert code_hash(tree) != before, file
        before = code_hash(tree)


def test_long_text_in_quotes_is_no_file(tmp_path):
    (tmp_path / "train.py").write_text(f"text = '{300 * 'x'}.y'")
    assert list(training_code(tmp_path)) == [tmp_path / "train.py"]


def append(file, line):
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a") as source:
        source.write(f"{line}\n")


@pytest.mark.parametrize(
    ("name", "line"),
    {
        "tricks.py": "    import os, tricks as t",
        "model/my_kernel.py": "from model import my_kernel",
        "kernels/fast.py": "from kernels import (",
        "kernels/cpu/avx.py": "import kernels.cpu\nkernel = getattr(kernels.cpu, ['avx', 'sse'][is_wide])",
    }.items(),
)
def test_code_hash_covers_what_the_code_imports(name, line, tree):
    """A new file counts from the moment that the code names it, whether git knows it or not."""
    before = code_hash(tree)
    append(tree / name, "x = 1")
    assert code_hash(tree) == before
    append(tree / "model" / "gpt.py", line + (" fast)" if line.endswith("(") else ""))
    named = code_hash(tree)
    append(tree / name, "x = 2")
    assert len({before, named, code_hash(tree)}) == 3
    (tree / name).unlink()
    assert code_hash(tree) not in (before, named)


@pytest.mark.parametrize(
    ("name", "line"),
    {
        "model/zebra.json": "",  # code may find it by a pattern
        "data/synthetic/words/zebras": "",
        "trainer/kernels/zebra.cu": "",
        "kernels/fused.cu": "load(sources=['kernels/fused.cu'])",
        "kernels/scan.cpp": 'source = ROOT / "kernels" / "scan.cpp"',
        "limits.json": 'open("limits.json")',
    }.items(),
)
def test_code_hash_covers_files_that_are_no_python(name, line, tree):
    append(tree / "model" / "gpt.py", line)
    hashes = [code_hash(tree)]
    for digit in "12":
        append(tree / name, digit)
        hashes.append(code_hash(tree))
    assert len({*hashes}) == 3


def test_code_hash_covers_another_script_that_trains(tree, monkeypatch):
    before = code_hash(tree)
    append(tree / "pretrain.py", "import train")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tree / "pretrain.py"), raising=False)
    assert code_hash(tree) != before


def test_code_hash_excludes_what_no_run_imports(tree):
    before = code_hash(tree)
    names = ["README.md", "tests/conftest.py", "tools/plot/style.py", "docs/settings.py", "examples/mine.py"]
    names += [".venv/lib.py", "lab/code/train.py", "._train.py", "model/._gpt.py", "data/synthetic/._world.py"]
    names += ["my_figures.py", "figures/my_plot.py", "model/my_sketch.py", "evaluate.py", "wandb/run-1/train.py"]
    names += ["model/__pycache__/gpt.cpython-313.pyc", "model/README.md", "model/gpt.py~", "model/.gpt.py.swp"]
    names += ["runs/run/config.json", "corpora/mine/metadata.json", "input.txt", "texts/a.json", "metrics.jsonl.old"]
    names += ["configs/stories.yaml", "accelerate_configs/cpu.yaml", "exports/run/config.json"]
    for name in names:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("changed")
        assert code_hash(tree) == before, name


def test_compare_facts_names_code_and_precision():
    then = {"code": "a", "mixed_precision": "no", "processes": 1}
    assert compare_facts(then, then | {"code": "b"}) == ["code"]
    assert compare_facts(then, then | {"mixed_precision": "bf16"}) == ["mixed_precision"]
    assert compare_facts(then, then | {"processes": 2}) == []


def test_compare_summation_order_depends_on_exact():
    then, now = {"processes": 1, "threads": None, "shards": 1}, {"processes": 2, "threads": 2, "shards": 1}
    then, now = then | {"device": "mps"}, now | {"device": "cpu"}
    assert compare_summation_order(then, now, exact=False) == ["device", "processes"], "a GPU has no threads to compare"
    assert compare_summation_order(then, now, exact=True) == []
    for device, exact in (("cpu", False), ("cpu", True), ("cuda", False), ("cuda", True)):
        then, now = ({"device": device, "processor": name} for name in ("one", "another"))
        named = compare_summation_order(then, now, exact)
        assert named == ([] if (device, exact) == ("cpu", True) else ["processor"]), (device, exact)


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


@pytest.mark.parametrize("code", thinned(["0123456789ab", None, ...], 2), ids=["other", "unknown", "same"])
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


def test_resume_reports_other_versions_in_one_line(run):
    checkpoint = run / "checkpoints" / "step-00000004"
    manifest = read_manifest(checkpoint)
    others = {"python": "3.0.1", "torch": "0.1", "accelerate": "0.2"}
    replace(manifest, provenance=manifest.provenance | others).write(checkpoint)
    changes = ", ".join(f"{name} {manifest.provenance[name]} instead of {other}" for name, other in others.items())
    message = f"Resumed with {changes}: from here on the bits may differ."
    settings = ["--schedule.name", "constant", "--out_dir", run.parent, "--name", "run"]
    for steps, count in ((4, 0), (5, 1)):  # the run is complete at first
        assert train(*RECIPE, steps, *settings).stdout.splitlines().count(message) == count
