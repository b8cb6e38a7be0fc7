"""Read the settings of a run back, from its config.yaml or the manifest of a checkpoint."""

from dataclasses import asdict
from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from config.errors import ConfigError
from config.resolve import replace_settings
from config.schema import TrainConfig, flat_settings
from config.yaml_files import read_yaml
from model.field_types import invalid_values

USE_ITS_CODE = "use the code that trained it, whose commit is in sessions.jsonl of the run"


def complete_settings(stored: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run as `section.name: value`; a setting added since, as by a fork, has its default."""
    return flat_settings(asdict(TrainConfig())) | flat_settings(stored)


def read_settings(file: Path, remedy: str = "; --resume never moves that run aside") -> dict[str, Any] | None:
    """Return the flat settings of the run whose config.yaml is `file`; None if there is no such file.

    Args:
        file: the config.yaml of a run.
        remedy: what the error message recommends, by default to a training that would resume the run.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        if not isinstance(stored := read_yaml(file.read_text()), dict):
            raise ValueError("it is empty" if stored is None else "it holds no settings")
        settings = complete_settings(stored)
        counts = ("steps", "seq_len", "global_batch_size")
        kinds: dict[str, set[type]] = dict.fromkeys(counts, {int}) | {"data.seed": {int}}
        kinds |= dict.fromkeys(("schedule.batch_warmup_from", "schedule.batch_warmup_steps"), {int, NoneType})
        wrong = [name for name, kind in kinds.items() if type(settings[name]) not in kind]
        if wrong := wrong or [name for name in counts if settings[name] < 1]:
            raise ValueError(f"{wrong[0]} is {settings[wrong[0]]!r}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, yaml.YAMLError, RecursionError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} is damaged ({error}){remedy}") from None
    return settings


def config_of(settings: dict[str, Any]) -> TrainConfig:
    """Return the settings of a run, nested or flat, as a TrainConfig.

    A setting that this code does not have is left out, except one of `model`: without it the network computes something
    else, even where all tensors fit.

    Raises:
        ConfigError: `model` has a setting, or a value of one, that this code does not have.
    """
    unknown = unknown_settings(settings)
    known = {key: value for key, value in complete_settings(settings).items() if key not in unknown}
    config = replace_settings(TrainConfig(), known)
    problems = [line for key, line in unknown.items() if key.startswith("model.")] or config.model.problems()
    # load_corpus explains a source that this code lacks better.
    problems = problems or [problem for problem in invalid_values(config) if not problem.startswith("data.")]
    if problems:
        raise ConfigError(f"{'; '.join(problems)}; {USE_ITS_CODE}")
    return config


def unknown_settings(settings: dict[str, Any]) -> dict[str, str]:
    """Return the settings of a run that this code does not have, each with a line that says so."""
    known = flat_settings(asdict(TrainConfig()))
    unknown = {key: value for key, value in complete_settings(settings).items() if key not in known}
    return {key: f"{key}: {value} there, and no setting any more" for key, value in unknown.items()}
