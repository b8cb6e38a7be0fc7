"""Parse config files and command lines into settings; rewrite the parser's errors as `setting: value; remedy`."""

import re
import sys
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, set_loader, set_parsing_settings

from config.errors import ConfigError
from config.resolve import PartialModel, require_consistent
from config.schema import TrainConfig
from config.yaml_files import read_strings
from model.field_types import describe, invalid_values

DEFAULT_CONFIG = Path(__file__).parent.parent / "configs" / "stories.yaml"

# Metadata of the fields of a script's settings: a field with a default that may be given by position, and a field of
# all words that are not options of the script, which are passed on to train.py.
POSITIONAL: dict[str, bool] = {"positional": True}
PASSED_ON: dict[str, bool] = {"passed_on": True}


class _Parser(ArgumentParser):
    """A parser of the fields of `settings_class` that raises its errors as ConfigError."""

    settings_class: type = TrainConfig

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise ConfigError(_explain(message, self.settings_class)) from None


def parse_config(args: list[str] | None = None, num_processes: int = 1) -> TrainConfig:
    """Parse `[--config FILE]... [--section.field VALUE]...`, where later settings override earlier ones.

    Without `--config`, configs/stories.yaml is read. `--help` and `--print_config` print and exit.

    Args:
        args: the command line without the program; by default that of this process.
        num_processes: number of training processes, which the batch size must fit.

    Raises:
        ConfigError: the parser's first error, or all inconsistent values together.
    """
    own_args = sys.argv[1:] if args is None else args
    has_config = any(arg.split("=")[0] == "--config" for arg in own_args)
    args = own_args if has_config else ["--config", str(DEFAULT_CONFIG), *own_args]
    parser = _train_parser()
    try:
        if "--print_config" in args:  # the parser prints before it refuses words that it does not know
            _parse(parser, [arg for arg in args if arg != "--print_config"])
        settings = _parse(parser, args)
    except ConfigError as error:
        raise _with_file_name(parser, args, error) from None
    config_files = settings.pop("config")
    if None in config_files:
        raise ConfigError("config: settings were given where a YAML file is meant; use --section.field VALUE for them")
    if settings["name"] is None:
        settings["name"] = Path(str(config_files[-1])).stem
    if settings["init_from"] is not None:
        given = parser.parse_args(own_args, defaults=False).get("model")
        settings["model"] = PartialModel(frozenset(vars(given) if given else ()), **vars(settings["model"]))
    config = TrainConfig(**settings)
    require_consistent(config, num_processes)
    return config


def parse_tool(settings_class: type, program: str, args: list[str] | None = None, positional: bool = True) -> Any:
    """Parse the command line of a program other than train.py.

    Args:
        settings_class: a dataclass. Fields without a default are positional; of type list[str], they take one word or
            more. A bool may be given without a value, which means true. See also POSITIONAL and PASSED_ON.
        program: the name of the program in `--help`.
        args: the command line without the program; by default that of this process.
        positional: whether fields without a default are positional.

    Returns:
        An instance of `settings_class`.

    Raises:
        ConfigError: the parser's first error, or all values that are out of range.
    """
    parser = _parser(settings_class, program, settings_class.__doc__ or "")
    lists = {setting.name for setting in fields(settings_class) if setting.type == list[str]}
    places = {setting.name: setting for setting in fields(settings_class) if "positional" in setting.metadata}
    parser.add_class_arguments(settings_class, as_group=False, as_positional=positional, skip={*lists, *places})
    for name in lists:
        parser.add_argument(name, nargs="+")
    for name, setting in places.items():
        parser.add_argument(name, nargs="?", type=setting.type, default=setting.default)
    args = sys.argv[1:] if args is None else args
    if any("passed_on" in setting.metadata for setting in fields(settings_class)):
        args = _move_options_first(args, settings_class)
    switches = {f"--{setting.name}" for setting in fields(settings_class) if setting.type is bool}
    args = [
        f"{word}=true" if word in switches and value not in ("true", "false") else word
        for word, value in pairwise([*args, ""])
    ]
    settings = settings_class(**_parse(parser, args))
    if problems := invalid_values(settings):
        raise ConfigError("\n".join(problems))
    return settings


def _move_options_first(args: list[str], settings_class: type) -> list[str]:
    """Return the options of `settings_class`, then `--`, then all other words of a command line."""
    options = {f"--{setting.name}": setting.type for setting in fields(settings_class) if setting.type != list[str]}
    own, passed_on, words = [], [], iter([*args, ""])
    following = next(words)
    while following:
        word, following = following, next(words, "")
        if word.partition("=")[0] not in {"-h", "--help", *options}:
            passed_on.append(word)
            continue
        own.append(word)
        takes_value = word in options and (options[word] is not bool or following in ("true", "false"))
        if takes_value and following:
            own.append(following)
            following = next(words, "")
    return [*own, "--", *passed_on]


