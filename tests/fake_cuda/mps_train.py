"""train.py on an Apple GPU that is emulated; the names of the operations that it ran go to the file OPERATIONS."""

import os
import sys
from pathlib import Path

from runtime.cli import scripts
from tests.fake_cuda import mps

if __name__ == "__main__":
    gpu = mps.install()
    exit_code = scripts.run_script("train")
    Path(os.environ["OPERATIONS"]).write_text("\n".join(gpu.operations()))
    sys.exit(exit_code)
