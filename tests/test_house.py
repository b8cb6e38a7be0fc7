"""The rules of this house that a tool can check: lint, arrows, sizes. A fork may delete this file."""

import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest

from tests.conftest import ROOT

RUFF = [sys.executable, "-m", "ruff"]


@pytest.mark.parametrize("arguments", [["check", "."], ["format", "--check", "."]], ids=lambda a: a[0])
def test_ruff(arguments):
    done = subprocess.run([*RUFF, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# What each part of the house may stand on, besides itself: every arrow runs downward.
MAY_IMPORT = {
    "model": {"model"},
    "files.py": set(),
    "config.py": {"model"},
    "data": {"config", "data", "files"},
    "training": {"config", "data", "files", "model", "training"},
    "cli.py": {"config", "training"},
    "launcher.py": {"config", "model", "training"},
    "plot.py": {"training"},
    "load.py": {"config", "data", "model", "training"},
    "export.py": {"cli", "config", "data", "load", "model", "plot", "training"},
    "sample.py": {"cli", "config", "data", "load", "training"},
    "train.py": {"cli", "config", "data", "launcher", "model", "plot", "training"},
    "verify.py": {"cli", "config", "data", "launcher", "model", "train", "training"},
    "examples": {"model", "examples"},
}


def imported_packages(part):
    for file in (ROOT / part).glob("*.py") if (ROOT / part).is_dir() else [ROOT / part]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                yield node.module.split(".")[0]
            elif isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_arrows_run_downward(part):
    inside = {Path(name).stem for name in (*MAY_IMPORT, "benchmarks", "tests")}
    assert set(imported_packages(part)) & inside <= MAY_IMPORT[part]
    if part in ("model", "files.py", "config.py", "data"):
        assert "accelerate" not in imported_packages(part)


def code_lines(text):
    """Lines that hold code: not blank, not a comment, not a docstring."""
    words = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {line for token in tokens if token.type not in words for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def code_sizes(*parts):
    files = [
        file for part in parts for file in ((ROOT / part).glob("*.py") if (ROOT / part).is_dir() else [ROOT / part])
    ]
    return {str(file.relative_to(ROOT)): code_lines(file.read_text()) for file in files}


def test_the_house_stays_small():
    core = code_sizes("train.py", "model", "data", "training")
    assert 1000 < sum(core.values()) < 3500
    assert not {file: lines for file, lines in core.items() if lines > 350}
    scripts = [str(file) for file in ROOT.glob("*.py") if "__main__" in file.read_text()]
    assert not {file: lines for file, lines in code_sizes(*scripts).items() if lines > 200}


def test_the_loop_fits_on_a_screen():
    functions = [
        node for node in ast.walk(ast.parse((ROOT / "train.py").read_text())) if isinstance(node, ast.FunctionDef)
    ]
    assert {"main", "train"} <= {node.name for node in functions}
    assert not {node.name for node in functions if node.end_lineno - node.lineno >= 140}


def test_uv_installs_what_pip_installs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == (ROOT / "requirements.txt").read_text().split()