@cache  # building it reads the source for the docstrings, which takes longer than parsing
def _train_parser() -> _Parser:
    parser = _parser(
        TrainConfig,
        "train.py",
        f"Trains a mini-GPT. Without --config it reads configs/{DEFAULT_CONFIG.name}, whose values override the "
        "defaults below. With --plan it only prints what the training would need.",
    )
    parser.add_argument("--config", action="config", help="YAML file of settings; may be given several times.")
    parser.add_class_arguments(TrainConfig, as_group=False)
    return parser


def _parser(settings_class: type, program: str, description: str) -> _Parser:
    # A value such as {class_path: os.system} names code, which the parser would import before it checks the type.
    set_parsing_settings(docstring_parse_attribute_docstrings=True, import_path_denylist=["*"])
    set_loader("yaml", _load_value, exceptions=(yaml.YAMLError,))
    parser = _Parser(prog=program, description=description, allow_abbrev=False)
    parser.settings_class = settings_class
    return parser


def _load_value(text: str) -> Any:
    """Read a file or a word of the command line; a word that YAML takes for a comment (`#x`) stays what it is."""
    value = read_strings(text)
    return text if value is None else value


def _parse(parser: _Parser, args: list[str]) -> dict[str, Any]:
    sections = [setting.name for setting in fields(parser.settings_class) if is_dataclass(setting.type)]
    try:
        parsed = parser.parse_args(args)
        if empty := [section for section in sections if parsed[section] is None]:
            raise ConfigError(
                "\n".join(f"{name}: null is not a section; leave it out for its defaults" for name in empty)
            )
        return vars(parser.instantiate(parsed))
    except UnicodeDecodeError as error:
        raise ConfigError(f"a config file is not UTF-8 text: {error}") from None
    except OverflowError:
        raise ConfigError("a setting has more digits than a number can have") from None
    except RecursionError:
        raise ConfigError("a config is nested too deeply, or contains itself") from None
    except ImportError as error:
        raise ConfigError(f"a setting cannot name code to import: {error}") from None


def _with_file_name(parser: _Parser, args: list[str], error: ConfigError) -> ConfigError:
    """Prefix the parser's error with the config file that causes it, if one does."""
    words = [word for arg in args for word in arg.split("=", 1)]
    for file in (value for name, value in pairwise(words) if name == "--config" and Path(value).is_file()):
        try:
            _parse(parser, ["--config", file])
        except ConfigError as error_of_file:
            if str(error_of_file) == str(error):
                return ConfigError(f"{file}: {error}")
    return error


def _explain(message: str, settings_class: type) -> str:
    """Rewrite a message of jsonargparse as `setting: value; remedy`."""
    if message.startswith("Unexpected config:"):
        return "there are no lines of the form `setting: value` in it"
    unknown = re.match(r"Option '(.*)' is not accepted|Group '(.*)' does not accept option '(.*)'", message)
    if unknown or (unknown := re.match(r"unrecognized arguments: --([^\s=]+)", message)):
        name = unknown[1] or f"{unknown[2]}.{unknown[3]}"
        names = _setting_names(settings_class)
        in_section = [other for other in names if other.endswith(f".{name}")]
        nearest = in_section or get_close_matches(name, names, n=1, cutoff=0.8)
        return f"{name} is not a setting; {f'did you mean {nearest[0]}? ' if nearest else ''}--help lists all"
    message = re.sub(r'^Parser key "(.+?)":\s+', r"\1: ", message)
    setting = message.partition(":")[0]
    annotation = _annotation(setting, settings_class)
    value = re.search(r"(?:Got value|Given value): (.*)|: (\S+) does not conform|(?:base 10|float): '(.*)'", message)
    if annotation is None or value is None:
        return message
    return f"{setting}: {value[1] or value[2] or value[3] or ''} must be {describe(annotation)}"


def _setting_names(settings_class: Any) -> list[str]:
    """Return the names of all settings, as `steps` or `optimizer.lr`."""
    names = [field.name for field in fields(settings_class) if not is_dataclass(field.type)]
    for section in (field for field in fields(settings_class) if is_dataclass(field.type)):
        names += [f"{section.name}.{name}" for name in _setting_names(section.type)]
    return names


def _annotation(setting: str, settings_class: Any) -> Any:
    """Return the type of the field that is named as `steps` or `optimizer.lr`; None if there is no such field."""
    section, _, name = setting.rpartition(".")
    types = {field.name: field.type for field in fields(settings_class)}
    if section:
        return _annotation(name, types[section]) if is_dataclass(types.get(section)) else None
    return types.get(name)
