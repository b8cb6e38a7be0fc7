"""benchmarks/known_effects.yaml: ideas that the command takes, and halves that nobody chose."""

import subprocess
import sys
from itertools import cycle

import pytest
import yaml

from runtime.config.errors import ConfigError
from runtime.config.parser import parse_config
from tests.conftest import ROOT, thinned
from tools.experiment.change import Checkouts, head_commit, merge, parse_idea, split_words

LAB = ["--config", str(ROOT / "configs" / "lab.yaml")]
ENTRIES = yaml.safe_load((ROOT / "benchmarks" / "known_effects.yaml").read_text())
COUNTING = sorted(
    (entry for entry in ENTRIES if entry["effect"] in ("better", "worse")), key=lambda entry: entry["name"]
)
CHANGES = {entry["name"]: entry["change"] for entry in ENTRIES if "change" in entry}
PATCHED = {name: text for name, text in CHANGES.items() if not text.startswith("--")}
needs_git = pytest.mark.skipif(head_commit() is None, reason="a patch needs the repository that it applies to")


def test_entries_are_complete():
    names = [entry["name"] for entry in ENTRIES]
    assert len(set(names)) == len(names)
    for entry in ENTRIES:
        counts = entry in COUNTING
        fields = {"name", "change" if "change" in entry else "missing", "effect", "size", "at", "sources"}
        assert entry.keys() == fields | ({"half"} if counts else set()), entry["name"]
        assert "change" in entry or not counts, f"{entry['name']} cannot be run"
        assert entry["effect"] in ("better", "worse", "none", "disputed"), entry["name"]
        assert all(isinstance(entry[field], str) and entry[field] for field in ("size", "at")), entry["name"]
        assert entry["sources"], entry["name"]
        assert all(source.keys() == {"cite", "where"} and all(source.values()) for source in entry["sources"])


def test_sign_that_counts_has_an_opened_source():
    for entry in COUNTING:
        assert any(not source["where"].startswith("not opened") for source in entry["sources"]), entry["name"]


def test_halves_alternate_by_name():
    assert [entry["half"] for entry in COUNTING] == [half for half, _ in zip(cycle(("choose", "report")), COUNTING)]
    for half in ("choose", "report"):
        effects = [entry["effect"] for entry in COUNTING if entry["half"] == half]
        assert len(effects) >= 12, half
        assert min(effects.count("better"), effects.count("worse")) >= 4, f"{half} favours one sign"


@pytest.mark.parametrize("name", [name for name in CHANGES if name not in PATCHED])
def test_settings_change_the_baseline(name):
    assert parse_config([*LAB, *split_words(CHANGES[name])]) != parse_config(LAB)


@needs_git
@pytest.mark.parametrize("name", thinned(PATCHED, 2))
def test_patch_applies_and_is_needed(name):
    idea = parse_idea(PATCHED[name])  # refuses a patch that does not apply, or changes data or seeds
    with pytest.raises(ConfigError):
        parse_config([*LAB, *idea.settings])


def test_every_patch_of_the_folder_is_used():
    used = {text.split()[0] for text in PATCHED.values()}
    folder = (ROOT / "benchmarks" / "known_effects").iterdir()
    assert {path.relative_to(ROOT).as_posix() for path in folder} == {path for path in used if path.startswith("bench")}


@needs_git
@pytest.mark.slow
def test_patched_code_accepts_its_settings():
    with Checkouts() as checkouts:
        for name, text in PATCHED.items():
            idea = parse_idea(text)
            command = [sys.executable, "train.py", "--config", "configs/lab.yaml", "--print_config", *idea.settings]
            folder = checkouts.folder(merge(idea.base, [idea]))
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            assert done.returncode == 0, f"{name}: {done.stderr}"
