"""Resolve a config: fill in its null settings, and load its data and the models that it names."""

from contextlib import suppress
from fractions import Fraction
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from data.corpus import Corpus, load_corpus
from data.sampler import BatchSizes
from runtime.config.errors import ConfigError
from runtime.config.schema import EvaluationConfig, TrainConfig
from runtime.config.stored_settings import complete_settings
from runtime.distributed.world import num_processes
from runtime.machine.cpu import use_portable_arithmetic
from trainer.checkpoint.manifest import InvalidCheckpoint, read_manifest
from trainer.pretrained.load import LoadedModel, hash_weights, load_run
from trainer.pretrained.tokenizer import check_tokenizer
from trainer.run.directory import Run
from trainer.run.resume import resumed_settings, with_stored_model

# Settings that may differ from those of the initial model.
NOT_FROM_INITIAL_MODEL = {"dropout"}


class PretrainedModels(NamedTuple):
    """The models that settings name."""

    initial: LoadedModel | None
    """The model that `init_from` names; None if it is null, or if a run with the same `init_from` resumes."""
    teacher: LoadedModel | None
    """The model that `teacher.path` names; None if the setting is null."""


class Resolved(NamedTuple):
    """A config whose null settings are filled in, and the data and models that were loaded for it."""

    config: TrainConfig
    corpus: Corpus
    models: PretrainedModels


def resolve(config: TrainConfig, run: Run | None = None) -> Resolved:
    """Fill in settings from the run directory, the pretrained models, the corpus and the launch.

    Called by every process; nothing is written. Raise ConfigError if the settings contradict each other, the run, the
    pretrained models or the corpus. Without `run`, as for tools.plan and verify.py, no run is resumed.
    """
    # The run that is resumed, else the checkpoint of a branch, decides what the data are.
    stored = resumed_settings(run, config) if run else None
    parent = None  # the settings of the checkpoint of a new branch
    if stored is not None:
        names = ("data.seed", "global_batch_size", "branch_from")
        config = config.replace(**{name: stored[name] for name in names if attrgetter(name)(config) is None})
    elif run and config.branch_from:
        with suppress(ConfigError, InvalidCheckpoint):  # reported when the run is opened
            parent = complete_settings(read_manifest(Path(config.branch_from)).config)
            if config.data.seed is None:
                config = config.replace(**{"data.seed": parent["data.seed"]})

    # The initial model, which decides what the network is. A run that has a checkpoint does not need it any more: it
    # may have been trained further, or deleted, since the run started.
    initial = None
    if config.init_from is not None:
        same_initial_model = stored and stored["init_hash"] and stored["init_from"] == config.init_from
        if run and stored and same_initial_model and run.manifests():
            config = with_stored_model(config, stored)
        else:
            config, initial = resolve_initial_model(config)
    check_consistent(config)  # before the corpus is loaded

    # The corpus, and the settings that are null until it is loaded.
    corpus = load_corpus(config)
    if initial is not None:
        check_tokenizer(str(config.init_from), initial.tokenizer, initial.model.config.vocab_size, corpus)
    config = corpus.fill_in(config)
    batch_size = config.global_batch_size or config.micro_batch_size * num_processes()
    config = config.replace(**{"global_batch_size": batch_size, "data.seed": config.data.seed or 0})
    config = with_steps(config, len(corpus.train), parent)
    check_consistent(config)  # again, with the settings that are now filled in
    check_generations(config, corpus)
    config, teacher = load_teacher(config, corpus) if config.teacher.path is not None else (config, None)
    return Resolved(config, corpus, PretrainedModels(initial, teacher))


def check_consistent(config: TrainConfig) -> None:
    """Raise ConfigError with all settings that contradict each other."""
    if problems := config.problems(num_processes()):
        raise ConfigError("\n".join(problems))


def check_generations(config: TrainConfig, corpus: Corpus) -> None:
    """Raise ConfigError for settings of generated texts that the data make useless: a chat model needs a question."""
    if not corpus.has_conversations:
        return
    for name in ("num_logged_generations", "temperature"):
        value = getattr(config.evaluation, name)
        if value and value != EvaluationConfig.model_fields[name].default:
            problem = f"evaluation.{name}: {value} has no effect on conversations, for which no texts are generated"
            raise ConfigError(f"{problem}; leave it out")


