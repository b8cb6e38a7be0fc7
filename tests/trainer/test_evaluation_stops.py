"""A signal or a kill in an evaluation loses nothing: a resumed run makes up for the evaluation."""

import json

import pytest
from accelerate import Accelerator

from data.corpus import load_corpus
from data.synthetic.stories import StoriesDataset
from model.config import GPTConfig
from model.gpt import GPTModel
from runtime.config.schema import TrainConfig
from tests.conftest import TINY_STORIES, assert_same_run, metrics, thinned, train
from trainer.checkpoint.manifest import read_manifest, step_directory
from trainer.evaluation import evaluate

# Step 2 is evaluated but not saved, and step 4 is evaluated, saved and the last one, which also samples texts.
WORDS = "--steps 4 --evaluation.every 2 --checkpoint.every 4 --evaluation.num_scored_generations 4 --exact true"
RECIPE = [*TINY_STORIES, *WORDS.split(), "--evaluation.micro_batch_size", 1, "--name"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run."""
    out_dir = tmp_path_factory.mktemp("whole")
    train(*RECIPE, "run", "--out_dir", out_dir, processes=2)
    return out_dir / "run"


def texts(run):
    return [json.loads(line) for line in (run / "generations.jsonl").read_text().splitlines()]


def assert_made_up(run, whole, step):
    assert_same_run(run, whole, 4)
    assert metrics(run) == metrics(whole) and texts(run) == texts(whole)
    now, expected = (read_manifest(step_directory(path / "checkpoints", step)) for path in (run, whole))
    assert now.evaluated and now.metrics["val/loss"] == expected.metrics["val/loss"]


@pytest.mark.parametrize("stop", thinned([(2, 1, 2), (0, 0, 0), (4, 0, 0)], 3), ids=str)
def test_signal_in_evaluation_is_obeyed_before_its_end(stop, runs, whole):
    step, rank, processes = stop
    arguments = [*RECIPE, "run", "--out_dir", runs]
    exit_code = 1 if processes else 75  # a launcher exits with 1
    done = train(*arguments, processes=processes, exit_code=exit_code, faults=f"stop_in_evaluation:{rank}:{step}")
    assert f"stopped after step {step}; run the same command again" in done.stderr
    assert json.loads((runs / "run" / "status.json").read_text())["state"] == "preempted"
    checkpoints = [path.name for path in (runs / "run" / "checkpoints").iterdir()]
    assert checkpoints == ([step_directory(runs, step).name] if step else [])
    if step:
        manifest = read_manifest(step_directory(runs / "run" / "checkpoints", step))
        assert not manifest.evaluated and "val/loss" not in manifest.metrics
        assert "val/loss" not in metrics(runs / "run")[-1]
    shown = train(*arguments, processes=processes).stdout
    assert f"[step {step} / 4] val/loss" in shown and f"[step {step} / 4] loss" not in shown
    assert_made_up(runs / "run", whole, 4)


def test_kill_in_last_evaluation_loses_no_training(runs, whole):
    arguments = [*RECIPE, "run", "--out_dir", runs, "--checkpoint.asynchronous", False]
    train(*arguments, exit_code=-9, faults="kill_in_evaluation:0:4")
    assert not read_manifest(step_directory(runs / "run" / "checkpoints", 4)).evaluated
    shown = train(*arguments).stdout
    assert f"resumed at step 4 from {runs}" in shown and "Training finished." in shown
    assert_made_up(runs / "run", whole, 4)
    assert "is complete: all 4 steps are done" in train(*arguments).stdout


def test_row_of_checkpoint_is_restored(runs, whole):
    """As after a kill between the rename of the checkpoint and the write of the row."""
    arguments = [*RECIPE, "run", "--out_dir", runs]
    train(*arguments, "--stop_after", 3, exit_code=75)
    rows = (runs / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert json.loads(rows[-1])["step"] == 3
    (runs / "run" / "metrics.jsonl").write_text("".join(rows[:-1]))
    train(*arguments)
    assert metrics(runs / "run") == metrics(whole)


def test_signal_is_obeyed_while_texts_are_compared(runs):
    """Comparing the last texts with every text of a large training set takes minutes."""
    arguments = [*RECIPE, "run", "--out_dir", runs, "--data.num_samples", 2_000_000_000]
    done = train(*arguments, exit_code=75, faults="stop_in_scan:0:4")
    assert (
        "stopped after step 4" in done.stderr
        and read_manifest(runs / "run" / "checkpoints" / "step-00000004").step == 4
    )


@pytest.mark.parametrize("processes", thinned([0, 2], 2))
def test_signal_is_obeyed_while_texts_are_generated(processes, runs, whole):
    """Before the end of the batch, which may take minutes: no text is logged."""
    arguments = [*RECIPE, "run", "--out_dir", runs]
    train(*arguments, processes=processes, exit_code=1 if processes else 75, faults="stop_in_generation:0:4")
    assert read_manifest(runs / "run" / "checkpoints" / "step-00000004").evaluated is False
    assert not (runs / "run" / "generations.jsonl").exists()
    train(*arguments, processes=processes)
    assert_made_up(runs / "run", whole, 4)


def test_row_is_kept_if_its_evaluation_is_no_longer_due(runs):
    """`evaluation.every` may change at a resume."""
    arguments = [*RECIPE, "run", "--out_dir", runs]
    train(*arguments, exit_code=75, faults="stop_in_evaluation:0:2")
    row = metrics(runs / "run")[-1]
    train(*arguments, "--evaluation.every", 3)
    assert row["step"] == 2 and row in metrics(runs / "run")
    assert [row["step"] for row in metrics(runs / "run")] == [1, 2, 3, 4]


def test_signal_in_evaluation_that_is_made_up_keeps_the_row(runs, whole):
    arguments = [*RECIPE, "run", "--out_dir", runs]
    for step in (2, 0):  # of the faulty session, which trains two steps or none
        train(*arguments, exit_code=75, faults=f"stop_in_evaluation:0:{step}")
        assert [row["step"] for row in metrics(runs / "run")] == [1, 2]
    train(*arguments)
    assert_made_up(runs / "run", whole, 4)


def test_stop_after_evaluates_first(runs, whole):
    """It is no signal, after which little time is left."""
    arguments = [*RECIPE, "run", "--out_dir", runs]
    train(*arguments, "--stop_after", 2, exit_code=75)
    assert metrics(runs / "run") == metrics(whole)[:2] and "val/loss" in metrics(runs / "run")[-1]
    assert read_manifest(step_directory(runs / "run" / "checkpoints", 2)).metrics["val/loss"]
    train(*arguments)
    assert_made_up(runs / "run", whole, 4)


def test_signal_after_last_step_ends_a_run_without_evaluations(runs):
    none = "--steps 4 --evaluation.every 0 --evaluation.num_scored_generations 0 --evaluation.num_logged_generations 0"
    train(*TINY_STORIES, *none.split(), "--name", "run", "--out_dir", runs, faults="stop:0:4", exit_code=0)


def test_stories_of_an_entropy_are_drawn_between_votes(monkeypatch):
    """Behind the last vote, nothing is drawn but the stories of the last batch: an entropy of many takes long."""
    corpus = load_corpus(TrainConfig.from_flat({"evaluation.every": 1, "evaluation.num_samples": 5}))
    model = GPTModel(GPTConfig(vocab_size=corpus.vocab_size, n_layers=1, d_model=16, n_heads=2, d_ff=16))
    drawn, draw = [], StoriesDataset._draw

    def draw_and_note(self, index):
        drawn.append(index)
        return draw(self, index)

    def vote():
        drawn.clear()
        return False

    monkeypatch.setattr(StoriesDataset, "_draw", draw_and_note)
    found = evaluate(model, corpus, 2, Accelerator(cpu=True), should_stop=vote)
    assert "val/entropy" in found and {*drawn} == {4}
