"""Which work on the processor comes first: training. Without torch, for whoever only prepares data."""

import os
import sys
from contextlib import suppress


def yield_cores() -> None:
    """Leave the cores to training, as a thread that works on files beside it; for the initializer of a pool.

    Where it takes a core from one thread of training, all others wait for that one again and again, and a step takes
    several times as long. On Linux a thread has a priority of its own, elsewhere only the process has.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # no reason not to save
            os.nice(19)
