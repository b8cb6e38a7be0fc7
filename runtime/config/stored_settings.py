"""Read the settings of a run, from its config.yaml or the manifest of a checkpoint."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from model.config import current_mlp_name
from runtime.config.errors import ConfigError
from runtime.config.help import all_fields, explain
from runtime.config.schema import TrainConfig, flat_settings

DEFAULTS = TrainConfig().flat()
USE_ITS_CODE = "use the code that trained it, whose commit is in sessions.jsonl of the run"


def complete_settings(stored: dict[str, Any]) -> dict[str, Any]:
    """Return the flat settings (`section.name: value`) of a run, with the default of each setting added since."""
    settings = DEFAULTS | flat_settings(stored)
    return settings | {"model.mlp": current_mlp_name(settings["model.mlp"])}


def unknown_settings(settings: dict[str, Any]) -> dict[str, str]:
    """Return the settings of a run that this code does not have, each with a message."""
    return {
        key: f"{key}: {value} in the run, but this code has no such setting"
        for key, value in flat_settings(settings).items()
        if key not in DEFAULTS
    }


def read_settings(file: Path) -> dict[str, Any] | None:
    """Return the flat settings of the run whose config.yaml is `file`; None if there is no such file.

    Raise ConfigError if it is damaged. A fork may have added settings, and choices of a setting.
    """
    try:
        settings = complete_settings(yaml.safe_load(file.read_text()))
        if problems := _validate(settings, ignored="literal_error")[1]:
            raise ValueError("; ".join(problems))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, RecursionError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} is damaged ({error}); --resume never moves that run aside") from None
    return settings


def config_of(settings: dict[str, Any]) -> TrainConfig:
    """Return the settings of a run as a TrainConfig, without settings that this code does not have.

    Raise ConfigError for such a setting in `model`, since without it the network might compute something else, and for
    values that this code refuses.
    """
    config, problems = _validate(settings)
    problems += [line for key, line in unknown_settings(settings).items() if key.startswith("model.")]
    if config is None or problems:
        raise ConfigError(f"{'; '.join(problems)}; {USE_ITS_CODE}")
    return config


def _validate(settings: dict[str, Any], ignored: str = "") -> tuple[TrainConfig | None, list[str]]:
    """Return the settings that this code has, or what is wrong, without pydantic's errors of the type `ignored`."""
    known = {key: value for key, value in flat_settings(settings).items() if key in DEFAULTS}
    try:
        return TrainConfig.from_flat(known), []
    except ValidationError as error:
        errors = [problem for problem in error.errors() if problem["type"] != ignored]
        return None, [*explain(errors, dict(all_fields(TrainConfig)), known).values()]
