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
from config.resolve import require_consistent
from config.schema import PartialModel, TrainConfig
from config.yaml_files import read_strings
from model.field_types import describe, invalid_values

DEFAULT_CONFIG = Path(__file__).parent.parent / "configs" / "stories.yaml"

# Field metadata for parse_tool. POSITIONAL: a field with a default that is a positional argument. PASSED_ON: a field of
# type list[str] for all arguments that are not options of the script; they are passed on to train.py.
POSITIONAL: dict[str, bool] = {"positional": True}
PASSED_ON: dict[str, bool] = {"passed_on": True}


class _Parser(ArgumentParser):
    """A parser of the fields of `settings_class` that raises its errors as ConfigError."""

    settings_class: type = TrainConfig

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise ConfigError(_explain(message, self.settings_class)) from None


def parse_config(args: list[str] | None = None, num_processes: int = 1, program: str = "train.py") -> TrainConfig:
    """Parse `[--config FILE]... [--section.field VALUE]...`, where later settings override earlier ones.

    Without `--config`, configs/stories.yaml is read. `--help` and `--print_config` print and exit.

    Args:
        args: the command line without the program; default: sys.argv[1:].
        num_processes: the number of training processes, which must be able to split the global batch.
        program: the name of the program in `--help`.

    Raises:
        ConfigError: the parser's first error, or all inconsistent values together.
    """
    user_args = sys.argv[1:] if args is None else args
    has_config = any(arg.split("=")[0] == "--config" for arg in user_args)
    args = user_args if has_config else ["--config", str(DEFAULT_CONFIG), *user_args]
    parser = _train_parser(program)
    try:
        if "--print_config" in args:  # jsonargparse prints and exits before it reports unknown arguments
            _parse(parser, [arg for arg in args if arg != "--print_config"])
        settings = _parse(parser, args)
    except ConfigError as error:
        raise _with_file_name(parser, args, error) from None
    config_files = settings.pop("config")
    if None in config_files:  # as after --config '{steps: 3}'
        raise ConfigError("config: settings were given where a YAML file is meant; use --section.field VALUE for them")
    if settings["name"] is None:
        settings["name"] = Path(str(config_files[-1])).stem
    if settings["init_from"] is not None:
        # The initial model determines the settings of `model`, except those that the user gave.
        given = parser.parse_args(user_args, defaults=False).get("model")
        settings["model"] = PartialModel(frozenset(vars(given) if given else ()), **vars(settings["model"]))
    config = TrainConfig(**settings)
    require_consistent(config, num_processes)
    return config


def parse_tool(settings_class: type, program: str, args: list[str] | None = None, positional: bool = True) -> Any:
    """Parse the command line of a program other than train.py.

    Args:
        settings_class: a dataclass. Fields without a default are positional; of type list[str], they take one argument
            or more. A bool may be given without a value, which means true. See also POSITIONAL and PASSED_ON.
        program: the name of the program in `--help`.
        args: the command line without the program; default: sys.argv[1:].
        positional: whether fields without a default are positional.

    Returns:
        An instance of `settings_class`.

    Raises:
        ConfigError: the parser's first error, or all values that are out of range.
    """
    parser = _parser(settings_class, program, settings_class.__doc__ or "")
    settings = fields(settings_class)
    lists = {setting.name for setting in settings if setting.type == list[str]}
    optional = {setting.name: setting for setting in settings if "positional" in setting.metadata}
    parser.add_class_arguments(settings_class, as_group=False, as_positional=positional, skip={*lists, *optional})
    for name in lists:
        parser.add_argument(name, nargs="+")
    for name, setting in optional.items():
        parser.add_argument(name, nargs="?", type=setting.type, default=setting.default)
    args = sys.argv[1:] if args is None else args
    if any("passed_on" in setting.metadata for setting in settings):
        args = _move_options_first(args, settings_class)
    flags = {f"--{setting.name}" for setting in settings if setting.type is bool}
    args = [  # --flag becomes --flag=true, unless its value follows
        f"{arg}=true" if arg in flags and next_arg not in ("true", "false") else arg
        for arg, next_arg in pairwise([*args, ""])
    ]
    parsed = settings_class(**_parse(parser, args))
    if problems := invalid_values(parsed):
        raise ConfigError("\n".join(problems))
    return parsed


