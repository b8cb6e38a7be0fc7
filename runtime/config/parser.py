"""Parse config files and command lines into settings; report all problems together, as `setting: value; remedy`."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

import yaml
from pydantic import ValidationError

from model.settings import Settings
from runtime.config.errors import ConfigError
from runtime.config.help import PASSED_ON, all_fields, explain, is_argument, print_help, section_class, show
from runtime.config.paths import expand_user_path
from runtime.config.unused import UnusedSetting, unused_settings
from runtime.config.yaml_files import read_yaml

if TYPE_CHECKING:
    from runtime.config.schema import TrainConfig

# Names of other programs for settings of this one, for the message that refuses them.
FAMILIAR_NAMES = {
    "learning_rate": "optimizer.lr",
    "min_lr": "schedule.min_lr_ratio",
    "warmup_iters": "schedule.warmup_steps",
    "warmup_ratio": "schedule.warmup_steps",
    "lr_scheduler_type": "schedule.name",
    "max_grad_norm": "optimizer.grad_clip",
    "beta1": "optimizer.betas",
    "beta2": "optimizer.betas",
    "batch_size": "micro_batch_size (of one process) or global_batch_size (of a step)",
    "per_device_train_batch_size": "micro_batch_size",
    "device_batch_size": "micro_batch_size",
    "total_batch_size": "global_batch_size",
    "grad_accum": "global_batch_size",
    "gradient_accumulation_steps": "global_batch_size",
    "block_size": "seq_len",
    "max_seq_len": "seq_len",
    "max_seq_length": "seq_len",
    "context_length": "seq_len",
    "max_iters": "steps",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "num_iterations": "steps",
    "n_layer": "model.n_layers",
    "n_head": "model.n_heads",
    "n_embd": "model.d_model",
    "depth": "model.n_layers",
    "hidden_size": "model.d_model",
    "output_dir": "out_dir",
    "run": "name",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "eval_interval": "evaluation.every",
    "eval_steps": "evaluation.every",
    "log_interval": "tracking.log_every",
    "logging_steps": "tracking.log_every",
    "report_to": "tracking.tracker",
    "wandb_project": "tracking.project",
    "wandb_log": "tracking.wandb",
    "dataset": "data.path",
    "dataset_name": "data.path",
    "model_name_or_path": "init_from",
    "optim": "optimizer.name",
    "gradient_checkpointing": "activation_checkpointing",
    "resume_from_checkpoint": "resume",
    "mixed_precision": "accelerate launch --mixed_precision",
    "dtype": "accelerate launch --mixed_precision",
    "bf16": "accelerate launch --mixed_precision bf16",
    "fp16": "accelerate launch --mixed_precision fp16",
    "device": "accelerate launch --cpu, or CUDA_VISIBLE_DEVICES",
}

LENGTHS = ("steps", "epochs", "tokens")  # the length of a run in three units, of which a user gives one
DEFAULT_CONFIG = Path(__file__).parents[2] / "configs" / "stories.yaml"


def parse_config(
    args: Sequence[str] | None = None,
    num_processes: int = 1,
    program: str = "train.py",
    purpose: str = "Trains a mini-GPT.",
    notify: Callable[[str], None] = lambda notice: None,
) -> "TrainConfig":
    """Parse `[--config FILE]... [--section.setting VALUE]...`, where later settings override earlier ones.

    Without `--config`, configs/stories.yaml is read. `--help` and `--print_config` print and exit. The settings of
    `model` that the user gave are in its `model_fields_set`.

    Args:
        args: the command line without the program; default: sys.argv[1:].
        num_processes: the number of training processes, which must be able to split the global batch.
        program: the name of the program in `--help`.
        purpose: a sentence about the program in `--help`.
        notify: called with a line for each config file of which settings were left out, because others made them
            useless, or whose micro-batches were made smaller for so many processes.

    Raises:
        ConfigError: all wrong values together or, if there are none, all settings that contradict each other or have no
            effect.
    """
    from runtime.config.schema import TrainConfig  # slow to build, and other programs need not

    given = _Given(TrainConfig)
    options, words = given.split(sys.argv[1:] if args is None else args)
    names = {name for name, _ in options}
    if "help" in names:
        print_help(
            TrainConfig,
            f"{program} [--config FILE]... [--section.setting VALUE]... [--print_config]",
            f"{purpose} Later settings override earlier ones. Without --config, configs/{DEFAULT_CONFIG.name} "
            "overrides the defaults below. --print_config prints the resulting settings as YAML.",
        )
        raise SystemExit(0)
    for word in words:
        form = f"--config {word}" if Path(word).suffix in (".yaml", ".yml") else "--section.setting VALUE"
        given.report(word, f"{word}: not an option; settings are given as {form}")
    files = [value for name, value in options if name == "config"] or [str(DEFAULT_CONFIG)]
    if "config" not in names:
        given.read_file(files[0])
        if any(name == "init_from" and value != "null" for name, value in options):
            # The initial model determines the settings of `model`, except those that the user gives.
            given.values = {name: value for name, value in given.values.items() if not name.startswith("model.")}
    for name, value in options:
        if name == "config":
            given.read_file(value)
        elif name != "print_config":
            given.read_option(name, value)
    given.check_length()
    config = given.validate_used()
    for source, settings in given.left_out.items():
        notify(f"{source}left out, because it has no effect: {', '.join(settings)}")
    source, smaller = given.sources.get("micro_batch_size"), config.micro_batch_size_for(num_processes)
    is_for_fewer = config.micro_batch_size_for(1) == config.micro_batch_size != smaller
    # With `exact`, the runs on all numbers of processes must have equal micro-batches.
    if source and is_for_fewer and smaller is not None and not config.exact:
        reason = f"{num_processes} processes share global_batch_size: {config.global_batch_size}"
        notify(f"{source}micro_batch_size: {smaller} instead of {config.micro_batch_size}, because {reason}")
        config = config.replace(micro_batch_size=smaller)
    named = config if config.name is not None else config.replace(name=Path(files[-1]).stem)
    has_model = config.init_from is None
    unused = [
        given.sources.get(setting.name, "") + setting.problem
        for setting in unused_settings(config, has_model, names)
        if not (setting.is_default and given.takes_back(setting))
    ]
    if problems := unused + named.problems(num_processes, has_model):
        raise ConfigError("\n".join(problems))
    if "print_config" in names:
        # Null settings stay null, so that another number of processes and another corpus can use the file, too.
        filled_in = {"name": named.name, "global_batch_size": config.micro_batch_size * num_processes}
        if nulls := [f"{name}: {value}" for name, value in filled_in.items() if config.flat()[name] is None]:
            print(f"# A run on {num_processes} process(es) fills in {', '.join(nulls)}. --help explains other nulls.")
        unresolved = None if config.has_steps else {"steps"}
        print(yaml.safe_dump(config.model_dump(mode="json", exclude=unresolved), sort_keys=False), end="")
        raise SystemExit(0)
    return named


def parse_tool(kind: type[Settings], program: str, args: Sequence[str] | None = None) -> Any:
    """Parse the command line of a program other than train.py.

    Args:
        kind: the settings, which may be marked as POSITIONAL or PASSED_ON. A bool without a value is true.
        program: the name of the program in `--help`.
        args: the command line without the program; default: sys.argv[1:].

    Raises:
        ConfigError: all wrong values together or, if there are none, all settings that have no effect.
    """
    given = _Given(kind)
    options, words = given.split(sys.argv[1:] if args is None else args)
    arguments = [name for name, field in given.fields.items() if is_argument(field)]
    if any(name == "help" for name, _ in options):
        words = [
            f"{name.upper()}..." if given.fields[name].annotation == list[str] else name.upper() for name in arguments
        ]
        print_help(kind, " ".join([program, *words, "[--setting VALUE]..."]), kind.__doc__ or "")
        raise SystemExit(0)
    for name, value in options:
        given.read_option(name, value)
    for name in arguments:
        if words and given.fields[name].annotation == list[str]:
            given.values[name], words = words, []
        elif words:
            given.read_option(name, words.pop(0))
    for word in words:
        given.report(word, f"{word}: unexpected argument; --help lists all settings")
    settings = given.validate()
    if problems := [setting.problem for setting in unused_settings(settings, typed=given.values)]:
        raise ConfigError("\n".join(problems))
    return settings


class _Given:
    """The settings that the user gave, by dotted name such as `optimizer.lr`, and the problems found so far."""

    def __init__(self, kind: type[Settings]):
        self.kind, self.fields = kind, dict(all_fields(kind))
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        """The config file of each value as the beginning of a message; "" for the command line."""
        self.replaced_sources: dict[str, str] = {}
        """The source of the value that a setting of the command line replaced, if it replaced one."""
        self.problems: dict[str, str] = {}
        """The first problem of each setting, file or word."""
        self.left_out: dict[str, list[str]] = {}
        """Settings of each config file that are left out, as "steps (epochs: 4)"."""

    def report(self, name: str, problem: str) -> None:
        """Add a problem, unless one is known for this setting, file or word."""
        self.problems.setdefault(name, problem)

    def split(self, args: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
        """Return the options of a command line with their values, and all other words.

        If the settings are PASSED_ON, options that are not settings are among the other words.
        """
        keeps_unknown = any(PASSED_ON in field.metadata for field in self.fields.values())
        has_arguments = any(map(is_argument, self.fields.values()))
        options, others, remaining = [], [], list(args)
        while remaining:
            word = remaining.pop(0)
            name, has_value, value = word.removeprefix("--").partition("=")
            is_flag = name in self.fields and self.fields[name].annotation is bool
            value_follows = bool(remaining) and (not remaining[0].startswith("--") or " " in remaining[0])
            if is_flag and has_arguments:  # as in `--chat RUN`
                value_follows = remaining[:1] in (["true"], ["false"])
            if name in ("help", "print_config") and has_value:
                self.report(word, f"{word}: --{name} takes no value; write --{name}, or leave it out")
            elif word in ("-h", "--help"):
                options.append(("help", ""))
            elif not word.startswith("--") or (keeps_unknown and name not in self.fields):
                others.append(word)
            elif has_value or word == "--print_config":
                options.append((name, value))
            elif value_follows:
                options.append((name, remaining.pop(0)))
            elif is_flag:
                options.append((name, "true"))
            elif name in self.fields or name == "config":
                self.report(name, f"{name}: has no value; give one as --{name}=VALUE")
            else:
                options.append((name, ""))  # to be reported as unknown
        return options, others

    def read_file(self, file: str) -> None:
        """Read the settings of a YAML file."""
        try:
            settings = read_yaml(expand_user_path("config", file).read_text(encoding="utf-8"))
            if not isinstance(settings, dict):
                raise ConfigError("no line has the form `setting: value`")
        except OSError as error:
            self.report(file, f"config: {file}: {error.strerror}")
        except (ConfigError, UnicodeDecodeError) as error:
            self.report(file, f"{file}: {error}")
        else:
            self._set(settings, f"{file}: ")

    def read_option(self, name: str, text: str) -> None:
        """Read a setting of the command line. Lists, mappings and sections are YAML; other values are literal."""
        value: Any = None if text == "null" else text
        field = self.fields.get(name)
        if field is not None and (section_class(field) or _has_items(field.annotation)):
            try:
                value = read_yaml(text)
            except ConfigError as error:
                self.report(name, f"{name}: {text}: {error}")
        self._set({name: value})

    def validate(self) -> Any:
        """Return an instance of the class of settings; raise ConfigError with all problems."""
        settings = None
        try:
            settings = self.kind.from_flat(self.values)
        except ValidationError as error:
            for name, problem in explain(error.errors(), self.fields, self.values).items():
                self.report(name, self.sources.get(name, "") + problem)
        parsed = settings.model_dump(by_alias=True) if settings is not None else {}
        for name, given in self.values.items() if parsed else ():
            value = reduce(getitem, name.split("."), parsed)
            if _is_misread(given, value):
                source = self.sources.get(name, "")
                self.report(name, f"{source}{name}: {show(given)} would be read as {show(value)}; write what you mean")
        if self.problems:
            raise ConfigError("\n".join(self.problems.values()))
        return settings

    def validate_used(self) -> "TrainConfig":
        """Validate without the settings of a config file that a setting from elsewhere has made useless.

        So a config file for stories serves as one for text, too. A setting that the same file or the command line makes
        useless stays, and is refused.
        """
        config = self.validate()
        while unused := [
            setting
            for setting in unused_settings(config, has_model=config.init_from is None)
            if (source := self.sources.get(setting.name)) and self.sources.get(setting.because, source) != source
        ]:
            for setting in unused:
                self._leave_out(setting.name, setting.reason)
            config = self.validate()
        return config

    def takes_back(self, setting: UnusedSetting) -> bool:
        """Return whether a setting of the command line replaced a value that would be refused in its place.

        That is an earlier value of the command line, or one of a config file that itself makes the setting useless.
        """
        replaced = self.replaced_sources.get(setting.name)
        return replaced is not None and replaced in ("", self.sources.get(setting.because, replaced))

    def _leave_out(self, name: str, reason: str) -> None:
        self.left_out.setdefault(self.sources[name], []).append(f"{name} ({reason})")
        self.sources[name] = ""  # so that settings that need this one are left out, too
        self.values.pop(name, None)

    def check_length(self) -> None:
        """Report two lengths of the run from the same config file or from the command line."""
        given = [f"{name}: {show(self.values[name])}" for name in LENGTHS if self.values.get(name) is not None]
        if len(given) > 1:
            source = self.sources.get("steps", "") or self.sources.get("epochs", "")
            self.report("steps", f"{source}{' and '.join(given)}: the length of the run; give only one of them")

    def _replace_length(self, name: str, value: Any, source: str) -> None:
        """Leave out a length of the run in another unit that an earlier config file gave."""
        for other in LENGTHS if name in LENGTHS and value is not None else ():
            if other != name and self.values.get(other) is not None and self.sources[other] not in ("", source):
                self._leave_out(other, f"{name}: {show(value)}")

    def _set(self, settings: dict[str, Any], source: str = "") -> None:
        seen = set()
        for name, value in self._flatten(settings):
            if name in seen:
                self.report(name, f"{source}{name} is set twice")
            elif name not in self.fields:
                in_section = [other for other in self.fields if other.endswith(f".{name}")]
                familiar = [FAMILIAR_NAMES[name]] if name in FAMILIAR_NAMES and "optimizer.lr" in self.fields else []
                nearest = in_section or familiar or get_close_matches(name, self.fields, n=1, cutoff=0.8)
                remedy = f"did you mean {nearest[0]}? " if nearest else ""
                self.report(name, f"{source}{name} is not a setting; {remedy}--help lists all")
            elif section_class(self.fields[name]):
                self.report(name, f"{source}{name}: {show(value)} is not a section; leave it out for its defaults")
            else:
                self._replace_length(name, value, source)
                if not source and name in self.sources:
                    self.replaced_sources[name] = self.sources[name]
                self.values[name], self.sources[name] = value, source
            seen.add(name)

    def _flatten(self, settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Yield settings by dotted name; `optimizer.lr` may also be a key of its own."""
        for key, value in settings.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict) and name in self.fields and section_class(self.fields[name]):
                yield from self._flatten(value, f"{name}.")
            else:
                yield name, value


def _is_misread(given: Any, value: Any) -> bool:
    """Return whether a number in `value` is not the one that is written: 1e-400 would be 0.0, and 1_0.5 would be 10.5.

    Underscores may only separate thousands.
    """
    if isinstance(given, dict):
        return any(_is_misread(given[key], value[key]) for key in given)
    if isinstance(given, list):
        return any(map(_is_misread, given, value))
    if not isinstance(given, str) or type(value) not in (int, float):
        return False
    if "_" in given:
        return re.fullmatch(r"[+-]?\d{1,3}(_\d{3})+(\.\d*)?([eE][+-]?\d+)?", given.strip()) is None
    return value == 0 and re.search("[1-9]", re.split("[eE]", given)[0]) is not None


def _has_items(annotation: Any) -> bool:
    """Return whether a type is a list, tuple or dict, or a union with one."""
    return get_origin(annotation) in (list, tuple, dict) or any(map(_has_items, get_args(annotation)))
