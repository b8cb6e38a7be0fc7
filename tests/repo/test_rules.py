"""The rules of this repository: lint and imports. A fork can leave them out, see the Makefile."""

import ast
import subprocess
import sys
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


def test_tools_are_listed():
    """As CONTRIBUTING.md says."""
    done = subprocess.run([sys.executable, "-m", "tools"], cwd=ROOT, capture_output=True, text=True)
    names = {f"python -m tools.{path.stem}" for path in (ROOT / "tools").iterdir() if path.suffix in ("", ".py")}
    names = {name for name in names if not name.rpartition(".")[-1].startswith(("_", "jobs"))}
    assert done.returncode == 0 and {line.split("  ")[0] for line in done.stdout.splitlines()} == names, done.stderr


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
        if not path.name.startswith("__") and path.suffix in ("", ".py")
    }
    graph = {name: others & names.keys() for name, others in names.items()}
    assert len(graph) > 15 and any(graph.values())
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_pyproject_matches_requirements():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == (ROOT / "requirements.txt").read_text().split()
