"""From config files and the words of a command line to settings, and what is wrong with them in plain words."""

import re
import sys
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import yaml
from jsonargparse import ArgumentParser, set_loader, set_parsing_settings

from config.errors import ConfigError
from config.resolve import PartialModel, require_consistent
from config.schema import TrainConfig, numbers_out_of_range
from config.yaml_files import read_words

DEFAULT_CONFIG = Path(__file__).parent.parent / "configs" / "stories.yaml"
SECTIONS = tuple(setting.name for setting in fields(TrainConfig) if is_dataclass(setting.type))
NO_NULL = "{}: null is no value of it; leave it out for its default"


def _nulls(settings: Any, prefix: str = "") -> list[str]:
    """Settings of a file that are null and cannot be, which the parser lets through; a problem each."""
    problems = []
    for setting in fields(settings):
        value, name = getattr(settings, setting.name), prefix + setting.name
        if is_dataclass(value):
            problems += _nulls(value, f"{name}.")
        elif value is None and type(None) not in get_args(setting.type):
            problems.append(NO_NULL.format(name))
    return problems


def _load_value(text: str) -> Any:
    """A file or a word of the command line; of a word that YAML takes for nothing (`#x`) the word itself."""
    value = read_words(text)
    return text if value is None else value


IN_WORDS = {  # the types of settings
    "PositiveInt": "a whole number above 0",
    "NonNegativeInt": "a whole number of at least 0",
    "PositiveFloat": "a number above 0",
    "NonNegativeFloat": "a number of at least 0",
    "OpenUnitInterval": "a number above 0 and below 1",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "tuple": "a list",
    "NoneType": "null",
}


def _in_plain_words(message: str) -> str:
    """What the parser says, as all other messages do: setting, value, what would be right."""
    message = re.sub(r"^Option '(.*)' is not accepted", r"\1 is no setting; --help lists all", message)
    message = re.sub(r"^Group '(.*)' does not accept option '(.*)'", r"\1.\2 is no setting; --help lists all", message)
    message = re.sub(r'^Parser key "(.+?)":\s+', r"\1: ", message)
    types = re.search(r"Subtypes: \[(.*)\]|Expected an? (.*)\. Got|Not of type (\w+)", message)
    if not types:
        return message
    value = re.search(r"(?:Got value|Given value): (.*)|: (\S+) does not conform|(?:base 10|float): '(.*)'", message)
    setting = message.partition(":")[0]
    given = value[value.lastindex] if value else "what is given"
    return f"{setting}: {given} must be {_types_in_plain_words(types[types.lastindex])}"


def _types_in_plain_words(types: str) -> str:
    """Of `<class 'int'>, typing.Literal['a', 'b']`: a whole number or one of 'a', 'b'."""
    names = re.sub(r"(jsonargparse\.)?typing\.|<class |>", "", types)
    choices = []
    for name, inside in re.findall(r"(\w+)(?:\[([^\]]*)\])?", names):
        if name == "Literal":
            choices.append(f"one of {inside}")
        else:
            choices.append(f"{name} [{inside}]" if inside else IN_WORDS.get(name, name))
    a_type_inside = r"(?<=[\[ ])\w+(?=[\],])"
    return re.sub(a_type_inside, lambda name: IN_WORDS.get(name[0], name[0]), " or ".join(choices))


class _Parser(ArgumentParser):
    def error(self, message: str, ex: Exception | None = None) -> None:
        if message.startswith("Unexpected config:"):
            message = "no lines of the form `setting: value` are in it"
        raise ConfigError(_in_plain_words(message)) from None


def parse_config(args: list[str] | None = None, num_processes: int = 1) -> TrainConfig:
    """The settings of the run from `[--config FILE]... [--section.field VALUE]...`, where later wins.

    Without `--config`, configs/stories.yaml is read. `--help` and `--print_config` print and exit.

    Raises:
        ConfigError: the parser's first error, or all inconsistent values together.
    """
    own_args = sys.argv[1:] if args is None else args
    has_config = any(arg.split("=")[0] == "--config" for arg in own_args)
    args = own_args if has_config else ["--config", str(DEFAULT_CONFIG), *own_args]
    parser = _train_parser()
    try:
        settings = _parse(parser, args, SECTIONS)
    except ConfigError as error:
        raise _with_its_file(parser, args, error) from None
    config_files = settings.pop("config")
    if None in config_files:
        raise ConfigError("config: settings were given where a YAML file is meant; use --section.field VALUE for them")
    if settings["name"] is None:
        settings["name"] = Path(str(config_files[-1])).stem
    if settings["init_from"] is not None:
        given = parser.parse_args(own_args, defaults=False).get("model")
        settings["model"] = PartialModel(frozenset(vars(given) if given else ()), **vars(settings["model"]))
    config = TrainConfig(**settings)
    if problems := _nulls(config):
        raise ConfigError("\n".join(problems))
    require_consistent(config, num_processes)
    return config


