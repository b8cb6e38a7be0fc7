"""A signal stops the trainings inside of tools."""

import pytest

from tests.conftest import TINY_STORIES, train
from tests.distributed.test_signals import SIGNALLED, assert_signal_stops

SIGNALLED_MODULE = SIGNALLED.replace("run_path(sys.argv[0], ", "run_module(sys.argv[0], alter_sys=True, ")


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Saved after steps 3 and 6."""
    out_dir = tmp_path_factory.mktemp("short")
    train(*TINY_STORIES, *"--steps 6 --checkpoint.every 3 --evaluation.every 0 --name run --out_dir".split(), out_dir)
    return out_dir / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "processes"),
    [
        (["tools.replay", "RUN", "5"], 0),  # its first training has one step only
        (["tools.replay", "RUN", "--audit", "9"], 2),
        (["tools.plan", *TINY_STORIES], 0),
    ],
    ids=["replay", "audit", "plan"],
)
def test_signal_stops_nested_training(words, processes, short, tmp_path):
    """With several processes, the signal goes to one that is not the main one."""
    assert_signal_stops(SIGNALLED_MODULE, [word.replace("RUN", str(short)) for word in words], processes, tmp_path)
