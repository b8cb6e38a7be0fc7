"""Read the settings of a run, from its config.yaml or the manifest of a checkpoint."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from config.errors import ConfigError
from config.resolve import replace_settings
from config.schema import TrainConfig, flat_settings
from config.yaml_files import read_yaml
from model.field_types import invalid_values

# Settings that are used without a check by `config_of`. Others may have values that this code refuses, such as a choice
# that a fork added.
ALWAYS_READ = ("steps:", "seq_len:", "global_batch_size:", "data.seed:", "schedule.batch_warmup_", "checkpoint.every:")
DEFAULTS = flat_settings(asdict(TrainConfig()))
USE_ITS_CODE = "use the code that trained it, whose commit is in sessions.jsonl of the run"


def complete_settings(stored: dict[str, Any]) -> dict[str, Any]:
    """Return the flat settings (`section.name: value`) of a run, with the default of each setting added since."""
    return DEFAULTS | flat_settings(stored)


def read_settings(file: Path, remedy: str = "; --resume never moves that run aside") -> dict[str, Any] | None:
    """Return the flat settings of the run whose config.yaml is `file`; None if there is no such file.

    Raise ConfigError, which ends in `remedy`, if it is damaged.
    """
    try:
        if not isinstance(stored := read_yaml(file.read_text()), dict):
            raise ValueError("it is empty" if stored is None else "it has no settings")
        settings = complete_settings(stored)
        if problems := [line for line in invalid_values(_without_unknown(settings)) if line.startswith(ALWAYS_READ)]:
            raise ValueError(problems[0])
        if unresolved := [name for name in ("global_batch_size", "data.seed") if settings[name] is None]:
            raise ValueError(f"{unresolved[0]}: null")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, yaml.YAMLError, RecursionError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} is damaged ({error}){remedy}") from None
    return settings


def config_of(settings: dict[str, Any]) -> TrainConfig:
    """Return the nested or flat settings of a run as a TrainConfig, without settings that this code does not have.

    Raise ConfigError for such a setting in `model`, since without it the network might compute something else.
    """
    config, unknown = _without_unknown(settings), unknown_settings(settings)
    problems = [line for key, line in unknown.items() if key.startswith("model.")] or config.model.problems()
    # load_corpus has a better message for a data source that this code lacks.
    problems = problems or [problem for problem in invalid_values(config) if not problem.startswith("data.")]
    if config.model.vocab_size is None:
        problems.append("model.vocab_size: null, but every run stores a number")
    if problems:
        raise ConfigError(f"{'; '.join(problems)}; {USE_ITS_CODE}")
    return config


def unknown_settings(settings: dict[str, Any]) -> dict[str, str]:
    """Return the settings of a run that this code does not have, each with a message."""
    return {key: no_such_setting(key, value) for key, value in flat_settings(settings).items() if key not in DEFAULTS}


def no_such_setting(key: str, value: Any) -> str:
    """Return the message for a setting of a run that this code does not have."""
    return f"{key}: {value} in the run, but this code has no such setting"


def _without_unknown(settings: dict[str, Any]) -> TrainConfig:
    known = {key: value for key, value in flat_settings(settings).items() if key in DEFAULTS}
    return replace_settings(TrainConfig(), DEFAULTS | known)
