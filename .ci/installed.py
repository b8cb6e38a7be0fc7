"""Check that this interpreter has the pinned versions of a requirements file: python .ci/installed.py FILE.

Exit code 0 if it has; 1, with the missing requirements on stdout, if it has not. The Makefile asks this instead of
comparing the ages of files, which say nothing about an environment that was linked or copied.
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def missing_requirements(file: Path) -> list[str]:
    """Return the lines of a requirements file that are not installed at their pinned version."""
    missing = []
    for line in file.read_text().split("\n"):
        if line.startswith("-r "):
            missing += missing_requirements(file.parent / line.removeprefix("-r "))
        elif pinned := re.fullmatch(r"([\w.-]+)(?:\[.*\])?==(\S+)", line.strip()):
            try:
                installed = version(pinned[1]).partition("+")[0]  # 2.13.0+cpu is 2.13.0
            except PackageNotFoundError:
                installed = ""
            if installed != pinned[2]:
                missing.append(line)
    return missing


if __name__ == "__main__":
    lines = missing_requirements(Path(sys.argv[1]))
    print(" ".join(lines))
    sys.exit(bool(lines))
