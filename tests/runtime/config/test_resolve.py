"""Resolving returns new configs; every open setting is filled in once."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from model.config import GPTConfig
from runtime.config.errors import ConfigError
from runtime.config.parser import parse_config
from runtime.config.paths import expand_user_path
from runtime.config.schema import TrainConfig
from tests.conftest import TINY_STORIES
from trainer.run.resolve import resolve, with_steps
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


LENGTHS = [
    (["--epochs", "2"], "sequences", 2 * 20),
    (["--epochs", "0.01"], "sequences", 0.01 * 20),
    (["--tokens", "9000"], "tokens", 9000),
    (["--tokens", "2560"], "tokens", 2560),  # a whole number of batches
]
WARM_UP = ["--schedule.batch_warmup_from", "2", "--schedule.batch_warmup_steps", "1"]


@pytest.mark.parametrize("warm_up", [[], WARM_UP], ids=["", "batch warm-up"])
@pytest.mark.parametrize(("length", "unit", "wanted"), LENGTHS)
def test_length_in_epochs_or_tokens_becomes_steps(length, unit, wanted, warm_up):
    """The last step is the first that reaches the length, counted batch by batch; the rest of the config is equal."""
    config, corpus, _ = resolve(
        parse_config([*map(str, TINY_STORIES), "--schedule.warmup_steps", "1", *length, *warm_up])
    )
    assert (config.epochs, config.tokens) == (None, None)
    size = 1 if unit == "sequences" else config.seq_len
    batches = [size * len(corpus.global_batches(config).indices(step)) for step in range(config.steps)]
    assert sum(batches[:-1]) < wanted <= sum(batches)


def test_schedule_is_checked_against_the_steps_of_the_epochs():
    words = [*map(str, TINY_STORIES), "--epochs", "1", "--schedule.warmup_steps"]
    parse_config([*words, "5000"])  # the corpus is not loaded yet
    with pytest.raises(ConfigError, match="schedule.warmup_steps: 5000: more than steps: 4") as error:
        resolve(parse_config([*words, "5000"]))
    assert str(error.value).endswith("\nepochs: 1 are 4 steps here"), "the user gave no steps"


def test_decimal_number_of_epochs_is_exact():
    """55 * 2.2 is 121.00000000000001 as a float, which would need a twelfth batch of 11."""
    words = "--global_batch_size 11 --micro_batch_size 11 --schedule.warmup_steps 1 --epochs"
    config = parse_config([*map(str, TINY_STORIES), *words.split(), "2.2"])
    assert [with_steps(config, samples, None).steps for samples in (55, 56)] == [11, 12]


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


@pytest.mark.parametrize("path", ["", "~nobody-of-this-name/x", "$HOME/x"])
def test_path_that_names_no_file_is_refused(path):
    """As in `--out "$UNSET"`, which would write into the current directory."""
    with pytest.raises(ConfigError, match="^out: "):
        expand_user_path("out", path)
    assert expand_user_path("out", "a$b") == Path("a$b")
