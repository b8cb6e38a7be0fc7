"""Entry point of python -m data.prepare."""

import sys

from data.prepare.prepare import cli

sys.exit(cli())
