"""The training step equals the textbook's on any number of processes and with any accumulation."""

import json
import math
import re

import pytest
import torch
import torch.nn.functional as F

from data.synthetic.stories import STORIES, StoriesDataset
from model.config import GPTConfig
from model.gpt import GPTModel
from tests.conftest import ROOT, TINY_STORIES, assert_same_run, environment, metrics, tensors, train
from tests.support import forked
from trainer.checkpoint.manifest import validate

STEPS = 6
PLAIN = [
    *TINY_STORIES,
    *f"--steps {STEPS} --model.dropout 0 --schedule.name constant --schedule.warmup_steps 0".split(),
    *"--optimizer.grad_clip 0.5 --evaluation.every 0".split(),
]


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory):
    """(logged rows, weights) of the loop with a hand-written all-reduce, on one process and on two."""
    results = []
    for processes in (1, 2):
        out_file = tmp_path_factory.mktemp("by_hand") / "weights.pt"
        done = forked.run(
            "tests/support/reference_all_reduce.py", [str(out_file), str(STEPS)], processes, environment()
        )
        assert done.returncode == 0, done.stderr
        results.append((json.loads(done.stdout), torch.load(out_file)))
    return results


ARRANGEMENTS = [(1, 6), pytest.param((2, 1), marks=pytest.mark.slow), (3, 2)]  # 2 and 3 processes are alike


@pytest.fixture(scope="module", params=ARRANGEMENTS, ids=lambda p: f"{p[0]}_processes_micro_batch_{p[1]}")
def trained(request, tmp_path_factory):
    """(logged rows, weights) of train.py, on 1, 2 and 3 processes with accumulation 1, 3 and 1."""
    processes, micro_batch_size = request.param
    out_dir = tmp_path_factory.mktemp("trained")
    arguments = ["--micro_batch_size", micro_batch_size, "--out_dir", out_dir, "--name", "run"]
    train(*PLAIN, *arguments, processes=processes)
    weights = tensors(out_dir / "run", STEPS)
    prefix = "model."
    return metrics(out_dir / "run"), {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}


