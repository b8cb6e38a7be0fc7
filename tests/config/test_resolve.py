"""Resolving returns new configs; every open setting is filled in once."""

from dataclasses import FrozenInstanceError, asdict, fields, is_dataclass

import pytest

from config.errors import ConfigError
from config.parser import parse_config
from config.resolve import (
    given_model_settings,
    replace_settings,
    with_initial_model,
    with_launch,
    with_stored_model,
    with_stored_settings,
)
from config.schema import TrainConfig, flat_settings
from model.config import GPTConfig
from run.resolve import resolve
from tests.conftest import TINY_STORIES


@pytest.mark.parametrize("section", [None, *(f.name for f in fields(TrainConfig) if is_dataclass(f.type))])
def test_config_is_frozen(section):
    settings = getattr(TrainConfig(), section) if section else TrainConfig()
    with pytest.raises(FrozenInstanceError):
        setattr(settings, fields(settings)[0].name, 1)


def test_replace_settings_changes_only_named_settings():
    config = TrainConfig()
    changed = replace_settings(config, {"steps": 7, "model.d_model": 64, "model.n_heads": 2, "data": config.data})
    assert (changed.steps, changed.model.d_model, changed.model.n_heads) == (7, 64, 2)
    assert replace_settings(changed, {"steps": 1000, "model": config.model}) == config
    given_section = replace_settings(config, {"model": GPTConfig(n_layers=5), "model.d_model": 64})
    assert (given_section.model.n_layers, given_section.model.d_model) == (5, 64)


def test_resolve_fills_in_open_settings():
    given = parse_config([*map(str, TINY_STORIES), "--global_batch_size", "null"])
    before = asdict(given)
    config, corpus, initial = resolve(given)
    assert asdict(given) == before
    assert config.model.vocab_size == corpus.vocab_size
    assert config.global_batch_size == given.micro_batch_size
    assert config.data.seed == 0
    assert initial is None


def test_stored_settings_fill_in_null_settings():
    stored = flat_settings(asdict(TrainConfig())) | {"data.seed": 3, "global_batch_size": 24, "branch_from": "x"}
    filled_in = with_stored_settings(TrainConfig(), stored)
    assert (filled_in.data.seed, filled_in.global_batch_size, filled_in.branch_from) == (3, 24, "x")
    given = replace_settings(TrainConfig(), {"data.seed": 4, "global_batch_size": 8, "branch_from": "y"})
    assert with_stored_settings(given, stored) == given


def test_launch_keeps_given_settings():
    given = replace_settings(TrainConfig(), {"data.seed": 4, "global_batch_size": 24})
    assert with_launch(given, 2) == given
    assert with_launch(TrainConfig(micro_batch_size=3), 2).global_batch_size == 6


def test_initial_model_overrides_defaults_but_not_dropout():
    config = parse_config(["--init_from", "x", "--model.dropout", "0.25"])
    assert given_model_settings(config) == {"dropout"}
    resolved = with_initial_model(config, GPTConfig(n_layers=5, dropout=0.5), "abc")
    assert (resolved.model, resolved.init_hash) == (GPTConfig(n_layers=5, dropout=0.25), "abc")


def test_initial_model_must_agree_with_given_settings():
    config = parse_config(["--init_from", "x", "--model.n_layers", "2"])  # the default, but given
    with pytest.raises(ConfigError, match="model.n_layers: 2, but 5 in x; leave it out"):
        with_initial_model(config, GPTConfig(n_layers=5), "abc")


def test_model_is_unchecked_until_initial_model_is_loaded():
    """The default model is too short for this sequence; the one that is loaded may not be."""
    arguments = ["--init_from", "x", "--seq_len", "1000"]
    for init_hash in ([], ["--init_hash", "abc"]):
        parse_config([*arguments, *init_hash])


def test_stored_model_keeps_given_settings():
    stored = flat_settings(asdict(TrainConfig(model=GPTConfig(n_layers=5)))) | {"init_hash": "abc"}
    config = parse_config(["--init_from", "x", "--model.n_layers", "2"])
    resolved = with_stored_model(config, stored)
    assert resolved.model.n_layers == 2 and resolved.init_hash == "abc"
    assert with_stored_model(parse_config(["--init_from", "x"]), stored).model.n_layers == 5
