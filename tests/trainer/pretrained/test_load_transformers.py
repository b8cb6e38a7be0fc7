"""Code of a model or tokenizer is never executed, whether from a folder, a run or the Hub."""

import ast
import io
import json
import sys

import pytest

from data.prepare.chat_template import open_tokenizer
from data.prepare.tokenizer import save_tokenizer
from runtime.config.errors import ConfigError
from tests.conftest import ROOT
from trainer.pretrained.load import load_run

SHIPPED = [
    file
    for file in ROOT.rglob("*.py")
    if not {"tests", ".venv"} & set(file.relative_to(ROOT).parts) and not file.name.startswith(".")
]


def calls_of_from_pretrained(text):
    """Yield each call of `from_pretrained` in Python source."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained":
            yield node


def allows_remote_code(call):
    values = [keyword.value for keyword in call.keywords if keyword.arg == "trust_remote_code"]
    return not (values and isinstance(values[0], ast.Constant) and values[0].value is False)


def test_every_from_pretrained_refuses_remote_code():
    calls = [(file.name, call) for file in SHIPPED for call in calls_of_from_pretrained(file.read_text())]
    assert len(calls) >= 5
    assert not [f"{name}:{call.lineno}" for name, call in calls if allows_remote_code(call)]


@pytest.fixture
def malicious(tmp_path, monkeypatch):
    """A folder whose tokenizer names custom code, which would write a file next to it; stdin holds "y" lines."""
    (folder := tmp_path / "model").mkdir()
    (folder / "own.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\nclass Own: pass\n")
    facts = {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    yield folder
    assert not (tmp_path / "was_run").exists()
    assert sys.stdin.read() == "y\n" * 9, "a question took a line of the input"


def test_open_tokenizer_runs_no_code(malicious):
    with pytest.raises(ValueError, match="trust_remote_code"):
        open_tokenizer(malicious)


def test_save_tokenizer_runs_no_code(malicious, tmp_path):
    with pytest.raises(ConfigError, match="trust_remote_code"):
        save_tokenizer(str(malicious), tmp_path / "out", [])


def test_load_run_runs_no_code(malicious):
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_run(malicious)