def _move_options_first(args: list[str], settings_class: type) -> list[str]:
    """Return the options of `settings_class` with their values, then `--`, then all other arguments."""
    types = {f"--{setting.name}": setting.type for setting in fields(settings_class) if setting.type != list[str]}
    options, others, i = [], [], 0
    while i < len(args):
        arg, next_arg = args[i], args[i + 1 : i + 2]  # the latter is [] after the last argument
        takes_value = arg in types and (types[arg] is not bool or next_arg in (["true"], ["false"]))
        is_option = arg.partition("=")[0] in {"-h", "--help", *types}
        (options if is_option else others).extend([arg, *next_arg] if takes_value else [arg])
        i += 1 + takes_value
    return [*options, "--", *others]


@cache  # building it reads the source for the docstrings, which takes longer than parsing
def _train_parser(program: str) -> _Parser:
    parser = _parser(
        TrainConfig,
        program,
        f"The settings of train.py. Without --config it reads configs/{DEFAULT_CONFIG.name}, whose values override the "
        "defaults below.",
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
    """Read a config file or an argument as YAML; an argument that is a YAML comment (`#x`) remains a string."""
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
        remedy = "" if error.encoding == "utf-8" else "; PYTHONUTF8=1 in the environment reads it as UTF-8"
        raise ConfigError(f"a config file is not {error.encoding.upper()} text: {error}{remedy}") from None
    except OverflowError:
        raise ConfigError("a setting has more digits than a number can have") from None
    except RecursionError:
        raise ConfigError("a config is nested too deeply, or contains itself") from None
    except ImportError as error:
        raise ConfigError(f"a setting cannot name code to import: {error}") from None


def _with_file_name(parser: _Parser, args: list[str], error: ConfigError) -> ConfigError:
    """Prefix the parser's error with the config file that causes it, if one does."""
    parts = [part for arg in args for part in arg.split("=", 1)]
    for file in (value for name, value in pairwise(parts) if name == "--config" and Path(value).is_file()):
        try:
            _parse(parser, ["--config", file])
        except ConfigError as error_of_file:
            if str(error_of_file) == str(error):
                return ConfigError(f"{file}: {error}")
    return error


def _explain(message: str, settings_class: type) -> str:
    """Rewrite a message of jsonargparse as `setting: value; remedy`."""
    if message.startswith("Unexpected config:"):
        return "no line has the form `setting: value`"
    unknown = re.match(r"Option '(.*)' is not accepted|Group '(.*)' does not accept option '(.*)'", message)
    if unknown or (unknown := re.match(r"unrecognized arguments: --([^\s=]+)", message)):
        name = unknown[1] or f"{unknown[2]}.{unknown[3]}"
        names = [name for name, kind in _setting_types(settings_class).items() if not is_dataclass(kind)]
        in_section = [other for other in names if other.endswith(f".{name}")]
        nearest = in_section or get_close_matches(name, names, n=1, cutoff=0.8)
        return f"{name} is not a setting; {f'did you mean {nearest[0]}? ' if nearest else ''}--help lists all"
    message = re.sub(r'^Parser key "(.+?)":\s+', r"\1: ", message)
    setting = message.partition(":")[0]
    annotation = _setting_types(settings_class).get(setting)
    value = re.search(r"(?:Got value|Given value): (.*)|: (\S+) does not conform|(?:base 10|float): '(.*)'", message)
    if annotation is None or value is None:
        return message
    return f"{setting}: {value[1] or value[2] or value[3] or ''} must be {describe(annotation)}"


def _setting_types(settings_class: Any) -> dict[str, Any]:
    """Return the types of all settings and sections by their dotted names, such as `steps` and `optimizer.lr`."""
    types = {field.name: field.type for field in fields(settings_class)}
    for section in (field for field in fields(settings_class) if is_dataclass(field.type)):
        types |= {f"{section.name}.{name}": kind for name, kind in _setting_types(section.type).items()}
    return types
