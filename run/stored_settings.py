"""Read the settings of a run, from its config.yaml or the manifest of a checkpoint."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from config.errors import ConfigError
from config.help import all_fields, explain
from config.schema import TrainConfig, flat_settings

DEFAULTS = TrainConfig().flat()
USE_ITS_CODE = "use the code that trained it, whose commit is in sessions.jsonl of the run"


def complete_settings(stored: dict[str, Any]) -> dict[str, Any]:
    """Return the flat settings (`section.name: value`) of a run, with the default of each setting added since."""
    return DEFAULTS | flat_settings(stored)


def read_settings(file: Path, remedy: str = "; --resume never moves that run aside") -> dict[str, Any] | None:
    """Return the flat settings of the run whose config.yaml is `file`; None if there is no such file.

    Raise ConfigError, which ends in `remedy`, if it is damaged.
    """
    try:
        if not isinstance(stored := yaml.safe_load(file.read_text()), dict):
            raise ValueError("it is empty" if stored is None else "it has no settings")
        settings = complete_settings(stored)
        if odd := [key for key in settings if not isinstance(key, str)]:
            raise ValueError(f"{odd[0]} is not the name of a setting")
        if config := _validate(settings, ignored="literal_error"):  # a fork may have added choices
            settings |= config.flat()
        if unresolved := [name for name in ("global_batch_size", "data.seed") if settings[name] is None]:
            raise ValueError(f"{unresolved[0]}: null")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, RecursionError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} is damaged ({error}){remedy}") from None
    return settings


def config_of(settings: dict[str, Any]) -> TrainConfig:
    """Return the nested or flat settings of a run as a TrainConfig, without settings that this code does not have.

    Raise ConfigError for such a setting in `model`, since without it the network might compute something else, and for
    values that this code refuses.
    """
    problems = [line for key, line in unknown_settings(settings).items() if key.startswith("model.")]
    config = None
    try:
        config = _validate(settings)
        assert config is not None, "no error is ignored"
        problems += config.model.problems()
        if config.model.vocab_size is None:
            problems.append("model.vocab_size: null, but every run stores a number")
    except ValueError as error:
        problems.append(str(error))
    if config is None or problems:
        raise ConfigError(f"{'; '.join(problems)}; {USE_ITS_CODE}")
    return config


def unknown_settings(settings: dict[str, Any]) -> dict[str, str]:
    """Return the settings of a run that this code does not have, each with a message."""
    return {key: no_such_setting(key, value) for key, value in flat_settings(settings).items() if key not in DEFAULTS}


def no_such_setting(key: str, value: Any) -> str:
    """Return the message for a setting of a run that this code does not have."""
    return f"{key}: {value} in the run, but this code has no such setting"


def _validate(settings: dict[str, Any], ignored: str = "") -> TrainConfig | None:
    """Return the settings that this code has; raise ValueError for wrong values.

    Return None if there are only pydantic errors of the type `ignored`.
    """
    known = {key: value for key, value in flat_settings(settings).items() if key in DEFAULTS}
    try:
        return TrainConfig.from_flat(known)
    except ValidationError as error:
        errors = [problem for problem in error.errors() if problem["type"] != ignored]
        if problems := explain(errors, dict(all_fields(TrainConfig)), known):
            raise ValueError("; ".join(problems.values())) from None
    return None
