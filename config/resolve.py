"""Fill in the settings that the command line and the config files leave null.

Each `with_*` function returns a new config. `run.resolve.resolve` calls them in this order: they fill in from the
stored settings of a resumed run, then from the initial model, the corpus (`Corpus.fill_in`) and the launch.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

from config.errors import ConfigError
from config.schema import PartialModel, TrainConfig
from model.config import GPTConfig

# Settings that may differ from those of the initial model.
NOT_FROM_INITIAL_MODEL = {"dropout"}


def given_model_settings(config: TrainConfig) -> frozenset[str]:
    """Return the settings of `model` that the user gave: those named in a PartialModel, otherwise all."""
    if isinstance(config.model, PartialModel):
        return config.model.given
    return frozenset(setting.name for setting in fields(config.model))


def replace_settings(config: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig:
    """Return a copy of a config with some settings changed; they are named like `steps` or `optimizer.lr`."""
    sections: dict[str, dict[str, Any]] = {}
    for setting, value in changes.items():
        section, _, name = setting.rpartition(".")
        sections.setdefault(section, {})[name] = value
    top = sections.pop("", {})
    # A whole section may be replaced too; settings within it are then applied to the new one.
    changed = {
        section: replace(top.pop(section, getattr(config, section)), **settings)
        for section, settings in sections.items()
    }
    return replace(config, **top, **changed)


def require_consistent(config: TrainConfig, num_processes: int) -> None:
    """Raise ConfigError with all settings that are out of range or contradict each other."""
    if problems := config.problems(num_processes):
        raise ConfigError("\n".join(problems))


def with_stored_settings(config: TrainConfig, stored: Mapping[str, Any]) -> TrainConfig:
    """Fill in data.seed, global_batch_size and branch_from, where null, from the flat settings of the resumed run."""
    names = ("data.seed", "global_batch_size", "branch_from")
    return replace_settings(config, {name: stored[name] for name in names if attrgetter(name)(config) is None})


def with_stored_model(config: TrainConfig, stored: Mapping[str, Any]) -> TrainConfig:
    """Fill in `model` settings that the user did not give, from the stored, flat settings of a run with `init_from`."""
    given = given_model_settings(config)
    settings = {
        setting.name: getattr(config.model, setting.name) if setting.name in given else stored[f"model.{setting.name}"]
        for setting in fields(GPTConfig)
    }
    init_hash = config.init_hash or stored["init_hash"]
    return replace(config, model=GPTConfig(**settings), init_hash=init_hash)


def with_initial_model(config: TrainConfig, initial: GPTConfig, weights_hash: str) -> TrainConfig:
    """Take the settings of `model` from the initial model, which `init_from` names, and record its weights' hash.

    Raises:
        ConfigError: a setting that the user gave contradicts that model, or its weights are not those of `init_hash`.
    """
    given = given_model_settings(config)
    for name in sorted(given - NOT_FROM_INITIAL_MODEL):
        value, initial_value = getattr(config.model, name), getattr(initial, name)
        if value not in (None, initial_value):
            raise ConfigError(f"model.{name}: {value}, but {initial_value} in {config.init_from}; leave it out")
    changes = {name: getattr(config.model, name) for name in NOT_FROM_INITIAL_MODEL & given}
    if config.init_hash not in (None, weights_hash):
        problem = f"init_hash: {config.init_hash}, but the weights of {config.init_from} have the hash {weights_hash}"
        raise ConfigError(f"{problem}; set init_hash to the latter, or null")
    return replace(config, model=replace(initial, **changes), init_hash=weights_hash)


def with_launch(config: TrainConfig, num_processes: int) -> TrainConfig:
    """Fill in the global batch size and the seed of the data where they are still null."""
    batch_size = config.global_batch_size or config.micro_batch_size * num_processes
    return replace_settings(config, {"global_batch_size": batch_size, "data.seed": config.data.seed or 0})
