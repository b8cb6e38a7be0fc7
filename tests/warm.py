"""Imported by the server of tests/forked.py before it forks: what every fork would have to do again."""

import gc

from arguments import parse_config

parse_config([])  # builds the parser
gc.freeze()  # no collection of a fork visits, and so copies, what it has inherited
