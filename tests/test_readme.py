"""The commands of the README do what it says. Long trainings are shortened; `make test` is what runs this."""

import json
import re
import subprocess

import pytest
import torch

from tests.conftest import ROOT, python, shell

README = (ROOT / "README.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
SHORT_STORIES = (
    "--steps 3 --schedule.warmup_steps 1 --schedule.decay_steps null --data.num_samples 50 --evaluation.num_samples 20 "
    "--evaluation.num_story_samples 2 --tracking.log_every 1"
)


@pytest.fixture(scope="module")
def out_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("readme") / "runs"


def shortened(command, out_dir):
    """The command as a test can run it: small, into `out_dir`, with two processes where it says so many GPUs."""
    if command == "make train":
        return f'make train ARGS="{SHORT_STORIES} --out_dir {out_dir}"'
    if command == "make verify":
        return f'make verify ARGS="--out_dir {out_dir}"'
    if "--multi_gpu" in command or "multi_gpu.yaml" in command:
        command = command.replace("train.py", "--num_processes 2 --main_process_port 0 train.py")
    if "train.py" in command:
        command += f" --out_dir {out_dir} --steps 3"
    return command.replace(" runs/", f" {out_dir}/")


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "make test"])
def test_command(command, out_dir):
    in_fork = command.startswith("python ") and "one_process" not in command
    done = (python if in_fork else shell)(shortened(command, out_dir), WANDB_MODE="disabled")
    if "train.py" in command and "--print_config" not in command:
        assert done.stdout.endswith("Training finished.\n")
        processes = 1 if command.startswith("python") else 2
        assert f"processes: {processes} x" in done.stdout
    if command == "make verify":
        assert done.stdout.count("\nPASS  ") == 8 and "\nEverything holds.\n" in done.stdout
    if command == "make train":
        assert "above the floor" in done.stdout and "sample/accepted" in done.stdout
        assert "The run lies in" in done.stdout and (out_dir / "stories" / "loss.png").exists()
        assert json.loads((out_dir / "stories" / "status.json").read_text())["state"] == "finished"


def test_the_python_that_it_shows(out_dir):
    """After the commands, which train the run that it loads."""
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        names = {}
        exec(code.replace("runs/", f"{out_dir}/"), names)
        assert names["model"].generate(torch.zeros(1, 1, dtype=torch.int64), 3).shape == (1, 4)


def test_all_the_commands_were_found():
    assert "make train" in COMMANDS and "make test" in COMMANDS and len(COMMANDS) >= 9


def test_what_the_readme_names_is_there():
    for name in re.findall(r"\]\(([^)#:]+)\)|`((?:[\w.]+/)+[\w.]+\.(?:py|yaml|patch))`", README):
        assert (ROOT / (name[0] or name[1])).exists(), name


def test_every_guarantee_names_a_test_that_is_there():
    table = (ROOT / "docs" / "reliability.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| what")]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(tests/\w+\.py)(?:::(\w+))?`(?:, `::(\w+)`)?", row)
        assert named, row
        for file, *tests in named:
            for test in filter(None, tests):
                assert f"def {test}(" in (ROOT / file).read_text(), test


def test_the_launch_files_are_all_in_the_table():
    for file in (ROOT / "accelerate_configs").glob("*.yaml"):
        assert f"| `accelerate_configs/{file.name}` |" in README


def test_make_help_lists_every_target_and_clean_spares_the_runs(tmp_path):
    makefile = (ROOT / "Makefile").read_text()
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in re.findall(r"^([a-z-]+):", makefile, re.MULTILINE):
        assert f"make {target} " in listed
    (tmp_path / "Makefile").write_text(makefile)
    for path in ("runs/stories/__pycache__/kept", ".venv/bin/python", "data/__pycache__/x.pyc"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["Makefile", "runs/stories/__pycache__/kept"]
