"""Check that this interpreter has the pinned versions of a requirements file: python .ci/installed.py FILE.

Exit code 0 if it has; 1, with the missing requirements on stdout, if it has not. The Makefile asks this instead of
comparing the ages of files, which say nothing about an environment that was linked or copied.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

missing = []
for line in Path(sys.argv[1]).read_text().split():
    name, _, pinned = line.partition("==")
    try:
        if pinned and version(name.partition("[")[0]).partition("+")[0] != pinned:  # 2.13.0+cpu is 2.13.0
            missing.append(line)
    except PackageNotFoundError:
        missing.append(line)
print(" ".join(missing))
sys.exit(bool(missing))
