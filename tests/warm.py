"""Imported by the server of tests/forked.py before it forks: what every fork would have to do again. No product of
matrices: before its first one, an exact run tells MKL to compute as on any processor."""

import gc
import weakref

from config.parser import parse_config

parse_config([])  # builds the parser
for finalizer in list(weakref.finalize._registry):  # torch's, of each of its operators: they end with the process
    finalizer.atexit = False
gc.collect()
gc.freeze()  # no collection of a fork visits, and so copies, what it has inherited
