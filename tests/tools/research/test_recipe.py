"""Settings are written into a recipe, whose comments and other settings stay."""

import pytest

from config.errors import ConfigError
from tests.conftest import ROOT
from tools.research.recipe import flatten, parse_settings, set_values

RECIPE = """# A recipe.
steps: 10 # few

optimizer: # AdamW
  lr: 1e-2 # high
  # as usual
  betas: [0.9, 0.95]

data:
  source: stories
"""


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"steps": "20"}, RECIPE.replace("10 # few", "20")),
        ({"optimizer.betas": "[0.9, 0.99]"}, RECIPE.replace("0.95", "0.99")),
        ({"optimizer.name": "muon"}, RECIPE.replace("# AdamW\n", "# AdamW\n  name: muon\n")),
        ({"exact": "true"}, RECIPE.replace("steps", "exact: true\nsteps")),
        ({"model.mlp": "relu2"}, RECIPE + "\nmodel:\n  mlp: relu2\n"),
        ({"data.source": "text", "data.path": "x: y"}, None),
    ],
    ids=str,
)
def test_set_values_changes_one_line(values, expected):
    if expected:
        assert set_values(RECIPE, values) == expected
        return
    with pytest.raises(ConfigError, match="cannot be set"):
        set_values(RECIPE, values)


def test_set_values_refuses_other_forms_of_yaml():
    with pytest.raises(ConfigError, match="write each setting as one line"):
        set_values("optimizer: {lr: 1}\n", {"optimizer.lr": "2"})


@pytest.mark.parametrize("name", ["lab.yaml", "stories.yaml"])
def test_set_values_edits_the_recipes(name):
    text = (ROOT / "configs" / name).read_text()
    edited = set_values(text, {"optimizer.lr": "3e-3", "model.qk_norm": "true"})
    assert flatten(edited) == flatten(text) | {"optimizer.lr": "3e-3", "model.qk_norm": "true"}


def test_parse_settings_accepts_both_forms():
    assert parse_settings(["--a.b", "1", "--c=x=y"]) == {"a.b": "1", "c": "x=y"}


@pytest.mark.parametrize("words", [["relu2"], ["--a.b"], ["--config", "x"], ["--model.mlp relu2"]], ids=str)
def test_parse_settings_refuses_other_words(words):
    with pytest.raises(ConfigError, match="--section.name VALUE"):
        parse_settings(words)
