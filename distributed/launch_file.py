"""Settings of the `accelerate launch` command that started this process, which Accelerate does not pass on."""

import os
from pathlib import Path
from typing import Any

import psutil
import yaml
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command_parser

SPELLINGS = ("launch", "accelerate-launch", "accelerate.commands.launch")


def launch_settings() -> dict[str, Any] | None:
    """Return the settings of the `accelerate launch` command that started this process; None for any other command."""
    try:
        parent = psutil.Process(os.getppid())
        return parse_launch_command(parent.cmdline(), parent.cwd())
    except psutil.Error:  # the parent has ended or belongs to another user
        return None


def parse_launch_command(words: list[str], directory: str) -> dict[str, Any] | None:
    """Parse a command line, run in `directory`, with Accelerate's own parser; None if it is not `accelerate launch`.

    Return the content of the launch file, overridden by the options given on the command line, and its path as
    `config_file`.
    """
    names = [Path(word).name for word in words]
    index = next((index for index, name in enumerate(names) if name in SPELLINGS), None)
    if index is None or "accelerate" not in " ".join(names[: index + 1]):
        return None
    given = launch_command_parser().parse_known_args([*words[index + 1 :], "train.py"])[0]
    # Without --config_file, Accelerate reads the file written by `accelerate config`, unless --cpu is given.
    path = Path(directory, given.config_file or ("" if given.cpu else default_config_file))
    file = yaml.safe_load(path.read_text()) or {} if path.is_file() else {}  # YAML includes JSON
    options = {name: getattr(given, name) for name in getattr(given, "nondefault", ())}
    return file | options | {"config_file": str(path)}


def unknown_section_keys(settings: dict[str, Any]) -> list[str]:
    """Return a problem for each unknown key in a section such as `fsdp_config`, which Accelerate does not check."""
    known = {action.dest for action in launch_command_parser()._actions}
    return [
        f"{settings['config_file']}: {section}.{key} is not an option of accelerate launch"
        for section, content in settings.items()
        for key in (content if isinstance(content, dict) else ())
        # Accelerate adds the section's name, such as fsdp_, to keys without it.
        if known.isdisjoint((key, section.removesuffix("config") + key))
    ]
