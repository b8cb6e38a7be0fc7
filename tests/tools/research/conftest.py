"""A chain in a small git repository with the fake train.py of the experiments."""

import csv
import sys
from types import SimpleNamespace

import pytest

from cli.scripts import run_script
from tests.tools.experiment.conftest import FAKE, run_experiment  # noqa: F401 - a fixture
from tools.experiment import change
from tools.research.settings import PARSERS, refuse_command

READ_JSON = 'settings |= json.loads(open(value).read() or "{}")'
READ_RECIPE = """
        section = ""
        for line in open(value).read().splitlines():
            key, _, text = line.partition(": ")
            if line.endswith(":"):
                section = line[:-1] + "."
            elif text:
                settings[(section if key.startswith(" ") else "") + key.strip()] = (
                    json.loads(text) if text[0] in "0123456789n" else text)
        if settings["model.mlp"] == "typo":
            refuse("model.mlp: typo must be gelu or relu2")"""
MORE_SETTINGS = """"data.seed": 0, "micro_batch_size": 4,
    "schedule.batch_warmup_from": None, "schedule.batch_warmup_steps": None,"""
RECIPE = """# The recipe.
steps: 100
optimizer:
  lr: 1.0
model:
  mlp: gelu
"""


@pytest.fixture
def research(run_experiment, monkeypatch):  # noqa: F811
    """Return a function that runs tools.research in a repository; it returns the exit code and what is printed."""
    root = run_experiment.root
    assert READ_JSON in FAKE
    (root / "train.py").write_text(
        FAKE.replace(READ_JSON, READ_RECIPE.strip()).replace('"data.path"', f'{MORE_SETTINGS} "data.path"')
    )
    (root / "configs" / "lab.yaml").write_text(RECIPE)
    for name, value in change.AUTHOR.items():
        monkeypatch.setenv(name, value)

    git = change.git  # run_experiment has set its ROOT to this repository
    git("init", "--quiet", "--initial-branch=main")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")

    printed = []  # (whether to stdout, text)

    def record(*words, file=None, **_):
        printed.append((file is None, " ".join(map(str, words))))

    monkeypatch.setattr("builtins.print", record)

    def run(command, *words):
        (run_experiment.lab / "started").unlink(missing_ok=True)
        printed.clear()
        monkeypatch.setattr(sys, "argv", ["tools.research", command, f"--lab={run_experiment.lab}", *words])
        code = run_script("tools.research", refuse_command, needs_torch=False, commands=PARSERS)
        out = "\n".join(text for is_out, text in printed if is_out)
        return SimpleNamespace(code=code, out=out, text="\n".join(text for _, text in printed))

    def rows():
        with open(run_experiment.lab / "ledger.tsv", newline="", errors="replace") as file:
            return [*csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]

    def start(*words):
        found = run("start", f"--config={root / 'configs' / 'lab.yaml'}", "--seeds=3", "--jobs=2", *words)
        assert found.code == 0, found.text
        return found

    run.git, run.root, run.lab, run.rows, run.start = git, root, run_experiment.lab, rows, start
    run.started = run_experiment.started
    return run
