"""The setting `launch` of scripts that train many runs."""

import sys
from pathlib import Path

import pytest

from runtime.config.errors import ConfigError
from tools.jobs.launch import Launch

ACCELERATE = f"{Path(sys.executable).with_name('accelerate')} launch"


@pytest.mark.parametrize(
    ("launch", "precision", "processes"),
    [
        (None, "no", 1),
        (f"{ACCELERATE} --config_file two.yaml", "bf16", 2),
        (f"{ACCELERATE} --config_file two.yaml --mixed_precision no", "no", 2),
        (f"{sys.executable} -m accelerate.commands.launch --config_file empty.yaml", "no", None),
        ("bash launch.sh", None, None),
    ],
)
def test_launch_parses_precision_and_processes(launch, precision, processes, tmp_path, monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("two.yaml").write_text("num_processes: 2\nmixed_precision: bf16\n")
    Path("empty.yaml").write_text("")
    found = Launch.parse(launch)
    assert (found.precision, found.processes) == (precision, processes)
    assert found.command == tuple((launch or sys.executable).split())


@pytest.mark.parametrize("program", [None, f"{sys.executable} -u"])
def test_launch_by_python_inherits_precision(program, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert Launch.parse(program).precision == "bf16"
    assert Launch.parse(f"{sys.executable} -m accelerate.commands.launch").precision == "no"


def test_identity_covers_words_that_are_too_long_for_a_path():
    identities = [Launch.parse(f"bash -c '{300 * 'x'} {word}'").identity for word in "aab"]
    assert identities[0] == identities[1] != identities[2]


@pytest.mark.parametrize(("launch", "problem"), [("'python", "cannot be parsed"), ("no-such-program x", "on the PATH")])
def test_launch_refuses_unusable_command(launch, problem):
    with pytest.raises(ConfigError, match=f"launch: .*{problem}"):
        Launch.parse(launch)
