"""Resolve a config, for train.py, tools.plan and verify.py: fill in its null settings and load its data."""

from typing import NamedTuple

from config.resolve import (
    replace_settings,
    require_consistent,
    with_initial_model,
    with_launch,
    with_stored_model,
    with_stored_settings,
)
from config.schema import TrainConfig
from data.corpus import Corpus, load_corpus
from distributed.cpu import use_portable_arithmetic
from distributed.world import num_processes
from run.directory import Run
from run.load import LoadedModel, hash_weights, load_run
from run.resume import can_resume_without_initial_model, data_seed_of_branch, resumed_settings
from run.tokenizer import check_tokenizer


class Resolved(NamedTuple):
    """A config whose null settings are filled in, and the data and model that were loaded for it."""

    config: TrainConfig
    corpus: Corpus
    initial: LoadedModel | None
    """The model that `init_from` names; None without `init_from`, or if the run resumes from a checkpoint."""


def resolve(config: TrainConfig, run: Run | None = None) -> Resolved:
    """Fill in settings from the run directory, the initial model, the corpus and the launch.

    Called by every process; nothing is written. Raise ConfigError if the settings contradict each other, the run, the
    initial model or the corpus. Without `run`, as for tools.plan and verify.py, no run is resumed.
    """
    initial, needs_initial = None, config.init_from is not None
    if run is not None and (stored := resumed_settings(run.path, config)) is not None:
        config = with_stored_settings(config, stored)
        if needs_initial and can_resume_without_initial_model(run.path, config, stored):
            config, needs_initial = with_stored_model(config, stored), False
    elif run is not None and config.data.seed is None:
        config = replace_settings(config, {"data.seed": data_seed_of_branch(config)})
    if needs_initial:
        config, initial = resolve_initial_model(config)
    require_consistent(config, num_processes())  # before the corpus is loaded
    corpus = load_corpus(config)
    if initial is not None:
        check_tokenizer(str(config.init_from), initial.tokenizer, initial.model.config.vocab_size, corpus)
    config = with_launch(corpus.fill_in(config), num_processes())
    require_consistent(config, num_processes())  # again, with the settings that are now filled in
    return Resolved(config, corpus, initial)


def resolve_initial_model(config: TrainConfig) -> tuple[TrainConfig, LoadedModel]:
    """Load the model that `init_from` names; return the config with its settings and weight hash, and the model.

    Raise ConfigError if there is no such model, or it contradicts a setting that the user gave.
    """
    if config.exact:  # must precede any computation
        use_portable_arithmetic()
    initial = load_run(str(config.init_from), setting="init_from")
    digest = hash_weights(initial.model.state_dict())
    config = with_initial_model(config, initial.model.config, digest)
    require_consistent(config, num_processes())
    return config, initial