def _with_its_file(parser: _Parser, args: list[str], error: ConfigError) -> ConfigError:
    """The parser's error, which names the config file where it stands in one."""
    words = [word for arg in args for word in arg.split("=", 1)]
    for file in (value for name, value in pairwise(words) if name == "--config" and Path(value).is_file()):
        try:
            _parse(parser, ["--config", file], SECTIONS)
        except ConfigError as of_file:
            if str(of_file) == str(error):
                return ConfigError(f"{file}: {error}")
    return error


@cache  # it reads the source for the docstrings, which takes longer than to parse
def _train_parser() -> _Parser:
    parser = _parser(
        "train.py",
        f"Trains a mini-GPT. Without --config it reads configs/{DEFAULT_CONFIG.name}, whose values come before the "
        "defaults below. With --plan it only says what that would need.",
    )
    parser.add_argument("--config", action="config", help="YAML file of settings; may be given several times.")
    parser.add_class_arguments(TrainConfig, as_group=False)
    return parser


def parse_tool(kind: type, program: str, args: list[str] | None = None, positional: bool = True) -> Any:
    """The settings of another program than train.py, a `kind` whose fields without a default are positional unless
    told, and a list[str] among these takes one word or more. A bool that is named is true.

    Raises:
        ConfigError: the parser's first error.
    """
    parser = _parser(program, kind.__doc__)
    lists = {setting.name for setting in fields(kind) if setting.type == list[str]}
    parser.add_class_arguments(kind, as_group=False, as_positional=positional, skip=lists)
    for name in lists:
        parser.add_argument(name, nargs="+")
    args = sys.argv[1:] if args is None else args
    switches = {f"--{setting.name}" for setting in fields(kind) if setting.type is bool}
    args = [
        f"{word}=true" if word in switches and value not in ("true", "false") else word
        for word, value in pairwise([*args, ""])
    ]
    settings = kind(**_parse(parser, args))
    if problems := numbers_out_of_range(vars(settings)):
        raise ConfigError("\n".join(problems))
    return settings


def own_arguments_first(words: list[str], kind: type) -> list[str]:
    """The options of a `kind`, and after `--` all other words, which are for train.py."""
    own, theirs, others = [], [], iter([*words, ""])
    options = {f"--{setting.name}": setting.type for setting in fields(kind) if setting.type != list[str]}
    following = next(others)
    while following:
        word, following = following, next(others, "")
        if word.partition("=")[0] not in {"-h", "--help", *options}:
            theirs.append(word)
            continue
        own.append(word)
        takes_value = word in options and (options[word] is not bool or following in ("true", "false"))
        if takes_value and following:
            own.append(following)
            following = next(others, "")
    return [*own, "--", *theirs]


def _parser(program: str, description: str) -> _Parser:
    # A value such as {class_path: os.system} names code, which the parser would import before it looks at the type.
    set_parsing_settings(docstring_parse_attribute_docstrings=True, import_path_denylist=["*"])
    set_loader("yaml", _load_value, exceptions=(yaml.YAMLError,))
    return _Parser(prog=program, description=description, allow_abbrev=False)


def _parse(parser: _Parser, args: list[str], sections: tuple[str, ...] = ()) -> dict[str, Any]:
    try:
        parsed = parser.parse_args(args)
        if empty := [NO_NULL.format(name) for name in sections if parsed[name] is None]:
            raise ConfigError("\n".join(empty))
        return vars(parser.instantiate(parsed))
    except UnicodeDecodeError as error:
        raise ConfigError(f"a config file is not UTF-8 text: {error}") from None
    except OverflowError:
        raise ConfigError("a setting has more digits than a number can have") from None
    except RecursionError:
        raise ConfigError("a config is nested too deeply, or contains itself") from None
    except ImportError as error:
        raise ConfigError(f"no setting names code to import: {error}") from None
