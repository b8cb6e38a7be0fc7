"""Any step of a run is retrained with its bits, and the loss of each of its sequences is shown."""

import json
import re
import shutil

import pytest

from data.corpus import load_corpus
from runtime.config.parser import parse_config
from tests.conftest import TINY_STORIES, environment, metrics, python, train
from tests.support import forked
from tests.trainer.test_schedule import FORK
from tools.replay import describe_outcome

RECIPE = [*TINY_STORIES, "--steps", 6, "--evaluation.every", 3, "--checkpoint.every", 2, "--micro_batch_size", 2]
SAMPLE = r"^  sample (\d+): loss (\S+?)(, NOT FINITE)?; '(.*)'$"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Checkpoints at steps 2, 4 and 6; dropout, and micro-batches of two sequences."""
    out_dir = tmp_path_factory.mktemp("runs")
    train(*RECIPE, "--out_dir", out_dir, "--name", "run")
    return out_dir / "run"


def replay(run, step, *words, processes=0, **env):
    done = forked.run("tools.replay", [str(run), str(step), *map(str, words)], processes, environment(**env))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def samples(shown):
    """Return the losses and texts of the sequences by index; one that was drawn twice in an epoch's end counts once."""
    return {int(index): (float(loss), text) for index, loss, _, text in re.findall(SAMPLE, shown, re.MULTILINE)}


def mean_loss(shown):
    """Return the mean of the shown losses, weighted by the targets of each sequence."""
    dataset = load_corpus(parse_config(TINY_STORIES)).train
    rows = re.findall(SAMPLE, shown, re.MULTILINE)
    counts = [int((dataset[int(index)]["labels"][1:] != -100).sum()) for index, *_ in rows]
    return sum(float(loss) * count for (_, loss, *_), count in zip(rows, counts, strict=True)) / sum(counts)


def test_step_is_reproduced_with_losses_of_training(run):
    shown = replay(run, 4)
    assert shown.startswith(f"steps 3 to 4, retrained from {run / 'checkpoints' / 'step-00000002'}\n")
    assert "reproduced bitwise (2 digest(s))" in shown
    row = metrics(run)[3]
    assert f"step 4: loss = {row['train/loss']:.6g}, gradient norm = {row['train/grad_norm']:.6g}" in shown
    assert "sequences of step 4: 6, 0 of them not finite" in shown
    assert mean_loss(shown) == pytest.approx(row["train/loss"], abs=1e-4), "with the dropout of the step"
    losses = [loss for loss, _ in samples(shown).values()]
    assert losses == sorted(losses, reverse=True)
    assert all(text.startswith("<|endoftext|>") for _, text in samples(shown).values())


def test_first_step_is_retrained_from_initial_weights(run):
    shown = replay(run, 1, "--num_sequences", 2)
    assert "steps 1 to 1, retrained from the initial weights\n" in shown and "reproduced bitwise (1 digest(s))" in shown
    assert len(samples(shown)) == 2


@pytest.mark.slow
def test_two_processes_show_the_same_sequences(tmp_path):
    train(*RECIPE, "--micro_batch_size", 1, "--out_dir", tmp_path, "--name", "run", processes=2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    shown = replay(tmp_path / "run", 4, processes=2)
    assert "reproduced bitwise (2 digest(s))" in shown and shown.count("sequences of step 4") == 1
    alone = replay(tmp_path / "run", 4)
    assert "; processes 2 in the run, 1 here\n" in alone and "reproduced " in alone
    assert samples(alone).keys() == samples(shown).keys()
    assert mean_loss(shown) == pytest.approx(metrics(tmp_path / "run")[3]["train/loss"], abs=1e-4)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}, "nothing is written"


