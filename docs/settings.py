"""Writes docs/settings.md from the settings' own docstrings: python -m docs.settings"""

import ast
import inspect
import types
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from config.schema import TrainConfig

PAGE = Path(__file__).parent / "settings.md"
HEAD = """# Settings

Made by `python -m docs.settings` from `config/schema.py` and `model/config.py`. In a YAML file a section is a key
(`optimizer: {lr: 0.001}`); on the command line it is `--optimizer.lr 0.001`. What comes later wins. Without
`--config`, `configs/stories.yaml` is read, whose values come before the defaults here. `python train.py --help` says
the same, `--print_config` what is in force, and `configs/` has recipes.
"""
WORDS = {"PositiveInt": "int > 0", "NonNegativeInt": "int >= 0", "PositiveFloat": "float > 0"}
WORDS |= {"NonNegativeFloat": "float >= 0", "NoneType": "null"}


def kind(annotation: Any) -> str:
    """A type as a reader of YAML knows it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(map(kind, arguments))
    if origin in (tuple, list):
        return f"[{', '.join(map(kind, arguments))}]"
    if origin is dict:
        return f"{{{': '.join(map(kind, arguments))}}}"
    return WORDS.get(annotation.__name__, annotation.__name__)


def docstrings(settings: type) -> dict[str, str]:
    """What stands under each field, in one line."""
    (body,) = ast.parse(inspect.getsource(settings)).body
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def entries(settings: type, section: str = "") -> list[str]:
    """A line for each setting that is no section."""
    explained, lines = docstrings(settings), []
    for field in fields(settings):
        if is_dataclass(field.type):
            continue
        default = field.default if field.default is not MISSING else field.default_factory()
        default = yaml.safe_dump(list(default) if isinstance(default, tuple) else default, default_flow_style=True)
        said = default.removesuffix("\n").removesuffix("\n...")
        lines.append(
            f"- **`{section}{field.name}`** ({kind(field.type)}; default {said}): {explained[field.name]}".replace(
                "<", "&lt;"
            )
        )
    return lines


def page() -> str:
    """The whole page."""
    parts = [HEAD, "\n".join(entries(TrainConfig))]
    for field in fields(TrainConfig):
        if is_dataclass(field.type):
            parts.append(f"\n## {field.name}\n\n{inspect.getdoc(field.type)}\n")
            parts.append("\n".join(entries(field.type, f"{field.name}.")))
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
