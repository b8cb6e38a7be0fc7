"""Make or check a corpus: python -m data.prepare --help (data/prepare/prepare.py)."""

import sys

from data.prepare.prepare import cli

# Worker processes import the functions that they run by the name of their module, which must not be "__main__".
if __name__ == "__main__":
    sys.exit(cli())
