"""The commands of docs/experiments.md run in its order, with short trainings."""

import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT, commands, environment

PAGE = (ROOT / "docs" / "experiments.md").read_text()
SHORT = "--steps 20 --schedule.warmup_steps 2 --data.num_samples 320 --evaluation.num_samples 20 --runs 7"


@pytest.mark.slow
def test_commands_of_page_run(tmp_path):
    own = [command for command in commands(PAGE) if "tools.experiment" in command]
    assert len(own) >= 4 and any(" confirm" in command for command in own)
    for command in own:
        is_race = not command.startswith(("python -m tools.experiment confirm", "python -m tools.experiment report"))
        command = command.replace("python -m tools.experiment", f"{sys.executable} -m tools.experiment")
        command += f" --folder {tmp_path}" + (f" {SHORT}" if is_race else "")
        done = subprocess.run(command, shell=True, cwd=ROOT, env=environment(), capture_output=True, text=True)
        if " confirm" in command and "no race" in done.stderr:  # so short a race finds nothing
            assert done.returncode == 2
            continue
        assert done.returncode == 0, command + done.stdout + done.stderr
    shutil.rmtree(tmp_path)
