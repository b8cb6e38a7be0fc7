"""Resolving returns new configs; every open setting is filled in once."""

import pytest
from pydantic import ValidationError

from model.config import GPTConfig
from runtime.config.parser import parse_config
from runtime.config.schema import TrainConfig
from tests.conftest import TINY_STORIES
from trainer.run.resolve import resolve
from trainer.run.resume import with_stored_model


@pytest.mark.parametrize("section", [None, "model", "optimizer"])
def test_config_is_frozen(section):
    settings = getattr(TrainConfig(), section) if section else TrainConfig()
    name = next(iter(type(settings).model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(settings, name, None)


def test_replace_changes_only_named_settings():
    config = TrainConfig()
    changed = config.replace(steps=7, **{"model.d_model": 64, "model.n_heads": 2, "data": config.data})
    assert (changed.steps, changed.model.d_model, changed.model.n_heads) == (7, 64, 2)
    assert changed.replace(steps=1000, model=config.model) == config
    given_section = config.replace(**{"model": GPTConfig(n_layers=5), "model.d_model": 64})
    assert (given_section.model.n_layers, given_section.model.d_model) == (5, 64)


@pytest.mark.parametrize("changes", [{"steps": 0}, {"optimizer.lr": float("nan")}, {"model.n_layer": 3}])
def test_changed_config_is_validated(changes):
    with pytest.raises(ValidationError, match=next(iter(changes)).rpartition(".")[2]):
        TrainConfig().replace(**changes)


def test_resolve_fills_in_open_settings():
    given = parse_config([*map(str, TINY_STORIES), "--global_batch_size", "null"])
    before = given.model_dump()
    config, corpus, models = resolve(given)
    assert given.model_dump() == before
    assert config.model.vocab_size == corpus.vocab_size
    assert config.global_batch_size == given.micro_batch_size
    assert config.data.seed == 0
    assert models == (None, None)


def test_resolve_keeps_given_settings():
    config, *_ = resolve(parse_config([*map(str, TINY_STORIES), "--global_batch_size", "16", "--data.seed", "4"]))
    assert (config.global_batch_size, config.data.seed) == (16, 4)


def test_model_settings_of_default_file_are_not_given():
    config = parse_config(["--init_from", "x", "--model.dropout", "0.25"])
    assert config.model.model_fields_set == {"dropout"}
    assert parse_config(["--init_from", "null"]).model.n_layers == parse_config([]).model.n_layers


def test_model_is_unchecked_until_initial_model_is_loaded():
    """The default model is too short for this sequence; the one that is loaded may not be."""
    assert parse_config(["--init_from", "x", "--seq_len", "1000", "--init_hash", "abc"]).seq_len == 1000


def test_stored_model_keeps_given_settings():
    stored = TrainConfig(model=GPTConfig(n_layers=5)).flat() | {"init_hash": "abc"}
    config = parse_config(["--init_from", "x", "--model.n_layers", "2"])
    resolved = with_stored_model(config, stored)
    assert resolved.model.n_layers == 2 and resolved.init_hash == "abc"
    assert with_stored_model(parse_config(["--init_from", "x"]), stored).model.n_layers == 5
