"""List the tools, which work on many runs or on finished ones: python -m tools."""

import ast
import textwrap
from pathlib import Path
from shutil import get_terminal_size

for path in sorted(Path(__file__).parent.iterdir()):
    script = path / "__main__.py" if path.is_dir() else path
    if script.is_file() and script.suffix == ".py" and not path.name.startswith("__"):
        summary = (ast.get_docstring(ast.parse(script.read_text())) or "").partition("\n")[0]
        line = f"python -m tools.{path.stem:<11} {summary.partition(': python')[0].rstrip('.')}"
        print(textwrap.fill(line, get_terminal_size((120, 24)).columns, subsequent_indent=" " * 28))
