"""Lint, and the rules of the house that a tool can check."""

import ast
import io
import subprocess
import sys
import tokenize

import pytest

from tests.conftest import ROOT

RUFF = [sys.executable, "-m", "ruff"]


@pytest.mark.parametrize("arguments", [["check", "."], ["format", "--check", "."]], ids=lambda a: a[0])
def test_ruff(arguments):
    done = subprocess.run([*RUFF, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def imported_packages(folder):
    for file in (ROOT / folder).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                yield file.name, node.module.split(".")[0]
            elif isinstance(node, ast.Import):
                yield from ((file.name, alias.name.split(".")[0]) for alias in node.names)


def test_the_model_knows_nothing_of_the_rest_and_nothing_imports_train():
    inside = {"train", "plot", "model", "data", "training", "accelerate"}
    assert {package for _, package in imported_packages("model")} & inside <= {"model"}
    assert not {package for _, package in imported_packages("data")} & {"train", "model", "accelerate"}
    assert "train" not in {package for _, package in imported_packages("training")}


def code_lines(text):
    """Lines that hold code: not blank, not a comment, not a docstring."""
    words = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {line for token in tokens if token.type not in words for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def test_the_core_stays_small():
    """The core is what a training run executes: not data/prepare.py, a program of its own, nor model/hub.py."""
    files = [
        ROOT / "train.py",
        *(file for name in ("model", "data", "training") for file in (ROOT / name).glob("*.py")),
    ]
    outside = {"data.prepare": "data/prepare.py", "model.hub": "model/hub.py"}
    for path in outside.values():
        files.remove(ROOT / path)
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    assert not {node.module for node in nodes if isinstance(node, ast.ImportFrom)} & outside.keys()
    assert 1000 < sum(code_lines(file.read_text()) for file in files) < 2500
