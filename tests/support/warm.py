"""Work that every fork would repeat; the server of tests/support/forked.py imports this module before it forks.

Nothing here may compute a matrix product: an exact run configures MKL before its first one.
"""

import gc
import importlib
import weakref
from contextlib import suppress

from runtime.config.parser import parse_config
from tests.support.forked import PRELOADED
from trainer.checkpoint.identity import code_hash

gc.disable()  # imports make no garbage
for name in PRELOADED:
    with suppress(ImportError):
        importlib.import_module(name)

parse_config([])  # builds the parser
code_hash()  # parses the imports of all files, which are cached by content
for finalizer in list(weakref.finalize._registry):  # one for each of torch's operators, needless at exit
    finalizer.atexit = False
gc.collect()
gc.enable()
gc.freeze()  # garbage collection in a fork would otherwise copy inherited memory
