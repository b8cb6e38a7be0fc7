"""The commands of docs/using.md and docs/evaluation.md, on a tiny run and a text of some lines.

tests/test_other_tools.py runs those of other programs.
"""

import json
import re

import pytest

from data.synthetic.stories import STORIES
from tests.conftest import ROOT, TINY_STORIES, commands, python, train
from tests.support.story_endings import QUESTIONS, make_questions

TEXT = "To be, or not to be? That is the question.\n" * 200


DATA, USING, EVALUATION = (
    # tests/repo/test_pages.py runs the others, which make texts
    [command for command in commands((ROOT / f"docs/{page}.md").read_text()) if "python -c" not in command]
    for page in ("data", "using", "evaluation")
)
assert len(USING) >= 7 and len(EVALUATION) >= 6
# What the pages print must train as printed, so nothing here may change the data or the model.
SHORT = "--steps 2 --schedule.warmup_steps 1 --schedule.decay_steps null --global_batch_size 2 --micro_batch_size 2"
SHORT += " --evaluation.num_samples 4 --tracking.wandb disabled"  # which takes longer than the training


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a user who has trained on stories and on a text, and a copy of the repository."""
    folder = tmp_path_factory.mktemp("user")
    for path in ROOT.iterdir():
        if path.suffix == ".py" or path.name in ("data", "model", "configs", "accelerate_configs", "docs"):
            (folder / path.name).symlink_to(path)
    (folder / "input.txt").write_text(TEXT)
    pairs = [{"prompt": f"{i}?", "response": f"It is {i}."} for i in range(40)]
    (folder / "answers.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    prepare, text, _, export = DATA[:4]  # using.md names exports/text
    python(f"{prepare} --num_workers 1", folder)
    python(f"{text} {SHORT}", folder)
    python(export, folder)
    train(*TINY_STORIES, "--steps", "4", "--checkpoint.every", 2, "--out_dir", folder / "runs", "--name", "stories")
    return folder


@pytest.mark.parametrize("command", USING)
def test_command_of_using_page_works(command, folder):
    more = SHORT if "train.py" in command else "--num_workers 1" if "data.prepare" in command else ""
    done = python(f"{command} {more}", folder)
    if "sample.py runs/stories" in command:
        assert done.stdout.count("Meet a brave girl") == 2 and done.stdout.count("the model's -") == 2
    if "train.py" in command:
        assert done.stdout.endswith("Training finished.\n")
    if "export.py" in command:
        out = folder / command.split()[3]
        assert {"README.md", "config.json", "model.safetensors"} <= {path.name for path in out.iterdir()}


@pytest.mark.parametrize("command", EVALUATION[:3])
def test_command_of_evaluation_page_works(command, folder):
    done = python(command, folder)
    if "evaluate.py" in command:
        run = folder / re.search(r"runs/\w+", command)[0]
        assert '"val/loss": ' in done.stdout and (run / "evaluation.json").exists()


def test_grammar_accepts_only_the_right_ending():
    assert QUESTIONS.read_text() == make_questions(), (
        "the grammar has changed: run python -m tests.support.story_endings"
    )
    rows = [json.loads(line) for line in QUESTIONS.read_text().splitlines()]
    assert len(rows) == 100
    for row in rows:
        texts = [f"{row['prompt']} {ending}" for ending in row["endings"]]
        accepted = [STORIES.grammar.log_probability(text) is not None for text in texts]
        assert accepted == [index == row["answer"] for index in range(4)]
