"""The text of the default recipe is prepared once, and results on another text are not resumed."""

import json
import shlex
import threading
import time

import psutil
import pytest
import yaml

from data.prepare.prepare import PrepareConfig
from runtime.config.errors import ConfigError, RunError
from runtime.config.parser import parse_tool
from runtime.files import lock
from tests.conftest import ROOT
from tools.experiment import agreement, corpus, settings
from tools.experiment.change import Checkouts
from tools.experiment.settings import AgreementConfig
from tools.experiment.variant import Recipe
from tools.jobs.launch import Launch

IDEA = "--model.effect_a 0.8"
# In place of data.prepare: it notes its process, takes a moment, and makes the corpus at once.
PREPARE = """
import os, sys, time
with open("prepared", "a") as file:
    print(os.getpid(), file=file)
time.sleep(SECONDS)
if os.path.exists("broken"):
    sys.exit("data.prepare: error: the disk is full")
os.mkdir("partial")
with open("partial/metadata.json", "w") as file:
    file.write('{"hash": "first"}')
os.rename("partial", sys.argv[1])
"""


@pytest.fixture
def folder(experiments, tmp_path, monkeypatch):
    """The current folder, with a quick program in place of data.prepare, and the default recipe on its corpus."""
    monkeypatch.chdir(tmp_path)
    settings.DEFAULT_CONFIG.write_text(yaml.safe_dump({"data": {"path": "corpora/python"}}))
    set_seconds(tmp_path, 0)
    monkeypatch.setattr(corpus, "PREPARE", shlex.quote(str(tmp_path / "prepare.py")))
    return tmp_path


def set_seconds(folder, seconds):
    """Let the preparation take so long."""
    (folder / "prepare.py").write_text(PREPARE.replace("SECONDS", str(seconds)))


def prepared(folder):
    """Return the processes that have prepared."""
    return (folder / "prepared").read_text().split() if (folder / "prepared").exists() else []


def recipe(checkouts, is_stopped=lambda: False):
    return Recipe(None, ["--config", str(settings.DEFAULT_CONFIG)], Launch(), checkouts, is_stopped=is_stopped)


def test_command_makes_the_corpus_of_the_default_recipe():
    config = parse_tool(PrepareConfig, "data.prepare", [*shlex.split(corpus.PREPARE)[2:], str(corpus.LIBRARY)])
    recipe = yaml.safe_load(settings.DEFAULT_CONFIG.read_text())
    assert recipe["data"] == {"source": "text", "path": config.out} and config.source == "python-library"
    for page in (ROOT / "docs" / "data.md", settings.DEFAULT_CONFIG):
        text = " ".join(page.read_text().replace("# ", "").split())
        assert f"python {corpus.PREPARE} {corpus.LIBRARY}" in text, page


def test_text_is_prepared_at_the_first_use_alone(experiments, folder):
    experiments.race(IDEA, "--data.path", "null", runs=1)
    assert not prepared(folder) and not (folder / "corpora").exists()
    result = experiments.race(IDEA, runs=1)
    assert f"preparing the text of the runs: python {folder / 'prepare.py'} corpora/python\n" in experiments.errors
    assert result["data"] == {"corpora/python": "first"} and len(prepared(folder)) == 1
    assert "data: corpora/python, hash first\n" in experiments.race(IDEA, runs=2, json=False)
    assert len(prepared(folder)) == 1 and "preparing" not in experiments.errors
    assert experiments.confirm(IDEA, seeds=2)["data"] == result["data"]


def test_commands_at_once_prepare_it_once(folder):
    set_seconds(folder, 0.3)
    threads = [threading.Thread(target=corpus.prepare_library, args=[recipe(Checkouts())]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(prepared(folder)) == 1 and (folder / "corpora" / "python").exists()


def test_signal_ends_the_preparation(folder):
    set_seconds(folder, 600)
    with pytest.raises(SystemExit) as error:
        corpus.prepare_library(recipe(Checkouts(), is_stopped=lambda: bool(prepared(folder))))
    assert error.value.code == 75 and not psutil.pid_exists(int(prepared(folder)[0]))
    with open(folder / "corpora" / ".lock", "a") as opened:  # and the wait for another one
        assert lock(opened)
        end = time.monotonic() + 0.1
        with pytest.raises(SystemExit):
            corpus.prepare_library(recipe(Checkouts(), is_stopped=lambda: time.monotonic() > end))
    assert len(prepared(folder)) == 1 and not (folder / "corpora" / "python").exists()


def test_failed_preparation_ends_the_command(experiments, folder):
    (folder / "broken").touch()
    message = experiments.race(IDEA, runs=1, error=RunError)
    assert message == "corpora/python cannot be prepared: data.prepare: error: the disk is full"
    assert not experiments.started() and not list(experiments.lab.iterdir())


def test_results_on_another_text_are_not_resumed(experiments, folder, monkeypatch):
    """By a race, a confirmation or an agreement; other settings are not affected."""
    experiments.race(IDEA, runs=3)
    metadata = folder / "corpora" / "python" / "metadata.json"
    metadata.write_text(json.dumps({"hash": "second"}))
    (experiments.lab / "started").unlink()
    before = sorted(experiments.lab.rglob("*"))
    effects = folder / "effects.yaml"
    effects.write_text(yaml.safe_dump([{"name": "a", "change": IDEA, "effect": "better", "half": "choose"}]))
    monkeypatch.setattr(agreement, "EFFECTS", effects)
    config = AgreementConfig(ideas_and_settings=[], folder=str(experiments.lab), jobs=1, json=True)
    messages = [
        experiments.race(IDEA, runs=3, error=ConfigError),
        experiments.confirm(IDEA, error=ConfigError),
        experiments._run(agreement.main, config, ConfigError),
    ]
    for message in messages:
        assert message.startswith("data: corpora/python has the hash second, and had first when ")
    assert sorted(experiments.lab.rglob("*")) == before and not experiments.started()
    assert experiments.race(IDEA, "--steps", "50", runs=1)["data"] == {"corpora/python": "second"}
    metadata.write_text(json.dumps({"hash": "first", "request": "other files"}))
    assert experiments.race(IDEA, runs=3)["runs"] == 3 and not experiments.started()