ONE_BAD_SEQUENCE = """
import runpy, sys, train
class Model(train.GPTModel):
    def forward(self, input_ids, labels=None, **named):
        output = super().forward(input_ids, labels=labels, **named)
        if labels is None:
            return output
        is_bad = (labels == BAD).all(dim=1).any()
        return output._replace(loss=output.loss / (1 - is_bad.float()))
import torch
from data.corpus import load_corpus
from runtime.config.parser import parse_config
BAD = load_corpus(parse_config(sys.argv[1].split())).train[7]["labels"]
train.GPTModel = Model
del sys.argv[:2]
run = runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module
run(sys.argv[0], run_name="__main__")
"""


def test_offending_sequence_of_a_stopped_run_is_marked(tmp_path):
    """A fork whose loss is infinite for sample 7 alone; it is in a micro-batch with another sample."""
    words = [*map(str, RECIPE), "--out_dir", str(tmp_path), "--name", "run"]
    code = [ONE_BAD_SEQUENCE, " ".join(map(str, TINY_STORIES))]
    stopped = forked.run("-c", [*code, "train.py", *words], 0, environment())
    step = int(re.search(rf"python -m tools.replay {tmp_path / 'run'} (\d+)", stopped.stderr)[1])
    assert stopped.returncode == 1 and f"step {step}: loss = nan" in stopped.stderr
    shown = forked.run("-c", [*code, "tools.replay", str(tmp_path / "run"), str(step)], 0, environment()).stdout
    assert f"step {step}: loss = nan, gradient norm = nan" in shown and "tools.replay" not in shown
    assert (
        f"sequences of step {step}: 6, 1 of them not finite; highest losses first:\n  sample 7: loss inf, NOT" in shown
    )


def test_diverged_run_has_no_finite_sequence(tmp_path):
    """The first update makes weights so large that no loss of the second step is finite."""
    diverges = "--steps 2 --evaluation.every 0 --optimizer.lr 1e30 --name run --out_dir".split()
    train(*TINY_STORIES, *diverges, tmp_path, exit_code=1)
    shown = replay(tmp_path / "run", 2)
    assert "step 2: loss = nan" in shown and "sequences of step 2: 6, 6 of them not finite" in shown


SPLITS = """
import sys, data.loader as loader
from runtime.cli import scripts
load = loader.StepDataset.__getitem__
def split(self, step):
    return {name: rows.reshape(-1, rows.shape[1] // 2) for name, rows in load(self, step).items()}
loader.StepDataset.__getitem__ = split
del sys.argv[0]
if sys.argv[0] == "train.py":
    scripts.run_and_exit("train")
from tools import replay
scripts.run_and_exit("tools.replay", replay.ReplayConfig)
"""


def test_rows_of_a_fork_are_shown(tmp_path):
    """Its StepDataset makes two rows of each sample."""
    recipe = [*map(str, RECIPE), "--out_dir", str(tmp_path), "--name", "run", "--check_replicas_every", "0"]
    for words in (["train.py", *recipe], ["tools.replay", str(tmp_path / "run"), "2"]):
        done = forked.run("-c", [SPLITS, *words], 0, environment())
        assert done.returncode == 0, done.stdout + done.stderr
    assert "sequences of step 2: 12, " in done.stdout and len(re.findall(r"\n  row \d+: loss ", done.stdout)) == 8


@pytest.mark.slow
def test_skipped_update_is_replayed(tmp_path):
    skips = "--steps 2 --checkpoint.every 1 --evaluation.every 0 --optimizer.lr 1e30 --on_nonfinite skip".split()
    train(*TINY_STORIES, *skips, "--name", "run", "--out_dir", tmp_path)
    shown = replay(tmp_path / "run", 2)
    assert "reproduced bitwise (1 digest(s))" in shown and "6 of them not finite" in shown


@pytest.mark.slow
def test_forked_dropout_schedule_is_replayed(tmp_path):
    recipe = [*TINY_STORIES, "--checkpoint.every", "2", "--out_dir", str(tmp_path), "--name", "run"]
    for words in (["train.py", *recipe], ["tools.replay", str(tmp_path / "run"), "4"]):
        done = forked.run("-c", [FORK, *words], 0, environment())
        assert done.returncode == 0, done
    assert "reproduced bitwise (2 digest(s))" in done.stdout
    assert mean_loss(done.stdout) == pytest.approx(metrics(tmp_path / "run")[3]["train/loss"], abs=1e-4)


