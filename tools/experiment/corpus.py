"""The corpora of an experiment: the one of the default recipe is prepared at its first use."""

import shlex
import sys
import time
from pathlib import Path
from typing import Any

from runtime.config.errors import ConfigError, RunError
from runtime.files import lock, open_no_link
from tools.experiment import change
from tools.experiment.runs import read_experiment
from tools.experiment.variant import Recipe, given_settings
from tools.jobs import runner
from tools.jobs.program import run_program

LIBRARY = Path("corpora/python")
"""`data.path` of configs/text_lab.yaml."""
PREPARE = "-m data.prepare --source python-library --tokenizer byte --validation hash:0.05 --out"


def prepare_library(recipe: Recipe) -> None:
    """Prepare the corpus of Python's library if the recipe trains on it and it does not exist.

    Raises:
        RunError: it cannot be prepared.
        SystemExit: a stop signal was received; the same command resumes.
    """
    given = given_settings(recipe.words, change.ROOT, {}) if recipe.data is None else recipe.data
    if given.get("data.path") != str(LIBRARY) or LIBRARY.exists():
        return
    LIBRARY.parent.mkdir(exist_ok=True)
    with open(LIBRARY.parent / ".lock", "a", opener=open_no_link) as opened:
        while not lock(opened):  # another command prepares it
            if recipe.is_stopped():
                runner.raise_stopped()
            time.sleep(runner.POLL_SECONDS)
        if LIBRARY.exists():
            return
        words = [*shlex.split(PREPARE), str(LIBRARY)]
        print(f"preparing the text of the runs: python {shlex.join(words)}", file=sys.stderr)
        done = run_program([sys.executable, *words], "", is_stopped=recipe.is_stopped)
    if recipe.is_stopped():
        runner.raise_stopped()
    if done.returncode:
        raise RunError(f"{LIBRARY} cannot be prepared: {done.stderr.strip() or done.returncode}")


def check_same_corpora(folder: Path, identity: dict[str, Any]) -> None:
    """Raise ConfigError if the same command has trained on other corpora: its results are not resumed.

    Args:
        folder: of the experiment.
        identity: `baseline`, the commit and the settings of all runs, and `data`, the hash of each corpus by its path.
    """
    for file in folder.parent.glob("*/experiment.json"):
        before = read_experiment(file.parent)
        data = before["data"] if before.get("baseline") == identity["baseline"] else {}
        for path, content in identity["data"].items():
            if data.get(path, content) != content:
                raise ConfigError(
                    f"data: {path} has the hash {content}, and had {data[path]} when {file.parent} was begun; another "
                    "version of Python has another library. Restore it, or give another --folder for this text"
                )
