"""Examples of data parallelism, each a script: python -m examples.NAME."""

import os
import sys

# `python -m` imports this first, and torch takes seconds. The processes that an example starts are silent.
if sys.argv[0] == "-m" and "RANK" not in os.environ:
    print("Loading torch ...", file=sys.stderr, flush=True)