def rewrite(file, change):
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        change(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
def test_other_digests_and_losses_are_reported(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    rewrite(copy / "metrics.jsonl", lambda row: row.update({"state/digest": "0" * 16}))
    assert "\nNOT reproduced bitwise: 2 of 2 digest(s) differ, although the code" in replay(copy, 4)
    rewrite(copy / "sessions.jsonl", lambda row: row.update({"processes": 4}))
    assert "2 of 2 digest(s) differ, perhaps because of processes 4 in the run, 1 here; the" in replay(copy, 4)
    rewrite(copy / "metrics.jsonl", lambda row: row.update({"train/loss": 5.0}))
    assert "NOT reproduced: train/loss was 5.0 in the run and is 5." in replay(copy, 4)


LOGGED = {"state/digest": "a", "train/loss": 2.0, "train/grad_norm": 1.0}
CODE = ["code 1 in the run, 2 here"]
SAME_LAUNCH = (
    "NOT reproduced bitwise: 1 of 1 digest(s) differ, although the code, the launch and the version of torch are those "
    "of the run"
)


@pytest.mark.parametrize(
    ("logged", "again", "differences", "outcome"),
    [
        ({}, LOGGED, [], "not compared: the run logged no digest of these steps"),
        (LOGGED, LOGGED, CODE, "reproduced bitwise (1 digest(s))"),
        (LOGGED, {**LOGGED, "state/digest": "b"}, [], SAME_LAUNCH),
        (
            LOGGED,
            {**LOGGED, "state/digest": "b", "train/loss": 2.001, "train/grad_norm": 1.04},
            CODE,
            "reproduced up to rounding: 1 train/loss within 0.1%, 1 train/grad_norm within 5.0%; 1 of 1 digest(s) "
            "differ, perhaps because of code 1 in the run, 2 here; the update of the last step",
        ),
        (
            LOGGED,
            {**LOGGED, "state/digest": "b", "train/loss": 2.1},
            CODE,
            "NOT reproduced: train/loss was 2.0 in the run and is 2.1 here",
        ),
        (
            LOGGED,
            {**LOGGED, "state/digest": "b", "train/grad_norm": 5.0},
            CODE,
            "NOT reproduced: train/grad_norm was 1.0 in the run and is 5 here",
        ),
        (
            {**LOGGED, "train/loss": None},
            {**LOGGED, "state/digest": "b"},
            CODE,
            "NOT reproduced: train/loss was None in the run and is 2 here",
        ),
        (
            {"state/digest": "a"},
            {**LOGGED, "state/digest": "b"},
            CODE,
            "NOT reproduced: 1 of 1 digest(s) differ, and the run logged no loss of these steps to compare",
        ),
    ],
)
def test_outcome_says_what_was_compared(logged, again, differences, outcome):
    assert describe_outcome([(logged, again)], differences).startswith(outcome)


@pytest.mark.slow
def test_gradient_of_a_fork_is_not_taken_for_rounding(tmp_path):
    """The run logs a digest with each checkpoint, but no loss before its end; then the gradient is multiplied by -5."""
    train(*RECIPE, "--tracking.log_every", 100, "--out_dir", tmp_path, "--name", "run")
    code = "import train, tools.replay as replay, sys; from runtime.cli.scripts import run_and_exit\n"
    code += "train.connect_parameters = lambda loss, model: -5 * loss\n"
    code += "del sys.argv[0]; run_and_exit('tools.replay', replay.ReplayConfig)"
    shown = forked.run("-c", [code, "tools.replay", str(tmp_path / "run"), "4"], 0, environment()).stdout
    assert "\nNOT reproduced: 2 of 2 digest(s) differ, and the run logged no loss" in shown, shown


def test_launch_of_the_run_is_restored_or_reported(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    recorded = {"threads": 2, "mixed_precision": "bf16", "processes": 4}
    rewrite(copy / "sessions.jsonl", lambda row: row.update(recorded))
    assert "step-00000002; processes 4 in the run, 1 here\n" in replay(copy, 3), "threads and precision are the run's"
    rewrite(copy / "sessions.jsonl", lambda row: row.update({"threads": None, "device": "cuda"}))
    assert "; device cuda in the run, cpu here, processes 4" in replay(copy, 3)


@pytest.mark.slow
def test_branch_is_replayed_from_its_parent(run, tmp_path):
    parent = shutil.copytree(run, tmp_path / "run") / "checkpoints" / "step-00000002"
    branch = ["--branch_from", parent, "--optimizer.weight_decay", 0.3, "--out_dir", tmp_path, "--name", "branch"]
    train(*RECIPE, *branch)
    shown = replay(tmp_path / "branch", 4)
    assert f"retrained from {parent}\n" in shown and "reproduced bitwise (2 digest(s))" in shown
    assert "step: 2 is not a step of" in refusal(tmp_path / "branch", 2)
    shutil.rmtree(parent)
    assert "no checkpoint before step 4 is left" in refusal(tmp_path / "branch", 4)
    assert "reproduced bitwise (1 digest(s))" in replay(tmp_path / "branch", 5)


@pytest.mark.slow
def test_run_with_init_from_is_replayed(run, tmp_path):
    train(*RECIPE, "--init_from", run, "--out_dir", tmp_path, "--name", "tuned")
    assert "reproduced bitwise (2 digest(s))" in replay(tmp_path / "tuned", 2)
    shutil.move(run, moved := tmp_path / "moved")
    try:
        assert "reproduced bitwise (1 digest(s))" in replay(tmp_path / "tuned", 5), "the initial model is not needed"
    finally:
        shutil.move(moved, run)


@pytest.mark.slow
def test_run_with_teacher_is_replayed(run, tmp_path):
    train(*RECIPE, "--teacher.path", run, "--out_dir", tmp_path, "--name", "taught")
    shown = replay(tmp_path / "taught", 4)
    assert "reproduced bitwise (2 digest(s))" in shown
    row = metrics(tmp_path / "taught")[3]
    assert mean_loss(shown) == pytest.approx((row["train/loss"] + row["train/teacher_kl"]) / 2, abs=1e-4)


def refusal(*words):
    done = forked.run("tools.replay", [str(word) for word in words], 0, environment())
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stdout + done.stderr
    return done.stderr


def test_wrong_arguments_are_refused(run):
    assert "step: 7 is beyond the 6 steps of" in refusal(run, 7)
    assert "is not the directory of a run: it has no config.yaml" in refusal(run / "checkpoints", 2)
    assert "no-such-user/run' names a user that this machine does not have" in refusal("~no-such-user/run", 3)


@pytest.mark.slow
def test_changed_corpus_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(f"Line {i} of a text." for i in range(300)))
    prepare = f"python -m data.prepare --source {tmp_path / 'text.txt'} --tokenizer byte --validation tail:0.1 --out"
    python(f"{prepare} {tmp_path / 'corpus'}")
    words = ["--data.source", "text", "--data.path", tmp_path / "corpus", "--steps", 2, "--evaluation.every", 0]
    train(*RECIPE, *words, "--out_dir", tmp_path, "--name", "run")
    assert "reproduced bitwise (2 digest(s))" in replay(tmp_path / "run", 2)
    shutil.rmtree(tmp_path / "corpus")
    (tmp_path / "text.txt").write_text("\n".join(f"Line {i} of another text." for i in range(300)))
    python(f"{prepare} {tmp_path / 'corpus'}")
    assert "data.hash" in refusal(tmp_path / "run", 2)
