"""The rules of this repository: lint, imports and sizes. A fork can leave them out, see the Makefile."""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from graphlib import TopologicalSorter

import pytest

from tests.conftest import ROOT

RUFF = [sys.executable, "-m", "ruff"]


@pytest.mark.parametrize("arguments", [["check", "."], ["format", "--check", "."]], ids=lambda a: a[0])
def test_ruff(arguments):
    done = subprocess.run([*RUFF, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# Everything outside these folders trains without them.
OPTIONAL = {"tools", "benchmarks", "examples", "docs", "tests"}
PARTS = sorted({path.name for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/__init__.py")})
CORE = [part for part in PARTS if part not in OPTIONAL]


def modules(part):
    return sorted((ROOT / part).rglob("*.py")) if (ROOT / part).is_dir() else [ROOT / part]


def imported_modules(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def imported_packages(part):
    return {name.split(".")[0] for file in modules(part) for name in imported_modules(file)}


@pytest.mark.parametrize("part", CORE)
def test_core_imports_no_tools(part):
    assert not imported_packages(part) & (OPTIONAL | {"pytest"})
    if part in ("model", "config", "data"):
        assert "accelerate" not in imported_packages(part)


CORE_TESTS = [
    file
    for file in (ROOT / "tests").rglob("*.py")
    if not {"tools", "repo"} & set(file.relative_to(ROOT).parts) and file.name != "test_examples.py"
]


def test_core_tests_import_no_tools():
    assert len(CORE_TESTS) > 50
    optional = ("tools", "benchmarks", "tests.tools", "tests.repo", "tests.test_examples")
    found = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in CORE_TESTS
        for name in imported_modules(file)
        if f"{name}.".startswith(tuple(f"{one}." for one in optional))
    }
    assert not found


def test_imports_have_no_circle():
    """Neither between packages, nor between the modules and packages of tools/."""
    names = {part.removesuffix(".py"): imported_packages(part) - {part} for part in CORE}
    names |= {
        f"tools.{path.stem}": {
            ".".join(name.split(".")[:2])
            for file in modules(path.relative_to(ROOT))
            for name in imported_modules(file)
            if name.startswith("tools.")
        }
        - {f"tools.{path.stem}"}
        for path in (ROOT / "tools").iterdir()
        if not path.name.startswith("__")
    }
    graph = {name: others & names.keys() for name, others in names.items()}
    assert len(graph) > 15 and any(graph.values())
    TopologicalSorter(graph).prepare()  # raises CycleError


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
    sizes = code_sizes(*CORE, "tools")
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
