"""The rules of this repository: lint, layers and sizes. A fork can leave them out, see the Makefile."""

import ast
import io
import re
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


# The layers of the repository, lowest first: a package imports only from lower layers and from itself.
LAYERS = [
    *(["model"], ["config"], ["distributed"], ["cli"], ["data"], ["training"], ["checkpoint"], ["run"], ["plotting"]),
    *(["sample.py", "evaluate.py", "export.py"], ["train.py"], ["jobs"], ["audit", "checks", "scaling"]),
    *(["experiments"], ["chain"], ["comparison"]),
    *(["plot.py", "compare.py", "replay.py", "verify.py"], ["sweep.py", "scale.py", "experiment.py", "research.py"]),
]
LAZY_IMPORTS = {"run": {"export.py"}}  # by run/trackers.py in the function that needs it, for tracking.log_model
LAYER_OF = {part: number for number, parts in enumerate(LAYERS) for part in parts}


def imported_packages(part):
    for file in (ROOT / part).rglob("*.py") if (ROOT / part).is_dir() else [ROOT / part]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                yield node.module.split(".")[0]
            elif isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)


def test_every_package_has_a_layer():
    parts = {path.name for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert parts == LAYER_OF.keys()


@pytest.mark.parametrize("part", LAYER_OF)
def test_imports_go_downward(part):
    names = {Path(other).stem: other for other in LAYER_OF}
    imported = {names[name] for name in set(imported_packages(part)) - {Path(part).stem} if name in names}
    imported -= LAZY_IMPORTS.get(part, set())
    assert not [other for other in imported if LAYER_OF[other] >= LAYER_OF[part]]
    if part in ("model", "config", "data"):
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
        file for part in parts for file in ((ROOT / part).rglob("*.py") if (ROOT / part).is_dir() else [ROOT / part])
    ]
    return {str(file.relative_to(ROOT)): code_lines(file.read_text()) for file in files}


def test_files_and_scripts_stay_small():
    sizes = code_sizes(*LAYER_OF)
    assert len(sizes) > 50
    assert not {file: lines for file, lines in sizes.items() if lines > 350}
    scripts = {str(file.relative_to(ROOT)) for file in ROOT.glob("*.py") if "__main__" in file.read_text()}
    assert not {file: lines for file, lines in sizes.items() if file in scripts and lines > 250}


def test_main_and_loop_fit_on_screen():
    functions = [
        node for node in ast.walk(ast.parse((ROOT / "train.py").read_text())) if isinstance(node, ast.FunctionDef)
    ]
    assert {"main", "train"} <= {node.name for node in functions}
    assert not {node.name for node in functions if node.end_lineno - node.lineno >= 140}


def test_test_names_are_short():
    """`test_<unit>_<behaviour>` in at most eight words."""
    files = [*(ROOT / "tests").rglob("test_*.py")]
    names = {name for file in files for name in re.findall(r"^def test_(\w+)", file.read_text(), re.M)}
    assert len(names) > 900
    assert not [name for name in names if len(name.split("_")) > 8 or name.startswith(("a_", "an_", "the_", "it_"))]


def test_pyproject_matches_requirements():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == (ROOT / "requirements.txt").read_text().split()
