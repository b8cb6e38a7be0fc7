"""A signal stops the training inside of a tool."""

import pytest

from tests.conftest import TINY_STORIES
from tests.runtime.distributed.test_signals import SIGNALLED, assert_signal_stops

SIGNALLED_MODULE = SIGNALLED.replace("run_path(sys.argv[0], ", "run_module(sys.argv[0], alter_sys=True, ")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 2])
def test_signal_stops_plan(processes, tmp_path):
    """With several processes, the signal goes to one that is not the main one."""
    assert_signal_stops(SIGNALLED_MODULE, ["tools.plan", *TINY_STORIES], processes, tmp_path)
