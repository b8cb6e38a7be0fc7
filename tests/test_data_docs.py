"""The commands of docs/data.md do what it says, on small texts and in short trainings."""

import json
import re

import pytest

from tests.conftest import ROOT, python
from tests.test_prepare import make_documents, write_jsonl

DOCS = (ROOT / "docs" / "data.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", DOCS, re.DOTALL) for line in block.splitlines()]
SHORT = (
    "--steps 2 --schedule.warmup_steps 1 --schedule.decay_steps 1 --evaluation.num_samples 8 "
    "--tracking.wandb disabled --tracking.log_every 1"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a user who has the texts and a copy of the repository."""
    folder = tmp_path_factory.mktemp("user")
    folders = (ROOT / name for name in ("data", "model", "training", "configs", "accelerate_configs"))
    for path in (*ROOT.glob("*.py"), *folders):
        (folder / path.name).symlink_to(path)
    documents = [text.replace("\r", "") for text in make_documents(60)]
    (folder / "input.txt").write_text("\n".join(documents))
    (folder / "stories.txt").write_text("<|endoftext|>\n".join(documents))
    (folder / "texts").mkdir()
    write_jsonl(folder / "texts" / "a.jsonl", documents)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, folder):
    training = "train.py" in command
    done = python(f"{command} {SHORT if training else '--num_workers 0'}", cwd=folder)
    if training:
        assert done.stdout.endswith("Training finished.\n") and "val/bits_per_byte" in done.stdout
    else:
        out = re.search(r"--out (\S+)", command)[1]
        metadata = json.loads((folder / out / "metadata.json").read_text())
        documents = metadata["train"]["documents"]
        assert documents == 1 if "input.txt" in command else 40 < documents < 60


def test_all_the_commands_were_found():
    assert len([command for command in COMMANDS if "data.prepare" in command]) >= 3
    assert len([command for command in COMMANDS if "train.py" in command]) >= 2


def test_the_files_that_it_names_are_there():
    for name in re.findall(r"(configs/\w+\.yaml)", DOCS):
        assert (ROOT / name).exists(), name
