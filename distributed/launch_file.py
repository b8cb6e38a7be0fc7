"""The launch file and options of `accelerate launch`, as far as Accelerate does not check or pass them on."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command_parser

# Sections of a launch file, and the prefix that Accelerate adds to their keys to get the name of a launch option.
SECTION_PREFIXES = {
    "fsdp_config": "fsdp_",
    "dynamo_config": "dynamo_",
    "fp8_config": "fp8_",
    "mpirun_config": "",
    "parallelism_config": "",
    "megatron_lm_config": "",
    "deepspeed_config": "",
}


class LaunchCommand(NamedTuple):
    """A parsed `accelerate launch` command."""

    path: Path | None
    """The launch file; None without one."""
    file: dict[str, Any]
    """Content of the launch file."""
    options: dict[str, Any]
    """Options given on the command line."""

    @property
    def settings(self) -> dict[str, Any]:
        """Top-level settings; options override the file."""
        return self.file | self.options


def find_launch_command() -> LaunchCommand | None:
    """Return the `accelerate launch` command that started this process; None if something else started it."""
    try:
        parent = psutil.Process(os.getppid())
        return parse_launch_command(parent.cmdline(), parent.cwd())
    except psutil.Error:  # the parent has ended or belongs to another user
        return None


def parse_launch_command(words: list[str], directory: str) -> LaunchCommand | None:
    """Parse a command line with Accelerate's own parser; return None if it does not call `accelerate launch`.

    Args:
        words: The command line, as `python .../accelerate launch --num_processes 2 train.py`.
        directory: Working directory of the command.
    """
    names = [Path(word).name for word in words]
    called = [
        index
        for index, name in enumerate(names)
        if name in ("accelerate-launch", "accelerate.commands.launch")
        or (name == "launch" and names[max(0, index - 1)].startswith("accelerate"))
    ]
    if not called:
        return None
    given = launch_command_parser().parse_known_args([*words[called[0] + 1 :], "train.py"])[0]
    path = None
    if given.config_file is not None:
        path = Path(directory, given.config_file)
    elif os.path.isfile(default_config_file) and not given.cpu:  # `accelerate config` wrote it; --cpu ignores it
        path = Path(default_config_file)
    options = {name: getattr(given, name) for name in getattr(given, "nondefault", ())}
    return LaunchCommand(path, _read(path), options)


def unknown_section_keys(launch: LaunchCommand) -> list[str]:
    """Return a problem for each key in a section of the launch file that Accelerate does not know.

    Accelerate refuses unknown top-level keys, but ignores unknown keys of sections.
    """
    known = {action.dest for action in launch_command_parser()._actions}
    return [
        f"{launch.path}: {section}.{key} is not a setting of Accelerate"
        for section, prefix in SECTION_PREFIXES.items()
        for key in launch.file.get(section) or {}
        if key not in known and prefix + key not in known
    ]


def _read(path: Path | None) -> dict[str, Any]:
    try:
        return (yaml.safe_load(path.read_text()) or {}) if path else {}  # YAML includes JSON
    except (OSError, yaml.YAMLError):  # Accelerate has read the file, so it was removed or edited since
        return {}
