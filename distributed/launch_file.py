"""The `accelerate launch` command that started this process: what Accelerate neither checks nor passes on."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command_parser


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
    """Parse a command line, run in `directory`, with Accelerate's own parser; None if it is not `accelerate launch`."""
    names = [Path(word).name for word in words]
    spellings = ("launch", "accelerate-launch", "accelerate.commands.launch")
    index = next((index for index, name in enumerate(names) if name in spellings), 0)
    if "accelerate" not in " ".join(names[: index + 1]) or names[index] not in spellings:
        return None
    given = launch_command_parser().parse_known_args([*words[index + 1 :], "train.py"])[0]
    path, file = None, {}
    if given.config_file is not None:
        path = Path(directory, given.config_file)
    elif os.path.isfile(default_config_file) and not given.cpu:  # `accelerate config` wrote it; --cpu ignores it
        path = Path(default_config_file)
    if path is not None and path.exists():  # an elastic restart may come after it was removed
        file = yaml.safe_load(path.read_text()) or {}  # YAML includes JSON
    return LaunchCommand(path, file, {name: getattr(given, name) for name in getattr(given, "nondefault", ())})


def unknown_section_keys(launch: LaunchCommand) -> list[str]:
    """Return a problem for each unknown key in a section such as `fsdp_config`, where Accelerate does not check."""
    known = {action.dest for action in launch_command_parser()._actions}
    return [
        f"{launch.path}: {section}.{key} is not an option of accelerate launch"
        for section, content in launch.file.items()
        for key in (content if isinstance(content, dict) else ())
        # Accelerate adds the section's name, such as fsdp_, to keys without it.
        if known.isdisjoint((key, section.removesuffix("config") + key))
    ]
