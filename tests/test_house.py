"""The rules of this house: lint, arrows, sizes, and the patches of docs/forking.md. A fork may delete this file."""

import ast
import io
import re
import shlex
import shutil
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest

from tests.conftest import ROOT, environment

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
    "evaluate.py": {"cli", "config", "data", "files", "load", "training"},
    "export.py": {"cli", "config", "data", "load", "model", "plot", "training"},
    "sample.py": {"cli", "config", "data", "load", "training"},
    "train.py": {"cli", "config", "data", "launcher", "load", "model", "plot", "training"},
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


# Of docs/forking.md, (name, lines, settings) of every experiment.
EXPERIMENTS = re.findall(
    r"^\| \[\w+\]\(patches/(\w+)\.patch\).*? \| (\d+) \| `(.*)` \|$", (ROOT / "docs/forking.md").read_text(), re.M
)
ON_TOP_OF_EACH_OTHER = [experiment for experiment in EXPERIMENTS if experiment[0] != "data_counting"]
APPLY = {
    "git": ["git", "apply"],
    "patch": ["patch", "--strip=1", "--silent", "--fuzz=0", "--no-backup-if-mismatch", "--input"],
}


def copy_of_the_repository(directory):
    shutil.copytree(ROOT, directory, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__", "*.png"))
    return directory


def apply(name, tool, directory, *options):
    program, *rest = APPLY[tool]
    command = [program, *rest[:1], *options, *rest[1:], ROOT / "docs" / "patches" / f"{name}.patch"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, f"{name} by {tool}: {done.stdout}{done.stderr}"


def test_every_experiment_is_as_long_as_its_page_says():
    assert {path.stem for path in (ROOT / "docs" / "patches").iterdir()} == {name for name, *_ in EXPERIMENTS}
    for name, lines, _ in EXPERIMENTS:
        patch = (ROOT / "docs" / "patches" / f"{name}.patch").read_text()
        assert len(re.findall(r"^(?:\+(?!\+\+)|-(?!--))", patch, re.M)) == int(lines) < 30, name


@pytest.mark.parametrize("tool", APPLY)
def test_experiments_apply_alone_and_on_top_of_each_other(tool, tmp_path):
    directory = copy_of_the_repository(tmp_path / "copy")
    for name, *_ in EXPERIMENTS:
        apply(name, tool, directory)
        apply(name, tool, directory, "--reverse")
    for order in (ON_TOP_OF_EACH_OTHER, ON_TOP_OF_EACH_OTHER[::-1]):
        for name, *_ in order:
            apply(name, tool, directory)
        done = subprocess.run([*RUFF, "check", "--quiet", "."], cwd=directory, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        for name, *_ in reversed(order):
            apply(name, tool, directory, "--reverse")


@pytest.mark.slow
@pytest.mark.parametrize(
    "experiments",
    [*([one] for one in EXPERIMENTS), ON_TOP_OF_EACH_OTHER],
    ids=lambda them: f"{len(them)}_{them[0][0]}",
)
def test_an_experiment_trains_resumes_and_is_verified(experiments, tmp_path):
    """The work is tests/fork_trial.py's, in the copy."""
    copy = copy_of_the_repository(tmp_path / "copy")
    for index, (name, *_) in enumerate(experiments):
        apply(name, list(APPLY)[index % 2], copy)
    settings = [word for *_, words in experiments for word in shlex.split(words)]
    command = [sys.executable, "-m", "tests.fork_trial", str(tmp_path / "runs"), *settings]
    done = subprocess.run(command, cwd=copy, env=environment(), capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    results = re.findall(r"^(PASS|SKIP)  ", done.stdout, re.M)
    no_family = {"block_parallel", "mlp_experts"} & {name for name, *_ in experiments}
    assert results.count("SKIP") == (2 if no_family else 0) and len(results) == 8
