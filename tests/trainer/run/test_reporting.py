"""Auxiliary metrics of a model or corpus: correct, printed, and the same on any number of processes."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from data.sampler import BatchSizes, GlobalBatches
from data.synthetic.stories import STORIES, StoriesDataset
from model.config import GPTConfig
from model.gpt import GPTModel
from runtime.config.schema import TrackingConfig, TrainConfig
from tests.conftest import TINY_STORIES, environment, metrics, tensors
from tests.programs.reporting_train import HELP, Z_LOSS
from tests.support import forked
from trainer.run.directory import Run
from trainer.run.reporting import Reporter
from trainer.run.summary import describe_threads

STEPS = 2
ALONE = SimpleNamespace(
    trackers=[],
    device=torch.device("cpu"),
    process_index=0,
    num_processes=1,
    is_main_process=True,
)


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """Output and rows of exact runs on 1 and 2 processes, and the directory of the second."""
    out_dir, outputs = tmp_path_factory.mktemp("reported"), []
    for processes in (1, 2):
        words = f"--steps {STEPS} --evaluation.every 1 --model.dropout 0 --exact true --name {processes}".split()
        words += ["--evaluation.num_scored_generations", "3"]
        words += ["--activation_checkpointing", str(processes == 2).lower()]
        arguments = [*TINY_STORIES, *words, "--out_dir", str(out_dir)]
        done = forked.run("tests/programs/reporting_train.py", arguments, processes, environment())
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    return outputs, [metrics(out_dir / str(processes)) for processes in (1, 2)], out_dir / "2"


def test_corpus_scores_the_bare_model_in_ddp(tmp_path):
    words = f"--steps 2 --evaluation.every 2 --evaluation.num_scored_generations 0 --out_dir {tmp_path}".split()
    done = forked.run("tests/programs/reporting_train.py", [*TINY_STORIES, *words], 2, environment())
    assert done.returncode == 0 and " val/generated = " in done.stdout, done.stderr


def by_hand(model, rows):
    """Compute mean cross-entropy, squared log-sum-exp, accuracy and targets per row in float64, by definition."""
    logits = torch.cat([model(row["input_ids"][None])[0][0, :-1] for row in rows])
    labels = torch.cat([row["labels"][1:] for row in rows])
    logits, labels = logits[labels != -100], labels[labels != -100]
    z_loss, hits = logits.exp().sum(-1).log().square().mean(), (logits.max(-1).indices == labels).double().mean()
    return F.cross_entropy(logits, labels), z_loss, hits, len(labels) / len(rows)


def network():
    torch.manual_seed(0)
    sizes = dict(n_layers=2, d_model=16, n_heads=2, d_ff=32, dropout=0.0)
    return GPTModel(GPTConfig(vocab_size=len(STORIES.vocabulary), **sizes)).double()


def test_metrics_are_independent_of_process_count(reported):
    _, (alone, together), _ = reported
    assert alone == together and len(alone) == STEPS


def test_auxiliary_metrics_are_divided_by_own_count(reported):
    _, (rows, _), run = reported
    model, dataset = network(), StoriesDataset("train", 20, 0, 128)
    loss, z_loss, _, targets = by_hand(model, [dataset[i] for i in GlobalBatches(20, BatchSizes(6), 0).indices(0)])
    term = sum(HELP * i * block.mlp.down_proj.weight.square().mean() for i, block in enumerate(model.blocks, start=1))
    (loss + Z_LOSS * z_loss + term).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    first = rows[0]
    assert first["train/grad_norm"] == pytest.approx(torch.nn.utils.get_total_norm(gradients).item(), rel=1e-5)
    assert first["train/loss"] == pytest.approx(loss.item(), rel=1e-6), "the cross-entropy alone"
    assert first["train/z_loss"] == pytest.approx(z_loss.item(), rel=1e-5)
    assert first["train/targets_per_row"] == targets and first["train/nothing"] is None
    assert first["train/help"] == pytest.approx(term.item(), rel=1e-5), "the sum of the blocks' terms"
    assert [first[f"train/{name}"] for name in ("index", "only/0", "only/1")] == [0.5, 0, 1]

    model.load_state_dict({n.removeprefix("model."): t for n, t in tensors(run, STEPS).items() if n[:6] == "model."})
    with torch.no_grad():
        loss, z_loss, top1, targets = by_hand(model, list(StoriesDataset("validation", 7, 0, 128)))
    last = rows[-1]
    assert last["val/loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert last["val/perplexity"] == pytest.approx(loss.exp().item(), rel=1e-5)
    assert last["val/z_loss"] == pytest.approx(z_loss.item(), rel=1e-5)
    assert last["val/top1"] == pytest.approx(top1.item())
    assert last["val/row"] == sum(range(7)) / 2 / 7, "a number of each sample, which the model does not get"
    assert last["val/targets_per_row"] == pytest.approx(targets) and last["val/nothing"] is None
    prompts = torch.stack([row["input_ids"][:4] for row in StoriesDataset("validation", 7, 0, 128)])
    generated = model(prompts)[0][:, -1].argmax(-1)
    assert last["val/generated"] == pytest.approx(generated.double().mean().item()) and last["val/generated"] > 0


def test_progress_line_shows_logged_metrics(reported):
    (output, _), (rows, _), _ = reported
    training, validation = (line for line in output.splitlines() if line.startswith(f"[step {STEPS} /"))
    for name in ("loss", "z_loss", "targets_per_row"):
        assert f" {name} = {rows[-1][f'train/{name}']:.4f} " in training
        assert f" val/{name} = {rows[-1][f'val/{name}']:.4f} " in validation
    assert re.search(r" tokens/s = [\d,]+ ms/step = [\d,.]+ left = 00:00$", training)
    assert " nothing = nan " in training and "train/tokens" not in training


def test_summary_names_what_was_chosen(reported):
    (output, _), _, _ = reported
    facts = dict(line.strip().split(": ", 1) for line in output.splitlines() if re.match(r" +[\w ]+: ", line))
    assert facts["processes"] == "1 x cpu, 1 thread(s) each" and facts["compile"] == "off"
    assert re.fullmatch(r"logits of [\d,]+ positions at once", facts["loss"])


@pytest.mark.parametrize(
    ("threads", "load", "hint"),
    [
        (2, 10.5, " (the load is 10.5 on 4 cores: OMP_NUM_THREADS=1 may be several times faster)"),
        (2, 5.9, ""),  # such as after another run on all cores
        (1, 10.5, ""),
    ],
)
def test_summary_says_that_the_machine_is_busy(threads, load, hint, monkeypatch):
    """The threads of an operation spin while they wait for each other."""
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    assert describe_threads() == f"{threads} thread(s) each{hint}"


def test_corpus_scores_generations_with_entropy_of_zero(reported):
    (output, _), (rows, _), _ = reported
    texts = [line.removeprefix("  | ").rpartition(" (")[0] for line in output.splitlines() if line.startswith("  | ")]
    assert len(texts) == 3 and rows[-1]["generation/characters"] == pytest.approx(sum(map(len, texts)) / 3)
    assert rows[-1]["generation/distinct"] == len(set(texts)) / 3 and rows[-1]["generation/memorized"] == 0
    assert "generation/valid" not in rows[-1], "only stories report it"
    assert rows[-1]["val/entropy"] == 0 and f"({rows[-1]['val/loss']:.4f} nats above the entropy of the data)" in output


@pytest.mark.parametrize(
    "entropy, shown",
    [(0.0, "(0.0500 nats above the entropy of the data)"), (0.2, "(25.0% above the entropy of the data)")],
)
def test_entropy_of_zero_is_reported(entropy, shown, tmp_path, capsys):
    config = TrainConfig(steps=1, tracking=TrackingConfig(wandb="disabled"))
    with Reporter(config, Run(tmp_path), 0, ALONE) as tracker:
        losses = {"val/loss": 0.25, "val/entropy": entropy, "val/excess_loss": 0.05}
        tracker.log(1, losses | {"val/exact_match": 0.5, "val/tiny": 1.25e-5})
        tracker.log(1, {"state/digest": "0123456789abcdef", "layers/weight_norm/0": 1.0})
    assert [len(json.loads(line)) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [6, 3]
    lines = [
        f"[step 1 / 1] val/loss = 0.2500 val/entropy = {entropy:.4f} "
        f"val/exact_match = 0.5000 val/tiny = 1.25e-05 {shown}"
    ]
    assert capsys.readouterr().out.splitlines() == lines, "digests and layer metrics are not printed"
