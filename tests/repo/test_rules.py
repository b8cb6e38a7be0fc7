"""The rules of this repository: lint and imports. A fork can leave them out, see the Makefile."""

import ast
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter

import pytest

from tests.conftest import ROOT, thinned

RUFF = [sys.executable, "-m", "ruff"]


@pytest.mark.parametrize("arguments", [["check", "."], ["format", "--check", "."]], ids=lambda a: a[0])
def test_ruff(arguments):
    done = subprocess.run([*RUFF, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# Each imports only those before it; the scripts stand between the trainer and the tools.
PACKAGES = ["model", "runtime", "data", "trainer"]
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))


def modules(part):
    return sorted((ROOT / part).rglob("*.py")) or [ROOT / f"{part}.py"]


def imported_modules(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def imported_packages(part):
    return {name.split(".")[0] for file in modules(part) for name in imported_modules(file)}


def test_tools_are_listed():
    """As CONTRIBUTING.md says."""
    done = subprocess.run([sys.executable, "-m", "tools"], cwd=ROOT, capture_output=True, text=True)
    names = {f"python -m tools.{path.stem}" for path in (ROOT / "tools").iterdir() if path.suffix in ("", ".py")}
    names = {name for name in names if not name.rpartition(".")[-1].startswith(("_", "jobs"))}
    listed = {line.split("  ")[0] for line in done.stdout.splitlines() if line[0] != " "}  # else it is wrapped
    assert done.returncode == 0 and listed == names, done.stderr


def test_root_has_only_known_packages():
    """A new top-level package is one more name that a user's own files may shadow."""
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == {*PACKAGES, "tools", "examples"}


@pytest.mark.parametrize("part", [*PACKAGES, *SCRIPTS])
def test_imports_lead_to_lower_packages(part):
    imported = imported_packages(part) - {part}
    allowed = set(PACKAGES[: PACKAGES.index(part)] if part in PACKAGES else [*PACKAGES, "train"])
    own = {*PACKAGES, *SCRIPTS, "tools", "benchmarks", "examples", "docs", "tests", "pytest"}
    assert not imported & own - allowed
    if part in ("model", "data"):
        assert "accelerate" not in imported


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


@pytest.mark.parametrize("script", thinned(SCRIPTS, 3))
def test_script_starts_with_a_safe_path(script, tmp_path):
    """As PYTHONSAFEPATH=1 asks for: Python leaves out the folder of the script."""
    done = subprocess.run([sys.executable, "-P", ROOT / f"{script}.py", "--help"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0 and b"usage" in done.stdout.lower(), done.stderr


def test_imports_have_no_circle():
    """Neither between the files and folders of a package, nor between those of tools/."""
    parts = [path for package in [*PACKAGES, "tools"] for path in (ROOT / package).iterdir()]
    parts = [path for path in parts if not path.name.startswith("_") and path.suffix in ("", ".py")]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in parts}
    graph = {
        name: {
            ".".join(module.split(".")[:2])
            for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])
            for module in imported_modules(file)
        }
        & names.keys() - {name}
        for name, path in names.items()
    }
    assert len(graph) > 50 and any(graph.values())
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_pyproject_matches_requirements():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == (ROOT / "requirements.txt").read_text().split()