def test_training_equals_hand_written_all_reduce(by_hand, trained):
    """The stories have different lengths, so a mean of the processes' or micro-batches' means would differ."""
    rows, weights = trained
    for rows_by_hand, weights_by_hand in by_hand:
        for ours, theirs in zip(rows, rows_by_hand, strict=True):
            assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=2e-6)
            assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=2e-5)
        assert weights.keys() == weights_by_hand.keys()
        for name, weight in weights.items():
            # AdamW divides small gradients by their own size, which magnifies rounding: 6 steps of 0.01 are compared.
            torch.testing.assert_close(weight, weights_by_hand[name], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_tutorial_configs_train(runs):
    recipe = ["--config", "configs/random_tokens.yaml", "--tracking.wandb", "disabled"]
    done = train(*recipe, "--out_dir", runs, processes=2)
    lines = done.stdout.splitlines()
    logged = [re.fullmatch(r"\[step (\d+) / 50\] loss = (\d+\.\d{4}).*", line) for line in lines]
    logged = [(int(match[1]), float(match[2])) for match in logged if match]
    assert [step for step, _ in logged] == [10, 20, 30, 40, 50]
    assert all(math.log(10_000) - 0.05 < loss < math.log(10_000) + 0.15 for _, loss in logged), logged
    assert lines[-1] == "Training finished."
    start_block = done.stdout.partition("\n[step ")[0]
    for fact in (
        "2 x cpu",
        "gloo",
        "fp32",
        "parameters",
        "16 sequences = 8 micro-batch x 2 processes x 1",
        "512 a step",
    ):
        assert fact in start_block
    assert "arning" not in done.stdout + done.stderr
    status = json.loads((runs / "random_tokens" / "status.json").read_text())
    assert status == {"state": "finished", "step": 50, "reason": "", "kind": None}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_gpu", "multi_gpu"])
def test_gpu_launch_files_work_without_a_gpu(name, runs):
    """On the CPU, with the precision and the launcher of the file: bf16 autocast."""
    launch_file = ROOT / "accelerate_configs" / f"{name}.yaml"
    processes = 1 if name == "one_gpu" else 2
    done = train(*PLAIN, "--out_dir", runs, "--name", "run", processes=processes, launch_file=launch_file)
    assert f"{processes} x " in done.stdout and "precision: bf16" in done.stdout
    assert {tensor.dtype for tensor in tensors(runs / "run", STEPS).values()} == {torch.float32}
    losses = [row["train/loss"] for row in metrics(runs / "run")]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.slow
def test_compiled_blocks_train_alike_under_clean_names(runs):
    arguments = [*PLAIN, "--model.dropout", 0.2, "--out_dir", runs]  # the masks are the same, too
    train(*arguments, "--name", "eager", processes=2)
    train(*arguments, "--name", "compiled", "--compile", "true", "--chunked_loss", "true", processes=2)
    assert tensors(runs / "compiled", STEPS).keys() == tensors(runs / "eager", STEPS).keys()
    for eager, compiled in zip(metrics(runs / "eager"), metrics(runs / "compiled"), strict=True):
        assert compiled["train/loss"] == pytest.approx(eager["train/loss"], rel=1e-4)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Rows and a run directory of 1 and 3 processes whose weights are the same, because the learning rate is 0."""
    out_dir = tmp_path_factory.mktemp("evaluated")
    for processes in (1, 3):
        arguments = ["--steps", 1, "--schedule.warmup_steps", 0, "--optimizer.lr", 0, "--evaluation.every", 1]
        arguments += ["--evaluation.num_scored_generations", 4]
        train(*TINY_STORIES, *arguments, "--out_dir", out_dir, "--name", processes, processes=processes)
    return [metrics(out_dir / str(processes))[-1] for processes in (1, 3)], out_dir / "3"


def test_evaluation_is_identical_on_any_processes(evaluated):
    rows, _ = evaluated
    of_evaluation = [{k: v for k, v in row.items() if k.startswith(("val/", "generation/"))} for row in rows]
    assert of_evaluation[0] == of_evaluation[1]
    expected = {"val/loss", "val/perplexity", "val/bits_per_byte", "val/entropy", "generation/valid"}
    assert expected <= of_evaluation[0].keys()


def test_evaluation_weighs_every_target_once(evaluated):
    rows, run = evaluated
    config = GPTConfig(vocab_size=len(STORIES.vocabulary), n_layers=2, d_model=16, n_heads=2, d_ff=32)
    model = GPTModel(config).double().eval()
    weights = {n.removeprefix("model."): t for n, t in tensors(run, 1).items() if n.startswith("model.")}
    model.load_state_dict(weights)
    dataset = StoriesDataset("validation", 7, 0, 128)
    losses = []
    for row in dataset:
        logits = model(row["input_ids"][None]).logits
        loss = F.cross_entropy(logits[0, :-1], row["labels"][1:], reduction="none")
        losses += loss[row["labels"][1:] != -100].tolist()
    assert rows[0]["val/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    num_bytes = sum(len(dataset.text(i).encode()) for i in range(7))
    assert rows[0]["val/bits_per_byte"] == pytest.approx(sum(losses) / num_bytes / math.log(2), rel=1e-6)
    assert rows[0]["val/entropy"] == pytest.approx(dataset.entropy_nats / len(losses))


def test_non_finite_loss_stops_run_and_is_unsaved(runs):
    """The first update makes huge weights and the second step a loss of NaN, which is noticed before the save."""
    arguments = ["--optimizer.lr", "1e30", "--tracking.log_every", 100, "--checkpoint.every", 1]
    arguments += ["--out_dir", runs, "--name", "run"]
    done = train(*PLAIN, *arguments, processes=2, exit_code=1)
    assert re.search(r"step 2: loss = .*, gradient norm = nan.* in micro-batches of process\(es\) \[", done.stderr)
    assert done.stderr.count("train.py: error:") == 1 and "Training finished." not in done.stdout
    status = json.loads((runs / "run" / "status.json").read_text())
    assert status["state"] == "failed" and "step 2: loss = " in status["reason"]
    assert [path.name for path in (runs / "run" / "checkpoints").iterdir()] == ["step-00000001"]
    validate(runs / "run" / "checkpoints" / "step-00000001")


def test_stop_after_beyond_last_step_changes_nothing(runs):
    train(*TINY_STORIES, "--steps", 2, "--out_dir", runs, "--name", "plain")
    done = train(*TINY_STORIES, "--steps", 2, "--stop_after", 5, "--out_dir", runs, "--name", "later")
    assert "[step 3 / 2]" not in done.stdout and done.stdout.endswith("Training finished.\n")
    assert_same_run(runs / "later", runs / "plain", 2)
