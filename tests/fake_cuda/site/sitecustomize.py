"""Run by Python at its start where this folder is in PYTHONPATH: gives real programs the devices."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.fake_cuda import device

device.install()