def with_steps(config: TrainConfig, num_samples: int, parent: dict[str, Any] | None) -> TrainConfig:
    """Convert `epochs` or `tokens` to steps, for a training set of `num_samples` sequences.

    Raise ConfigError if the steps contradict another setting, or if a new branch has other batches than its `parent`,
    because then the steps so far are another part of the length.
    """
    if config.has_steps:
        return config
    name, value = ("epochs", config.epochs) if config.epochs is not None else ("tokens", config.tokens)
    batches = ("global_batch_size", "seq_len", "schedule.batch_warmup_from", "schedule.batch_warmup_steps")
    different = [name for name in batches if parent and attrgetter(name)(config) != parent[name]]
    if different:
        problem = (
            f"{name}: {value:g} includes those of {config.branch_from}, which has another {' and '.join(different)}"
        )
        raise ConfigError(f"{problem}; give steps")

    # The decimal number that was given, because 55 sequences * 2.2 are 121.00000000000001 as binary floats.
    sequences = Fraction(str(value)) * (num_samples if name == "epochs" else Fraction(1, config.seq_len))
    steps = BatchSizes.from_config(config).steps_for(sequences)
    config = config.replace(steps=steps, epochs=None, tokens=None)
    if problems := config.problems(num_processes()):
        raise ConfigError("\n".join([*problems, f"{name}: {value:g} are {steps} steps here"]))
    return config


def resolve_initial_model(config: TrainConfig) -> tuple[TrainConfig, LoadedModel]:
    """Load the model that `init_from` names; return the config with its settings and weight hash, and the model.

    Raise ConfigError as load_given_model does, or if it contradicts a setting that the user gave.
    """
    config, loaded = load_given_model(config, "init_from", "init_hash")
    initial, given = loaded.model.config, {name: getattr(config.model, name) for name in config.model.model_fields_set}
    kept = {name: given.pop(name) for name in NOT_FROM_INITIAL_MODEL & given.keys()}
    for name, value in sorted(given.items()):
        if value not in (None, getattr(initial, name)):
            problem = f"model.{name}: {value}, but {getattr(initial, name)} in {config.init_from}"
            raise ConfigError(f"{problem}; leave it out")
    config = config.replace(model=initial.replace(**kept))
    check_consistent(config)
    return config, loaded


def load_teacher(config: TrainConfig, corpus: Corpus) -> tuple[TrainConfig, LoadedModel]:
    """Load the model that `teacher.path` names; return the config with its weight hash, and the model.

    Raise ConfigError as load_given_model does, or if it cannot read the sequences of this run.
    """
    config, loaded = load_given_model(config, "teacher.path", "teacher.hash")
    path, teacher = str(config.teacher.path), loaded.model.config
    if loaded.config is None and not loaded.model.predicts_next_token:  # models of transformers predict the next one
        problem = f"teacher.path: {path} predicts the next token, and this model does not"
        raise ConfigError(f"{problem}; choose a run of this code")
    check_tokenizer(path, loaded.tokenizer, None, corpus)
    if teacher.vocab_size != config.model.vocab_size:
        problem = f"model.vocab_size: {config.model.vocab_size}, but {teacher.vocab_size} in the teacher {path}"
        raise ConfigError(f"{problem}; set it to the latter, or choose a teacher with this vocabulary")
    if config.seq_len > (longest := teacher.max_position_embeddings):
        problem = f"seq_len: {config.seq_len} is longer than the {longest} positions of the teacher {path}"
        raise ConfigError(f"{problem}; use at most {longest}")
    return config, loaded


def load_given_model(config: TrainConfig, setting: str, hash_setting: str) -> tuple[TrainConfig, LoadedModel]:
    """Load the model that `setting` names; return the config with the hash of its weights, and the model.

    Raise ConfigError if there is no such model, or `hash_setting` is another hash.
    """
    if config.exact:  # must precede any computation
        use_portable_arithmetic()
    path, expected = attrgetter(setting, hash_setting)(config)
    loaded = load_run(path, setting=setting)
    digest = hash_weights(loaded.model.state_dict())
    if expected not in (None, digest):
        problem = f"{hash_setting}: {expected}, but the weights of {path} have the hash {digest}"
        raise ConfigError(f"{problem}; set {hash_setting} to the latter, or null")
    return config.replace(**{hash_setting: digest}), loaded
